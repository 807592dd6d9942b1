// The arrays of a convolution's call, dense or depthwise.
#pragma once

#include <optional>

#include "common/epilogue.h"

namespace jaxext {

constexpr const char* kConvRoles[] = {"fprop", "dgrad", "wgrad"};

// The two operands and the result of a role, in the order of slots (x, w, y without the open one), of one dtype.
struct ConvArrays {
  Dtype operands, result;
  const void *first, *second;
  void* out;
};
ConvArrays TakeConv(Arrays& arrays, ConvRole role, const ConvProblem& problem, int64_t splits);

// The epilogue of fprop.
Epilogue TakeConvEpilogue(Arrays& arrays, const EpilogueOptions& options, const ConvProblem& problem, Dtype result);

// The targets of one family and number of axes: "conv2d_fprop" and so on.  `refuses(role, rank, problem, dtypes, arch)`;
// `launch(role, rank, problem, config, arrays, epilogue, stream)`, whose epilogue may be null.
template <class Config, class Refuses, class Launch>
std::vector<Target> ConvTargets(const std::string& family, int rank, Refuses refuses, Launch launch) {
  std::vector<Target> targets;
  const std::string stem = family + std::to_string(rank) + "d_";
  const auto refuses_of = [=](ConvRole role) {
    return [=](const ConvProblem& p, const Dtypes& dtypes, std::optional<int> arch) { return refuses(role, rank, p, dtypes, arch); };
  };
  for (const ConvRole role : {ConvRole::kFprop, ConvRole::kDgrad, ConvRole::kWgrad}) {
    const auto plain = [=](Arrays& arrays, const ConvProblem& p, const Config& config, LaunchStream stream) {
      const ConvArrays taken = TakeConv(arrays, role, p, config.splits);
      if (Status status = arrays.Done(); !status.ok()) return status;
      return launch(role, rank, p, config, taken, /*epilogue=*/nullptr, stream);
    };
    targets.push_back(TargetOf<ConvProblem, Config>(stem + kConvRoles[static_cast<int>(role)], refuses_of(role), plain));
  }
  const auto fused = [=](Arrays& arrays, const ConvProblem& p, const Config& config, const EpilogueOptions& options, LaunchStream stream) {
    const ConvArrays taken = TakeConv(arrays, ConvRole::kFprop, p, config.splits);
    const Epilogue epilogue = TakeConvEpilogue(arrays, options, p, taken.result);
    if (Status status = arrays.Done(); !status.ok()) return status;
    return launch(ConvRole::kFprop, rank, p, config, taken, &epilogue, stream);
  };
  targets.push_back(TargetOf<ConvProblem, Config, EpilogueOptions>(stem + "bias_act", refuses_of(ConvRole::kFprop), fused));
  return targets;
}

}  // namespace jaxext
