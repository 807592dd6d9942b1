// The handlers of products in pieces: XLA's buffers and attributes become a call of `Pieces`.
#include "pieces/pieces.h"

#include "matmul/matmul_ffi.h"

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
ffi::Error Call(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, PiecesAttributes attributes) {
  const auto [B, M, N, K, tile_m, tile_n, pieces, splits] = attributes;
  Dtype operands, result;
  if (Status s = CheckMatmul(kRole, {B, M, N, K}, splits, first, second, *out, &operands, &result); !s.ok()) return ToError(s);
  return ToError(Pieces(kRole, {B, M, N, K}, {tile_m, tile_n, pieces, splits}, operands, result, first.untyped_data(),
                        second.untyped_data(), out->untyped_data(), stream));
}

template <MatmulRole kRole>
constexpr Handlers kHandlersOf = kHandlers<&Binding<PiecesAttributes>, &Call<kRole>>;

}  // namespace

std::vector<Target> PiecesTargets() {
  return {
      {"jaxext_pieces_nn_v1", kHandlersOf<MatmulRole::kNN>},
      {"jaxext_pieces_nt_v1", kHandlersOf<MatmulRole::kNT>},
      {"jaxext_pieces_tn_v1", kHandlersOf<MatmulRole::kTN>},
  };
}

}  // namespace jaxext
