// The target of scaled products: its arrays, and its table of kernels.
#include "scaled/scaled.h"

#include "common/refusals.h"

namespace jaxext {

Scale TakeScale(Arrays& arrays, const char* name, int64_t batch, int64_t outer, int64_t steps, bool steps_last) {
  std::vector<int64_t> shape = {batch, steps_last ? outer : steps, steps_last ? steps : outer};
  const Buffer* next = arrays.PeekOperand();
  if (next != nullptr && next->shape.size() == 3) {
    for (int axis = 0; axis < 3; ++axis) shape[axis] = next->shape[axis] == 1 ? 1 : shape[axis];
  }
  const Array scale = arrays.Operand(name, shape, Dtype::kF32);
  if (!arrays.ok()) return {};
  const auto stride = [&](int axis, int64_t apart) { return shape[axis] == 1 ? 0 : apart; };
  const int64_t of_second = stride(1, shape[2]), of_third = stride(2, 1);
  return {static_cast<const float*>(scale.data), stride(0, Product({shape[1], shape[2]})), steps_last ? of_second : of_third,
          steps_last ? of_third : of_second};
}

namespace {

Status Launch(Arrays& arrays, const ScaledProblem& p, const ScaledConfig& config, LaunchStream stream) {
  const Array a = arrays.Operand("a", {p.B, p.M, p.K}), b = arrays.Operand("b", {p.B, p.N, p.K});
  const Scale left = TakeScale(arrays, "left", p.B, p.I, p.S, /*steps_last=*/true);
  // Columns that have a scale each have them beside each other.
  const Scale right = TakeScale(arrays, "right", p.B, p.J, p.S, /*steps_last=*/p.J != p.N);
  const Array d = arrays.Result("d", InParts({p.B, p.M, p.N}, config.splits));
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchScaled(p, config, a.dtype, b.dtype, d.dtype, a.data, b.data, left, right, d.data, stream);
}

Row Facts(const ScaledKernel& k) { return {{"operands", Name(k.first)}, {"second", Name(k.second)}, {"most_splits", kMostSplits}}; }

const Registered registered({"scaled", {TargetOf<ScaledProblem, ScaledConfig>("scaled", ScaledRefuses, Launch)}, [] {
                               return RowsOf(ScaledKernels(), Facts);
                             }});

}  // namespace
}  // namespace jaxext
