// Products of few rows with a matrix of small integers on the GPU:
//
//     y[b,m,n] = Σ_k x[b,m,k] q[b,k,n] scale[b,k/g,n]
//
// x is bfloat16 or float16, q int8 or int4, a scale float32, for g neighbours along the sum.  The integers become 16-bit floats, exactly,
// so that products are exact too.  They are added in float32, and multiplied by the scale after each 32, always in the same order.  A
// launcher checks all that its kernel relies on and otherwise says what it got and what it wants.
#pragma once

#include <cstdint>

#include "common/family.h"

namespace jaxext {

// x[B,M,K], q[B,K,N], scale[B,S,N], y[B,M,N].
struct WeightOnlyProblem {
  JAXEXT_INTEGERS(B, M, N, K, S,
                  bits)  // of an integer, 8 or 4: two of 4 lie in a byte, neighbours along N, the first in the low half
};

struct WeightOnlyConfig {
  JAXEXT_INTEGERS(tile_m, tile_n,  // rows and columns of a block
                  splits)          // partial results along a leading axis of the result, which is float32 if there are several
};

// Of x, w and the result.
Reason WeightOnlyRefuses(const WeightOnlyProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

struct WeightOnlyOperands {
  Dtype dtype, of_result;
  const void *x, *q;
  const float* scale;
};

Status LaunchWeightOnly(const WeightOnlyProblem& problem, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, void* result,
                        LaunchStream stream);

}  // namespace jaxext
