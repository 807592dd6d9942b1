// From a role to a plain product, and from a configuration to its kernel.
#include "matmul/matmul.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

namespace jaxext {
namespace {

std::string Listed(const std::set<std::string>& names) {
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : ", ") + name;
  return joined;
}

// Whether CUTLASS can number the tiles with 32 bits, in a grid that it rounds up to pairs of blocks and bands of eight.
bool FewTiles(const Gemm& gemm, const MatmulConfig& config, int64_t batch) {
  const auto tiles = [](int64_t size, int64_t tile) { return CeilDiv(size, tile) + 15; };
  return Product({tiles(gemm.m, config.tile_m), tiles(gemm.n, config.tile_n), batch}) <= kMostOfAxis;
}

std::string ManyTiles(const MatmulProblem& p) { return Text(p) + " make 2^31 tiles or more, want fewer"; }

bool Computes(const MatmulKernel& kernel, MatmulRole role, const Dtypes& dtypes, bool fused) {
  return kernel.role == role && kernel.fused == fused && ShortName(kernel.operands) == dtypes.first && dtypes.second == dtypes.first &&
         ShortName(kernel.result) == dtypes.result;
}

// The role of the kernels that compute a role of operands of this dtype.  Float32 has NT alone: callers transpose operands of other roles.
MatmulRole KernelRole(MatmulRole role, const std::string& operands) { return operands == ShortName(Dtype::kF32) ? MatmulRole::kNT : role; }

std::string WrongDtypes(MatmulRole role, const Dtypes& dtypes, bool fused) {
  const auto& [first, second, result, further] = dtypes;
  if (first != second) {
    // Gradients of float32 results have such operands.  benchmarks/notes/gpu.md says why no kernel multiplies float32 by 16 bits.
    const bool wide = first == ShortName(Dtype::kF32) || second == ShortName(Dtype::kF32);
    const bool gradient = wide && role != MatmulRole::kNN;
    return "the operands are " + first + " and " + second + ", want one dtype" +
           (gradient ? ": name no implementation for gradients of fp32 results" : ": convert one, or name no implementation");
  }
  std::set<std::string> operands, results;
  for (const MatmulKernel& kernel : MatmulKernels()) {
    if (kernel.role != KernelRole(role, ShortName(kernel.operands)) || kernel.fused != fused) continue;
    operands.insert(ShortName(kernel.operands));
    if (ShortName(kernel.operands) == first) results.insert(ShortName(kernel.result));
  }
  const std::string name = std::string(Name(role)) + (fused ? " with an epilogue" : "");
  if (operands.empty()) return "no kernel is of " + name;
  if (results.empty()) return "the operands are " + first + ", " + name + " takes " + Listed(operands);
  return "the result is " + result + ", " + name + " of " + first + " gives " + Listed(results);
}

// The reason if no kernel of the role supports the problem, whatever the tile.
Reason CheckProblem(MatmulRole role, const MatmulProblem& p, const Dtypes& dtypes, bool fused) {
  const std::vector<MatmulKernel>& kernels = MatmulKernels();
  const MatmulRole computed = KernelRole(role, dtypes.first);
  const auto kernel =
      std::find_if(kernels.begin(), kernels.end(), [&](const MatmulKernel& k) { return Computes(k, computed, dtypes, fused); });
  if (kernel == kernels.end()) return WrongDtypes(role, dtypes, fused);
  if (std::min({p.B, p.M, p.N, p.K}) == 0) return {};
  if (Reason reason = CheckSizes({p.B, p.M, p.N, p.K})) return reason;
  const bool nt = role == MatmulRole::kNT;
  const int64_t bytes = Bytes(kernel->operands);
  if (kernel->operands == Dtype::kF32) {
    // Of TN both operands are copied before, and padded.
    const int64_t depth = nt ? p.N : role == MatmulRole::kNN ? p.K : 0;
    if (Reason reason = CheckRow("each operand", nt ? 'N' : 'K', depth, bytes)) return reason;
  } else {
    if (Reason reason = CheckRow("the left operand", nt ? 'N' : 'K', nt ? p.N : p.K, bytes)) return reason;
    if (Reason reason = CheckRow("the right operand", 'N', p.N, bytes)) return reason;
  }
  if (Reason reason = CheckRow("the result", nt ? 'K' : 'N', nt ? p.K : p.N, Bytes(kernel->result))) return reason;
  if (std::max({Product({p.B, p.M, p.K}), Product({p.B, p.K, p.N}), Product({p.B, p.M, p.N})}) > kMostElements) {
    return "an array of " + Text(p) + " has 2^38 elements or more, want fewer";
  }
  return {};
}

}  // namespace

const std::vector<MatmulKernel>& MatmulKernels() {
  static const auto* const kernels =
      new std::vector<MatmulKernel>(Joined({MatmulNN(), MatmulNT(), MatmulTN(), MatmulNTE4M3(), MatmulNTTF32(), MatmulNNFused()}));
  return *kernels;
}

Gemm GemmOf(MatmulRole role, const MatmulProblem& p, int64_t splits, const void* first, const void* second, void* out) {
  // A part of the contracted axis is a batch element: its distance from the next is its depth times the stride of that axis.
  Gemm g = {};
  g.l = p.B * splits;
  g.d = out;
  const bool split = splits > 1;
  switch (role) {
    case MatmulRole::kNN:  // c[M,N] = a[M,K] b[K,N]
      g.m = p.M, g.n = p.N, g.k = p.K / splits;
      g.a = first, g.a_leading = p.K, g.a_batch = split ? g.k : p.M * p.K;
      g.b = second, g.b_leading = p.N, g.b_batch = split ? g.k * p.N : p.K * p.N;
      break;
    case MatmulRole::kNT:  // a[M,K] = c[M,N] bᵀ[N,K], from (b, c)
      g.m = p.M, g.n = p.K, g.k = p.N / splits;
      g.a = second, g.a_leading = p.N, g.a_batch = split ? g.k : p.M * p.N;
      g.b = first, g.b_leading = p.N, g.b_batch = split ? g.k : p.K * p.N;
      break;
    case MatmulRole::kTN:  // b[K,N] = aᵀ[K,M] c[M,N]
      g.m = p.K, g.n = p.N, g.k = p.M / splits;
      g.a = first, g.a_leading = p.K, g.a_batch = split ? g.k * p.K : p.M * p.K;
      g.b = second, g.b_leading = p.N, g.b_batch = split ? g.k * p.N : p.M * p.N;
      break;
  }
  return g;
}

int BandOf(int64_t rows, int64_t columns, int64_t cluster_m, int64_t batch, int64_t multiprocessors) {
  const auto up = [](int64_t size, int64_t to) { return (size + to - 1) / to * to; };
  const auto rounds = [&](int64_t band) {
    return up(up(rows, band * cluster_m) * up(columns, band) * batch, multiprocessors) / multiprocessors;
  };
  for (int band : {8, 4, 2}) {
    if (rounds(1) > 1 && 8 * rounds(band) <= 9 * rounds(1)) return band;
  }
  return 1;
}

Reason MatmulRefuses(MatmulRole role, bool fused, const MatmulProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("matmul", arch)) return reason;
  if (Reason reason = CheckProblem(role, p, dtypes, fused)) return reason;
  if (p.B == 0 || p.M == 0 || p.N == 0 || p.K == 0) return {};
  const Gemm gemm = GemmOf(role, p, 1, nullptr, nullptr, nullptr);
  for (const MatmulKernel& kernel : MatmulKernels()) {
    if (Computes(kernel, KernelRole(role, dtypes.first), dtypes, fused) && FewTiles(gemm, kernel.config, Product({p.B, kMostSplits})))
      return {};
  }
  return ManyTiles(p);
}

Status LaunchMatmul(MatmulRole role, const MatmulProblem& problem, const MatmulConfig& config, const ProductArrays& arrays,
                    const Epilogue* epilogue, LaunchStream stream) {
  const auto& [operands, result, first, second, out] = arrays;
  const bool fused = epilogue != nullptr;
  for (int64_t size : {problem.B, problem.M, problem.N, problem.K, config.splits}) {
    if (size < 1)
      return Invalid("matmul: sizes and splits are " + Text(problem) + " splits=" + std::to_string(config.splits) + ", want 1 or more");
  }
  if (const Reason reason = CheckProblem(role, problem, {ShortName(operands), ShortName(operands), ShortName(result)}, fused)) {
    return Invalid("matmul: " + *reason);
  }
  if (config.splits > 1 && problem.B > 1)
    return Invalid("matmul: splits is " + std::to_string(config.splits) + " and B is " + std::to_string(problem.B) +
                   ", want one of them to be 1");
  if (config.splits > 1 && fused) return Invalid("matmul: splits is " + std::to_string(config.splits) + " with an epilogue, want 1");
  if (config.splits > 1 && result != Dtype::kF32)
    return Invalid(std::string("matmul: partial results are ") + Name(result) + ", want float32");

  const int64_t depth = role == MatmulRole::kNN ? problem.K : role == MatmulRole::kNT ? problem.N : problem.M;
  if (depth % config.splits != 0)
    return Invalid("matmul: the contracted axis has " + std::to_string(depth) +
                   " elements, want a multiple of splits=" + std::to_string(config.splits));
  const MatmulKernel* kernel = Find(MatmulKernels(), config, [&](const MatmulKernel& k) {
    return k.role == role && k.operands == arrays.operands && k.result == arrays.result && k.fused == fused;
  });
  if (kernel == nullptr) {
    return Invalid("matmul: no kernel with " + Text(config) + " takes " + Name(operands) + " operands and gives " + Name(result) +
                   " in this role");
  }
  Gemm gemm = GemmOf(role, problem, config.splits, first, second, out);
  if (fused) gemm.epilogue = *epilogue;
  if (!FewTiles(gemm, config, gemm.l)) return Invalid("matmul: " + ManyTiles(problem));
  for (int64_t part : {gemm.a_batch, gemm.b_batch}) {
    if (config.splits > 1 && part * Bytes(operands) % 16 != 0)
      return Invalid("matmul: a part of an operand has " + std::to_string(part * Bytes(operands)) + " bytes, TMA wants a multiple of 16");
  }
  const Epilogue& added = gemm.epilogue;
  if (Reason reason = CheckAligned({first, second, out, added.bias, added.residual, added.saved})) return Invalid("matmul: " + *reason);
  return kernel->launch(gemm, stream);
}

}  // namespace jaxext
