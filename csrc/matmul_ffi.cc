// The handlers of matrix products: XLA's buffers and attributes become a call of `Matmul`.
#include <algorithm>

#include "epilogue_ffi.h"
#include "ffi.h"
#include "matmul.h"

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

// Checks the product's arrays and says their dtypes.
template <MatmulRole kRole>
Status CheckMatmul(const MatmulAttributes& attributes, const ffi::AnyBuffer& first, const ffi::AnyBuffer& second, const ffi::AnyBuffer& out,
                   Dtype* operands, Dtype* result) {
  const auto [B, M, N, K] = ProblemOf(attributes);
  const struct {
    const char* name;
    std::vector<int64_t> shape;
  } a = {"a", {B, M, K}}, b = {"b", {B, K, N}}, c = {"c", {B, M, N}};
  const auto& x = kRole == MatmulRole::kNT ? b : a;
  const auto& y = kRole == MatmulRole::kNN ? b : c;
  const auto& z = kRole == MatmulRole::kNN ? c : kRole == MatmulRole::kNT ? a : b;

  Dtype other;
  if (Status s = Check(x.name, first, x.shape, operands); !s.ok()) return s;
  if (Status s = Check(y.name, second, y.shape, &other); !s.ok()) return s;
  if (Status s = Check(z.name, out, InParts(z.shape, attributes.splits), result); !s.ok()) return s;
  return CheckSame(*operands, other);
}

template <MatmulRole kRole>
ffi::Error Call(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, MatmulAttributes attributes) {
  Dtype operands, result;
  if (Status s = CheckMatmul<kRole>(attributes, first, second, *out, &operands, &result); !s.ok()) return ToError(s);
  return ToError(Matmul(kRole, ProblemOf(attributes), ConfigOf(attributes), operands, result, first.untyped_data(), second.untyped_data(),
                        out->untyped_data(), /*epilogue=*/nullptr, stream));
}

ffi::Error CallLinear(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second, ffi::RemainingArgs operands, Result out,
                      ffi::RemainingRets results, LinearAttributes attributes) {
  constexpr auto kRole = MatmulRole::kNN;
  Dtype dtype, result;
  Epilogue epilogue;
  if (Status s = CheckMatmul<kRole>(attributes, first, second, *out, &dtype, &result); !s.ok()) return ToError(s);
  const auto [B, M, N, K] = ProblemOf(attributes);
  if (Status s = EpilogueOf(attributes, operands, results, {B, N}, {B, M, N}, result, &epilogue); !s.ok()) return ToError(s);
  return ToError(Matmul(kRole, ProblemOf(attributes), ConfigOf(attributes), dtype, result, first.untyped_data(), second.untyped_data(),
                        out->untyped_data(), &epilogue, stream));
}

template <MatmulRole kRole>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = Binding<MatmulAttributes>().To(&Call<kRole>, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

XLA_FFI_Error* HandleLinear(XLA_FFI_CallFrame* frame) {
  static auto* handler = EpilogueBinding<LinearAttributes>().To(&CallLinear, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

}  // namespace

std::vector<Target> MatmulTargets() {
  return {
      {"jaxext_matmul_nn_v1", &Handle<MatmulRole::kNN>},
      {"jaxext_matmul_nt_v1", &Handle<MatmulRole::kNT>},
      {"jaxext_matmul_tn_v1", &Handle<MatmulRole::kTN>},
      {"jaxext_linear_v1", &HandleLinear},
  };
}

FfiVersion CompiledFfiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jaxext
