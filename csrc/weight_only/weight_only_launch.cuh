// The launch of weight_only_launch.h, to be instantiated for one dtype per compile unit.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "weight_only/weight_only.cuh"
#include "weight_only/weight_only_launch.h"

namespace jaxext::weight_only {

// The kernels of `kTiles` in weight_only_plan.cc; none for other tiles.
template <typename T>
auto KernelOf(int bits, int tiles, int columns) -> decltype(&WeightOnlyKernel<T, 8, 1, 8>) {
  if (bits == 4) {
    if (tiles == 1) return columns == 32 ? WeightOnlyKernel<T, 4, 1, 32> : WeightOnlyKernel<T, 4, 1, 8>;
    return tiles == 2 ? WeightOnlyKernel<T, 4, 2, 16> : WeightOnlyKernel<T, 4, 4, 8>;
  }
  if (tiles == 1) return columns == 16 ? WeightOnlyKernel<T, 8, 1, 16> : WeightOnlyKernel<T, 8, 1, 8>;
  return tiles == 2 ? WeightOnlyKernel<T, 8, 2, 8> : WeightOnlyKernel<T, 8, 4, 8>;
}

template <typename T>
cudaError_t Launch(const Plan& plan, const WeightOnlyOperands& operands, void* result, LaunchStream stream) {
  const auto kernel = KernelOf<T>(plan.bits, plan.tiles, plan.columns);
  KernelNeeds needs;
  if (Resident(plan.bits, plan.tiles, plan.columns) > 1)
    needs.carveout = 25;  // two blocks take 18 KB, of 100 KB or more; x is cached in the rest
  if (cudaError_t error = Load(reinterpret_cast<const void*>(kernel), needs); error != cudaSuccess) return error;
  return jaxext::Launch({static_cast<unsigned>(plan.grid), 1, 1}, {kThreads, 1, 1}, plan.shared_bytes, stream, kernel, plan.params,
                        static_cast<const T*>(operands.x), static_cast<const uint8_t*>(operands.q), operands.scale, result);
}

}  // namespace jaxext::weight_only
