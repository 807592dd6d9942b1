// The targets of ragged products: their arrays, and the table of kernels.
#include "ragged/ragged.h"

namespace jaxext {
namespace {

// The places are visits or, in TN, ranges.
Status Launch(MatmulRole role, Arrays& arrays, const RaggedProblem& p, const RaggedConfig& config, LaunchStream stream) {
  const auto& [B, P, R, M, N, K, G] = p;
  if (config.tile_m < 1) return Invalid("ragged: tile_m is " + std::to_string(config.tile_m) + ", want 1 or more");
  const Slots slots = {{{"x", {B, P, R, M, K}}, {"w", {B, G, K, N}}, {"y", {B, P, R, M, N}}}};
  const ProductArrays taken = TakeProduct(arrays, static_cast<int>(role), slots, /*splits=*/1);
  const bool sums = role == MatmulRole::kTN;
  const std::vector<int64_t> shape = {B, P, sums ? G : VisitsOf(p, config.tile_m), sums ? 2 : 5};
  const Array places = arrays.Operand(sums ? "ranges" : "visits", shape, Dtype::kS32);
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchRagged(role, p, config, taken, static_cast<const int32_t*>(places.data), stream);
}

Target TargetOf(MatmulRole role) {
  return TargetOfRole<RaggedProblem, RaggedConfig>(std::string("ragged_") + Name(role), role, RaggedRefuses, Launch);
}

Row Facts(const RaggedKernel& k) { return {{"role", Name(k.role)}, {"operands", Name(k.dtype)}, {"result", Name(k.dtype)}}; }

const Registered registered({"ragged", {TargetOf(MatmulRole::kNN), TargetOf(MatmulRole::kNT), TargetOf(MatmulRole::kTN)}, [] {
                               return RowsOf(RaggedKernels(), Facts);
                             }});

}  // namespace
}  // namespace jaxext
