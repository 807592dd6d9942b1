// The target of products with an own transpose: its arrays, and its table of kernels.
#include "gram/gram.h"

namespace jaxext {
namespace {

Status Launch(Arrays& arrays, const GramProblem& p, const GramConfig& config, const GramOptions& options, LaunchStream stream) {
  const Array x = arrays.Operand("x", {p.B, p.M, p.N});
  const Array y = arrays.Result("y", InParts({p.B, p.M, p.M}, config.splits));
  const bool added = arrays.operands_left() > 0;
  const void* addend = added ? arrays.Operand("addend", {p.B, p.M, p.M}, y.dtype).data : nullptr;
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchGram(p, config, x.dtype, y.dtype, {x.data, addend, options.scale, options.of_addend}, y.data, stream);
}

Row Facts(const GramKernel& k) { return {{"operands", Name(k.operands)}, {"most_splits", kMostSplits}}; }

const Registered registered({"gram", {TargetOf<GramProblem, GramConfig, GramOptions>("gram", GramRefuses, Launch)}, [] {
                               return RowsOf(GramKernels(), Facts);
                             }});

}  // namespace
}  // namespace jaxext
