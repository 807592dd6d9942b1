#include "common/product_arrays.h"

namespace jaxext {

Slots SlotsOf(const MatmulProblem& p) { return {{{"a", {p.B, p.M, p.K}}, {"b", {p.B, p.K, p.N}}, {"c", {p.B, p.M, p.N}}}}; }

Slots SlotsOf(const ConvProblem& p) {
  return {{{"x", {p.B, p.N, p.input[0], p.input[1], p.input[2], p.G, p.C}},
           {"w", {p.B, p.G, p.K, p.filter[0], p.filter[1], p.filter[2], p.C}},
           {"y", {p.B, p.N, p.output[0], p.output[1], p.output[2], p.G, p.K}}}};
}

// A role is the number of its open slot, plus one: the third slot of 0.
static_assert(static_cast<int>(MatmulRole::kNN) == 0 && static_cast<int>(MatmulRole::kNT) == 1 && static_cast<int>(MatmulRole::kTN) == 2);
static_assert(static_cast<int>(ConvRole::kFprop) == 0 && static_cast<int>(ConvRole::kDgrad) == 1);
static_assert(static_cast<int>(ConvRole::kWgrad) == 2);

ProductArrays TakeProduct(Arrays& arrays, int role, const Slots& slots, int64_t splits) {
  const Slot& open = slots[role == 0 ? 2 : role - 1];
  const Slot& one = slots[role == 1 ? 1 : 0];
  const Slot& other = slots[role == 0 ? 1 : 2];
  const Array first = arrays.Operand(one.name, one.shape);
  const Array second = arrays.Operand(other.name, other.shape, first.dtype);
  const Array out = arrays.Result(open.name, InParts(open.shape, splits));
  return {first.dtype, out.dtype, first.data, second.data, out.data};
}

std::vector<int64_t> BiasOf(const MatmulProblem& p) { return {p.B, p.N}; }

std::vector<int64_t> BiasOf(const ConvProblem& p) { return {p.B, p.G, p.K}; }

}  // namespace jaxext
