#include "weight_only/weight_only_plan.h"

#include <algorithm>

#include "common/refusals.h"

namespace jaxext::weight_only {
namespace {

std::string Text(int64_t number) { return std::to_string(number); }

// The tiles for which a kernel was compiled (weight_only_launch.cuh): the first is the widest, with 16-byte accesses.  Those from kWide
// rows on are Hopper's (wide_weight_only.cuh).
struct Tile {
  int64_t bits, m, n;
};
constexpr Tile kTiles[] = {{4, 8, 256}, {4, 8, 64}, {4, 16, 256}, {4, 32, 256}, {4, 64, 256}, {4, 128, 256},
                           {8, 8, 128}, {8, 8, 64}, {8, 16, 128}, {8, 32, 256}, {8, 64, 256}, {8, 128, 256}};
constexpr int64_t kWide = 64;

std::string TooManyRows(int64_t rows) {
  return Text(rows) + " rows, it takes " + Text(kMostRows) + " at most, and more on compute capability 9.0";
}

Status CheckConfig(int64_t bits, const WeightOnlyConfig& config) {
  const bool compiled = std::any_of(std::begin(kTiles), std::end(kTiles), [&](const Tile& tile) {
    return tile.bits == bits && tile.m == config.tile_m && tile.n == config.tile_n;
  });
  if (!compiled) {
    std::string want;
    for (const Tile& tile : kTiles) {
      if (tile.bits == bits) want += (want.empty() ? "" : ", ") + Text(tile.m) + "x" + Text(tile.n);
    }
    return Invalid("weight_only: tile_m x tile_n is " + Text(config.tile_m) + "x" + Text(config.tile_n) + ", want one of " + want);
  }
  if (config.splits < 1 || config.splits > kMostSplits) {
    return Invalid("weight_only: splits is " + Text(config.splits) + ", want 1 to " + Text(kMostSplits));
  }
  return {};
}

}  // namespace

bool IsEmpty(const WeightOnlyProblem& problem) { return problem.B == 0 || problem.M == 0 || problem.N == 0; }

Status Make(const WeightOnlyProblem& problem, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, Plan* plan) {
  const std::string x = ShortName(operands.dtype);
  const std::string result = config.splits > 1 && operands.of_result == Dtype::kF32 ? x : ShortName(operands.of_result);
  if (const Reason reason = WeightOnlyRefuses(problem, {x, "i8", result})) return Invalid("weight_only: " + *reason);
  if (Status status = CheckConfig(problem.bits, config); !status.ok()) return status;
  const bool wide = config.tile_m >= kWide;
  if (!wide && problem.M > kMostRows) return Invalid("weight_only: " + TooManyRows(problem.M));
  if (config.splits > 1 && operands.of_result != Dtype::kF32) {
    return Invalid(std::string("weight_only: the result is ") + Name(operands.of_result) + ", want float32, as partial results are");
  }
  *plan = {};
  if (IsEmpty(problem)) return {};
  Params& p = plan->params;
  p.B = static_cast<int>(problem.B), p.M = static_cast<int>(problem.M), p.N = static_cast<int>(problem.N);
  p.K = static_cast<int>(problem.K), p.S = static_cast<int>(problem.S);
  p.row_blocks = static_cast<int>(CeilDiv(problem.M, config.tile_m));
  p.column_blocks = static_cast<int>(CeilDiv(problem.N, config.tile_n));
  p.splits = static_cast<int>(config.splits);
  p.steps = static_cast<int>(problem.K / kStep);
  p.share = static_cast<int>(wide ? 2 * CeilDiv(CeilDiv(p.steps, 2), config.splits) : CeilDiv(p.steps, config.splits));
  const int64_t of_scale = std::max<int64_t>(p.steps / problem.S, 1);
  p.of_scale = of_scale == 1 ? 0 : static_cast<unsigned>(CeilDiv(int64_t{1} << 32, of_scale));
  p.wide = operands.of_result == Dtype::kF32;
  plan->bits = static_cast<int>(problem.bits);
  plan->tiles = static_cast<int>(config.tile_m / kRowsOfTile), plan->columns = static_cast<int>(config.tile_n / config.tile_m);
  plan->grid = Product({p.B, p.splits, p.column_blocks, p.row_blocks});
  plan->wide = wide;
  plan->shared_bytes = wide ? 0 : SharedBytes(plan->tiles, plan->columns);
  if (plan->grid > kMostGridX) return Invalid("weight_only: " + Text(plan->grid) + " blocks, a grid has " + Text(kMostGridX) + " at most");
  return {};
}

}  // namespace jaxext::weight_only

namespace jaxext {

using namespace weight_only;

Reason WeightOnlyRefuses(const WeightOnlyProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  const std::pair<const char*, int64_t> sizes[] = {{"B", p.B}, {"M", p.M}, {"N", p.N}, {"K", p.K}};
  for (const auto& [name, size] : sizes) {
    if (size < 0) return std::string(name) + " is " + Text(size) + ", it takes 0 or more";
    if (size >= kMostIndex) return std::string(name) + " is " + Text(size) + ", it takes fewer than " + Text(kMostIndex);
  }
  if (p.K >= kMostDepth) return "K is " + Text(p.K) + ", it takes fewer than " + Text(kMostDepth);
  if (p.bits != 4 && p.bits != 8) return "integers of " + Text(p.bits) + " bits, it takes 4 or 8";
  if (dtypes.second != "i8") return "w is " + dtypes.second + ", it takes int8 and int4";
  if (dtypes.first != "bf16" && dtypes.first != "fp16") return "x is " + dtypes.first + ", it takes bf16, fp16";
  if (dtypes.result != dtypes.first && dtypes.result != "fp32") {
    return "the result is " + dtypes.result + ", it takes " + dtypes.first + ", as x, and fp32";
  }
  if (p.M > kMostRows && arch && *arch != 90) return TooManyRows(p.M);
  for (const auto& [name, size] : {sizes[2], sizes[3]}) {
    if (size % kMultiple != 0) return std::string(name) + " is " + Text(size) + ", it takes multiples of " + Text(kMultiple);
  }
  if (p.S < 1 || (p.K > 0 && p.K % Product({p.S, kMultiple}) != 0)) {
    return Text(p.S) + " scales along K of " + Text(p.K) + ", it takes blocks of multiples of " + Text(kMultiple);
  }
  if (arch && *arch < 80) return "compute capability " + CapabilityText(*arch) + ", it takes 8.0 and newer";
  const int64_t blocks = p.M > kMostRows ? Product({p.N / 256 + 1, p.M / kWide + 1}) : Product({p.N / 64 + 1, p.M / kRowsOfTile + 1});
  if (Product({p.B, weight_only::kMostSplits, blocks}) > kMostGridX) {
    return Text(p.B) + " products with " + Text(p.N) + " columns, it takes fewer: a grid has " + Text(kMostGridX) + " blocks at most";
  }
  return {};
}

}  // namespace jaxext
