// The arrays and targets of matrix products and convolutions: a target for each role, and one of the first role with an epilogue.
#pragma once

#include <array>

#include "common/epilogue.h"

namespace jaxext {

// An array of a problem.
struct Slot {
  const char* name;
  std::vector<int64_t> shape;
};

// The third one is open in nn and fprop, the first in nt and dgrad, the second in tn and wgrad.
using Slots = std::array<Slot, 3>;
Slots SlotsOf(const MatmulProblem& problem);  // a, b, c
Slots SlotsOf(const ConvProblem& problem);    // x, w, y

// The two operands and the result of a role, in the order of slots, of one dtype.
struct ProductArrays {
  Dtype operands, result;
  const void *first, *second;
  void* out;
};
ProductArrays TakeProduct(Arrays& arrays, int role, const Slots& slots, int64_t splits);

// The shape of an epilogue's bias.
std::vector<int64_t> BiasOf(const MatmulProblem& problem);
std::vector<int64_t> BiasOf(const ConvProblem& problem);

// Targets of the names stem + role, and `fused`, if it is not null, of the first role with an epilogue.
// `refuses(role, fused, problem, dtypes, arch)`; `launch(role, problem, config, arrays, epilogue, stream)`, whose epilogue may be null.
template <class Role, class Problem, class Config, class Refuses, class Launch>
std::vector<Target> ProductTargets(const std::string& stem, const char* fused, Refuses refuses, Launch launch) {
  std::vector<Target> targets;
  const auto refuses_of = [=](Role role, bool fuses) {
    return [=](const Problem& p, const Dtypes& dtypes, std::optional<int> arch) { return refuses(role, fuses, p, dtypes, arch); };
  };
  for (int i = 0; i < 3; ++i) {
    const auto role = static_cast<Role>(i);
    const auto plain = [=](Arrays& arrays, const Problem& p, const Config& config, LaunchStream stream) {
      const ProductArrays taken = TakeProduct(arrays, i, SlotsOf(p), config.splits);
      if (Status status = arrays.Done(); !status.ok()) return status;
      return launch(role, p, config, taken, static_cast<const Epilogue*>(nullptr), stream);
    };
    targets.push_back(TargetOf<Problem, Config>(stem + Name(role), refuses_of(role, false), plain));
  }
  if (fused == nullptr) return targets;
  const auto with_epilogue = [=](Arrays& arrays, const Problem& p, const Config& config, const EpilogueOptions& options,
                                 LaunchStream stream) {
    const ProductArrays taken = TakeProduct(arrays, 0, SlotsOf(p), config.splits);
    const Epilogue epilogue = TakeEpilogue(arrays, options, BiasOf(p), SlotsOf(p)[2].shape, taken.result);
    if (Status status = arrays.Done(); !status.ok()) return status;
    return launch(Role{}, p, config, taken, &epilogue, stream);
  };
  targets.push_back(TargetOf<Problem, Config, EpilogueOptions>(fused, refuses_of(Role{}, true), with_epilogue));
  return targets;
}

// Those of convolutions of one family with 1 to 3 axes: "conv2d_fprop" and so on.  `refuses(role, rank, problem, dtypes, arch)`;
// `launch(role, rank, problem, config, arrays, epilogue, stream)`.
template <class Config, class Refuses, class Launch>
std::vector<Target> ConvTargets(const std::string& family, Refuses refuses, Launch launch) {
  const auto of_rank = [=](int rank) {
    const std::string stem = family + std::to_string(rank) + "d_";
    return ProductTargets<ConvRole, ConvProblem, Config>(
        stem, (stem + "bias_act").c_str(), [=](ConvRole role, bool, const auto&... given) { return refuses(role, rank, given...); },
        [=](ConvRole role, const auto&... given) { return launch(role, rank, given...); });
  };
  return Joined({of_rank(1), of_rank(2), of_rank(3)});
}

}  // namespace jaxext
