// The target of weight-only products: its arrays, and the table of Hopper's kernels.
#include "weight_only/weight_only.h"
#include "weight_only/wide_weight_only.h"

namespace jaxext {
namespace {

Status Launch(Arrays& arrays, const WeightOnlyProblem& p, const WeightOnlyConfig& config, LaunchStream stream) {
  const Array x = arrays.Operand("x", {p.B, p.M, p.K});
  const Array w = arrays.Operand("w", {p.B, p.K, p.bits == 4 ? p.N / 2 : p.N}, Dtype::kS8);  // bytes, whatever is packed in them
  const Array scale = arrays.Operand("scale", {p.B, p.S, p.N}, Dtype::kF32);
  const Array y = arrays.Result("y", InParts({p.B, p.M, p.N}, config.splits));
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchWeightOnly(p, config, {x.dtype, y.dtype, x.data, w.data, static_cast<const float*>(scale.data)}, y.data, stream);
}

Row Facts(const WideWeightOnlyKernel& k) { return {{"operands", Name(k.operands)}, {"bits", k.bits}}; }

const Registered registered({"weight_only", {TargetOf<WeightOnlyProblem, WeightOnlyConfig>("weight_only", WeightOnlyRefuses, Launch)}, [] {
                               return RowsOf(WideWeightOnlyKernels(), Facts);
                             }});

}  // namespace
}  // namespace jaxext
