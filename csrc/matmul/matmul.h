// The kernels of matrix products on Hopper, and how to launch them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/product_arrays.h"

namespace jaxext {

// The config of a kernel.  Exported programs hold it, so a released tile may be removed only with a new version of the targets.
struct MatmulConfig {
  JAXEXT_INTEGERS(tile_m, tile_n, tile_k,
                  cluster_m,  // blocks, one above the other, that share their loads of the right operand
                  pingpong,   // 1: two warp groups take turns, one multiplies while the other stores; 0: both work on one tile
                  splits)     // above 1: so many float32 partial results, each over a part of the contracted axis
};

// Every role as a plain product: D[l,m,n] = Σ_k A[l,m,k] B[l,k,n].  Strides are in elements: `leading` is that of the axis that is not
// contiguous; D is dense.
struct Gemm {
  int64_t m, n, k, l;
  const void* a;
  const void* b;
  void* d;
  int64_t a_leading, a_batch, b_leading, b_batch;
  Epilogue epilogue;  // of the kernels that fuse one; bias[l,n], residual and saved as D
};

struct MatmulKernel {
  MatmulRole role;
  Dtype operands, result;
  bool fused;           // whether it has an epilogue
  MatmulConfig config;  // with splits = 1
  int stages;
  int shared_bytes;
  Status (*launch)(const Gemm&, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<MatmulKernel>& MatmulKernels();

// `role` as a plain product, of its operands in the order of slots (a, b, c without the open one); splits stand in the batch.
Gemm GemmOf(MatmulRole role, const MatmulProblem& problem, int64_t splits, const void* first, const void* second, void* out);

// The number of rows or columns of tiles in a band: 1, 2, 4 or 8.  Tiles of a band are computed one after the other, so that they share
// data in the L2 cache, but CUTLASS pads the last bands with useless tiles.  The result is the widest band that needs at most an eighth
// more waves.  If there is only one wave, all tiles are computed at once anyway.
int BandOf(int64_t rows, int64_t columns, int64_t cluster_m, int64_t batch, int64_t multiprocessors);

// Problems with a size of 0 are accepted, whatever the other sizes.  `fused`: with an epilogue.  Every role of float32 is accepted, as
// transposed operands make it NT, the only one that is launched.
Reason MatmulRefuses(MatmulRole role, bool fused, const MatmulProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// The result of `role`, with an epilogue if there is one: of NN, and of NT in float32.
Status LaunchMatmul(MatmulRole role, const MatmulProblem& problem, const MatmulConfig& config, const ProductArrays& arrays,
                    const Epilogue* epilogue, LaunchStream stream);

// The compile units' parts of the table.
std::vector<MatmulKernel> MatmulNN();
std::vector<MatmulKernel> MatmulNT();
std::vector<MatmulKernel> MatmulTN();
std::vector<MatmulKernel> MatmulNTE4M3();
std::vector<MatmulKernel> MatmulNTTF32();
std::vector<MatmulKernel> MatmulNNFused();

}  // namespace jaxext
