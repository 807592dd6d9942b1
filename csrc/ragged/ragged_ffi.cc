// The handlers of ragged products: XLA's buffers and attributes become a call of `Ragged`.
#include "ragged/ragged.h"

#include "common/ffi.h"

namespace jaxext {

struct RaggedAttributes {
  int64_t B, P, R, M, N, K, G;
  int64_t tile_m, tile_n, tile_k, cluster_n;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::RaggedAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("P"), ::xla::ffi::StructMember<int64_t>("R"),
                                      ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),
                                      ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<int64_t>("G"),
                                      ::xla::ffi::StructMember<int64_t>("tile_m"), ::xla::ffi::StructMember<int64_t>("tile_n"),
                                      ::xla::ffi::StructMember<int64_t>("tile_k"), ::xla::ffi::StructMember<int64_t>("cluster_n"));

namespace jaxext {
namespace {

// The places are visits or, in TN, ranges.
template <MatmulRole kRole>
ffi::Error Call(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, ffi::AnyBuffer places, Result out,
                RaggedAttributes attributes) {
  const auto [B, P, R, M, N, K, G, tile_m, tile_n, tile_k, cluster_n] = attributes;
  const RaggedProblem problem = {B, P, R, M, N, K, G};
  const struct {
    const char* name;
    std::vector<int64_t> shape;
  } x = {"x", {B, P, R, M, K}}, w = {"w", {B, G, K, N}}, y = {"y", {B, P, R, M, N}};
  const auto& one = kRole == MatmulRole::kNT ? w : x;
  const auto& other = kRole == MatmulRole::kNN ? w : y;
  const auto& open = kRole == MatmulRole::kNN ? y : kRole == MatmulRole::kNT ? x : w;

  Dtype operands, second_operand, result;
  if (Status s = Check(one.name, first, one.shape, &operands); !s.ok()) return ToError(s);
  if (Status s = Check(other.name, second, other.shape, &second_operand); !s.ok()) return ToError(s);
  if (Status s = Check(open.name, *out, open.shape, &result); !s.ok()) return ToError(s);
  if (Status s = CheckSame(operands, second_operand); !s.ok()) return ToError(s);
  if (tile_m < 1) return ToError(Invalid("ragged: tile_m is " + std::to_string(tile_m) + ", want 1 or more"));
  const bool sums = kRole == MatmulRole::kTN;
  const std::vector<int64_t> shape = {B, P, sums ? G : VisitsOf(problem, tile_m), sums ? 2 : 5};
  if (Status s = CheckIntegers(sums ? "ranges" : "visits", places, shape); !s.ok()) return ToError(s);
  return ToError(Ragged(kRole, problem, {tile_m, tile_n, tile_k, cluster_n}, operands, result, first.untyped_data(), second.untyped_data(),
                        static_cast<const int32_t*>(places.untyped_data()), out->untyped_data(), stream));
}

template <MatmulRole kRole>
constexpr Handlers kHandlersOf = kHandlers<&BindingOfThree<RaggedAttributes>, &Call<kRole>>;

}  // namespace

std::vector<Target> RaggedTargets() {
  return {
      {"jaxext_ragged_nn_v1", kHandlersOf<MatmulRole::kNN>},
      {"jaxext_ragged_nt_v1", kHandlersOf<MatmulRole::kNT>},
      {"jaxext_ragged_tn_v1", kHandlersOf<MatmulRole::kTN>},
  };
}

}  // namespace jaxext
