#include "causal/causal_plan.h"

#include <algorithm>

#include "common/refusals.h"

namespace jaxext::causal {
namespace {

std::string Text(int64_t number) { return std::to_string(number); }

bool IsForward(CausalRole role) { return role == CausalRole::kForward; }

const char* RoleName(CausalRole role) { return IsForward(role) ? "forward" : "backward"; }

int64_t MostTaps(CausalRole role) { return IsForward(role) ? kMostTaps : kMoreTaps; }

Status CheckConfig(CausalRole role, const CausalConfig& config) {
  const auto refuse = [&](const char* field, int64_t got, const std::string& want) {
    return Invalid(std::string("causal ") + RoleName(role) + ": " + field + " is " + Text(got) + ", want " + want);
  };
  if (config.lanes < 1 || config.lanes > 32 || (config.lanes & (config.lanes - 1)) != 0) {
    return refuse("lanes", config.lanes, "a power of two up to 32");
  }
  if (config.strip < 1 || config.strip >= kMostIndex) return refuse("strip", config.strip, "1 to 2^30 - 1");
  const int64_t most = IsForward(role) ? 1 : kMostSplits;
  if (config.splits < 1 || config.splits > most) return refuse("splits", config.splits, "1 to " + Text(most));
  return {};
}

Kind KindOf(const CausalProblem& problem, const CausalOperands& operands, bool vector) {
  if (!vector || problem.J > kTaps) return Kind::kMany;
  return problem.J == kTaps && operands.seq_idx == nullptr ? Kind::kExact : Kind::kUpTo;
}

}  // namespace

bool IsEmpty(const CausalProblem& problem, CausalRole role) {
  return problem.C == 0 || (IsForward(role) && (problem.B == 0 || problem.T == 0));
}

Status Make(const CausalProblem& problem, CausalRole role, const CausalConfig& config, const CausalOperands& operands, bool aligned,
            Plan* plan) {
  if (Status status = CheckConfig(role, config); !status.ok()) return status;
  const std::string dtype = ShortName(operands.dtype);
  const std::string bias = operands.bias != nullptr ? ShortName(operands.of_bias) : "";
  if (const Reason reason = CausalRefuses(role, problem, {dtype, ShortName(operands.of_weight), dtype, bias})) {
    return Invalid("causal: " + *reason);
  }
  *plan = {};
  if (IsEmpty(problem, role)) return {};
  const int widest = static_cast<int>(kVectorBytes / Bytes(operands.dtype));
  const bool vector = aligned && problem.C % widest == 0;
  plan->kind = KindOf(problem, operands, vector);
  plan->vector = !vector ? 1 : IsForward(role) || plan->kind == Kind::kExact ? widest : kManyVector;
  plan->lanes = static_cast<int>(config.lanes);

  Params& p = plan->params;
  p.B = static_cast<int>(problem.B), p.T = static_cast<int>(problem.T), p.C = static_cast<int>(problem.C),
  p.J = static_cast<int>(problem.J);
  p.activation = operands.activation;
  const int64_t steps = std::max<int64_t>(problem.T, 1);  // a sequence without steps has the cotangent of its state
  p.strip = static_cast<int>(std::min(config.strip, steps));
  p.strips = static_cast<int>(CeilDiv(steps, p.strip));
  p.channel_blocks = static_cast<int>(CeilDiv(problem.C, config.lanes * plan->vector));
  const int64_t tiles = CeilDiv(problem.B * p.strips, kThreads / config.lanes);
  p.tiles = static_cast<int>(tiles), p.share = static_cast<int>(CeilDiv(tiles, config.splits));
  p.groups = static_cast<int>(CeilDiv(problem.J, kTaps));
  plan->grid = p.channel_blocks * (IsForward(role) ? tiles : config.splits);

  const int taps = IsForward(role) ? p.groups * kTaps : plan->kind == Kind::kMany ? kMoreTaps : kTaps;
  p.there = ~0u << (taps - p.J);
  const int64_t staged = (taps + 1) * config.lanes, summed = IsForward(role) ? 0 : kThreads;
  plan->shared_bytes = static_cast<int>((staged + summed) * plan->vector * sizeof(float));
  if (plan->grid > kMostGridX) {
    return Invalid("causal: " + Text(plan->grid) + " blocks, a grid has " + Text(kMostGridX) + " at most");
  }
  return {};
}

}  // namespace jaxext::causal

namespace jaxext {

using namespace causal;

Reason CausalRefuses(CausalRole role, const CausalProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  for (int64_t size : {p.B, p.T, p.C}) {
    if (size < 0) return "a size is " + Text(size) + ", it takes 0 or more";
  }
  if (p.J < 1) return Text(p.J) + " taps, it takes 1 or more";
  if (p.J > MostTaps(role)) return Text(p.J) + " taps, its " + RoleName(role) + " takes " + Text(MostTaps(role)) + " at most";
  const std::pair<const char*, const std::string&> named[] = {{"x", dtypes.first}, {"weight", dtypes.second}, {"bias", dtypes.further}};
  for (const auto& [name, dtype] : named) {
    if (dtype == "" && name == named[2].first) continue;
    if (dtype != "fp32" && dtype != "bf16" && dtype != "fp16") return std::string(name) + " is " + dtype + ", it takes fp32, bf16, fp16";
  }
  if (dtypes.result != dtypes.first) return "x is " + dtypes.first + " and y " + dtypes.result + ", it takes one dtype";
  if (arch && *arch < 80) return "compute capability " + CapabilityText(*arch) + ", it takes 8.0 and newer";
  if (p.C >= kMostIndex) return Text(p.C) + " channels, it takes fewer than " + Text(kMostIndex);
  if (p.T >= kMostIndex) return Text(p.T) + " steps, it takes fewer than " + Text(kMostIndex);
  const int64_t steps = Product({p.B, std::max<int64_t>(p.T, 1)});
  if (steps >= kMostPositions) {
    return Text(p.B) + " sequences of " + Text(p.T) + " steps, it numbers fewer than " + Text(kMostPositions) + " steps";
  }
  return {};
}

}  // namespace jaxext
