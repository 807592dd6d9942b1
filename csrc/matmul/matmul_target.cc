// The targets of matrix products, and the table of kernels.
#include "matmul/matmul.h"

namespace jaxext {
namespace {

Row Facts(const MatmulKernel& k) {
  return {{"role", Name(k.role)},
          {"operands", Name(k.operands)},
          {"result", Name(k.result)},
          {"fused", int64_t{k.fused}},
          {"most_splits", kMostSplits}};
}

const Registered registered({"matmul",
                             ProductTargets<MatmulRole, MatmulProblem, MatmulConfig>("matmul_", "linear", MatmulRefuses, LaunchMatmul),
                             [] { return RowsOf(MatmulKernels(), Facts); }});

}  // namespace
}  // namespace jaxext
