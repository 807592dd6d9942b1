// The refusals of ragged products of scaled 8-bit floats, and the kernel of a configuration.
#include "ragged_scaled/ragged_scaled.h"

#include <algorithm>
#include <string>

namespace jaxext {
namespace {

bool Computes(const ScaledKernel& kernel, const Dtypes& dtypes) {
  return dtypes.first == ShortName(kernel.first) && dtypes.second == ShortName(kernel.second) &&
         (dtypes.result == "bf16" || dtypes.result == "fp32");
}

// Matrices of rows, each as one of a product of scaled numbers.
ScaledProblem MatricesOf(const RaggedScaledProblem& p) { return {Product({p.B, p.P, p.R}), p.M, p.N, p.K, p.M, p.J, p.S}; }

// Tiles of the result, including those that fill up a cluster.
int64_t Tiles(const RaggedScaledProblem& p, const ScaledConfig& config) {
  const int64_t cluster = config.cluster_m;
  return Product({p.B, p.P, p.R, VisitsOf(p, config.tile_m), CeilDiv(p.N, config.tile_n * cluster), cluster});
}

bool Empty(const RaggedScaledProblem& p) { return Product({p.B, p.P, p.R, p.M, p.N, p.K, p.G}) == 0; }

}  // namespace

const std::vector<ScaledKernel>& RaggedScaledKernels() {
  static const auto* const kernels = new std::vector<ScaledKernel>(RaggedScaledE4M3());
  return *kernels;
}

Reason RaggedScaledRefuses(const RaggedScaledProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("ragged_scaled", arch)) return reason;
  const auto computes = [&](const ScaledKernel& kernel) { return Computes(kernel, dtypes); };
  const std::vector<ScaledKernel>& kernels = RaggedScaledKernels();
  if (std::none_of(kernels.begin(), kernels.end(), computes)) {
    return dtypes.first + " times " + dtypes.second + " into " + dtypes.result + ", want fp8e4nv or fp8e5 times fp8e4nv, into bf16 or fp32";
  }
  if (Reason reason = CheckSizes({p.B, p.P, p.R, p.M, p.N, p.K, p.G})) return reason;
  if (Empty(p)) return {};
  const int64_t matrices = std::max(Product({p.B, p.P, p.R}), Product({p.B, p.G}));
  if (matrices > kMostOfAxis) return Text(p) + " make 2^31 matrices or more, want fewer";
  if (std::max({Product({p.B, p.P, p.R, p.M, p.K}), Product({p.B, p.G, p.N, p.K}), Product({p.B, p.P, p.R, p.M, p.N})}) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  ScaledProblem one = MatricesOf(p);
  one.B = 1;
  if (Reason reason = CheckScaledSizes(one, dtypes.result)) return reason;
  for (const ScaledKernel& kernel : kernels) {
    if (computes(kernel) && Tiles(p, kernel.config) <= kMostOfAxis) return {};
  }
  return Text(p) + " make 2^31 tiles or more, want fewer";
}

Status LaunchRaggedScaled(const RaggedScaledProblem& p, const RaggedScaledConfig& config, Dtype first, Dtype second, Dtype result,
                          const void* a, const void* b, const Scale& left, const Scale& right, const int32_t* visits, void* d,
                          LaunchStream stream) {
  if (Reason reason = RaggedScaledRefuses(p, {ShortName(first), ShortName(second), ShortName(result)})) {
    return Invalid("ragged_scaled: " + *reason);
  }
  if (Empty(p)) return Invalid("ragged_scaled: sizes are " + Text(p) + ", want 1 or more");
  const ScaledConfig tile = {config.tile_m, config.tile_n, config.tile_k, config.cluster_n, 1};
  const ScaledKernel* kernel =
      Find(RaggedScaledKernels(), tile, [&](const ScaledKernel& k) { return k.first == first && k.second == second; });
  if (kernel == nullptr) return Invalid("ragged_scaled: no kernel has " + Text(config));
  if (Tiles(p, tile) > kMostOfAxis) return Invalid("ragged_scaled: " + Text(p) + " make 2^31 tiles or more, want fewer");
  if (Reason reason = CheckScaledArrays(MatricesOf(p), a, b, right, d)) return Invalid("ragged_scaled: " + *reason);
  ScaledGemm gemm = {MatricesOf(p), 1, a, b, left, right, d, result == Dtype::kF32};
  gemm.ragged = {visits,
                 static_cast<int>(VisitsOf(p, config.tile_m)),
                 static_cast<int>(p.B * p.G),
                 static_cast<int>(p.G),
                 static_cast<int>(p.R),
                 static_cast<int>(p.P * p.R)};
  return kernel->launch(gemm, stream);
}

}  // namespace jaxext
