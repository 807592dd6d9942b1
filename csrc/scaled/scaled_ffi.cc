// The handler of scaled products: XLA's buffers and attributes become a call of `Scaled`.
#include "scaled/scaled.h"

#include "common/ffi.h"

namespace jaxext {

struct ScaledAttributes {
  int64_t B, M, N, K, I, J, S;
  int64_t tile_m, tile_n, tile_k, cluster_m, splits;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::ScaledAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),
                                      ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<int64_t>("I"),
                                      ::xla::ffi::StructMember<int64_t>("J"), ::xla::ffi::StructMember<int64_t>("S"),
                                      ::xla::ffi::StructMember<int64_t>("tile_m"), ::xla::ffi::StructMember<int64_t>("tile_n"),
                                      ::xla::ffi::StructMember<int64_t>("tile_k"), ::xla::ffi::StructMember<int64_t>("cluster_m"),
                                      ::xla::ffi::StructMember<int64_t>("splits"));

namespace jaxext {
namespace {

// A scale of shape (batch, outer, steps), or (batch, steps, outer).  An axis may have one element for all.
Status ScaleOf(const std::string& name, const ffi::AnyBuffer& buffer, int64_t batch, int64_t outer, int64_t steps, bool steps_last,
               Scale* scale) {
  const int64_t second = steps_last ? outer : steps, third = steps_last ? steps : outer;
  if (buffer.element_type() != ffi::F32) return WrongDtype(name, buffer, "F32");
  const auto got = buffer.dimensions();
  const auto one_or = [](int64_t size, int64_t all) { return size == 1 || size == all; };
  if (got.size() != 3 || !one_or(got[0], batch) || !one_or(got[1], second) || !one_or(got[2], third)) {
    return CheckShape(name, buffer, {batch, second, third});
  }
  const auto stride = [&](int axis, int64_t apart) { return got[axis] == 1 ? 0 : apart; };
  const int64_t of_second = stride(1, got[2]), of_third = stride(2, 1);
  *scale = {static_cast<const float*>(buffer.untyped_data()), stride(0, got[1] * got[2]), steps_last ? of_second : of_third,
            steps_last ? of_third : of_second};
  return {};
}

ffi::Error Call(LaunchStream stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer left, ffi::AnyBuffer right, Result out,
                ScaledAttributes attributes) {
  const auto [B, M, N, K, I, J, S, tile_m, tile_n, tile_k, cluster_m, splits] = attributes;
  Dtype first, second, result;
  Scale of_a, of_b;
  if (Status s = Check("a", a, {B, M, K}, &first); !s.ok()) return ToError(s);
  if (Status s = Check("b", b, {B, N, K}, &second); !s.ok()) return ToError(s);
  if (Status s = Check("d", *out, InParts({B, M, N}, splits), &result); !s.ok()) return ToError(s);
  if (Status s = ScaleOf("left", left, B, I, S, /*steps_last=*/true, &of_a); !s.ok()) return ToError(s);
  // Columns that have a scale each have them beside each other.
  if (Status s = ScaleOf("right", right, B, J, S, /*steps_last=*/J != N, &of_b); !s.ok()) return ToError(s);
  return ToError(Scaled({B, M, N, K, I, J, S}, {tile_m, tile_n, tile_k, cluster_m, splits}, first, second, result, a.untyped_data(),
                        b.untyped_data(), of_a, of_b, out->untyped_data(), stream));
}

auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attrs<ScaledAttributes>();
}

}  // namespace

std::vector<Target> ScaledTargets() { return {{"jaxext_scaled_v1", kHandlers<&Bind, &Call>}}; }

}  // namespace jaxext
