// Products of a matrix with its own transpose on Hopper: the kernels, what they refuse, and how to launch them.
//
//     y[b,i,j] = scale Σ_n x[b,i,n] x[b,j,n] + of_addend addend[b,i,j]
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/family.h"

namespace jaxext {

// x[B,M,N], y[B,M,M].
struct GramProblem {
  JAXEXT_INTEGERS(B, M, N)
};

// Exported programs hold it, so a released tile may be removed only with a new version of the target.
struct GramConfig {  // tile_m and tile_n are of the rows and columns of y, tile_k of N
  JAXEXT_INTEGERS(tile_m, tile_n, tile_k,
                  cluster_m,  // blocks, one above the other, that share what they load for the columns
                  splits)     // above 1: so many float32 partial results, each over a part of the sum
};

struct GramOptions {
  JAXEXT_REALS(scale, of_addend)
};

struct GramOperands {
  const void* x;
  const void* addend;  // of y's shape and dtype, and symmetric; or null
  double scale, of_addend;
};

struct Gram {
  GramProblem sizes;
  int64_t splits;
  GramOperands operands;
  void* y;
  bool wide;  // y is float32, else of x's dtype
};

struct GramKernel {
  Dtype operands;
  GramConfig config;  // of one part
  int stages;
  int shared_bytes;
  Status (*launch)(const Gram&, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<GramKernel>& GramKernels();

// `dtypes`: of x, of x again, of y and of the addend.
Reason GramRefuses(const GramProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// The clusters of one matrix, and of one part, that touch the lower triangle.
int64_t GramClusters(int64_t rows, const GramConfig& config);

// y, or its partial results.
Status LaunchGram(const GramProblem& problem, const GramConfig& config, Dtype dtype, Dtype result, const GramOperands& operands, void* y,
                  LaunchStream stream);

// The compile units' parts of the table.
std::vector<GramKernel> GramBF16();
std::vector<GramKernel> GramF16();

}  // namespace jaxext
