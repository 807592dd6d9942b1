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
// otherwise says what it got and what it wants.
#pragma once

#include <cstdint>

#include "common/epilogue.h"

namespace jaxext {

enum class CausalRole { kForward, kBackward };

// Sequences, steps, channels and taps: x[B,T,C], weight[J,C].
struct CausalProblem {
  JAXEXT_INTEGERS(B, T, C, J)
};

struct CausalConfig {
  JAXEXT_INTEGERS(lanes,   // vectors of channels side by side in a block, a power of two
                  strip,   // steps of a sequence that a thread walks along
                  splits)  // backward: partial sums; otherwise 1
};

// After x and the weight come the operands that exist, and backward d_y.  The results are y, or d_x, the partial sums and, if there is a
// state, its cotangent.
struct CausalOptions {
  JAXEXT_INTEGERS(activation,                                    // `Activation`
                  bias, initial_states, seq_idx, idx_of_states)  // 1 or 0: whether it exists
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

// Of x, weight, y and the bias.
Reason CausalRefuses(CausalRole role, const CausalProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

Status LaunchCausal(CausalRole role, const CausalProblem& problem, const CausalConfig& config, const CausalOperands& operands,
                    const CausalResults& results, LaunchStream stream);

}  // namespace jaxext
