// The kernels of ragged products on Hopper, and how to launch them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/product_arrays.h"
#include "ragged/visits.h"

namespace jaxext {

// x[B,P,R,M,K], w[B,G,K,N], y[B,P,R,M,N]: rows in G groups, and a matrix for each.
struct RaggedProblem {
  JAXEXT_INTEGERS(B, P, R, M, N, K, G)
};

// The config of a kernel.  Exported programs hold it, so a released tile may be removed only with a new version of the targets.
struct RaggedConfig {
  JAXEXT_INTEGERS(tile_m, tile_n, tile_k,
                  cluster_n)  // neighbouring blocks that share their loads of the left operand
};

// NN and NT: D[i,m,n] = Σ_k A[i,m,k] B[group of row m,k,n].  TN: D[g,m,n] = Σ_i,k A[i,m,k] B[i,k,n], k over the rows of group g.  Strides
// are those of a matrix product (matmul.h).
struct RaggedGemm {
  int64_t m, n, k;
  int64_t a_matrices, b_matrices, d_matrices;
  int64_t P, R, G;
  int64_t visits;         // of each matrix of rows; TN has none
  const int32_t* places;  // visits[B,P,visits,5] or, in TN, ranges[B,P,G,2]: see kernels/ragged/problem.py
  const void* a;
  const void* b;
  void* d;
  int64_t a_leading, a_batch, b_leading, b_batch;
};

struct RaggedKernel {
  MatmulRole role;
  Dtype dtype;  // of operands and result
  RaggedConfig config;
  int stages;
  int shared_bytes;
  Status (*launch)(const RaggedGemm&, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<RaggedKernel>& RaggedKernels();

Reason RaggedRefuses(MatmulRole role, const RaggedProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// The result of `role`, of its operands in the order of slots (x, w, y without the open one).
Status LaunchRagged(MatmulRole role, const RaggedProblem& problem, const RaggedConfig& config, const ProductArrays& arrays,
                    const int32_t* places, LaunchStream stream);

// The compile units' parts of the table.
std::vector<RaggedKernel> RaggedNN();
std::vector<RaggedKernel> RaggedNT();
std::vector<RaggedKernel> RaggedTN();

}  // namespace jaxext
