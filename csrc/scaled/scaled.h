// The kernels of products of scaled 8-bit floats on Hopper, and how to launch them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/family.h"

namespace jaxext {

constexpr int64_t kScaledStep = 128;  // of what is contracted: its product is scaled, and moved to the sums in float32

// d[m,n] = Σ_k a[m,k] b[n,k], for each of B.  A scale has an element for each block: of rows in I blocks, columns in J, what is contracted
// in S.
struct ScaledProblem {
  JAXEXT_INTEGERS(B, M, N, K, I, J, S)
};

// The config of a kernel.  Exported programs hold it, so a released tile may be removed only with a new version of the target.
struct ScaledConfig {
  JAXEXT_INTEGERS(tile_m, tile_n, tile_k,
                  cluster_m,  // neighbouring blocks that share their loads of the right operand
                  splits)     // partial results, in float32
};

// A scale in float32 and how far its elements are apart: in the batch, of blocks of rows (columns), of blocks of what is contracted.  0:
// one element serves all.
struct Scale {
  const float* data;
  int64_t batch, outer, step;
};

// The groups of rows of a ragged product (ragged_scaled.h), in which each has a matrix b, and scales of its columns.
struct RaggedRows {
  const int32_t* visits;               // [.., count, 5]: see kernels/ragged/problem.py
  int count;                           // of the visits of a matrix a
  int matrices, groups;                // b, in all and of a matrix a
  int sharing_ranges, sharing_groups;  // neighbouring matrices a with the same visits, and with the same matrices b
};

struct ScaledGemm {
  ScaledProblem sizes;
  int64_t splits;
  const void* a;
  const void* b;
  Scale left, right;
  void* d;
  bool wide;  // d is float32, else bfloat16
  RaggedRows ragged = {};
};

struct ScaledKernel {
  Dtype first, second;  // of the operands
  ScaledConfig config;  // of one part
  int stages;
  int shared_bytes;
  Status (*launch)(const ScaledGemm&, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<ScaledKernel>& ScaledKernels();

// Of a, b and d.
Reason ScaledRefuses(const ScaledProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// d, or its partial sums.  A scale of columns that have one each has them beside each other.
Status LaunchScaled(const ScaledProblem& problem, const ScaledConfig& config, Dtype first, Dtype second, Dtype result, const void* a,
                    const void* b, const Scale& left, const Scale& right, void* d, LaunchStream stream);

// Shared with ragged products of scaled numbers: the reason if sizes are not as the kernels want them, whatever the tile; and if arrays are
// not.
Reason CheckScaledSizes(const ScaledProblem& problem, const std::string& result);
Reason CheckScaledArrays(const ScaledProblem& problem, const void* a, const void* b, const Scale& right, const void* d);

// The next operand, a scale of shape (batch, outer, steps), or (batch, steps, outer).  An axis may have one element for all.
Scale TakeScale(Arrays& arrays, const char* name, int64_t batch, int64_t outer, int64_t steps, bool steps_last);

// The compile units' parts of the table.
std::vector<ScaledKernel> ScaledE4M3();
std::vector<ScaledKernel> ScaledE5M2();

}  // namespace jaxext
