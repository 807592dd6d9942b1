// From the launcher of weight_only.h to the kernels of one dtype, which are compiled apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "weight_only/weight_only_plan.h"

namespace jaxext::weight_only {

// Launch what is planned for x of T.
template <typename T>
cudaError_t Launch(const Plan& plan, const WeightOnlyOperands& operands, void* result, LaunchStream stream);

}  // namespace jaxext::weight_only
