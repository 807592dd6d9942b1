// The handlers of products in pieces: XLA's buffers and attributes become a call of `Pieces`.
#include "ffi.h"
#include "pieces.h"

namespace jaxext {

struct PiecesAttributes {
  int64_t B, M, N, K;
  int64_t tile_m, tile_n, pieces, splits;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::PiecesAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),
                                      ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<int64_t>("tile_m"),
                                      ::xla::ffi::StructMember<int64_t>("tile_n"), ::xla::ffi::StructMember<int64_t>("pieces"),
                                      ::xla::ffi::StructMember<int64_t>("splits"));

namespace jaxext {
namespace {

template <MatmulRole kRole>
ffi::Error Call(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, PiecesAttributes attributes) {
  const auto [B, M, N, K, tile_m, tile_n, pieces, splits] = attributes;
  const struct {
    const char* name;
    std::vector<int64_t> shape;
  } a = {"a", {B, M, K}}, b = {"b", {B, K, N}}, c = {"c", {B, M, N}};
  const auto& x = kRole == MatmulRole::kNT ? b : a;
  const auto& y = kRole == MatmulRole::kNN ? b : c;
  const auto& z = kRole == MatmulRole::kNN ? c : kRole == MatmulRole::kNT ? a : b;
  Dtype operands, other, result;
  if (Status s = Check(x.name, first, x.shape, &operands); !s.ok()) return ToError(s);
  if (Status s = Check(y.name, second, y.shape, &other); !s.ok()) return ToError(s);
  if (Status s = Check(z.name, *out, InParts(z.shape, splits), &result); !s.ok()) return ToError(s);
  if (Status s = CheckSame(operands, other); !s.ok()) return ToError(s);
  return ToError(Pieces(kRole, {B, M, N, K}, {tile_m, tile_n, pieces, splits}, operands, result, first.untyped_data(),
                        second.untyped_data(), out->untyped_data(), stream));
}

template <MatmulRole kRole>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = Binding<PiecesAttributes>().To(&Call<kRole>, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

}  // namespace

std::vector<Target> PiecesTargets() {
  return {
      {"jaxext_pieces_nn_v1", &Handle<MatmulRole::kNN>},
      {"jaxext_pieces_nt_v1", &Handle<MatmulRole::kNT>},
      {"jaxext_pieces_tn_v1", &Handle<MatmulRole::kTN>},
  };
}

}  // namespace jaxext
