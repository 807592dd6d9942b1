// The handlers of dense convolutions: XLA's buffers and attributes become a call of `Conv`.
#include "conv/conv.h"
#include "common/epilogue_ffi.h"
#include "common/ffi.h"

namespace jaxext {

struct ConvCallAttributes : ConvAttributes {
  int64_t tile_m, tile_n, cluster, splits;
};

struct ConvBiasActAttributes : ConvCallAttributes, EpilogueAttributes {};

}  // namespace jaxext

#define JAXEXT_CONV_CONFIG                                                                                                                \
  ::xla::ffi::StructMember<int64_t>("tile_m"), ::xla::ffi::StructMember<int64_t>("tile_n"), ::xla::ffi::StructMember<int64_t>("cluster"), \
      ::xla::ffi::StructMember<int64_t>("splits")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::ConvCallAttributes, JAXEXT_CONV_MEMBERS, JAXEXT_CONV_CONFIG);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::ConvBiasActAttributes, JAXEXT_CONV_MEMBERS, JAXEXT_CONV_CONFIG, JAXEXT_EPILOGUE_MEMBERS);

namespace jaxext {
namespace {

ConvConfig ConfigOf(const ConvCallAttributes& a) { return {a.tile_m, a.tile_n, a.cluster, a.splits}; }

template <int kRank, ConvRole kRole>
ffi::Error Call(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, Result out, ConvCallAttributes attributes) {
  ConvProblem problem;
  Dtype operands, result;
  if (Status s = ProblemOf(attributes, &problem); !s.ok()) return ToError(s);
  if (Status s = CheckConv(kRole, problem, attributes.splits, first, second, *out, &operands, &result); !s.ok()) return ToError(s);
  return ToError(Conv(kRole, kRank, problem, ConfigOf(attributes), operands, result, first.untyped_data(), second.untyped_data(),
                      out->untyped_data(), /*epilogue=*/nullptr, stream));
}

template <int kRank>
ffi::Error CallBiasAct(LaunchStream stream, ffi::AnyBuffer first, ffi::AnyBuffer second, ffi::RemainingArgs operands, Result out,
                       ffi::RemainingRets results, ConvBiasActAttributes attributes) {
  ConvProblem problem;
  Dtype dtype, result;
  Epilogue epilogue;
  if (Status s = CheckConvBiasAct(attributes, attributes, attributes.splits, first, second, operands, *out, results, &problem, &dtype,
                                  &result, &epilogue);
      !s.ok()) {
    return ToError(s);
  }
  return ToError(Conv(ConvRole::kFprop, kRank, problem, ConfigOf(attributes), dtype, result, first.untyped_data(), second.untyped_data(),
                      out->untyped_data(), &epilogue, stream));
}

template <int kRank, ConvRole kRole>
constexpr Handlers kHandlersOf = kHandlers<&Binding<ConvCallAttributes>, &Call<kRank, kRole>>;

template <int kRank>
void AddTargets(std::vector<Target>* targets) {
  const std::string stem = "jaxext_conv" + std::to_string(kRank) + "d_";
  targets->push_back({stem + "fprop_v1", kHandlersOf<kRank, ConvRole::kFprop>});
  targets->push_back({stem + "dgrad_v1", kHandlersOf<kRank, ConvRole::kDgrad>});
  targets->push_back({stem + "wgrad_v1", kHandlersOf<kRank, ConvRole::kWgrad>});
  targets->push_back({stem + "bias_act_v1", kHandlers<&EpilogueBinding<ConvBiasActAttributes>, &CallBiasAct<kRank>>});
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
