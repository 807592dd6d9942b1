// The targets of products in pieces: their arrays, and the table of kernels.
#include "pieces/pieces.h"

namespace jaxext {
namespace {

Target TargetOfRole(MatmulRole role) {
  const auto refuses = [role](const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
    return PiecesRefuses(role, p, dtypes, arch);
  };
  const auto launch = [role](Arrays& arrays, const MatmulProblem& p, const PiecesConfig& config, LaunchStream stream) {
    const auto [operands, result, first, second, out] = TakeMatmul(arrays, role, p, config.splits);
    if (Status status = arrays.Done(); !status.ok()) return status;
    return LaunchPieces(role, p, config, operands, result, first, second, out, stream);
  };
  return TargetOf<MatmulProblem, PiecesConfig>(std::string("pieces_") + kMatmulRoles[static_cast<int>(role)], refuses, launch);
}

std::vector<Row> Kernels() {
  std::vector<Row> rows;
  for (const PiecesKernel& k : PiecesKernels()) {
    rows.push_back(RowOf({{"operands", Name(Dtype::kF32)}, {"most_splits", kMostSplits}}, k.config, k.stages, k.shared_bytes));
  }
  return rows;
}

const Registered registered({"pieces",
                             {TargetOfRole(MatmulRole::kNN), TargetOfRole(MatmulRole::kNT), TargetOfRole(MatmulRole::kTN)},
                             Kernels});

}  // namespace
}  // namespace jaxext
