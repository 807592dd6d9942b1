// What the kernels of products in pieces refuse, and from a configuration to its kernel.
#include "pieces/pieces.h"

#include <algorithm>
#include <string>

namespace jaxext {
namespace {

constexpr int64_t kUnit = 4;  // elements of 16 bytes, which TMA wants a multiple of

bool Empty(const MatmulProblem& p) { return Product({p.B, p.M, p.N, p.K}) == 0; }

int64_t Depth(MatmulRole role, const MatmulProblem& p) { return role == MatmulRole::kNN ? p.K : role == MatmulRole::kNT ? p.N : p.M; }

// The reason if no kernel supports the problem.  What it lets pass has fewer than 2^31 tiles.
Reason CheckProblem(MatmulRole role, const MatmulProblem& p) {
  if (Reason reason = CheckSizes({p.B, p.M, p.N, p.K})) return reason;
  const bool nt = role == MatmulRole::kNT;
  if (Reason reason = CheckRow("the left operand", nt ? 'N' : 'K', nt ? p.N : p.K, Bytes(Dtype::kF32))) return reason;
  if (Reason reason = CheckRow("the right operand", 'N', p.N, Bytes(Dtype::kF32))) return reason;
  if (std::max({Product({p.B, p.M, p.K}), Product({p.B, p.K, p.N}), Product({p.B, p.M, p.N})}) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  return {};
}

}  // namespace

const std::vector<PiecesKernel>& PiecesKernels() {
  static const auto* const kernels = new std::vector<PiecesKernel>(PiecesOfBF16());
  return *kernels;
}

Reason PiecesRefuses(MatmulRole role, const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("pieces", arch)) return reason;
  for (const std::string& dtype : {dtypes.first, dtypes.second, dtypes.result}) {
    if (dtype != "fp32") return dtypes.first + " times " + dtypes.second + " into " + dtypes.result + ", want fp32 alone";
  }
  if (std::min({p.B, p.M, p.N, p.K}) >= 0 && Empty(p)) return {};
  return CheckProblem(role, p);
}

Status LaunchPieces(MatmulRole role, const MatmulProblem& p, const PiecesConfig& config, const ProductArrays& arrays, LaunchStream stream) {
  const auto& [operands, result, first, second, out] = arrays;
  if (Reason reason = PiecesRefuses(role, p, {ShortName(operands), ShortName(operands), ShortName(result)})) {
    return Invalid("pieces: " + *reason);
  }
  const int64_t splits = config.splits, depth = Depth(role, p);
  if (Empty(p)) return Invalid("pieces: sizes are " + Text(p) + ", want 1 or more");
  if (Reason reason = CheckSplits(splits)) return Invalid("pieces: " + *reason);
  if (splits > 1 && p.B > 1) {
    return Invalid("pieces: splits is " + std::to_string(splits) + " and B is " + std::to_string(p.B) + ", want one of them to be 1");
  }
  if (splits > 1 && depth % (splits * kUnit) != 0) {
    return Invalid("pieces: the contracted axis has " + std::to_string(depth) + " elements, want a multiple of 4 for each of " +
                   std::to_string(splits) + " parts");
  }
  const PiecesKernel* kernel = Find(PiecesKernels(), config, [](const PiecesKernel&) { return true; });
  if (kernel == nullptr) return Invalid("pieces: no kernel has " + Text(config));
  if (Reason reason = CheckAligned({first, second, out})) return Invalid("pieces: " + *reason);
  return kernel->launch(role, GemmOf(role, p, splits, first, second, out), stream);
}

}  // namespace jaxext
