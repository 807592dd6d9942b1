// Rows times numbers:  y[b,m,n] = x[b,m,n] scale[m]
#pragma once

#include "common/family.h"

namespace jaxext {

// x[B,M,N], scale[M], y[B,M,N].
struct RowscaleProblem {
  JAXEXT_INTEGERS(B, M, N)
};

struct RowscaleConfig {
  JAXEXT_INTEGERS(lanes)  // neighbours along N that a thread computes
};

}  // namespace jaxext
