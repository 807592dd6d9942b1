// The target of ragged products of scaled 8-bit floats: its arrays, and its table of kernels.
#include "ragged_scaled/ragged_scaled.h"

namespace jaxext {
namespace {

Status Launch(Arrays& arrays, const RaggedScaledProblem& p, const RaggedScaledConfig& config, LaunchStream stream) {
  if (config.tile_m < 1) return Invalid("ragged_scaled: tile_m is " + std::to_string(config.tile_m) + ", want 1 or more");
  const int64_t matrices = Product({p.B, p.P, p.R}), groups = Product({p.B, p.G});
  const Array a = arrays.Operand("a", {matrices, p.M, p.K}), b = arrays.Operand("b", {groups, p.N, p.K});
  const Scale left = TakeScale(arrays, "left", matrices, p.M, p.S, /*steps_last=*/true);
  // Columns that have a scale each have them beside each other.
  const Scale right = TakeScale(arrays, "right", groups, p.J, p.S, /*steps_last=*/p.J != p.N);
  const Array visits = arrays.Operand("visits", {p.B, p.P, VisitsOf(p, config.tile_m), 5}, Dtype::kS32);
  const Array d = arrays.Result("d", {matrices, p.M, p.N});
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchRaggedScaled(p, config, a.dtype, b.dtype, d.dtype, a.data, b.data, left, right, static_cast<const int32_t*>(visits.data),
                            d.data, stream);
}

// The rows of the table have the names of this family's config.
std::vector<Row> Rows() {
  std::vector<Row> rows;
  for (const ScaledKernel& k : RaggedScaledKernels()) {
    const RaggedScaledConfig config = {k.config.tile_m, k.config.tile_n, k.config.tile_k, k.config.cluster_m};
    rows.push_back(RowOf({{"operands", Name(k.first)}, {"second", Name(k.second)}}, config, k.stages, k.shared_bytes));
  }
  return rows;
}

const Registered registered({"ragged_scaled",
                             {TargetOf<RaggedScaledProblem, RaggedScaledConfig>("ragged_scaled", RaggedScaledRefuses, Launch)},
                             Rows});

}  // namespace
}  // namespace jaxext
