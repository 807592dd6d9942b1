// Causal depthwise convolution of sequences on the GPU, with bias, activation, state and boundaries of sequences, and its derivative.
//
//     z[b,t,c] = Σ_i weight[i,c] x[b,t-(J-1)+i,c] + bias[c]      y = activation(z)
//
// The inputs before t = 0 are the state's, or zero.  With `seq_idx`, a tap reads only what has the same number as its step t.  With
// dz = d_y activation'(z), and a sum only over what the taps read:
//
//     d_x[b,s,c] = Σ_i weight[i,c] dz[b,s+(J-1)-i,c]             also of the state, whose steps are -(J-1) to -1
//     d_weight[i,c] = Σ_{b,t} dz[b,t,c] x[b,t-(J-1)+i,c]         d_bias[c] = Σ_{b,t} dz[b,t,c]
//
// Products and sums are in float32, always in the same order, and rounded once.  A launcher checks all that its kernel relies on and
// otherwise says what it got and what it wants.  It must not know XLA.
#pragma once

#include <cstdint>

#include "common/epilogue.h"
#include "common/problem.h"
#include "common/status.h"

namespace jaxext {

enum class CausalRole { kForward, kBackward };

// Sequences, steps, channels and taps: x[B,T,C], weight[J,C].  By the same names as in Python: `jaxext.kernels._causal.CausalProblem`.
struct CausalProblem {
  int64_t B, T, C, J;
};

// How; by the same names as in jaxext/backends/cuda/cuda_causal.py.
struct CausalConfig {
  int64_t lanes;   // vectors of channels side by side in a block, a power of two
  int64_t strip;   // steps of a sequence that a thread walks along
  int64_t splits;  // backward: partial sums; otherwise 1
};

struct CausalOperands {
  Dtype dtype, of_weight, of_bias;  // the first is also that of the state, of d_y and of results
  Activation activation;
  const void *x, *weight;
  const void* bias;                        // or none, as all that follow
  const void* initial_states;              // [B,J-1,C]
  const int32_t *seq_idx, *idx_of_states;  // [B,T] and [B,J-1]
  const void* d_y;                         // backward
};

struct CausalResults {
  void* first;             // y or d_x
  float* sums;             // backward: [splits,J,C], or [splits,J+1,C] where there is a bias, whose sum is the last; their sum is d_weight
  void* d_initial_states;  // backward: if there is a state
};

Status Causal(CausalRole role, const CausalProblem& problem, const CausalConfig& config, const CausalOperands& operands,
              const CausalResults& results, LaunchStream stream);

}  // namespace jaxext
