// Products of few rows with a matrix of small integers on the GPU:
//
//     y[b,m,n] = Σ_k x[b,m,k] q[b,k,n] scale[b,k/g,n]
//
// x is bfloat16 or float16, q int8 or int4, a scale float32, for g neighbours along the sum.  The integers become 16-bit floats, exactly,
// so that products are exact too.  They are added in float32, and multiplied by the scale after each 32, always in the same order.  A
// launcher checks all that its kernel relies on and otherwise says what it got and what it wants.  It must not know XLA.
#pragma once

#include <cstdint>

#include "common/problem.h"
#include "common/status.h"

namespace jaxext {

// x[B,M,K], q[B,K,N], scale[B,S,N], y[B,M,N].  By the same names as in Python: jaxext/backends/cuda/cuda_weight_only.py.
//
// `bits` of an integer are 8 or 4.  Two of 4 lie in a byte, neighbours along N, the first in the low half.
struct WeightOnlyProblem {
  int64_t B, M, N, K, S, bits;
};

// How; by the same names.
struct WeightOnlyConfig {
  int64_t tile_m, tile_n;  // rows and columns of a block
  int64_t splits;          // partial results along a leading axis of the result, which is float32 if there are several
};

struct WeightOnlyOperands {
  Dtype dtype, of_result;
  const void *x, *q;
  const float* scale;
};

Status WeightOnly(const WeightOnlyProblem& problem, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, void* result,
                  LaunchStream stream);

}  // namespace jaxext
