// The handlers of depthwise convolutions: XLA's buffers and attributes become a call of a launcher.
#include "depthwise.h"
#include "ffi.h"

namespace jaxext {

struct DepthwiseAttributes : ConvAttributes {
  int64_t lanes, strip, pieces, splits;
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::DepthwiseAttributes, JAXEXT_CONV_MEMBERS, ::xla::ffi::StructMember<int64_t>("lanes"),
                                      ::xla::ffi::StructMember<int64_t>("strip"), ::xla::ffi::StructMember<int64_t>("pieces"),
                                      ::xla::ffi::StructMember<int64_t>("splits"));

namespace jaxext {
namespace {

template <ConvRole kRole>
ffi::Error Call(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, DepthwiseAttributes attributes) {
  const DepthwiseConfig config = {attributes.lanes, attributes.strip, attributes.pieces, attributes.splits};
  ConvProblem problem;
  Dtype operands, result;
  if (Status s = ProblemOf(attributes, &problem); !s.ok()) return ToError(s);
  if (Status s = CheckConv(kRole, problem, config.splits, first, second, *out, &operands, &result); !s.ok()) return ToError(s);
  constexpr auto kLaunch = kRole == ConvRole::kFprop ? &DepthwiseFprop : kRole == ConvRole::kDgrad ? &DepthwiseDgrad : &DepthwiseWgrad;
  return ToError(kLaunch(problem, config, operands, result, first.untyped_data(), second.untyped_data(), out->untyped_data(), stream));
}

template <ConvRole kRole>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = Binding<DepthwiseAttributes>().To(&Call<kRole>, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

}  // namespace

// Both ranks call the same kernels; their names tell them apart in profiles.
std::vector<Target> DepthwiseTargets() {
  std::vector<Target> targets;
  for (const std::string rank : {"1", "2"}) {
    targets.push_back({"jaxext_depthwise" + rank + "d_fprop_v1", &Handle<ConvRole::kFprop>});
    targets.push_back({"jaxext_depthwise" + rank + "d_dgrad_v1", &Handle<ConvRole::kDgrad>});
    targets.push_back({"jaxext_depthwise" + rank + "d_wgrad_v1", &Handle<ConvRole::kWgrad>});
  }
  return targets;
}

}  // namespace jaxext
