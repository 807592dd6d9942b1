// The handler of weight-only products: XLA's buffers and attributes become a call of the launcher.
#include "common/ffi.h"
#include "weight_only/weight_only.h"

namespace jaxext {

struct WeightOnlyAttributes {
  int64_t B, M, N, K, S, bits;
  int64_t tile_m, tile_n, splits;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::WeightOnlyAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),
                                      ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<int64_t>("S"),
                                      ::xla::ffi::StructMember<int64_t>("bits"), ::xla::ffi::StructMember<int64_t>("tile_m"),
                                      ::xla::ffi::StructMember<int64_t>("tile_n"), ::xla::ffi::StructMember<int64_t>("splits"));

namespace jaxext {
namespace {

// As bytes, whatever is packed in them.
Status CheckWeight(const ffi::AnyBuffer& buffer, const WeightOnlyAttributes& a) {
  if (Status s = CheckShape("w", buffer, {a.B, a.K, a.bits == 4 ? a.N / 2 : a.N}); !s.ok()) return s;
  return buffer.element_type() == ffi::S8 ? Status{} : WrongDtype("w", buffer, "S8");
}

ffi::Error Call(LaunchStream stream, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scale, Result y, WeightOnlyAttributes a) {
  WeightOnlyOperands operands = {};
  Dtype of_scale;
  if (Status s = Check("x", x, {a.B, a.M, a.K}, &operands.dtype); !s.ok()) return ToError(s);
  if (Status s = CheckWeight(w, a); !s.ok()) return ToError(s);
  if (Status s = Check("scale", scale, {a.B, a.S, a.N}, &of_scale); !s.ok()) return ToError(s);
  if (of_scale != Dtype::kF32) return ToError(WrongDtype("scale", scale, "F32"));
  if (Status s = Check("y", *y, InParts({a.B, a.M, a.N}, a.splits), &operands.of_result); !s.ok()) return ToError(s);
  operands.x = x.untyped_data(), operands.q = w.untyped_data();
  operands.scale = static_cast<const float*>(scale.untyped_data());
  return ToError(WeightOnly({a.B, a.M, a.N, a.K, a.S, a.bits}, {a.tile_m, a.tile_n, a.splits}, operands, y->untyped_data(), stream));
}

}  // namespace

std::vector<Target> WeightOnlyTargets() { return {{"jaxext_weight_only_v1", kHandlers<&BindingOfThree<WeightOnlyAttributes>, &Call>}}; }

}  // namespace jaxext
