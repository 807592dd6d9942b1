// The targets of matrix products, and the table of kernels.
#include "matmul/matmul.h"

namespace jaxext {
namespace {

// NT with an epilogue, whose bias has an element for each K.
Target LinearNT() {
  const auto refuses = [](const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
    return MatmulRefuses(MatmulRole::kNT, /*fused=*/true, p, dtypes, arch);
  };
  const auto launch = [](Arrays& arrays, const MatmulProblem& p, const MatmulConfig& config, const EpilogueOptions& options,
                         LaunchStream stream) {
    const ProductArrays taken = TakeProduct(arrays, static_cast<int>(MatmulRole::kNT), SlotsOf(p), config.splits);
    const Epilogue epilogue = TakeEpilogue(arrays, options, {p.B, p.K}, SlotsOf(p)[0].shape, taken.result);
    if (Status status = arrays.Done(); !status.ok()) return status;
    return LaunchMatmul(MatmulRole::kNT, p, config, taken, &epilogue, stream);
  };
  return TargetOf<MatmulProblem, MatmulConfig, EpilogueOptions>("linear_nt", refuses, launch);
}

Row Facts(const MatmulKernel& k) {
  return {{"role", Name(k.role)},
          {"operands", Name(k.operands)},
          {"result", Name(k.result)},
          {"fused", int64_t{k.fused}},
          {"most_splits", kMostSplits}};
}

const Registered registered(
    {"matmul",
     Joined({ProductTargets<MatmulRole, MatmulProblem, MatmulConfig>("matmul_", "linear", MatmulRefuses, LaunchMatmul), {LinearNT()}}),
     [] { return RowsOf(MatmulKernels(), Facts); }});

}  // namespace
}  // namespace jaxext
