// The handlers of depthwise convolutions: XLA's buffers and attributes become a call of a launcher.
#include "depthwise/depthwise.h"
#include "common/epilogue_ffi.h"
#include "common/ffi.h"

namespace jaxext {

struct DepthwiseAttributes : ConvAttributes {
  int64_t lanes, strip, pieces, lines, splits;
};

struct DepthwiseBiasActAttributes : DepthwiseAttributes, EpilogueAttributes {};

}  // namespace jaxext

#define JAXEXT_DEPTHWISE_CONFIG                                                                                                        \
  ::xla::ffi::StructMember<int64_t>("lanes"), ::xla::ffi::StructMember<int64_t>("strip"), ::xla::ffi::StructMember<int64_t>("pieces"), \
      ::xla::ffi::StructMember<int64_t>("lines"), ::xla::ffi::StructMember<int64_t>("splits")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::DepthwiseAttributes, JAXEXT_CONV_MEMBERS, JAXEXT_DEPTHWISE_CONFIG);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::DepthwiseBiasActAttributes, JAXEXT_CONV_MEMBERS, JAXEXT_DEPTHWISE_CONFIG,
                                      JAXEXT_EPILOGUE_MEMBERS);

namespace jaxext {
namespace {

DepthwiseConfig ConfigOf(const DepthwiseAttributes& a) { return {a.lanes, a.strip, a.pieces, a.lines, a.splits}; }

template <ConvRole kRole>
ffi::Error Call(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, DepthwiseAttributes attributes) {
  ConvProblem problem;
  Dtype operands, result;
  if (Status s = ProblemOf(attributes, &problem); !s.ok()) return ToError(s);
  if (Status s = CheckConv(kRole, problem, attributes.splits, first, second, *out, &operands, &result); !s.ok()) return ToError(s);
  return ToError(Depthwise(kRole, problem, ConfigOf(attributes), operands, result, first.untyped_data(), second.untyped_data(),
                           out->untyped_data(), /*epilogue=*/nullptr, stream));
}

ffi::Error CallBiasAct(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, ffi::RemainingArgs operands, Result out,
                       ffi::RemainingRets results, DepthwiseBiasActAttributes attributes) {
  ConvProblem problem;
  Dtype dtype, result;
  Epilogue epilogue;
  if (Status s = CheckConvBiasAct(attributes, attributes, attributes.splits, first, second, operands, *out, results, &problem, &dtype,
                                  &result, &epilogue);
      !s.ok()) {
    return ToError(s);
  }
  return ToError(Depthwise(ConvRole::kFprop, problem, ConfigOf(attributes), dtype, result, first.untyped_data(), second.untyped_data(),
                           out->untyped_data(), &epilogue, stream));
}

template <ConvRole kRole>
constexpr Handlers kHandlersOf = kHandlers<&Binding<DepthwiseAttributes>, &Call<kRole>>;

}  // namespace

// All ranks call the same kernels; their names tell them apart in profiles.
std::vector<Target> DepthwiseTargets() {
  std::vector<Target> targets;
  for (const std::string rank : {"1", "2", "3"}) {
    targets.push_back({"jaxext_depthwise" + rank + "d_fprop_v1", kHandlersOf<ConvRole::kFprop>});
    targets.push_back({"jaxext_depthwise" + rank + "d_dgrad_v1", kHandlersOf<ConvRole::kDgrad>});
    targets.push_back({"jaxext_depthwise" + rank + "d_wgrad_v1", kHandlersOf<ConvRole::kWgrad>});
    targets.push_back({"jaxext_depthwise" + rank + "d_bias_act_v1", kHandlers<&EpilogueBinding<DepthwiseBiasActAttributes>, &CallBiasAct>});
  }
  return targets;
}

}  // namespace jaxext
