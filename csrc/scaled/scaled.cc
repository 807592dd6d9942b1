// What the kernels of scaled products refuse, and from a configuration to its kernel.
#include "scaled/scaled.h"

#include <algorithm>
#include <string>

namespace jaxext {
namespace {

bool Computes(const ScaledKernel& kernel, const Dtypes& dtypes) {
  return dtypes.first == ShortName(kernel.first) && dtypes.second == ShortName(kernel.second) &&
         (dtypes.result == "bf16" || dtypes.result == "fp32");
}

// Tiles of all parts, including those that fill up a cluster.
int64_t Tiles(const ScaledProblem& p, const ScaledConfig& config, int64_t splits) {
  return Product({p.B, splits, CeilDiv(p.M, config.tile_m * config.cluster_m), config.cluster_m, CeilDiv(p.N, config.tile_n)});
}

// The reason if an axis is not cut into that many blocks.
Reason CheckBlocks(const std::string& axis, int64_t size, int64_t blocks) {
  if (blocks > 0 && size % blocks == 0) return {};
  return axis + " of " + std::to_string(size) + " in " + std::to_string(blocks) + " blocks, want a number that divides it";
}

bool Empty(const ScaledProblem& p) { return Product({p.B, p.M, p.N, p.K}) == 0; }

}  // namespace

Reason CheckScaledSizes(const ScaledProblem& p, const std::string& result) {
  if (Reason reason = CheckSizes({p.B, p.M, p.N, p.K})) return reason;
  if (p.K % 16 != 0) return std::to_string(p.K) + " elements are contracted, TMA wants a multiple of 16";
  if (const int64_t bytes = p.N * (result == "fp32" ? 4 : 2); bytes % 16 != 0) {
    return "a row of " + std::to_string(p.N) + " elements of the result has " + std::to_string(bytes) + " bytes, want a multiple of 16";
  }
  if (std::max({Product({p.B, p.M, p.K}), Product({p.B, p.N, p.K}), Product({p.B, p.M, p.N})}) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  if (Reason reason = CheckBlocks("rows", p.M, p.I)) return reason;
  if (Reason reason = CheckBlocks("columns", p.N, p.J)) return reason;
  if (Reason reason = CheckBlocks("a sum", p.K, p.S)) return reason;
  if (p.S > 1 && p.K / p.S % kScaledStep != 0) {
    return "scales for each " + std::to_string(p.K / p.S) + " elements of a sum, want one for all or for multiples of 128";
  }
  if (p.J > 1 && p.J < p.N && p.N / p.J % kScaledStep != 0) {
    return "scales for each " + std::to_string(p.N / p.J) + " columns, want one for all, for each, or for multiples of 128";
  }
  return {};
}

Reason CheckScaledArrays(const ScaledProblem& p, const void* a, const void* b, const Scale& right, const void* d) {
  if (Reason reason = CheckAligned({a, b, right.data, d})) return reason;
  if (p.J == p.N && (right.outer != 1 || right.step % 4 != 0 || right.batch % 4 != 0)) {
    return "the scales of columns are " + std::to_string(right.outer) + " apart, want them beside each other";
  }
  return {};
}

const std::vector<ScaledKernel>& ScaledKernels() {
  static const auto* const kernels = new std::vector<ScaledKernel>(Joined({ScaledE4M3(), ScaledE5M2()}));
  return *kernels;
}

Reason ScaledRefuses(const ScaledProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("scaled", arch)) return reason;
  const auto computes = [&](const ScaledKernel& kernel) { return Computes(kernel, dtypes); };
  const std::vector<ScaledKernel>& kernels = ScaledKernels();
  if (std::none_of(kernels.begin(), kernels.end(), computes)) {
    return dtypes.first + " times " + dtypes.second + " into " + dtypes.result +
           ", want fp8e4nv times fp8e4nv or fp8e5, or fp8e5 times fp8e4nv, into bf16 or fp32";
  }
  const bool negative = std::min({p.B, p.M, p.N, p.K}) < 0;
  if (!negative && Empty(p)) return {};
  if (Reason reason = CheckScaledSizes(p, dtypes.result)) return reason;
  for (const ScaledKernel& kernel : kernels) {
    if (computes(kernel) && Tiles(p, kernel.config, 1) <= kMostOfAxis) return {};
  }
  return Text(p) + " make 2^31 tiles or more, want fewer";
}

Status LaunchScaled(const ScaledProblem& p, const ScaledConfig& config, Dtype first, Dtype second, Dtype result, const void* a,
                    const void* b, const Scale& left, const Scale& right, void* d, LaunchStream stream) {
  if (Reason reason = ScaledRefuses(p, {ShortName(first), ShortName(second), ShortName(result)})) return Invalid("scaled: " + *reason);
  if (Empty(p)) return Invalid("scaled: sizes are " + Text(p) + ", want 1 or more");
  const ScaledKernel* kernel = Find(ScaledKernels(), config, [&](const ScaledKernel& k) { return k.first == first && k.second == second; });
  if (kernel == nullptr) return Invalid("scaled: no kernel has " + Text(config));
  if (Reason reason = CheckSplits(config.splits)) return Invalid("scaled: " + *reason);
  if (config.splits > 1 && result != Dtype::kF32) return Invalid("scaled: parts are " + std::string(Name(result)) + ", want float32");
  if (Tiles(p, config, config.splits) > kMostOfAxis) return Invalid("scaled: " + Text(p) + " make 2^31 tiles or more, want fewer");
  if (Reason reason = CheckScaledArrays(p, a, b, right, d)) return Invalid("scaled: " + *reason);
  return kernel->launch({p, config.splits, a, b, left, right, d, result == Dtype::kF32}, stream);
}

}  // namespace jaxext
