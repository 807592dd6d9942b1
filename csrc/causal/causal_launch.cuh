// The launches of causal_launch.h, to be instantiated for one dtype per compile unit.
#pragma once

#include <cuda_runtime.h>

#include "causal/causal.cuh"
#include "causal/causal_launch.h"
#include "common/launch.cuh"

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

inline dim3 GridOf(const Plan& plan) { return {static_cast<unsigned>(plan.grid), 1, 1}; }
inline dim3 BlockOf(const Plan& plan) { return {static_cast<unsigned>(plan.lanes), static_cast<unsigned>(kThreads / plan.lanes), 1}; }

template <typename T>
cudaError_t LaunchForward(const Plan& plan, const CausalOperands& operands, const CausalResults& results, LaunchStream stream) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  void (*kernel)(Params, Arrays<T>, T*) = CausalForward<T, 1, Kind::kMany>;
  if (plan.vector > 1) {
    kernel = plan.kind == Kind::kExact  ? CausalForward<T, kVector, Kind::kExact>
             : plan.kind == Kind::kUpTo ? CausalForward<T, kVector, Kind::kUpTo>
                                        : CausalForward<T, kVector, Kind::kMany>;
  }
  return Launch(GridOf(plan), BlockOf(plan), plan.shared_bytes, stream, kernel, plan.params, ArraysOf<T>(operands),
                static_cast<T*>(results.first));
}

template <typename T>
cudaError_t LaunchBackward(const Plan& plan, const CausalOperands& operands, const CausalResults& results, LaunchStream stream) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  void (*kernel)(Params, Arrays<T>, T*, float*, T*) = CausalBackward<T, 1, kMoreTaps, false>;
  if (plan.vector > 1) {
    kernel = plan.kind == Kind::kExact  ? CausalBackward<T, kVector, kTaps, true>
             : plan.kind == Kind::kUpTo ? CausalBackward<T, kManyVector, kTaps, false>
                                        : CausalBackward<T, kManyVector, kMoreTaps, false>;
  }
  return Launch(GridOf(plan), BlockOf(plan), plan.shared_bytes, stream, kernel, plan.params, ArraysOf<T>(operands),
                static_cast<T*>(results.first), results.sums, static_cast<T*>(results.d_initial_states));
}

}  // namespace jaxext::causal
