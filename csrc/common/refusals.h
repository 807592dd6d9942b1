// What the reasons for refusing a problem are made of.  Each family has a function `...Refuses(problem, dtypes, arch)`: Python calls it
// through module.cc when a program is lowered, and the launcher before every launch.  There is no other list of limits.  `arch` is the
// compute capability times 10; a launch omits it and asks the device.  Numbers may be any of 64 bits.  Plain C++.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "common/problem.h"

namespace jaxext {

using Reason = std::optional<std::string>;  // for refusing

// The dtypes of the operands, in the order of slots, of the result, and of a further operand, such as a bias ("" if there is none), by the
// short names of `jaxext.backends.fields.DTYPES`.  Python has more dtypes than any kernel here.
struct Dtypes {
  std::string first, second, result, further = "";
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
    case Dtype::kS8:
      return "i8";
    case Dtype::kS32:
      return "i32";
  }
  return "?";
}

// Without a second argument: where TMA can read.
inline bool Aligned(const void* pointer, int64_t bytes = 16) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

inline Reason CheckAligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (!Aligned(array)) return "an operand or a result does not begin at a multiple of 16 bytes";
  }
  return {};
}

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

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t Sum(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kMostInteger : sum;
}

// Limits of the kernels that CUTLASS and TMA serve.
constexpr int64_t kMostOfAxis = (int64_t{1} << 31) - (int64_t{1} << 16);  // and of tiles, which CUTLASS rounds up, with 32 bits
constexpr int64_t kMostElements = (int64_t{1} << 38) - 1;                 // of an array; TMA's strides have 40 bits, in bytes
constexpr int64_t kMostSplits = 32;                                       // parts of a sum

// The reason if an axis is negative, or has more elements than 32 bits can number.
inline Reason CheckSizes(std::initializer_list<int64_t> sizes) {
  for (int64_t size : sizes) {
    if (size < 0) return "an axis has " + std::to_string(size) + " elements, want 0 or more";
    if (size > kMostOfAxis) return "an axis has " + std::to_string(size) + " elements, want " + std::to_string(kMostOfAxis) + " at most";
  }
  return {};
}

// The reason if TMA cannot read rows of so many elements along an axis.
inline Reason CheckRow(const std::string& array, char axis, int64_t size, int64_t bytes) {
  const int64_t unit = 16 / bytes;
  if (size % unit == 0) return {};
  return "a row of " + array + " has " + std::to_string(size * bytes) + " bytes, TMA wants a multiple of 16: pad " + axis + " to " +
         std::to_string(CeilDiv(size, unit) * unit);
}

inline Reason CheckSplits(int64_t splits) {
  if (splits >= 1 && splits <= kMostSplits) return {};
  return "splits is " + std::to_string(splits) + ", want 1 to " + std::to_string(kMostSplits);
}

inline Reason CheckArch(const char* kernels, std::optional<int> arch) {
  if (!arch || *arch == 90) return {};
  return "compute capability is " + CapabilityText(*arch) + ", the " + kernels + " kernels want 9.0";
}

}  // namespace jaxext
