// What is asked of a kernel, by the same names as in Python: `jaxext.kernels._gemm.MatmulProblem` and
// `jaxext.kernels._geometry.ConvProblem`.
//
// Arrays are dense and row-major with one axis per label:  a[B,M,K], b[B,K,N], c[B,M,N];  x[B,N,D,H,W,G,C], w[B,G,K,T,R,S,C],
// y[B,N,O,P,Q,G,K], where missing spatial axes, the leading ones, have size 1.  It must not know CUDA, XLA or Python.
#pragma once

#include <array>
#include <cstdint>

namespace jaxext {

enum class Dtype { kF32, kBF16, kF16, kE4M3, kE5M2 };

constexpr int64_t Bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : dtype == Dtype::kE4M3 || dtype == Dtype::kE5M2 ? 1 : 2; }

constexpr const char* Name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return "float32";
    case Dtype::kBF16:
      return "bfloat16";
    case Dtype::kF16:
      return "float16";
    case Dtype::kE4M3:
      return "float8_e4m3fn";
    case Dtype::kE5M2:
      return "float8_e5m2";
  }
  return "?";
}

enum class MatmulRole { kNN, kNT, kTN };         // c open, a open, b open
enum class ConvRole { kFprop, kDgrad, kWgrad };  // y open, x open, w open

struct MatmulProblem {
  int64_t B, M, N, K;
};

// x[B,P,R,M,K], w[B,G,K,N], y[B,P,R,M,N]: rows in G groups, and a matrix for each.
struct RaggedProblem {
  int64_t B, P, R, M, N, K, G;
};

// d[m,n] = Σ_k a[m,k] b[n,k], for each of B.  A scale has an element for each block: of rows in I blocks, columns in J, what is contracted
// in S.
struct ScaledProblem {
  int64_t B, M, N, K, I, J, S;
};

struct ConvProblem {
  int64_t B, N, G, C, K;
  std::array<int64_t, 3> input, filter, output, stride, low, input_dilation, filter_dilation;
};

}  // namespace jaxext
