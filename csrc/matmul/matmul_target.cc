// The targets of matrix products: their arrays, and the table of kernels.
#include "matmul/matmul.h"

namespace jaxext {
namespace {

Target Plain(MatmulRole role) {
  const auto refuses = [role](const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
    return MatmulRefuses(role, p, dtypes, /*fused=*/false, arch);
  };
  const auto launch = [role](Arrays& arrays, const MatmulProblem& p, const MatmulConfig& config, LaunchStream stream) {
    const auto [operands, result, first, second, out] = TakeMatmul(arrays, role, p, config.splits);
    if (Status status = arrays.Done(); !status.ok()) return status;
    return LaunchMatmul(role, p, config, operands, result, first, second, out, /*epilogue=*/nullptr, stream);
  };
  return TargetOf<MatmulProblem, MatmulConfig>(std::string("matmul_") + kMatmulRoles[static_cast<int>(role)], refuses, launch);
}

Reason LinearRefuses(const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  return MatmulRefuses(MatmulRole::kNN, p, dtypes, /*fused=*/true, arch);
}

Status LaunchLinear(Arrays& arrays, const MatmulProblem& p, const MatmulConfig& config, const EpilogueOptions& options,
                    LaunchStream stream) {
  const auto [operands, result, first, second, out] = TakeMatmul(arrays, MatmulRole::kNN, p, config.splits);
  const Epilogue epilogue = TakeEpilogue(arrays, options, {p.B, p.N}, {p.B, p.M, p.N}, result);
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchMatmul(MatmulRole::kNN, p, config, operands, result, first, second, out, &epilogue, stream);
}

std::vector<Row> Kernels() {
  std::vector<Row> rows;
  for (const MatmulKernel& k : MatmulKernels()) {
    rows.push_back(RowOf({{"role", kMatmulRoles[static_cast<int>(k.role)]},
                          {"operands", Name(k.operands)},
                          {"result", Name(k.result)},
                          {"fused", int64_t{k.fused}},
                          {"most_splits", kMostSplits}},
                         k.config, k.stages, k.shared_bytes));
  }
  return rows;
}

const Registered registered({"matmul",
                             {Plain(MatmulRole::kNN), Plain(MatmulRole::kNT), Plain(MatmulRole::kTN),
                              TargetOf<MatmulProblem, MatmulConfig, EpilogueOptions>("linear", LinearRefuses, LaunchLinear)},
                             Kernels});

}  // namespace

MatmulArrays TakeMatmul(Arrays& arrays, MatmulRole role, const MatmulProblem& p, int64_t splits) {
  const struct Slot {
    const char* name;
    std::vector<int64_t> shape;
  } a = {"a", {p.B, p.M, p.K}}, b = {"b", {p.B, p.K, p.N}}, c = {"c", {p.B, p.M, p.N}};
  const Slot& one = role == MatmulRole::kNT ? b : a;
  const Slot& other = role == MatmulRole::kNN ? b : c;
  const Slot& open = role == MatmulRole::kNN ? c : role == MatmulRole::kNT ? a : b;
  const Array first = arrays.Operand(one.name, one.shape);
  const Array second = arrays.Operand(other.name, other.shape, first.dtype);
  const Array out = arrays.Result(open.name, InParts(open.shape, splits));
  return {first.dtype, out.dtype, first.data, second.data, out.data};
}

}  // namespace jaxext
