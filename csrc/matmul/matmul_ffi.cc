// The handlers of matrix products: XLA's buffers and attributes become a call of `Matmul`.
#include <algorithm>

#include "common/epilogue_ffi.h"
#include "common/ffi.h"
#include "matmul/matmul.h"
#include "matmul/matmul_ffi.h"

namespace jaxext {

struct MatmulAttributes {
  int64_t B, M, N, K;
  int64_t tile_m, tile_n, tile_k, cluster_m, pingpong, splits;
};

struct LinearAttributes : MatmulAttributes, EpilogueAttributes {};

}  // namespace jaxext

#define JAXEXT_MATMUL_MEMBERS                                                                                                           \
  ::xla::ffi::StructMember<int64_t>("B"), ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),               \
      ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<int64_t>("tile_m"), ::xla::ffi::StructMember<int64_t>("tile_n"), \
      ::xla::ffi::StructMember<int64_t>("tile_k"), ::xla::ffi::StructMember<int64_t>("cluster_m"),                                      \
      ::xla::ffi::StructMember<int64_t>("pingpong"), ::xla::ffi::StructMember<int64_t>("splits")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::MatmulAttributes, JAXEXT_MATMUL_MEMBERS);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::LinearAttributes, JAXEXT_MATMUL_MEMBERS, JAXEXT_EPILOGUE_MEMBERS);

namespace jaxext {
namespace {

MatmulProblem ProblemOf(const MatmulAttributes& a) { return {a.B, a.M, a.N, a.K}; }
MatmulConfig ConfigOf(const MatmulAttributes& a) { return {a.tile_m, a.tile_n, a.tile_k, a.cluster_m, a.pingpong, a.splits}; }

template <MatmulRole kRole>
ffi::Error Call(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, MatmulAttributes attributes) {
  Dtype operands, result;
  if (Status s = CheckMatmul(kRole, ProblemOf(attributes), attributes.splits, first, second, *out, &operands, &result); !s.ok()) {
    return ToError(s);
  }
  return ToError(Matmul(kRole, ProblemOf(attributes), ConfigOf(attributes), operands, result, first.untyped_data(), second.untyped_data(),
                        out->untyped_data(), /*epilogue=*/nullptr, stream));
}

ffi::Error CallLinear(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, ffi::RemainingArgs operands, Result out,
                      ffi::RemainingRets results, LinearAttributes attributes) {
  constexpr auto kRole = MatmulRole::kNN;
  Dtype dtype, result;
  Epilogue epilogue;
  const auto [B, M, N, K] = ProblemOf(attributes);
  if (Status s = CheckMatmul(kRole, {B, M, N, K}, attributes.splits, first, second, *out, &dtype, &result); !s.ok()) return ToError(s);
  if (Status s = EpilogueOf(attributes, operands, results, {B, N}, {B, M, N}, result, &epilogue); !s.ok()) return ToError(s);
  return ToError(Matmul(kRole, ProblemOf(attributes), ConfigOf(attributes), dtype, result, first.untyped_data(), second.untyped_data(),
                        out->untyped_data(), &epilogue, stream));
}

template <MatmulRole kRole>
constexpr Handlers kHandlersOf = kHandlers<&Binding<MatmulAttributes>, &Call<kRole>>;

}  // namespace

std::vector<Target> MatmulTargets() {
  return {
      {"jaxext_matmul_nn_v1", kHandlersOf<MatmulRole::kNN>},
      {"jaxext_matmul_nt_v1", kHandlersOf<MatmulRole::kNT>},
      {"jaxext_matmul_tn_v1", kHandlersOf<MatmulRole::kTN>},
      {"jaxext_linear_v1", kHandlers<&EpilogueBinding<LinearAttributes>, &CallLinear>},
  };
}

FfiVersion CompiledFfiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jaxext
