// The kernels of products of float32 numbers in pieces of bfloat16 on Hopper, and how to launch them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "matmul/matmul.h"

namespace jaxext {

// The config of a kernel.  Exported programs hold it, so a released tile may be removed only with a new version of the targets.
struct PiecesConfig {
  JAXEXT_INTEGERS(tile_m, tile_n,
                  pieces,  // of each factor: 2 make three products, 3 make six
                  splits)  // partial results, each over a part of the contracted axis
};

struct PiecesKernel {
  PiecesConfig config;  // of one part
  int stages;
  int shared_bytes;
  Status (*launch)(MatmulRole, const Gemm&, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<PiecesKernel>& PiecesKernels();

// Of products in pieces of bfloat16, however many.
Reason PiecesRefuses(MatmulRole role, const MatmulProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// The float32 result of `role`, or its partial sums.
Status LaunchPieces(MatmulRole role, const MatmulProblem& problem, const PiecesConfig& config, const ProductArrays& arrays,
                    LaunchStream stream);

// The compile unit's part of the table.
std::vector<PiecesKernel> PiecesOfBF16();

}  // namespace jaxext
