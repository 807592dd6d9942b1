// What is asked of a kernel, by the same names as in Python: `jaxext.kernels.matmul.problem.MatmulProblem` and
// `jaxext.kernels.geometry.ConvProblem`.
//
// Arrays are dense and row-major with one axis per label:  a[B,M,K], b[B,K,N], c[B,M,N];  x[B,N,D,H,W,G,C], w[B,G,K,T,R,S,C],
// y[B,N,O,P,Q,G,K], where missing spatial axes, the leading ones, have size 1.
#pragma once

#include <cstdint>

#include "common/schema.h"

namespace jaxext {

enum class Dtype { kF32, kBF16, kF16, kE4M3, kE5M2, kS8, kS32 };

constexpr int64_t Bytes(Dtype dtype) {
  return dtype == Dtype::kF32 || dtype == Dtype::kS32 ? 4 : dtype == Dtype::kBF16 || dtype == Dtype::kF16 ? 2 : 1;
}

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
    case Dtype::kS8:
      return "int8";
    case Dtype::kS32:
      return "int32";
  }
  return "?";
}

enum class MatmulRole { kNN, kNT, kTN };         // c open, a open, b open
enum class ConvRole { kFprop, kDgrad, kWgrad };  // y open, x open, w open

constexpr const char* Name(MatmulRole role) { return role == MatmulRole::kNN ? "nn" : role == MatmulRole::kNT ? "nt" : "tn"; }
constexpr const char* Name(ConvRole role) { return role == ConvRole::kFprop ? "fprop" : role == ConvRole::kDgrad ? "dgrad" : "wgrad"; }

struct MatmulProblem {
  JAXEXT_INTEGERS(B, M, N, K)
};

struct ConvProblem {
  JAXEXT_INTEGERS(B, N, G, C, K)
  JAXEXT_TRIPLES(input, filter, output, stride, low, input_dilation, filter_dilation)
};

}  // namespace jaxext
