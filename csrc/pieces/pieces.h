// The kernels of products of float32 numbers in pieces of bfloat16 on Hopper, and how to launch them.  It must not know XLA or Python.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "matmul/matmul.h"
#include "common/problem.h"
#include "common/status.h"

namespace jaxext {

// The config of a kernel.  Exported programs hold it, so a released tile may be removed only with a new version of the targets.  The
// fields of `jaxext.backends.cuda.cuda_pieces.PiecesConfig`.
struct PiecesConfig {
  int64_t tile_m, tile_n;
  int64_t pieces;  // of each factor: 2 make three products, 3 make six
  int64_t splits;  // partial results, each over a part of the contracted axis
};

struct PiecesKernel {
  PiecesConfig config;  // of one part
  int stages;
  int shared_bytes;
  Status (*launch)(MatmulRole, const Gemm&, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<PiecesKernel>& PiecesKernels();

// The float32 result of `role`, or its partial sums.
Status Pieces(MatmulRole role, const MatmulProblem& problem, const PiecesConfig& config, Dtype operands, Dtype result, const void* first,
              const void* second, void* out, LaunchStream stream);

// The compile unit's part of the table.
std::vector<PiecesKernel> PiecesOfBF16();

}  // namespace jaxext
