// Two targets with every kind of field and of array, whose launches say in their errors what arrives, and launchers in place of those of
// four families, which say the numbers and addresses that no record of a launch shows.  Built with the handlers of csrc/ by
// tests/backends/cuda/test_ffi.py; needs no CUDA.
#include <cstring>
#include <stdexcept>

#include "causal/causal.h"
#include "common/family.h"
#include "common/ffi.h"
#include "depthwise/depthwise.h"
#include "gram/gram.h"
#include "scaled/scaled.h"

namespace jaxext {
namespace {

struct Problem {
  JAXEXT_INTEGERS(B, M)
  JAXEXT_TRIPLES(input, low)
};
struct Config {
  JAXEXT_INTEGERS(tile, splits)
};
struct Options {
  JAXEXT_INTEGERS(added)
  JAXEXT_REALS(scale, shift)
};
struct Unnamed {
  JAXEXT_INTEGERS(B, M)
  int64_t extra;
};

Status Launch(Arrays& arrays, const Problem& p, const Config& config, const Options& options, LaunchStream stream) {
  const Array x = arrays.Operand("x", {p.B, p.M}), rows = arrays.Operand("rows", {p.M}, Dtype::kS32);
  const Array y = arrays.Result("y", InParts({p.B, p.M}, config.splits)), saved = arrays.Result("saved", {p.B}, x.dtype);
  const Array added = options.added != 0 ? arrays.Operand("added", {p.B}, y.dtype) : Array{x.dtype, nullptr};
  if (Status status = arrays.Done(); !status.ok()) return status;
  std::string text = stream ? "launch" : "load";
  for (int64_t number : {p.B, p.M, p.input[0], p.input[1], p.input[2], p.low[0], p.low[1], p.low[2], config.tile, config.splits}) {
    text += " " + std::to_string(number);
  }
  text += " " + std::to_string(options.scale) + " " + std::to_string(options.shift);
  for (const Array& array : {x, rows, added, y, saved}) {
    text += std::string(" ") + Name(array.dtype) + " " + std::to_string(reinterpret_cast<uintptr_t>(array.data));
  }
  return Internal(text);
}

Reason Refuses(const Problem&, const Dtypes&, std::optional<int>) { return {}; }
Reason RefusesUnnamed(const Unnamed&, const Dtypes&, std::optional<int>) { return {}; }

Target Plain(const char* name) {
  return TargetOf<Config>(name, [](const auto&...) { return Reason(); }, [](Arrays&, const Config&, LaunchStream) { return Status(); });
}

const Registered registered({"invented", {TargetOf<Problem, Config, Options>("invented", Refuses, Launch), Plain("plain")}, {}});

}  // namespace

Reason CausalRefuses(CausalRole, const CausalProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason DepthwiseRefuses(ConvRole, int, const ConvProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason GramRefuses(const GramProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason ScaledRefuses(const ScaledProblem&, const Dtypes&, std::optional<int>) { return {}; }
const std::vector<GramKernel>& GramKernels() { throw std::logic_error("no kernels here"); }
const std::vector<ScaledKernel>& ScaledKernels() { throw std::logic_error("no kernels here"); }

Status Addresses(std::initializer_list<const void*> arrays) {
  std::string text;
  for (const void* array : arrays) text += std::to_string(reinterpret_cast<uintptr_t>(array)) + " ";
  return Internal(text);
}

Status LaunchCausal(CausalRole, const CausalProblem&, const CausalConfig&, const CausalOperands& o, const CausalResults& r, LaunchStream) {
  return Addresses({o.x, o.weight, o.bias, o.initial_states, o.seq_idx, o.idx_of_states, o.d_y, r.first, r.sums, r.d_initial_states});
}

Status LaunchDepthwise(ConvRole, int, const ConvProblem&, const DepthwiseConfig&, const ProductArrays& arrays, const Epilogue* epilogue,
                       LaunchStream) {
  const Epilogue none, &added = epilogue != nullptr ? *epilogue : none;
  return Addresses({arrays.first, arrays.second, added.bias, added.residual, arrays.out, added.saved});
}

Status LaunchGram(const GramProblem&, const GramConfig&, Dtype, Dtype, const GramOperands& o, void*, LaunchStream) {
  return Internal(std::to_string(o.scale) + " " + std::to_string(o.of_addend));
}

Status LaunchScaled(const ScaledProblem&, const ScaledConfig&, Dtype, Dtype, Dtype, const void*, const void*, const Scale& left,
                    const Scale& right, void*, LaunchStream) {
  std::string text;
  for (const Scale& scale : {left, right}) {
    for (int64_t stride : {scale.batch, scale.outer, scale.step}) text += std::to_string(stride) + " ";
  }
  return Internal(text);
}

}  // namespace jaxext

using namespace jaxext;

// The message about the families and one more, which is broken: 0 in no way, 1 a member without a name, 2 a target twice, 3 an attribute
// twice, 4 a family twice.
extern "C" void CheckBroken(int32_t how, char* message) {
  const auto launch = [](Arrays&, const auto&...) { return Status(); };
  Target target = Plain(how == 2 ? "plain" : "broken");
  if (how == 1) target = TargetOf<Unnamed>("broken", RefusesUnnamed, launch);
  if (how == 3) target = TargetOf<Problem, Problem>("broken", Refuses, launch);
  Families().push_back({how == 4 ? "invented" : "broken", {target}, {}});
  std::strcpy(message, CheckFamilies().message.c_str());
  Families().pop_back();
}

// The handler of that name and stage, or null.
extern "C" void* HandlerOf(const char* name, int32_t initialize) {
  for (const auto& [target, handlers] : HandlersByTarget()) {
    if (target == name) return reinterpret_cast<void*>(initialize ? handlers.initialize : handlers.execute);
  }
  return nullptr;
}
