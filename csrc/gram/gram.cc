// What the kernels of products with an own transpose refuse, and from a configuration to its kernel.
#include "gram/gram.h"

#include <algorithm>
#include <string>

namespace jaxext {
namespace {

int64_t Clusters(const GramProblem& p, const GramConfig& config, int64_t splits) {
  return Product({p.B, splits, GramClusters(p.M, config)});
}

// The reason if no kernel supports the problem, whatever the tile.
Reason CheckProblem(const GramProblem& p, const std::string& result) {
  if (Reason reason = CheckSizes({p.B, p.M, p.N})) return reason;
  if (Reason reason = CheckRow("x", 'N', p.N, 2)) return reason;
  if (const int64_t unit = result == "fp32" ? 4 : 8; p.M % unit != 0) {
    return "a row of the result has " + std::to_string(p.M * 16 / unit) + " bytes, want a multiple of 16: pad M to " +
           std::to_string(CeilDiv(p.M, unit) * unit);
  }
  if (std::max(Product({p.B, p.M, p.N}), Product({p.B, p.M, p.M})) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  return {};
}

bool Empty(const GramProblem& p) { return Product({p.B, p.M, p.N}) == 0; }

}  // namespace

const std::vector<GramKernel>& GramKernels() {
  static const auto* const kernels = new std::vector<GramKernel>(Joined({GramBF16(), GramF16()}));
  return *kernels;
}

int64_t GramClusters(int64_t rows, const GramConfig& config) {
  const int64_t height = config.tile_m * config.cluster_m, across = CeilDiv(rows, config.tile_n);
  int64_t clusters = 0;
  for (int64_t i = 1; i <= CeilDiv(rows, height); ++i) clusters += std::min(across, CeilDiv(i * height, config.tile_n));
  return clusters;
}

Reason GramRefuses(const GramProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("gram", arch)) return reason;
  if (dtypes.first != "bf16" && dtypes.first != "fp16") return "x is " + dtypes.first + ", want bf16 or fp16";
  if (dtypes.second != dtypes.first) return "the operands are " + dtypes.first + " and " + dtypes.second + ", want one dtype";
  if (dtypes.result != dtypes.first && dtypes.result != "fp32") {
    return "the result is " + dtypes.result + ", want " + dtypes.first + " or fp32";
  }
  if (!dtypes.further.empty() && dtypes.further != dtypes.result) {
    return "the addend is " + dtypes.further + ", want " + dtypes.result + ", as the result";
  }
  if (std::min({p.B, p.M, p.N}) >= 0 && Empty(p)) return {};
  if (Reason reason = CheckProblem(p, dtypes.result)) return reason;
  for (const GramKernel& kernel : GramKernels()) {
    if (ShortName(kernel.operands) == dtypes.first && Clusters(p, kernel.config, 1) <= kMostOfAxis) return {};
  }
  return Text(p) + " make 2^31 clusters of tiles or more, want fewer";
}

Status LaunchGram(const GramProblem& p, const GramConfig& config, Dtype dtype, Dtype result, const GramOperands& operands, void* y,
                  LaunchStream stream) {
  if (Reason reason = GramRefuses(p, {ShortName(dtype), ShortName(dtype), ShortName(result)})) {
    return Invalid("gram: " + *reason);
  }
  if (Empty(p)) return Invalid("gram: sizes are " + Text(p) + ", want 1 or more");
  const GramKernel* kernel = Find(GramKernels(), config, [&](const GramKernel& k) { return k.operands == dtype; });
  if (kernel == nullptr) return Invalid("gram: no kernel has " + Text(config));
  if (Reason reason = CheckSplits(config.splits)) return Invalid("gram: " + *reason);
  const int64_t steps = CeilDiv(p.N, config.tile_k);
  if ((config.splits - 1) * CeilDiv(steps, config.splits) >= steps) {
    return Invalid("gram: splits is " + std::to_string(config.splits) + ", with " + std::to_string(steps) +
                   " steps of the sum a part has none");
  }
  if (config.splits > 1 && result != Dtype::kF32) return Invalid("gram: parts are " + std::string(Name(result)) + ", want float32");
  if (config.splits > 1 && operands.addend != nullptr) {
    return Invalid("gram: splits is " + std::to_string(config.splits) + " with an addend, want 1");
  }
  if (Clusters(p, config, config.splits) > kMostOfAxis) {
    return Invalid("gram: " + Text(p) + " make 2^31 clusters of tiles or more, want fewer");
  }
  if (Reason reason = CheckAligned({operands.x, operands.addend, y})) return Invalid("gram: " + *reason);
  return kernel->launch({p, config.splits, operands, y, result == Dtype::kF32}, stream);
}

}  // namespace jaxext
