#include "common/conv_arrays.h"

namespace jaxext {

ConvArrays TakeConv(Arrays& arrays, ConvRole role, const ConvProblem& p, int64_t splits) {
  const struct Slot {
    const char* name;
    std::vector<int64_t> shape;
  } x = {"x", {p.B, p.N, p.input[0], p.input[1], p.input[2], p.G, p.C}},
    w = {"w", {p.B, p.G, p.K, p.filter[0], p.filter[1], p.filter[2], p.C}},
    y = {"y", {p.B, p.N, p.output[0], p.output[1], p.output[2], p.G, p.K}};
  const Slot& open = role == ConvRole::kFprop ? y : role == ConvRole::kDgrad ? x : w;
  const Slot& one = role == ConvRole::kDgrad ? w : x;
  const Slot& other = role == ConvRole::kFprop ? w : y;
  const Array first = arrays.Operand(one.name, one.shape);
  const Array second = arrays.Operand(other.name, other.shape, first.dtype);
  const Array out = arrays.Result(open.name, InParts(open.shape, splits));
  return {first.dtype, out.dtype, first.data, second.data, out.data};
}

Epilogue TakeConvEpilogue(Arrays& arrays, const EpilogueOptions& options, const ConvProblem& p, Dtype result) {
  return TakeEpilogue(arrays, options, {p.B, p.G, p.K}, {p.B, p.N, p.output[0], p.output[1], p.output[2], p.G, p.K}, result);
}

}  // namespace jaxext
