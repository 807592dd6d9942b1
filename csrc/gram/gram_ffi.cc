// The handler of products with an own transpose: XLA's buffers and attributes become a call of `LaunchGram`.
#include "gram/gram.h"

#include "common/ffi.h"

namespace jaxext {

struct GramAttributes {
  int64_t B, M, N;
  int64_t tile_m, tile_n, tile_k, cluster_m, splits;
  double scale, of_addend;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::GramAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),
                                      ::xla::ffi::StructMember<int64_t>("tile_m"), ::xla::ffi::StructMember<int64_t>("tile_n"),
                                      ::xla::ffi::StructMember<int64_t>("tile_k"), ::xla::ffi::StructMember<int64_t>("cluster_m"),
                                      ::xla::ffi::StructMember<int64_t>("splits"), ::xla::ffi::StructMember<double>("scale"),
                                      ::xla::ffi::StructMember<double>("of_addend"));

namespace jaxext {
namespace {

ffi::Error Call(LaunchStream stream, ffi::AnyBuffer x, ffi::RemainingArgs added, Result y, GramAttributes attributes) {
  const auto [B, M, N, tile_m, tile_n, tile_k, cluster_m, splits, scale, of_addend] = attributes;
  Dtype dtype, result;
  if (Status s = Check("x", x, {B, M, N}, &dtype); !s.ok()) return ToError(s);
  if (Status s = Check("y", *y, InParts({B, M, M}, splits), &result); !s.ok()) return ToError(s);
  GramOperands operands = {x.untyped_data(), nullptr, scale, of_addend};
  if (added.size() > 1) return ToError(Invalid(std::to_string(added.size()) + " operands beside x, want an addend or none"));
  if (added.size() == 1) {
    const ffi::AnyBuffer addend = *added.get<ffi::AnyBuffer>(0);
    Dtype got;
    if (Status s = Check("addend", addend, {B, M, M}, &got); !s.ok()) return ToError(s);
    if (got != result) return ToError(Invalid(std::string("addend is ") + Name(got) + ", want " + Name(result)));
    operands.addend = addend.untyped_data();
  }
  return ToError(LaunchGram({B, M, N}, {tile_m, tile_n, tile_k, cluster_m, splits}, dtype, result, operands, y->untyped_data(), stream));
}

auto Bind() { return ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>().Attrs<GramAttributes>(); }

}  // namespace

std::vector<Target> GramTargets() { return {{"jaxext_gram_v1", kHandlers<&Bind, &Call>}}; }

}  // namespace jaxext
