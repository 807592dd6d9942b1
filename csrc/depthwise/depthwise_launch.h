// From the launchers of depthwise.h to the kernels of one dtype, which are compiled apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "depthwise/depthwise_plan.h"
#include "common/epilogue.h"

namespace jaxext::depthwise {

// Launch what is planned for operands of T, in the order of the kernels' pointers: source, filter and target, or x, y and w.
template <typename T>
cudaError_t LaunchGather(const Plan& plan, const void* source, const void* filter, void* target, const Epilogue* epilogue,
                         LaunchStream stream);
template <typename T>
cudaError_t LaunchMma(const Plan& plan, const void* source, const void* filter, void* target, const Epilogue* epilogue,
                      LaunchStream stream);
template <typename T>
cudaError_t LaunchMmaWgrad(const Plan& plan, const void* x, const void* y, void* w, LaunchStream stream);
template <typename T>
cudaError_t LaunchWgrad(const Plan& plan, const void* x, const void* y, void* w, LaunchStream stream);

}  // namespace jaxext::depthwise
