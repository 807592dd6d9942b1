// Visits of ragged products: kernels/ragged/problem.py.
#pragma once

#include <algorithm>

#include "common/refusals.h"

namespace jaxext {

// The number of visits of a matrix of rows, in tiles of `tile_m` rows.
template <typename Problem>
int64_t VisitsOf(const Problem& p, int64_t tile_m) {
  return Sum(p.M / tile_m + (p.M % tile_m > 0), std::max<int64_t>(1, std::min(p.G, p.M)) - 1);
}

}  // namespace jaxext
