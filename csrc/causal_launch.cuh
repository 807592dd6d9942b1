// The launches of causal_launch.h, to be instantiated for one dtype per compile unit.
#pragma once

#include <cuda_runtime.h>

#include "causal.cuh"
#include "causal_launch.h"
#include "relaxed_capture.h"

namespace jaxext::causal {

template <typename T>
Arrays<T> ArraysOf(const CausalOperands& o) {
  return {static_cast<const T*>(o.x),
          static_cast<const T*>(o.initial_states),
          static_cast<const T*>(o.d_y),
          o.weight,
          o.bias,
          o.of_weight,
          o.of_bias,
          o.seq_idx,
          o.idx_of_states};
}

// What was wrong on this thread before is not asked for, and a launch that CUDA refuses leaves nothing for the next who asks.
template <typename... Arguments>
cudaError_t Launch(const Plan& plan, cudaStream_t stream, void (*kernel)(Params, Arguments...), Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3{static_cast<unsigned>(plan.grid), 1, 1};
  config.blockDim = dim3{static_cast<unsigned>(plan.lanes), static_cast<unsigned>(kThreads / plan.lanes), 1};
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  const RelaxedCapture relaxed;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, plan.params, arguments...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

template <typename T>
cudaError_t LaunchForward(const Plan& plan, const CausalOperands& operands, const CausalResults& results, cudaStream_t stream) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  void (*kernel)(Params, Arrays<T>, T*) = CausalForward<T, 1, Kind::kMany>;
  if (plan.vector > 1) {
    kernel = plan.kind == Kind::kExact  ? CausalForward<T, kVector, Kind::kExact>
             : plan.kind == Kind::kUpTo ? CausalForward<T, kVector, Kind::kUpTo>
                                        : CausalForward<T, kVector, Kind::kMany>;
  }
  return Launch(plan, stream, kernel, ArraysOf<T>(operands), static_cast<T*>(results.first));
}

template <typename T>
cudaError_t LaunchBackward(const Plan& plan, const CausalOperands& operands, const CausalResults& results, cudaStream_t stream) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  void (*kernel)(Params, Arrays<T>, T*, float*, T*) = CausalBackward<T, 1, kMoreTaps, false>;
  if (plan.vector > 1) {
    kernel = plan.kind == Kind::kExact  ? CausalBackward<T, kVector, kTaps, true>
             : plan.kind == Kind::kUpTo ? CausalBackward<T, kManyVector, kTaps, false>
                                        : CausalBackward<T, kManyVector, kMoreTaps, false>;
  }
  return Launch(plan, stream, kernel, ArraysOf<T>(operands), static_cast<T*>(results.first), results.sums,
                static_cast<T*>(results.d_initial_states));
}

}  // namespace jaxext::causal
