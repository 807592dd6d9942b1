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

struct ScaledGemm {
  ScaledProblem sizes;
  int64_t splits;
  const void* a;
  const void* b;
  Scale left, right;
  void* d;
  bool wide;  // d is float32, else bfloat16
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

// The compile units' parts of the table.
std::vector<ScaledKernel> ScaledE4M3();
std::vector<ScaledKernel> ScaledE5M2();

}  // namespace jaxext
