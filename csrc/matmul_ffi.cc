// The handlers of matrix products: XLA's buffers and attributes become a call of `Matmul`.
#include <algorithm>

#include "ffi.h"
#include "matmul.h"

namespace jaxext {

struct MatmulAttributes {
  int64_t B, M, N, K;
  int64_t tile_m, tile_n, tile_k, cluster_m, pingpong, splits;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::MatmulAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("M"), ::xla::ffi::StructMember<int64_t>("N"),
                                      ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<int64_t>("tile_m"),
                                      ::xla::ffi::StructMember<int64_t>("tile_n"), ::xla::ffi::StructMember<int64_t>("tile_k"),
                                      ::xla::ffi::StructMember<int64_t>("cluster_m"), ::xla::ffi::StructMember<int64_t>("pingpong"),
                                      ::xla::ffi::StructMember<int64_t>("splits"));

namespace jaxext {
namespace {

template <MatmulRole kRole>
ffi::Error Call(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, MatmulAttributes attributes) {
  const MatmulProblem problem = {attributes.B, attributes.M, attributes.N, attributes.K};
  const MatmulConfig config = {attributes.tile_m,    attributes.tile_n,   attributes.tile_k,
                               attributes.cluster_m, attributes.pingpong, attributes.splits};
  const auto [B, M, N, K] = problem;
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
  if (Status s = Check(z.name, *out, InParts(z.shape, config.splits), &result); !s.ok()) return ToError(s);
  if (Status s = CheckSame(operands, other); !s.ok()) return ToError(s);
  return ToError(
      Matmul(kRole, problem, config, operands, result, first.untyped_data(), second.untyped_data(), out->untyped_data(), stream));
}

template <MatmulRole kRole>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = Binding<MatmulAttributes>().To(&Call<kRole>, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

}  // namespace

std::vector<Target> MatmulTargets() {
  return {
      {"jaxext_matmul_nn_v1", &Handle<MatmulRole::kNN>},
      {"jaxext_matmul_nt_v1", &Handle<MatmulRole::kNT>},
      {"jaxext_matmul_tn_v1", &Handle<MatmulRole::kTN>},
  };
}

FfiVersion CompiledFfiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jaxext
