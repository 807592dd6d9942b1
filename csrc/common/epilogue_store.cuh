// Accumulators on their way through shared memory to global memory, so that a warp stores whole lines of 128 bytes.
#pragma once

#include "common/sm90.cuh"  // first
#include "cutlass/numeric_conversion.h"

namespace jaxext::sm90 {

// 16 rows of a line each, of a warp.  16 bytes more keep rows apart in the banks.
struct alignas(16) StagedRows {
  char rows[16][128 + 16];
};

}  // namespace jaxext::sm90
