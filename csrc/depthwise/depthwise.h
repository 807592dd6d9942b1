// Depthwise convolution on the GPU, along one to three axes, in its three roles: one input channel per group, K outputs.
//
//     fprop   y[n,p,g,k] = Σ_r x[n,s(p,r),g] w[g,k,r]
//     dgrad   x[n,i,g]   = Σ_{r,k} y[n,s(i,r),g,k] w[g,k,r]
//     wgrad   w[g,k,r]   = Σ_{n,p} y[n,p,g,k] x[n,s(p,r),g]
//
// where s(t, r) is the source that the target t meets at the tap r (kernels/geometry.py).  Sums are in float32 and always in the same
// order.  A launcher checks all that its kernel relies on and otherwise says what it got and what it wants.
#pragma once

#include <cstdint>

#include "common/product_arrays.h"

namespace jaxext {

struct DepthwiseConfig {
  JAXEXT_INTEGERS(lanes,   // vectors of channels side by side in a block, a power of two
                  strip,   // targets in a row that a thread walks along
                  pieces,  // wgrad: pieces of the filter that share a block, a power of two; otherwise 1
                  lines,   // on tensor cores, lines of targets that are walked down; otherwise 0
                  splits)  // wgrad: partial sums, which go along a leading axis of the result; otherwise 1
};

Reason DepthwiseRefuses(ConvRole role, int rank, const ConvProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// The result of `role`, of operands in the order of slots (x, w, y without the open one), both of `dtype`.  The result is of it too; of
// wgrad it may be, and with splits > 1 it is, float32.  Fprop may have an epilogue; its bias is [B,G,K].
Status LaunchDepthwise(ConvRole role, int rank, const ConvProblem& problem, const DepthwiseConfig& config, const ProductArrays& arrays,
                       const Epilogue* epilogue, LaunchStream stream);

}  // namespace jaxext
