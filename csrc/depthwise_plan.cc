#include "depthwise_plan.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

namespace jaxext::depthwise {
namespace {

constexpr const char* kAxisNames[] = {"first", "height", "width"};

const char* RoleName(ConvRole role) { return role == ConvRole::kFprop ? "fprop" : role == ConvRole::kDgrad ? "dgrad" : "wgrad"; }

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

// Sizes, steps and the places that they lead to, of one axis.
Status CheckAxis(const ConvProblem& problem, int i) {
  const auto refuse = [&](const std::string& what) { return Invalid(std::string("depthwise: on the ") + kAxisNames[i] + " axis " + what); };
  const int64_t sizes[] = {problem.input[i], problem.filter[i], problem.output[i]};
  for (int64_t size : sizes) {
    if (size < 0 || size >= kMostIndex) return refuse("a size is " + std::to_string(size) + ", want 0 to 2^30 - 1");
  }
  for (int64_t step : {problem.stride[i], problem.input_dilation[i]}) {
    if (step < 1 || step > kMostStep) return refuse("a stride or input dilation is " + std::to_string(step) + ", want 1 to 65535");
  }
  const int64_t dilation = problem.filter_dilation[i];
  if (dilation < 1 || dilation >= kMostIndex) return refuse("the filter dilation is " + std::to_string(dilation) + ", want 1 to 2^30 - 1");
  if (sizes[1] > kMostTaps) return refuse("the filter has " + std::to_string(sizes[1]) + " taps, want 31 at most");
  const int64_t low = problem.low[i];
  if (low <= -kMostIndex || low >= kMostIndex) return refuse("the low padding is " + std::to_string(low) + ", want less than 2^30");
  const int64_t reach = std::max(problem.stride[i] * sizes[2], problem.input_dilation[i] * sizes[0]) + dilation * sizes[1] + std::abs(low);
  if (reach >= kMostIndex) return refuse("places reach " + std::to_string(reach) + ", want less than 2^30");
  if (i == 0 && (sizes[0] != 1 || sizes[1] != 1 || sizes[2] != 1 || low != 0)) {
    return Invalid("depthwise: three spatial axes, it takes one or two (the first must have size 1 everywhere, without padding)");
  }
  return {};
}

Status CheckProblem(const ConvProblem& problem) {
  for (int i = 0; i < 3; ++i) {
    if (Status status = CheckAxis(problem, i); !status.ok()) return status;
  }
  if (problem.C != 1) return Invalid("depthwise: " + std::to_string(problem.C) + " input channels per group, it takes 1");
  if (problem.K != 1) return Invalid("depthwise: " + std::to_string(problem.K) + " outputs per group, it takes 1");
  for (int64_t size : {problem.B, problem.N, problem.G}) {
    if (size < 0 || size >= kMostIndex) return Invalid("depthwise: B, N or G is " + std::to_string(size) + ", want 0 to 2^30 - 1");
  }
  return {};
}

Status CheckConfig(ConvRole role, const DepthwiseConfig& config, Dtype dtype, Dtype result) {
  const std::string name = std::string("depthwise ") + RoleName(role) + ": ";
  if (dtype != Dtype::kF32 && dtype != Dtype::kBF16 && dtype != Dtype::kF16) {
    return Invalid(name + "dtype " + Name(dtype) + ", it takes float32, bfloat16 and float16");
  }
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
  if (config.splits > 1 && result != Dtype::kF32) return Invalid(name + "a result of " + Name(result) + " in parts, want float32");
  if (result != dtype && !(wgrad && result == Dtype::kF32)) {
    return Invalid(name + "a result of " + Name(result) + " from operands of " + Name(dtype) + ", want " + Name(dtype) +
                   (wgrad ? " or float32" : ""));
  }
  return {};
}

Axis MakeAxis(const ConvProblem& problem, ConvRole role, int i) {
  const bool dgrad = role == ConvRole::kDgrad;
  const int64_t T = dgrad ? problem.input[i] : problem.output[i], S = dgrad ? problem.output[i] : problem.input[i], R = problem.filter[i];
  const int64_t a = dgrad ? problem.input_dilation[i] : problem.stride[i], d = dgrad ? problem.stride[i] : problem.input_dilation[i];
  const int64_t b = dgrad ? -problem.filter_dilation[i] : problem.filter_dilation[i], offset = dgrad ? problem.low[i] : -problem.low[i];
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

// The kernels made for a number of taps: the rows and images of most networks.
int GatherTaps(const Params& p, bool line) {
  const int taps = p.w.R;
  if (p.w.d != 1 || p.h.d != 1) return 0;
  if (line) return taps >= 2 && taps <= 4 ? taps : 0;
  return taps == 3 || taps == 5 || taps == 7 ? taps : 0;
}

// The least number of sums that a thread can hold and that covers a piece.
int WgradTaps(int columns) { return columns <= 5 ? std::max(columns, 2) : kWgradTaps; }

Status PlanGather(const ConvProblem& problem, const DepthwiseConfig& config, int vector, Plan* plan) {
  Params& p = plan->params;
  plan->line = plan->vector && plan->window && p.h.R == 1 && GatherTaps(p, true) != 0;
  plan->taps = plan->vector && plan->window ? GatherTaps(p, plan->line) : 0;
  const int64_t row_bytes = std::max(1, p.w.taps) * (config.lanes * vector + 4) * sizeof(float);  // a tap's row has 4 more: see Stage
  p.staged_rows = static_cast<int>(std::clamp<int64_t>(kSharedBytes / row_bytes, 1, std::max(1, p.h.taps)));
  plan->shared_bytes = static_cast<int>(p.staged_rows * row_bytes);
  if (plan->shared_bytes > kSharedBytes) {
    return Invalid("depthwise: lanes is " + std::to_string(config.lanes) + ", with which " + std::to_string(p.w.taps) + " taps need " +
                   std::to_string(plan->shared_bytes) + " bytes of shared memory, there are " + std::to_string(kSharedBytes));
  }
  const int64_t strips = int64_t{p.N} * p.h.targets * p.strips;
  plan->grid[0] = p.channel_blocks * CeilDiv(strips, kThreads / config.lanes);
  plan->grid[1] = int64_t{p.h.phases} * p.w.phases;
  plan->grid[2] = problem.B;
  return {};
}

void PlanWgrad(const ConvProblem& problem, const DepthwiseConfig& config, int vector, Dtype result, Plan* plan) {
  Params& p = plan->params;
  plan->window = plan->window && plan->vector;
  const int most = plan->window ? kWgradTaps : kNarrowWgradTaps;
  p.row_pieces = static_cast<int>(CeilDiv(p.w.taps, most));
  plan->taps = plan->window ? WgradTaps(static_cast<int>(CeilDiv(p.w.taps, p.row_pieces))) : kNarrowWgradTaps;
  p.classes = std::min(p.w.step, p.w.R);
  p.pieces = static_cast<int>(config.pieces);
  p.float_result = result == Dtype::kF32;
  const int64_t pieces = int64_t{p.h.R} * p.classes * p.row_pieces;
  const int64_t tiles = CeilDiv(int64_t{p.N} * p.h.targets * p.strips, kThreads / (config.lanes * config.pieces));
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
  if (Status status = CheckProblem(problem); !status.ok()) return status;
  if (Status status = CheckConfig(role, config, dtype, result); !status.ok()) return status;
  *plan = {};
  if (IsEmpty(problem, role)) return {};
  plan->vector = aligned && problem.G * Bytes(dtype) % kVectorBytes == 0;
  plan->lanes = static_cast<int>(config.lanes);
  const int vector = plan->vector ? static_cast<int>(kVectorBytes / Bytes(dtype)) : 1;
  Params& p = plan->params;
  p.N = static_cast<int>(problem.N), p.G = static_cast<int>(problem.G);
  p.h = MakeAxis(problem, role, 1), p.w = MakeAxis(problem, role, 2);
  if (p.w.taps <= 1) p.w.tap_stride = p.w.target_stride;  // any will do for a single tap, and this one leaves no holes in a strip
  p.spacing = std::abs(p.w.tap_stride) / std::gcd(p.w.target_stride, p.w.tap_stride);
  p.hop = static_cast<int>(int64_t{p.w.target_stride} * p.spacing / std::abs(p.w.tap_stride));
  plan->window = p.hop == 1;
  const int64_t targets_apart = int64_t{p.spacing} * std::max(p.w.target_stride, p.w.period);
  const int64_t apart = std::max<int64_t>(targets_apart, std::abs(p.w.tap_stride));
  if (apart >= kMostApart) {
    return Invalid("depthwise: neighbours in a strip or a filter row lie " + std::to_string(apart) + " places apart, want fewer than 2^25");
  }
  const int64_t of_class = CeilDiv(p.w.targets, p.spacing);  // targets of a residue modulo the spacing
  p.strip = static_cast<int>(std::clamp<int64_t>(of_class, 1, config.strip));
  const int64_t strips = p.spacing * CeilDiv(of_class, p.strip);
  const int64_t positions = problem.N * p.h.phases * p.h.targets;
  if (strips >= kMostPositions || positions >= kMostPositions || positions * strips >= kMostPositions ||
      positions * std::max<int64_t>(1, p.w.T) >= kMostPositions) {
    return Invalid("depthwise: " + std::to_string(positions) + " lines of " + std::to_string(p.w.T) + " positions in " +
                   std::to_string(strips) + " strips, want fewer than 2^31 - 2^16 in all");
  }
  p.strips = static_cast<int>(strips);
  p.channel_blocks = static_cast<int>(CeilDiv(problem.G, config.lanes * vector));
  if (role == ConvRole::kWgrad) {
    PlanWgrad(problem, config, vector, result, plan);
  } else if (Status status = PlanGather(problem, config, vector, plan); !status.ok()) {
    return status;
  }
  if (plan->grid[0] > kMostGridX || plan->grid[1] > kMostGridYZ || plan->grid[2] > kMostGridYZ) {
    return Invalid("depthwise: a grid of " + std::to_string(plan->grid[0]) + " x " + std::to_string(plan->grid[1]) + " x " +
                   std::to_string(plan->grid[2]) + " blocks, the limit is 2147483647 x 65535 x 65535");
  }
  return {};
}

}  // namespace jaxext::depthwise
