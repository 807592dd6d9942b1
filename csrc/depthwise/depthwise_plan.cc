#include "depthwise/depthwise_plan.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

#include "common/refusals.h"

namespace jaxext::depthwise {
namespace {

std::string Text(int64_t number) { return std::to_string(number); }

bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

int64_t Modulo(int64_t a, int64_t d) { return ((a % d) + d) % d; }

int64_t Inverse(int64_t a, int64_t modulus) {
  int64_t old_r = Modulo(a, modulus), r = modulus, old_s = 1, s = 0;
  while (r != 0) {
    const int64_t q = old_r / r;
    old_r -= q * r, std::swap(old_r, r);
    old_s -= q * s, std::swap(old_s, s);
  }
  return Modulo(old_s, modulus);
}

Congruence MakeCongruence(int64_t wanted, int64_t given, int64_t offset, int64_t d) {
  const int64_t gcd = std::gcd(wanted, d);
  return {static_cast<unsigned>(d), static_cast<unsigned>(Modulo(-given, d)), static_cast<unsigned>(Modulo(-offset, d)),
          static_cast<unsigned>(gcd), static_cast<unsigned>(Inverse(wanted / gcd, d / gcd))};
}

Status CheckConfig(ConvRole role, const DepthwiseConfig& config, Dtype result) {
  const std::string name = std::string("depthwise ") + Name(role) + ": ";
  const auto refuse = [&](const char* field, int64_t got, const std::string& want) {
    return Invalid(name + field + " is " + std::to_string(got) + ", want " + want);
  };
  if (!IsPowerOfTwo(config.lanes) || config.lanes > 32) return refuse("lanes", config.lanes, "a power of two up to 32");
  if (config.strip < 1 || config.strip >= kMostIndex) return refuse("strip", config.strip, "1 to 2^30 - 1");
  const bool wgrad = role == ConvRole::kWgrad;
  const int64_t most_pieces = wgrad ? kThreads / config.lanes : 1;
  if (!IsPowerOfTwo(config.pieces) || config.pieces > most_pieces) {
    return refuse("pieces", config.pieces, "a power of two up to " + std::to_string(most_pieces));
  }
  const int64_t most_splits = wgrad ? kMostGridYZ : 1;
  if (config.splits < 1 || config.splits > most_splits) return refuse("splits", config.splits, "1 to " + std::to_string(most_splits));
  if (config.lines < 0 || config.lines > kMmaMostLines) return refuse("lines", config.lines, "0 to " + std::to_string(kMmaMostLines));
  if (config.splits > 1 && result != Dtype::kF32) return Invalid(name + "a result of " + Name(result) + " in parts, want float32");
  return {};
}

Axis MakeAxis(const ConvProblem& problem, ConvRole role, int i) {
  const bool dgrad = role == ConvRole::kDgrad;
  const int64_t T = dgrad ? problem.input[i] : problem.output[i], S = dgrad ? problem.output[i] : problem.input[i], R = problem.filter[i];
  const int64_t a = dgrad ? problem.input_dilation[i] : problem.stride[i], d = dgrad ? problem.stride[i] : problem.input_dilation[i];
  const int64_t dilation = R > 0 ? problem.filter_dilation[i] : 1;  // that of no taps may be any number
  const int64_t b = dgrad ? -dilation : dilation, offset = dgrad ? problem.low[i] : -problem.low[i];
  const int64_t period = d / std::gcd(a, d), step = d / std::gcd(b, d);
  Axis axis{};
  axis.T = static_cast<int>(T), axis.R = static_cast<int>(R), axis.S = static_cast<int>(S);
  axis.a = static_cast<int>(a), axis.b = static_cast<int>(b), axis.offset = static_cast<int>(offset), axis.d = static_cast<int>(d);
  axis.period = static_cast<int>(period);
  axis.phases = static_cast<int>(std::min(period, T));
  axis.targets = static_cast<int>(CeilDiv(T, period));
  axis.step = static_cast<int>(step);
  axis.taps = static_cast<int>(CeilDiv(R, step));
  axis.target_stride = static_cast<int>(a * period / d);
  axis.tap_stride = static_cast<int>(b * step / d);
  axis.first_tap = MakeCongruence(b, a, offset, d);
  axis.first_target = MakeCongruence(a, b, offset, d);
  return axis;
}

Axis MakeWidth(const ConvProblem& problem, ConvRole role) {
  Axis axis = MakeAxis(problem, role, 2);
  if (axis.taps <= 1) axis.tap_stride = axis.target_stride;  // any will do for a single tap, and this one leaves no holes in a strip
  return axis;
}

int Spacing(const Axis& width) { return std::abs(width.tap_stride) / std::gcd(width.target_stride, width.tap_stride); }

// Sizes and steps, and the places that they lead to.
Reason CheckAxes(const ConvProblem& p) {
  for (const auto& sizes : {p.input, p.filter, p.output}) {
    for (int64_t size : sizes) {
      if (size < 0) return "a size is " + Text(size) + ", it takes 0 or more";
    }
  }
  for (const auto& steps : {p.stride, p.input_dilation, p.filter_dilation}) {
    for (int64_t step : steps) {
      if (step < 1) return "a stride or dilation of " + Text(step) + ", it takes 1 or more";
    }
  }
  const int64_t taps = *std::max_element(p.filter.begin(), p.filter.end());
  if (taps > kMostTaps) return Text(taps) + " taps along an axis, it takes " + Text(kMostTaps) + " at most";
  for (const auto& steps : {p.stride, p.input_dilation}) {
    const int64_t step = *std::max_element(steps.begin(), steps.end());
    if (step > kMostStep) return "a stride or input dilation of " + Text(step) + ", it takes " + Text(kMostStep) + " at most";
  }
  for (int i = 0; i < 3; ++i) {
    const int64_t ends = std::max(Product({p.input[i], p.input_dilation[i]}), Product({p.output[i], p.stride[i]}));
    const int64_t low = p.low[i] < 0 ? -std::max(p.low[i], -kMostInteger) : p.low[i];
    const int64_t reach = Sum(Sum(ends, Product({p.filter[i], p.filter_dilation[i]})), low);
    if (reach >= kMostIndex) return "an axis reaches " + Text(reach) + " places, it takes fewer than " + Text(kMostIndex);
  }
  return {};
}

// Whether the channels of y divide into vectors, and each vector's channels of x are neighbours that start at a multiple of their number.
bool FillsVectors(const ConvProblem& p, int64_t vector) { return p.G * p.K % vector == 0 && (vector % p.K == 0 || p.K % vector == 0); }

// Channels, and how many filters share them.
void SetChannels(const ConvProblem& problem, ConvRole role, int vector, Params* p) {
  const int filters = static_cast<int>(problem.G * problem.K), G = static_cast<int>(problem.G), K = static_cast<int>(problem.K);
  const bool dgrad = role == ConvRole::kDgrad;
  p->N = static_cast<int>(problem.N), p->filters = filters;
  p->source_channels = dgrad ? filters : G, p->target_channels = dgrad ? G : filters;
  p->source_share = dgrad ? 1 : K, p->target_share = dgrad ? K : 1;
  p->folds = dgrad && K > vector ? K / vector : 1;
}

// The kernels made for a number of taps: the rows and images of most networks.
int GatherTaps(const Params& p, bool line) {
  const int taps = p.w.R;
  if (p.w.d != 1 || p.h.d != 1 || p.d.d != 1) return 0;
  if (line) return taps >= 2 && taps <= 4 ? taps : 0;
  return taps == 3 || taps == 5 || taps == 7 ? taps : 0;
}

// The least number of sums that a thread can hold and that covers a piece.
int WgradTaps(int columns) { return columns <= 5 ? std::max(columns, 2) : kWgradTaps; }

Status PlanGather(const ConvProblem& problem, const DepthwiseConfig& config, int vector, Plan* plan) {
  Params& p = plan->params;
  const bool special = plan->vector && plan->window && !plan->many;
  plan->line = special && p.d.R == 1 && p.h.R == 1 && GatherTaps(p, true) != 0;
  plan->taps = special ? GatherTaps(p, plan->line) : 0;
  const int64_t row_bytes = std::max(1, p.w.taps) * (config.lanes * vector + 4) * sizeof(float);  // a tap's row has 4 more: see Stage
  p.staged_rows = static_cast<int>(std::clamp<int64_t>(kSharedBytes / row_bytes, 1, std::max(1, p.folds * p.d.taps * p.h.taps)));
  plan->shared_bytes = static_cast<int>(p.staged_rows * row_bytes);
  if (plan->shared_bytes > kSharedBytes) {
    return Invalid("depthwise: lanes is " + std::to_string(config.lanes) + ", with which " + std::to_string(p.w.taps) + " taps need " +
                   std::to_string(plan->shared_bytes) + " bytes of shared memory, there are " + std::to_string(kSharedBytes));
  }
  const int64_t strips = int64_t{p.N} * p.d.targets * p.h.targets * p.strips;
  plan->grid[0] = p.channel_blocks * CeilDiv(strips, kThreads / config.lanes);
  plan->grid[1] = int64_t{p.d.phases} * p.h.phases * p.w.phases;
  plan->grid[2] = problem.B;
  return {};
}

MmaAxis MakeMmaAxis(const Axis& axis) {
  const bool turned = axis.tap_stride < 0;
  const int last = axis.R - 1;
  return {axis.T, axis.S, axis.R, axis.offset - (turned ? last : 0), turned ? last : 0, turned ? -1 : 1};
}

// Neighbouring targets and taps meet neighbouring sources.
bool HasUnitSteps(const Axis& axis) { return axis.d == 1 && axis.a == 1 && std::abs(axis.b) == 1; }

// What tensor cores take instead, if they do not take the problem.
Reason MmaRefuses(const ConvProblem& problem, ConvRole role, Dtype dtype) {
  const Axis d = MakeAxis(problem, role, 0), h = MakeAxis(problem, role, 1), w = MakeAxis(problem, role, 2);
  if (Bytes(dtype) != 2) return std::string("16 bits, not ") + Name(dtype);
  if (problem.K != 1 || problem.G % kMmaVector != 0) {
    return "a multiple of " + Text(kMmaVector) + " groups of one output, not " + Text(problem.G) + " of " + Text(problem.K);
  }
  if (d.R != 1 || d.T != d.S || d.offset != 0 || d.d != 1 || d.a != 1) return "two axes, not three";
  if (!HasUnitSteps(h) || !HasUnitSteps(w)) return "no strides and dilations";
  if (h.R < 1 || h.R > kMmaRows || w.R < 1 || w.R > kMmaColumns) {
    return "1x1 to " + Text(kMmaRows) + "x" + Text(kMmaColumns) + " taps, not " + Text(h.R) + "x" + Text(w.R);
  }
  const int64_t plane = std::max(int64_t{h.T} * w.T, int64_t{h.S} * w.S);
  if (role == ConvRole::kWgrad && Product({problem.B, problem.N, problem.G, d.T, plane}) > kMostMmaElements) {
    return "arrays of 2^34 elements at most";
  }
  return {};
}

MmaParams LinesOf(const ConvProblem& problem, ConvRole role, const DepthwiseConfig& config, const Plan& plan) {
  MmaParams p{};
  p.h = MakeMmaAxis(plan.params.h), p.w = MakeMmaAxis(MakeAxis(problem, role, 2));
  p.images = plan.params.N * plan.params.d.T, p.channels = plan.params.filters;
  p.lines = static_cast<int>(std::min<int64_t>(config.lines, p.h.T));
  p.parts = static_cast<int>(CeilDiv(p.h.T, p.lines));
  p.steps = p.lines + p.h.taps - 1;
  p.source_pitch = int64_t{p.w.S} * p.channels, p.target_pitch = int64_t{p.w.T} * p.channels;
  p.channel_blocks = static_cast<int>(CeilDiv(p.channels, kMmaChannels));
  p.column_blocks = static_cast<int>(CeilDiv(p.w.T, kMmaTargets));
  return p;
}

int64_t Walks(const MmaParams& p) { return CeilDiv(int64_t{p.images} * p.parts, kMmaLines) * p.column_blocks; }

void PlanMma(const ConvProblem& problem, ConvRole role, const DepthwiseConfig& config, Plan* plan) {
  MmaParams& p = plan->mma = LinesOf(problem, role, config, *plan);
  plan->rows = p.h.taps <= 5 ? 5 : kMmaRows;
  plan->grid[0] = Walks(p) * p.channel_blocks;
  plan->grid[1] = 1, plan->grid[2] = problem.B;
  plan->shared_bytes = kMmaSharedBytes;
  plan->lanes = kMmaThreads;
}

void PlanMmaWgrad(const ConvProblem& problem, const DepthwiseConfig& config, Dtype result, Plan* plan) {
  MmaWgradParams& p = plan->mma_wgrad;
  p.geometry = LinesOf(problem, ConvRole::kWgrad, config, *plan);
  plan->rows = p.geometry.h.taps <= 3 ? 3 : p.geometry.h.taps <= 5 ? 5 : kMmaRows;
  p.geometry.steps = static_cast<int>(CeilDiv(p.geometry.steps + 1, plan->rows)) * plan->rows;
  p.walks = static_cast<int>(Walks(p.geometry)), p.share = static_cast<int>(CeilDiv(p.walks, config.splits));
  p.source_pitch = static_cast<unsigned>(p.geometry.source_pitch / kMmaVector),
  p.target_pitch = static_cast<unsigned>(p.geometry.target_pitch / (kMmaVector / 2));
  p.float_result = result == Dtype::kF32;
  plan->grid[0] = p.geometry.channel_blocks;
  plan->grid[1] = config.splits, plan->grid[2] = problem.B;
  plan->shared_bytes = kMmaWgradSharedBytes;
  plan->lanes = kMmaThreads;
}

void PlanWgrad(const ConvProblem& problem, const DepthwiseConfig& config, int vector, Dtype result, Plan* plan) {
  Params& p = plan->params;
  plan->window = plan->window && plan->vector;
  const bool special = plan->window && !plan->many;
  const int most = special ? kWgradTaps : kFewWgradTaps;
  p.row_pieces = static_cast<int>(CeilDiv(p.w.taps, most));
  plan->taps = special ? WgradTaps(static_cast<int>(CeilDiv(p.w.taps, p.row_pieces))) : kFewWgradTaps;
  p.classes = std::min(p.w.step, p.w.R);
  p.pieces = static_cast<int>(config.pieces);
  p.float_result = result == Dtype::kF32;
  const int64_t pieces = int64_t{p.d.R} * p.h.R * p.classes * p.row_pieces;
  const int64_t tiles = CeilDiv(int64_t{p.N} * p.d.targets * p.h.targets * p.strips, kThreads / (config.lanes * config.pieces));
  p.tiles = static_cast<int>(tiles), p.share = static_cast<int>(CeilDiv(tiles, config.splits));
  plan->grid[0] = p.channel_blocks * CeilDiv(pieces, config.pieces);
  plan->grid[1] = config.splits;
  plan->grid[2] = problem.B;
  plan->shared_bytes = static_cast<int>(kThreads * vector * sizeof(float));
}

}  // namespace

bool IsEmpty(const ConvProblem& problem, ConvRole role) {
  const auto& sizes = role == ConvRole::kFprop ? problem.output : role == ConvRole::kDgrad ? problem.input : problem.filter;
  const bool without_images = role != ConvRole::kWgrad && problem.N == 0;
  return problem.B == 0 || problem.G == 0 || without_images || std::count(sizes.begin(), sizes.end(), 0) > 0;
}

Status Make(const ConvProblem& problem, ConvRole role, const DepthwiseConfig& config, Dtype dtype, Dtype result, bool aligned, Plan* plan) {
  if (Status status = CheckConfig(role, config, result); !status.ok()) return status;
  constexpr int kRank = 3;  // the handlers of fewer axes call the same kernels
  if (const Reason reason = DepthwiseRefuses(role, kRank, problem, {ShortName(dtype), ShortName(dtype), ShortName(result)})) {
    return Invalid("depthwise: " + *reason);
  }
  *plan = {};
  if (config.lines > 0) {
    if (const Reason reason = MmaRefuses(problem, role, dtype)) {
      return Invalid("depthwise " + std::string(Name(role)) + ": lines is " + Text(config.lines) + ", want 0: tensor cores take " +
                     *reason);
    }
  }
  if (IsEmpty(problem, role)) return {};
  plan->vector = aligned && FillsVectors(problem, kVectorBytes / Bytes(dtype));
  plan->many = plan->vector && problem.K > 1;
  plan->lanes = static_cast<int>(config.lanes);
  const int vector = plan->vector ? static_cast<int>(kVectorBytes / Bytes(dtype)) : 1;
  Params& p = plan->params;
  SetChannels(problem, role, vector, &p);
  p.d = MakeAxis(problem, role, 0), p.h = MakeAxis(problem, role, 1), p.w = MakeWidth(problem, role);
  p.spacing = Spacing(p.w);
  p.hop = static_cast<int>(int64_t{p.w.target_stride} * p.spacing / std::abs(p.w.tap_stride));
  plan->window = p.hop == 1;
  const int64_t of_class = CeilDiv(p.w.targets, p.spacing);  // targets of a residue modulo the spacing
  p.strip = static_cast<int>(std::clamp<int64_t>(of_class, 1, config.strip));
  p.strips = static_cast<int>(p.spacing * CeilDiv(of_class, p.strip));
  p.channel_blocks = static_cast<int>(CeilDiv(p.filters, config.lanes * vector * p.folds));
  // Without vectors, or targets to sum, there are the other kernels alone.
  const bool on_tensor_cores = config.lines > 0 && aligned && p.h.T > 0 && p.w.T > 0;
  if (role == ConvRole::kWgrad && on_tensor_cores) {
    PlanMmaWgrad(problem, config, result, plan);
  } else if (role == ConvRole::kWgrad) {
    PlanWgrad(problem, config, vector, result, plan);
  } else if (on_tensor_cores) {
    PlanMma(problem, role, config, plan);
  } else if (Status status = PlanGather(problem, config, vector, plan); !status.ok()) {
    return status;
  }
  if (plan->grid[0] > kMostGridX) {
    return Invalid("depthwise: " + Text(plan->grid[0]) + " blocks along the first axis of the grid, it takes " + Text(kMostGridX) +
                   " at most");
  }
  return {};
}

}  // namespace jaxext::depthwise

namespace jaxext {

using namespace depthwise;

Reason DepthwiseRefuses(ConvRole role, int, const ConvProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (p.C != 1) return Text(p.C) + " input channels per group, it takes 1";
  if (p.K < 1 || p.K > kMostOutputs) return Text(p.K) + " outputs per group, it takes 1 to " + Text(kMostOutputs);
  for (int64_t size : {p.B, p.N, p.G}) {
    if (size < 0) return "a size is " + Text(size) + ", it takes 0 or more";
  }
  if (Product({p.G, p.K}) >= kMostIndex) {
    return Text(Product({p.G, p.K})) + " outputs of all groups, it takes fewer than " + Text(kMostIndex);
  }
  for (const std::string& dtype : {dtypes.first, dtypes.second, dtypes.result}) {
    if (dtype != "fp32" && dtype != "bf16" && dtype != "fp16") return "dtype " + dtype + ", it takes fp32, bf16, fp16";
  }
  const bool wgrad = role == ConvRole::kWgrad;
  if (dtypes.second != dtypes.first || (dtypes.result != dtypes.first && !(wgrad && dtypes.result == "fp32"))) {
    return dtypes.first + " times " + dtypes.second + " into " + dtypes.result + ", it takes a single dtype";
  }
  if (arch && *arch < 80) return "compute capability " + CapabilityText(*arch) + ", it takes 8.0 and newer";
  if (Reason reason = CheckAxes(p)) return reason;
  const Axis d = MakeAxis(p, role, 0), h = MakeAxis(p, role, 1), w = MakeWidth(p, role);
  const int64_t phases = Product({d.phases, h.phases, w.phases}), spacing = Spacing(w);
  if (p.B > kMostGridYZ || (!wgrad && phases > kMostGridYZ)) {
    return "B=" + Text(p.B) + " and " + Text(phases) + " phases, it takes " + Text(kMostGridYZ) + " at most";
  }
  const int64_t apart = std::max<int64_t>(spacing * std::max(w.target_stride, w.period), std::abs(w.tap_stride));
  if (apart >= kMostApart) {
    return "neighbours in a strip or a filter row lie " + Text(apart) + " places apart, it takes fewer than " + Text(kMostApart);
  }
  // A bound for the lines and strips of every config.
  const int64_t positions = Product({p.N, d.phases, d.targets, h.phases, h.targets, int64_t{w.phases} * w.targets + spacing});
  if (positions >= kMostPositions) return "about " + Text(positions) + " positions, it takes fewer than " + Text(kMostPositions);
  return {};
}

}  // namespace jaxext
