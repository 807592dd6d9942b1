// From a role to a plain product, and from a configuration to its kernel.
#include "matmul.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace jaxext {
namespace {

std::string Text(const MatmulProblem& p) {
  return "B=" + std::to_string(p.B) + " M=" + std::to_string(p.M) + " N=" + std::to_string(p.N) + " K=" + std::to_string(p.K);
}

std::string Text(const MatmulConfig& c) {
  return std::to_string(c.tile_m) + "x" + std::to_string(c.tile_n) + "x" + std::to_string(c.tile_k) + " in clusters of " +
         std::to_string(c.cluster_m) + (c.pingpong ? ", ping-pong" : ", cooperative");
}

const MatmulKernel* Find(MatmulRole role, const MatmulConfig& config, Dtype operands, Dtype result) {
  for (const MatmulKernel& kernel : MatmulKernels()) {
    const MatmulConfig& c = kernel.config;
    if (kernel.role == role && kernel.operands == operands && kernel.result == result && c.tile_m == config.tile_m &&
        c.tile_n == config.tile_n && c.tile_k == config.tile_k && c.cluster_m == config.cluster_m && c.pingpong == config.pingpong) {
      return &kernel;
    }
  }
  return nullptr;
}

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

const std::vector<MatmulKernel>& MatmulKernels() {
  static const std::vector<MatmulKernel>* const kernels = [] {
    auto* all = new std::vector<MatmulKernel>;
    for (const auto& part : {MatmulNNLarge(), MatmulNNSkinny(), MatmulNNPingpong(), MatmulNTLarge(), MatmulNTSkinny(), MatmulNTPingpong(),
                             MatmulTNLarge(), MatmulTNSkinny(), MatmulTNPingpong(), MatmulNTE4M3()}) {
      all->insert(all->end(), part.begin(), part.end());
    }
    return all;
  }();
  return *kernels;
}

Gemm GemmOf(MatmulRole role, const MatmulProblem& p, int64_t splits, const void* first, const void* second, void* out) {
  // A part of the contracted axis is a batch of its own: as long a way from the next as it is deep, in units of that axis' stride.
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

Status Matmul(MatmulRole role, const MatmulProblem& problem, const MatmulConfig& config, Dtype operands, Dtype result, const void* first,
              const void* second, void* out, cudaStream_t stream) {
  constexpr int64_t kMost = (int64_t{1} << 31) - (int64_t{1} << 16);  // CUTLASS rounds up, with 32 bits
  constexpr int64_t kMostElements = (int64_t{1} << 38) - 1;           // of an array; TMA's strides have 40 bits, in bytes
  for (int64_t size : {problem.B, problem.M, problem.N, problem.K, config.splits}) {
    if (size < 1 || size > kMost)
      return Invalid("matmul: sizes and splits are " + Text(problem) + " splits=" + std::to_string(config.splits) +
                     ", want 1 to 2^31 - 2^16");
  }
  if (config.splits > 1 && problem.B > 1)
    return Invalid("matmul: splits is " + std::to_string(config.splits) + " and B is " + std::to_string(problem.B) +
                   ", want one of them to be 1");
  if (config.splits > 1 && result != Dtype::kF32)
    return Invalid(std::string("matmul: partial results are ") + Name(result) + ", want float32");

  const MatmulKernel* kernel = Find(role, config, operands, result);
  if (kernel == nullptr) {
    return Invalid("matmul: no kernel of tiles " + Text(config) + " takes " + Name(operands) + " operands and gives " + Name(result) +
                   " in this role");
  }
  const int64_t depth = role == MatmulRole::kNN ? problem.K : role == MatmulRole::kNT ? problem.N : problem.M;
  if (depth % config.splits != 0)
    return Invalid("matmul: the contracted axis has " + std::to_string(depth) +
                   " elements, want a multiple of splits=" + std::to_string(config.splits));
  const Gemm gemm = GemmOf(role, problem, config.splits, first, second, out);
  if (std::max({gemm.m * gemm.k, gemm.k * gemm.n, gemm.m * gemm.n}) > kMostElements / gemm.l) {
    return Invalid("matmul: an array of " + Text(problem) + " has 2^38 elements or more, want fewer");
  }
  // CUTLASS numbers tiles with 32 bits, of a grid that it rounds up to pairs of blocks and bands of eight.
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile + 15; };
  if (tiles(gemm.m, config.tile_m) > kMost / gemm.l / tiles(gemm.n, config.tile_n)) {
    return Invalid("matmul: " + Text(problem) + " make 2^31 tiles or more, want fewer");
  }
  // TMA wants every row, and every batch, to begin at a multiple of 16 bytes.
  const struct {
    const char* what;
    int64_t bytes;
  } strides[] = {
      {"left operand", gemm.a_leading * Bytes(operands)},
      {"left operand's batch", gemm.l > 1 ? gemm.a_batch * Bytes(operands) : 0},
      {"right operand", gemm.b_leading * Bytes(operands)},
      {"right operand's batch", gemm.l > 1 ? gemm.b_batch * Bytes(operands) : 0},
      {"result", gemm.n * Bytes(result)},
  };
  for (const auto& stride : strides) {
    if (stride.bytes % 16 != 0)
      return Invalid(std::string("matmul: a row of the ") + stride.what + " has " + std::to_string(stride.bytes) +
                     " bytes, want a multiple of 16");
  }
  if (!Aligned(first) || !Aligned(second) || !Aligned(out))
    return Invalid("matmul: an operand or the result does not begin at a multiple of 16 bytes");
  return kernel->launch(gemm, stream);
}

}  // namespace jaxext
