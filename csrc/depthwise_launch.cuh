// The launches of depthwise_launch.h, to be instantiated for one dtype per compile unit.
#pragma once

#include "depthwise.cuh"
#include "depthwise_launch.h"

namespace jaxext::depthwise {

inline dim3 Grid(const Plan& plan) {
  return {static_cast<unsigned>(plan.grid[0]), static_cast<unsigned>(plan.grid[1]), static_cast<unsigned>(plan.grid[2])};
}

inline dim3 Block(const Plan& plan) { return {static_cast<unsigned>(plan.lanes), static_cast<unsigned>(kThreads / plan.lanes), 1}; }

template <typename T>
cudaError_t LaunchGather(const Plan& plan, const void* source, const void* filter, void* target, cudaStream_t stream) {
  GatherKernel<T>(plan)<<<Grid(plan), Block(plan), plan.shared_bytes, stream>>>(plan.params, static_cast<const T*>(source),
                                                                                static_cast<const T*>(filter), static_cast<T*>(target));
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchWgrad(const Plan& plan, const void* x, const void* y, void* w, cudaStream_t stream) {
  WgradKernel<T>(plan)<<<Grid(plan), Block(plan), plan.shared_bytes, stream>>>(plan.params, static_cast<const T*>(x),
                                                                               static_cast<const T*>(y), w);
  return cudaGetLastError();
}

}  // namespace jaxext::depthwise
