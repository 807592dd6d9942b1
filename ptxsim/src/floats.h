// The small floating-point formats, by way of double: each of their values is a double, and rounding once to nearest even is exact.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ptx {

struct Format {
  int exponent, mantissa;  // bits
  bool infinity;           // e4m3 has none: its largest exponent is a number's, but for all ones, NaN
};
constexpr Format kF16Format{5, 10, true}, kBF16Format{8, 7, true}, kE4M3Format{4, 3, false}, kE5M2Format{5, 2, true},
    kTF32Format{8, 10, true}, kF32Format{8, 23, true};

constexpr int Bias(Format f) { return (1 << (f.exponent - 1)) - 1; }
constexpr uint32_t NaN(Format f) { return (1u << (f.exponent + f.mantissa)) - 1; }  // as the hardware makes it
constexpr uint32_t Infinity(Format f) { return ((1u << f.exponent) - 1) << f.mantissa; }
constexpr uint32_t Largest(Format f) { return f.infinity ? Infinity(f) - 1 : NaN(f) - 1; }

inline double Decode(uint32_t bits, Format f) {
  const uint32_t fraction = bits & ((1u << f.mantissa) - 1), exponent = bits >> f.mantissa & ((1u << f.exponent) - 1);
  const bool negative = bits >> (f.exponent + f.mantissa) & 1;
  double value;
  if (exponent == (1u << f.exponent) - 1 && f.infinity)
    value = fraction ? std::nan("") : std::numeric_limits<double>::infinity();
  else if (!f.infinity && (bits & NaN(f)) == NaN(f))
    value = std::nan("");
  else if (exponent == 0)
    value = std::ldexp(fraction, 1 - Bias(f) - f.mantissa);
  else
    value = std::ldexp(fraction | 1u << f.mantissa, static_cast<int>(exponent) - Bias(f) - f.mantissa);
  return negative ? -value : value;
}

enum class Rounding { kNearestEven, kZero, kNearestAway, kDown, kUp };

// The processor rounds so while this lives.  What it computes must be read from memory and written to it meanwhile.
class RoundingMode {
 public:
  explicit RoundingMode(Rounding way) {
    std::fesetround(way == Rounding::kZero   ? FE_TOWARDZERO
                    : way == Rounding::kDown ? FE_DOWNWARD
                    : way == Rounding::kUp   ? FE_UPWARD
                                             : FE_TONEAREST);
  }
  ~RoundingMode() { std::fesetround(FE_TONEAREST); }
  RoundingMode(const RoundingMode&) = delete;
  RoundingMode& operator=(const RoundingMode&) = delete;
};

// saturate: what is too large becomes the largest number, not infinity.
inline uint32_t Encode(double value, Format f, Rounding rounding = Rounding::kNearestEven, bool saturate = false) {
  if (std::isnan(value)) return NaN(f);
  const uint32_t sign = std::signbit(value) ? 1u << (f.exponent + f.mantissa) : 0;
  const double size = std::fabs(value);
  const uint32_t beyond = saturate ? Largest(f) : f.infinity ? Infinity(f) : NaN(f);
  if (std::isinf(size)) return sign | beyond;
  if (size == 0) return sign;
  int exponent = std::ilogb(size);
  if (exponent < 1 - Bias(f)) exponent = 1 - Bias(f);
  const double scaled = std::ldexp(size, f.mantissa - exponent);  // its integer part is the mantissa
  double whole = std::floor(scaled);
  const double rest = scaled - whole;
  const bool up = rounding == Rounding::kNearestEven   ? rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) == 1)
                  : rounding == Rounding::kNearestAway ? rest >= 0.5
                  : rounding == Rounding::kUp          ? rest > 0 && !sign
                  : rounding == Rounding::kDown        ? rest > 0 && sign
                                                       : false;
  whole += up;
  // A carry into the exponent comes out right, since the mantissa's lowest bit follows the exponent's.
  const uint64_t bits = static_cast<uint64_t>(whole) + (static_cast<uint64_t>(exponent + Bias(f) - 1) << f.mantissa);
  const bool never_beyond = rounding == Rounding::kZero || rounding == (sign ? Rounding::kUp : Rounding::kDown);
  if (bits > Largest(f)) return sign | (never_beyond ? Largest(f) : beyond);
  return sign | static_cast<uint32_t>(bits);
}

// .ftz: of a number of the smallest exponent only its sign.
template <class T>
T Flush(T value, bool flush) {
  return flush && std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(T{0}, value) : value;
}

// relu, which NaN passes by
inline double Rectified(double value, bool relu) { return relu && value <= 0 ? 0 : value; }

inline float FloatOf(uint64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  float value;
  std::memcpy(&value, &low, 4);
  return value;
}
inline uint64_t BitsOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

}  // namespace ptx
