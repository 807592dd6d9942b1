// The problems that the kernels refuse, with reasons.  Python calls these functions through module.cc when a program is lowered, and the
// launchers call them before every launch.  There is no other list of limits.  Plain C++: it must not know CUDA, XLA or Python.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "causal/causal.h"
#include "common/problem.h"
#include "weight_only/weight_only.h"

namespace jaxext {

using Reason = std::optional<std::string>;  // for refusing

// The dtypes of the operands, in the order of slots, and of the result, by the short names of `jaxext.backends.kernel.DTYPES`.  Python has
// more dtypes than any kernel here.
struct Dtypes {
  std::string first, second, result;
};

constexpr const char* ShortName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return "fp32";
    case Dtype::kBF16:
      return "bf16";
    case Dtype::kF16:
      return "fp16";
    case Dtype::kE4M3:
      return "fp8e4nv";
    case Dtype::kE5M2:
      return "fp8e5";
  }
  return "?";
}

// `arch` is the compute capability times 10.  A launch omits it and asks the device.
//
// `fused`: with an epilogue (csrc/common/epilogue.h).
//
// No kernel is launched for a problem with a size of 0, so products and dense convolutions with such a size are accepted, whatever the
// other sizes.  Arguments may be any numbers of 64 bits.
Reason MatmulRefuses(MatmulRole role, const MatmulProblem& problem, const Dtypes& dtypes, bool fused, std::optional<int> arch = {});
Reason RaggedRefuses(MatmulRole role, const RaggedProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});
// In pieces of bfloat16, however many.
Reason PiecesRefuses(MatmulRole role, const MatmulProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});
// Of a, b and d.
Reason ScaledRefuses(const ScaledProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});
Reason ConvRefuses(ConvRole role, int rank, const ConvProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});
Reason DepthwiseRefuses(ConvRole role, int rank, const ConvProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});
// Of x, weight and y; the bias's dtype is "" where there is none.
Reason CausalRefuses(CausalRole role, const CausalProblem& problem, const Dtypes& dtypes, const std::string& bias,
                     std::optional<int> arch = {});
// Of x, w and the result.
Reason WeightOnlyRefuses(const WeightOnlyProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// For the functions above.

// Where TMA can read.
inline bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// 90 -> "9.0"
inline std::string CapabilityText(int arch) { return std::to_string(arch / 10) + "." + std::to_string(arch % 10); }

constexpr int64_t kMostInteger = std::numeric_limits<int64_t>::max();

// The product of sizes that are not negative, or kMostInteger if it is larger.
inline int64_t Product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  bool more = false;
  for (int64_t size : sizes) {
    if (size == 0) return 0;
    more = __builtin_mul_overflow(product, size, &product) || more;
  }
  return more ? kMostInteger : product;
}

inline int64_t Sum(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kMostInteger : sum;
}

}  // namespace jaxext
