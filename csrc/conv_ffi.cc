// The handlers of dense convolutions: XLA's buffers and attributes become a call of `Conv`.
#include "conv.h"
#include "ffi.h"

namespace jaxext {

struct ConvCallAttributes : ConvAttributes {
  int64_t tile_m, tile_n, cluster_m, splits;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::ConvCallAttributes, JAXEXT_CONV_MEMBERS, ::xla::ffi::StructMember<int64_t>("tile_m"),
                                      ::xla::ffi::StructMember<int64_t>("tile_n"), ::xla::ffi::StructMember<int64_t>("cluster_m"),
                                      ::xla::ffi::StructMember<int64_t>("splits"));

namespace jaxext {
namespace {

template <int kRank, ConvRole kRole>
ffi::Error Call(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, ConvCallAttributes attributes) {
  const ConvConfig config = {attributes.tile_m, attributes.tile_n, attributes.cluster_m, attributes.splits};
  ConvProblem problem;
  Dtype operands, result;
  if (Status s = ProblemOf(attributes, &problem); !s.ok()) return ToError(s);
  if (Status s = CheckConv(kRole, problem, config.splits, first, second, *out, &operands, &result); !s.ok()) return ToError(s);
  return ToError(
      Conv(kRole, kRank, problem, config, operands, result, first.untyped_data(), second.untyped_data(), out->untyped_data(), stream));
}

template <int kRank, ConvRole kRole>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = Binding<ConvCallAttributes>().To(&Call<kRank, kRole>, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

template <int kRank>
void AddTargets(std::vector<Target>* targets) {
  const std::string stem = "jaxext_conv" + std::to_string(kRank) + "d_";
  targets->push_back({stem + "fprop_v1", &Handle<kRank, ConvRole::kFprop>});
  targets->push_back({stem + "dgrad_v1", &Handle<kRank, ConvRole::kDgrad>});
  targets->push_back({stem + "wgrad_v1", &Handle<kRank, ConvRole::kWgrad>});
}

}  // namespace

std::vector<Target> ConvTargets() {
  std::vector<Target> targets;
  AddTargets<1>(&targets);
  AddTargets<2>(&targets);
  AddTargets<3>(&targets);
  return targets;
}

}  // namespace jaxext
