// What the kernels of products with an own transpose refuse, and from a configuration to its kernel.
#include "gram/gram.h"

#include <algorithm>
#include <string>

#include "matmul/matmul.h"

namespace jaxext {
namespace {

constexpr int64_t kMostSplits = 32;  // known to jaxext/backends/cuda/cuda_gram.py

std::string Text(const GramProblem& p) { return "B=" + std::to_string(p.B) + " M=" + std::to_string(p.M) + " N=" + std::to_string(p.N); }

int64_t Cut(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

int64_t Clusters(const GramProblem& p, const GramConfig& config, int64_t splits) {
  return Product({p.B, splits, GramClusters(p.M, config)});
}

// The reason if no kernel supports the problem, whatever the tile.
Reason CheckProblem(const GramProblem& p, const std::string& result) {
  for (int64_t size : {p.B, p.M, p.N}) {
    if (size < 0) return "an axis has " + std::to_string(size) + " elements, want 0 or more";
    if (size > kMostOfAxis) return "an axis has " + std::to_string(size) + " elements, want " + std::to_string(kMostOfAxis) + " at most";
  }
  if (p.N % 8 != 0) {
    return "a row of x has " + std::to_string(p.N * 2) + " bytes, TMA wants a multiple of 16: pad N to " + std::to_string(Cut(p.N, 8) * 8);
  }
  if (const int64_t unit = result == "fp32" ? 4 : 8; p.M % unit != 0) {
    return "a row of the result has " + std::to_string(p.M * 16 / unit) + " bytes, want a multiple of 16: pad M to " +
           std::to_string(Cut(p.M, unit) * unit);
  }
  if (std::max(Product({p.B, p.M, p.N}), Product({p.B, p.M, p.M})) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  return {};
}

bool Empty(const GramProblem& p) { return Product({p.B, p.M, p.N}) == 0; }

}  // namespace

const std::vector<GramKernel>& GramKernels() {
  static const std::vector<GramKernel>* const kernels = [] {
    auto* all = new std::vector<GramKernel>(GramBF16());
    for (const GramKernel& kernel : GramF16()) all->push_back(kernel);
    return all;
  }();
  return *kernels;
}

int64_t GramClusters(int64_t rows, const GramConfig& config) {
  const int64_t height = config.tile_m * config.cluster_m, across = Cut(rows, config.tile_n);
  int64_t clusters = 0;
  for (int64_t i = 1; i <= Cut(rows, height); ++i) clusters += std::min(across, Cut(i * height, config.tile_n));
  return clusters;
}

Reason GramRefuses(const GramProblem& p, const Dtypes& dtypes, const std::string& addend, std::optional<int> arch) {
  if (arch && *arch != 90) return "compute capability is " + CapabilityText(*arch) + ", the gram kernels want 9.0";
  if (dtypes.first != "bf16" && dtypes.first != "fp16") return "x is " + dtypes.first + ", want bf16 or fp16";
  if (dtypes.second != dtypes.first) return "the operands are " + dtypes.first + " and " + dtypes.second + ", want one dtype";
  if (dtypes.result != dtypes.first && dtypes.result != "fp32") {
    return "the result is " + dtypes.result + ", want " + dtypes.first + " or fp32";
  }
  if (!addend.empty() && addend != dtypes.result) return "the addend is " + addend + ", want " + dtypes.result + ", as the result";
  if (std::min({p.B, p.M, p.N}) >= 0 && Empty(p)) return {};
  if (Reason reason = CheckProblem(p, dtypes.result)) return reason;
  for (const GramKernel& kernel : GramKernels()) {
    if (ShortName(kernel.operands) == dtypes.first && Clusters(p, kernel.config, 1) <= kMostOfAxis) return {};
  }
  return Text(p) + " make 2^31 clusters of tiles or more, want fewer";
}

Status LaunchGram(const GramProblem& p, const GramConfig& config, Dtype dtype, Dtype result, const GramOperands& operands, void* y,
                  LaunchStream stream) {
  const std::string of_addend = operands.addend == nullptr ? "" : ShortName(result);
  if (Reason reason = GramRefuses(p, {ShortName(dtype), ShortName(dtype), ShortName(result)}, of_addend)) {
    return Invalid("gram: " + *reason);
  }
  if (Empty(p)) return Invalid("gram: sizes are " + Text(p) + ", want 1 or more");
  const auto& kernels = GramKernels();
  const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const GramKernel& k) {
    const GramConfig& c = k.config;
    return k.operands == dtype && c.tile_m == config.tile_m && c.tile_n == config.tile_n && c.tile_k == config.tile_k &&
           c.cluster_m == config.cluster_m;
  });
  if (kernel == kernels.end()) {
    return Invalid("gram: no kernel of tiles " + std::to_string(config.tile_m) + "x" + std::to_string(config.tile_n) + "x" +
                   std::to_string(config.tile_k) + " in clusters of " + std::to_string(config.cluster_m));
  }
  if (config.splits < 1 || config.splits > kMostSplits) {
    return Invalid("gram: splits is " + std::to_string(config.splits) + ", want 1 to " + std::to_string(kMostSplits));
  }
  const int64_t steps = Cut(p.N, config.tile_k);
  if ((config.splits - 1) * Cut(steps, config.splits) >= steps) {
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
  for (const void* array : {operands.x, operands.addend, static_cast<const void*>(y)}) {
    if (!Aligned(array)) return Invalid("gram: an operand or the result does not begin at a multiple of 16 bytes");
  }
  return kernel->launch({p, config.splits, operands, y, result == Dtype::kF32}, stream);
}

}  // namespace jaxext
