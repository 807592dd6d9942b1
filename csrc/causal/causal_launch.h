// From the launcher of causal.h to the kernels of one dtype, which are compiled apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "causal/causal_plan.h"

namespace jaxext::causal {

// Launch what is planned for x of T.
template <typename T>
cudaError_t LaunchForward(const Plan& plan, const CausalOperands& operands, const CausalResults& results, LaunchStream stream);
template <typename T>
cudaError_t LaunchBackward(const Plan& plan, const CausalOperands& operands, const CausalResults& results, LaunchStream stream);

}  // namespace jaxext::causal
