// The launches of depthwise_launch.h, to be instantiated for one dtype per compile unit.
#pragma once

#include <cuda_runtime.h>

#include "depthwise/depthwise_gather.cuh"
#include "depthwise/depthwise_launch.h"
#include "depthwise/depthwise_mma.cuh"
#include "depthwise/depthwise_mma_wgrad.cuh"
#include "depthwise/depthwise_wgrad.cuh"
#include "common/launch.cuh"

namespace jaxext::depthwise {

template <typename P, typename Kernel, typename... Arguments>
cudaError_t Launch(const Plan& plan, int threads, const P& params, LaunchStream stream, Kernel kernel, Arguments... arguments) {
  const dim3 grid = {static_cast<unsigned>(plan.grid[0]), static_cast<unsigned>(plan.grid[1]), static_cast<unsigned>(plan.grid[2])};
  const dim3 block = {static_cast<unsigned>(plan.lanes), static_cast<unsigned>(threads / plan.lanes), 1};
  return jaxext::Launch(grid, block, plan.shared_bytes, stream, kernel, params, arguments...);
}

// Calls `launch` with what a kernel does with its sums.
template <typename T, class What>
cudaError_t WithFinish(const Epilogue* epilogue, const What& launch) {
  if (epilogue == nullptr) return launch(Unchanged<T>{});
  return launch(
      Finish<T>{epilogue->activation, epilogue->bias, static_cast<const T*>(epilogue->residual), static_cast<T*>(epilogue->saved)});
}

template <typename T>
cudaError_t LaunchGather(const Plan& plan, const void* source, const void* filter, void* target, const Epilogue* epilogue,
                         LaunchStream stream) {
  return WithFinish<T>(epilogue, [&](auto finish) {
    return Launch(plan, kThreads, plan.params, stream, GatherKernel<T, decltype(finish)>(plan), finish, static_cast<const T*>(source),
                  static_cast<const T*>(filter), static_cast<T*>(target));
  });
}

template <typename T>
cudaError_t LaunchMma(const Plan& plan, const void* source, const void* filter, void* target, const Epilogue* epilogue,
                      LaunchStream stream) {
  return WithFinish<T>(epilogue, [&](auto finish) {
    return Launch(plan, kMmaThreads, plan.mma, stream, MmaKernel<T, decltype(finish)>(plan), finish, static_cast<const T*>(source),
                  static_cast<const T*>(filter), static_cast<T*>(target));
  });
}

template <typename T>
cudaError_t LaunchMmaWgrad(const Plan& plan, const void* x, const void* y, void* w, LaunchStream stream) {
  return Launch(plan, kMmaThreads, plan.mma_wgrad, stream, MmaWgradKernel<T>(plan), static_cast<const T*>(x), static_cast<const T*>(y), w);
}

template <typename T>
cudaError_t LaunchWgrad(const Plan& plan, const void* x, const void* y, void* w, LaunchStream stream) {
  return Launch(plan, kThreads, plan.params, stream, WgradKernel<T>(plan), static_cast<const T*>(x), static_cast<const T*>(y), w);
}

}  // namespace jaxext::depthwise
