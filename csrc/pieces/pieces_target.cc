// The targets of products in pieces, and the table of kernels.
#include "pieces/pieces.h"

namespace jaxext {
namespace {

Reason Refuses(MatmulRole role, bool, const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  return PiecesRefuses(role, p, dtypes, arch);
}

Status Launch(MatmulRole role, const MatmulProblem& p, const PiecesConfig& config, const ProductArrays& arrays, const Epilogue*,
              LaunchStream stream) {
  return LaunchPieces(role, p, config, arrays, stream);
}

Row Facts(const PiecesKernel&) { return {{"operands", Name(Dtype::kF32)}, {"most_splits", kMostSplits}}; }

const Registered registered({"pieces",
                             ProductTargets<MatmulRole, MatmulProblem, PiecesConfig>("pieces_", /*fused=*/nullptr, Refuses, Launch),
                             [] { return RowsOf(PiecesKernels(), Facts); }});

}  // namespace
}  // namespace jaxext
