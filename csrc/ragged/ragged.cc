// From a role to a ragged product of matrices, and from a configuration to its kernel.
#include "ragged/ragged.h"

#include <algorithm>
#include <string>

#include "matmul/matmul.h"

namespace jaxext {
namespace {

bool Computes(const RaggedKernel& kernel, MatmulRole role, const Dtypes& dtypes) {
  const std::string dtype = ShortName(kernel.dtype);
  return kernel.role == role && dtypes.first == dtype && dtypes.second == dtype && dtypes.result == dtype;
}

// Tiles of the result, including the padding of clusters and bands.
int64_t Tiles(MatmulRole role, const RaggedProblem& p, const RaggedConfig& config) {
  const int64_t columns = CeilDiv(role == MatmulRole::kNT ? p.K : p.N, config.tile_n * config.cluster_n) * config.cluster_n;
  if (role == MatmulRole::kTN) return Product({p.B, p.G, CeilDiv(p.K, config.tile_m), columns});
  return Product({p.B, p.P, p.R, VisitsOf(p, config.tile_m), columns});
}

// The reason if no kernel supports the problem, whatever the tile.
Reason CheckProblem(const RaggedProblem& p) {
  if (Reason reason = CheckSizes({p.B, p.P, p.R, p.M, p.N, p.K, p.G})) return reason;
  for (int64_t row : {p.K, p.N}) {
    if (row % 8 != 0)
      return "a row of " + std::to_string(row) + " elements has " + std::to_string(2 * row) + " bytes, TMA wants a multiple of 16";
  }
  if (std::max({Product({p.B, p.P, p.R, p.M, p.K}), Product({p.B, p.G, p.K, p.N}), Product({p.B, p.P, p.R, p.M, p.N})}) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  if (std::max(Product({p.B, p.P, p.R}), Product({p.B, p.G})) > kMostOfAxis) return Text(p) + " make 2^31 matrices or more, want fewer";
  return {};
}

bool Empty(const RaggedProblem& p) { return Product({p.B, p.P, p.R, p.M, p.N, p.K, p.G}) == 0; }

}  // namespace

const std::vector<RaggedKernel>& RaggedKernels() {
  static const auto* const kernels = new std::vector<RaggedKernel>(Joined({RaggedNN(), RaggedNT(), RaggedTN()}));
  return *kernels;
}

Reason RaggedRefuses(MatmulRole role, const RaggedProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("ragged", arch)) return reason;
  const auto computes = [&](const RaggedKernel& kernel) { return Computes(kernel, role, dtypes); };
  const std::vector<RaggedKernel>& kernels = RaggedKernels();
  if (std::none_of(kernels.begin(), kernels.end(), computes)) {
    return dtypes.first + " times " + dtypes.second + " into " + dtypes.result + ", want one dtype, bf16 or fp16";
  }
  if (Reason reason = CheckProblem(p)) return reason;
  if (Empty(p)) return {};
  for (const RaggedKernel& kernel : kernels) {
    if (computes(kernel) && Tiles(role, p, kernel.config) <= kMostOfAxis) return {};
  }
  return Text(p) + " make 2^31 tiles or more, want fewer";
}

Status LaunchRagged(MatmulRole role, const RaggedProblem& p, const RaggedConfig& config, const ProductArrays& arrays, const int32_t* places,
                    LaunchStream stream) {
  const auto& [operands, result, first, second, out] = arrays;
  if (Reason reason = RaggedRefuses(role, p, {ShortName(operands), ShortName(operands), ShortName(result)})) {
    return Invalid("ragged: " + *reason);
  }
  if (Empty(p)) return Invalid("ragged: sizes are " + Text(p) + ", want 1 or more");
  const RaggedKernel* kernel =
      Find(RaggedKernels(), config, [&](const RaggedKernel& k) { return k.role == role && k.dtype == arrays.operands; });
  if (kernel == nullptr) return Invalid("ragged: no kernel has " + Text(config));
  if (Tiles(role, p, config) > kMostOfAxis) return Invalid("ragged: " + Text(p) + " make 2^31 tiles or more, want fewer");
  if (Reason reason = CheckAligned({first, second, out})) return Invalid("ragged: " + *reason);

  const Gemm matrix = GemmOf(role, {1, p.M, p.N, p.K}, 1, first, second, out);
  const int64_t rows = p.B * p.P * p.R, groups = p.B * p.G;
  RaggedGemm gemm = {};
  gemm.m = matrix.m, gemm.n = matrix.n, gemm.k = matrix.k;
  gemm.a = matrix.a, gemm.a_leading = matrix.a_leading, gemm.a_batch = matrix.a_batch;
  gemm.b = matrix.b, gemm.b_leading = matrix.b_leading, gemm.b_batch = matrix.b_batch;
  gemm.d = out, gemm.places = places;
  gemm.a_matrices = rows;
  gemm.b_matrices = role == MatmulRole::kTN ? rows : groups;
  gemm.d_matrices = role == MatmulRole::kTN ? groups : rows;
  gemm.P = p.P, gemm.R = p.R, gemm.G = p.G;
  gemm.visits = VisitsOf(p, config.tile_m);
  return kernel->launch(gemm, stream);
}

}  // namespace jaxext
