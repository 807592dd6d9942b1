// The targets of ragged products: their arrays, and the table of kernels.
#include "matmul/matmul.h"
#include "ragged/ragged.h"

namespace jaxext {
namespace {

// The places are visits or, in TN, ranges.
Status Launch(MatmulRole role, Arrays& arrays, const RaggedProblem& p, const RaggedConfig& config, LaunchStream stream) {
  const auto& [B, P, R, M, N, K, G] = p;
  const struct Slot {
    const char* name;
    std::vector<int64_t> shape;
  } x = {"x", {B, P, R, M, K}}, w = {"w", {B, G, K, N}}, y = {"y", {B, P, R, M, N}};
  const Slot& one = role == MatmulRole::kNT ? w : x;
  const Slot& other = role == MatmulRole::kNN ? w : y;
  const Slot& open = role == MatmulRole::kNN ? y : role == MatmulRole::kNT ? x : w;
  if (config.tile_m < 1) return Invalid("ragged: tile_m is " + std::to_string(config.tile_m) + ", want 1 or more");
  const Array first = arrays.Operand(one.name, one.shape);
  const Array second = arrays.Operand(other.name, other.shape, first.dtype);
  const bool sums = role == MatmulRole::kTN;
  const std::vector<int64_t> shape = {B, P, sums ? G : VisitsOf(p, config.tile_m), sums ? 2 : 5};
  const Array places = arrays.Operand(sums ? "ranges" : "visits", shape, Dtype::kS32);
  const Array out = arrays.Result(open.name, open.shape);
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchRagged(role, p, config, first.dtype, out.dtype, first.data, second.data, static_cast<const int32_t*>(places.data), out.data,
                      stream);
}

Target TargetOfRole(MatmulRole role) {
  const auto refuses = [role](const RaggedProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
    return RaggedRefuses(role, p, dtypes, arch);
  };
  const auto launch = [role](Arrays& arrays, const RaggedProblem& p, const RaggedConfig& config, LaunchStream stream) {
    return Launch(role, arrays, p, config, stream);
  };
  return TargetOf<RaggedProblem, RaggedConfig>(std::string("ragged_") + kMatmulRoles[static_cast<int>(role)], refuses, launch);
}

std::vector<Row> Kernels() {
  std::vector<Row> rows;
  for (const RaggedKernel& k : RaggedKernels()) {
    rows.push_back(RowOf({{"role", kMatmulRoles[static_cast<int>(k.role)]}, {"operands", Name(k.dtype)}, {"result", Name(k.dtype)}},
                         k.config, k.stages, k.shared_bytes));
  }
  return rows;
}

const Registered registered({"ragged",
                             {TargetOfRole(MatmulRole::kNN), TargetOfRole(MatmulRole::kNT), TargetOfRole(MatmulRole::kTN)},
                             Kernels});

}  // namespace
}  // namespace jaxext
