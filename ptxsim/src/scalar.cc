// Arithmetic, logic and comparisons: each lane for itself.
#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "floats.h"
#include "machine.h"

namespace ptx {
namespace {

// f(a, b, c) of the bits of up to three operands; those that are not there are the last one.
template <class F>
void Each(Warp& w, const Instruction& i, Mask mask, F f) {
  const auto& o = i.operands;
  const auto row = [&](size_t n) -> const Row& { return w.Read(o[std::min(n, o.size() - 1)]); };
  const Row &a = row(1), &b = row(2), &c = row(3);
  Row& d = w.Write(o[0]);
  ForLanes(mask, [&](int l) { d[l] = f(a[l], b[l], c[l]); });
}
// The same with values of a type.
template <class T, auto kFunction>
void Map(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [](uint64_t a, uint64_t b, uint64_t c) {
    if constexpr (std::is_invocable_v<decltype(kFunction), T, T, T>)
      return Bits(kFunction(Get<T>(a), Get<T>(b), Get<T>(c)));
    else if constexpr (std::is_invocable_v<decltype(kFunction), T, T>)
      return Bits(kFunction(Get<T>(a), Get<T>(b)));
    else
      return Bits(kFunction(Get<T>(a)));
  });
}
// Of both 16-bit halves of 32 bits.
template <class T, auto kFunction>
void Halves(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [](uint64_t a, uint64_t b, uint64_t) {
    return Bits(kFunction(Get<T>(a), Get<T>(b))) | Bits(kFunction(Get<T>(a >> 16), Get<T>(b >> 16))) << 16;
  });
}

// What `make` returns for the C++ type of a type of integers; nullptr for other types.
template <class F>
Handler ByType(Type type, F make) {
  return type == Type::kS16                         ? make(int16_t{})
         : type == Type::kU16 || type == Type::kB16 ? make(uint16_t{})
         : type == Type::kS32                       ? make(int32_t{})
         : type == Type::kU32 || type == Type::kB32 ? make(uint32_t{})
         : type == Type::kS64                       ? make(int64_t{})
         : type == Type::kU64 || type == Type::kB64 ? make(uint64_t{})
                                                    : nullptr;
}
#define BY_TYPE(...)                           \
  ByType(type, [](auto zero) -> Handler {      \
    using T [[maybe_unused]] = decltype(zero); \
    return __VA_ARGS__;                        \
  })

template <class T>
using Unsigned = std::make_unsigned_t<T>;
// Wrapping arithmetic, without C++'s promotion of small types and undefined overflow.
template <class T>
constexpr auto Add = [](T a, T b) { return static_cast<T>(Unsigned<T>(a) + Unsigned<T>(b)); };
template <class T>
constexpr auto Sub = [](T a, T b) { return static_cast<T>(Unsigned<T>(a) - Unsigned<T>(b)); };
template <class T>
constexpr auto MulLow = [](T a, T b) { return static_cast<T>(static_cast<uint64_t>(Unsigned<T>(a)) * Unsigned<T>(b)); };
template <class T>
constexpr auto MulHigh = [](T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
};
template <class T>
constexpr auto Div = [](T a, T b) -> T {
  return b == 0 ? static_cast<T>(-1) : b == static_cast<T>(-1) && std::is_signed_v<T> ? Sub<T>(0, a) : a / b;
};
template <class T>
constexpr auto Rem = [](T a, T b) -> T {
  return b == 0 ? a : b == static_cast<T>(-1) && std::is_signed_v<T> ? 0 : a % b;
};
template <class T>
constexpr auto Min = [](T a, T b) { return std::min(a, b); };
template <class T>
constexpr auto Max = [](T a, T b) { return std::max(a, b); };
template <class T>
constexpr auto RectifiedMin = [](T a, T b) { return std::max(std::min(a, b), T{0}); };
template <class T>
constexpr auto RectifiedMax = [](T a, T b) { return std::max({a, b, T{0}}); };
template <class T>
constexpr auto MadLow = [](T a, T b, T c) { return Add<T>(MulLow<T>(a, b), c); };
template <class T>
constexpr auto MadHigh = [](T a, T b, T c) { return Add<T>(MulHigh<T>(a, b), c); };
// Of the low 24 bits of a and b: the low or, of 48, the high 32.
template <class T, int kShift>
constexpr auto Mul24 = [](T a, T b) {
  const auto low = [](T x) { return static_cast<int64_t>(static_cast<T>(Unsigned<T>(x) << 8) >> 8); };
  return static_cast<T>(low(a) * low(b) >> kShift);
};
template <class T, int kShift>
constexpr auto Mad24 = [](T a, T b, T c) { return Add<T>(Mul24<T, kShift>(a, b), c); };
template <class T>
constexpr auto SumOfDifference = [](T a, T b, T c) { return Add<T>(c, a < b ? Sub<T>(b, a) : Sub<T>(a, b)); };
template <class T>
constexpr auto Negate = [](T a) { return Sub<T>(0, a); };
template <class T>
constexpr auto Absolute = [](T a) { return a < 0 ? Sub<T>(0, a) : a; };
template <class T>
constexpr auto PopCount = [](T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); };
template <class T>
constexpr auto LeadingZeros = [](T a) { return static_cast<uint32_t>(std::countl_zero(Unsigned<T>(a))); };
template <class T>
constexpr auto Reversed = [](T a) {
  T reversed = 0;
  for (size_t n = 0; n < 8 * sizeof(T); ++n) reversed = reversed << 1 | (a >> n & 1);
  return reversed;
};
// The highest bit that is not the sign, or how far a shift takes it to the top.
template <class T, bool kShift>
constexpr auto HighestBit = [](T a) {
  const int zeros = std::countl_zero(Unsigned<T>(a < 0 ? ~a : a)), last = 8 * sizeof(T) - 1;
  return static_cast<uint32_t>(zeros > last ? -1 : kShift ? zeros : last - zeros);
};

// Of floats: NaN only if both are, and -0 is less than 0.
template <class T>
T Least(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : std::signbit(a) == std::signbit(b) ? std::min(a, b) : std::signbit(a) ? a : b;
}
template <class T>
T Greatest(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : std::signbit(a) == std::signbit(b) ? std::max(a, b) : std::signbit(a) ? b : a;
}

// a * b + c, which the next rounding, to a smaller format, makes the nearest: odd in its last bit if it is not exact.
double FmaToOdd(double a, double b, double c) {
  const double product = a * b, sum = product + c, added = sum - product, lost = (product - (sum - added)) + (c - added);
  if (!std::isfinite(sum) || lost == 0 || (Bits(sum) & 1)) return sum;
  return std::nextafter(sum, lost > 0 ? INFINITY : -INFINITY);
}

template <class T>
T Fused(T a, T b, T c) {
  return std::fma(a, b, c);
}

enum Arithmetic { kAdd, kSub, kMul, kFma, kMin, kMax, kNeg, kAbs, kDiv, kSqrt, kRcp };
template <class T, auto kFused = Fused<T>>
T Calculate(int operation, T a, T b, T c) {
  return operation == kAdd   ? a + b
         : operation == kSub ? a - b
         : operation == kMul ? a * b
         : operation == kFma ? kFused(a, b, c)
         : operation == kMin ? Least(a, b)
         : operation == kMax ? Greatest(a, b)
         : operation == kNeg ? -a
         : operation == kAbs ? std::fabs(a)
         : operation == kDiv ? a / b
         : operation == kRcp ? 1 / a
                             : std::sqrt(a);
}
// f16, bf16 and pairs of them, by way of double: exact but for the last rounding.  flag: relu behind it.
void SmallFloats(Warp& w, const Instruction& i, Mask mask) {
  const bool pair = i.type == Type::kF16x2 || i.type == Type::kBF16x2;
  const Format format = FormatOf(i.type);
  Each(w, i, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
    uint64_t bits = 0;
    for (int shift = 0; shift <= 16 * pair; shift += 16) {
      const auto value = [&](uint64_t from) { return Decode(from >> shift & 0xffff, format); };
      const double result = Calculate<double, FmaToOdd>(i.choice, value(a), value(b), value(c));
      bits |= static_cast<uint64_t>(Encode(Rectified(result, i.flag), format)) << shift;
    }
    return bits;
  });
}

// f32 and f64; flag: .ftz; other: .sat
template <class T>
void Floats(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
    const auto value = [&](uint64_t from) { return Flush(Get<T>(from), i.flag); };
    const T result = Flush(Calculate(i.choice, value(a), value(b), value(c)), i.flag);
    return Bits(!i.other ? result : result > 0 ? std::min(result, T{1}) : T{0});
  });
}
// .rz, .rm and .rp; count: the rounding
template <class T>
void Directed(Warp& w, const Instruction& i, Mask mask) {
  const RoundingMode mode(static_cast<Rounding>(i.count));
  Floats<T>(w, i, mask);
}

// The size of b with the sign of a.
template <class T>
constexpr auto CopySign = [](T a, T b) { return std::copysign(b, a); };

// Approximations of f64: with .ftz (flag) of the upper halves of a number's bits alone.
template <auto kFunction>
void Approximate(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t kept = i.flag ? ~0ull << 32 : ~0ull;
  Each(w, i, mask, [&](uint64_t a, uint64_t, uint64_t) {
    const double x = Flush(Get<double>(a & kept), i.flag);
    return Bits(Flush(kFunction(x), i.flag)) & (std::isnan(x) ? ~0ull : kept);
  });
}

// f32 of one or two operands, in double.
template <auto kFunction>
void Function(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [&](uint64_t a, uint64_t b, uint64_t) {
    const double x = Flush(FloatOf(a), i.flag), y = Flush(FloatOf(b), i.flag);
    if constexpr (std::is_invocable_v<decltype(kFunction), double, double>)
      return BitsOfFloat(Flush(static_cast<float>(kFunction(x, y)), i.flag));
    else
      return BitsOfFloat(Flush(static_cast<float>(kFunction(x)), i.flag));
  });
}

// The product is twice as wide as the operands.
template <class T>
void MulWide(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t added = i.operands.size() == 4 ? ~0ull : 0, width = sizeof(T) == 2 ? 0xffffffff : ~0ull;
  const auto extended = [](uint64_t from) { return static_cast<uint64_t>(static_cast<int64_t>(Get<T>(from))); };
  Each(w, i, mask, [&](uint64_t a, uint64_t b, uint64_t c) { return (extended(a) * extended(b) + (c & added)) & width; });
}

void Logic(Warp& w, const Instruction& i, Mask mask) {
  const bool predicates = i.type == Type::kPred;  // whose operands may be negated
  const Mask pa = predicates ? w.Predicate(i.operands[1]) : 0, pb = predicates ? w.Predicate(i.operands[2]) : 0;
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  const uint64_t width = Ones(BitsOf(i.type));
  ForLanes(mask, [&](int l) {
    const uint64_t x = predicates ? pa >> l & 1 : a[l], y = predicates ? pb >> l & 1 : b[l];
    d[l] = (i.choice == 0 ? x & y : i.choice == 1 ? x | y : x ^ y) & width;
  });
}
void Not(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t width = Ones(BitsOf(i.type));
  Each(w, i, mask, [&](uint64_t a, uint64_t, uint64_t) { return ~a & width; });
}

// Shifts by the type's width or more give zero, or the sign.
template <class T>
void ShiftLeft(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [](uint64_t a, uint64_t b, uint64_t) {
    const auto by = static_cast<uint32_t>(b);
    return by >= 8 * sizeof(T) ? 0 : a << by & Ones(8 * sizeof(T));
  });
}
template <class T>
void ShiftRight(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [](uint64_t a, uint64_t b, uint64_t) {
    const auto by = static_cast<uint32_t>(b);
    const T x = Get<T>(a);
    return Bits(by >= 8 * sizeof(T) ? static_cast<T>(std::is_signed_v<T> && x < 0 ? -1 : 0) : static_cast<T>(x >> by));
  });
}

enum Comparison { kNum = 6, kNan };  // behind eq, ne, lt, le, gt and ge
template <class T>
bool Compare(int comparison, bool unordered, T a, T b) {
  const bool nan = a != a || b != b, results[] = {a == b, a != b, a<b, a <= b, a> b, a >= b};
  return comparison == kNum ? !nan : comparison == kNan ? nan : nan ? unordered : results[comparison];
}
// setp: choice holds the comparison and how it is combined with a predicate (0 none, 1 and, 2 or, 3 xor); flag: NaN counts; other: .ftz
template <class T>
void SetP(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const Row &a = w.Read(o[1]), &b = w.Read(o[2]);
  const int comparison = i.choice & 15, with = i.choice >> 4 & 3;
  const Mask c = with ? w.Predicate(o[3]) : 0;
  const auto value = [&](uint64_t from) -> T {
    if constexpr (std::is_same_v<T, double>)  // f64, f16 and bf16
      return i.type == Type::kF64 ? Get<double>(from) : Decode(from & 0xffff, FormatOf(i.type));
    if constexpr (std::is_same_v<T, float>) return Flush(FloatOf(from), i.other);
    return Get<T>(from);
  };
  Mask first = 0, second = 0;
  ForLanes(mask, [&](int l) {
    const bool holds = Compare(comparison, i.flag, value(a[l]), value(b[l])), p = c >> l & 1;
    const auto combined = [&](bool x) { return with == 0 ? x : with == 1 ? x && p : with == 2 ? x || p : x != p; };
    first |= static_cast<Mask>(combined(holds)) << l, second |= static_cast<Mask>(combined(!holds)) << l;
  });
  WriteOneOrTwo(w, o[0], mask, [&](int l) { return first >> l & 1; }, [&](int l) { return second >> l & 1; });
}

void SelP(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  const Mask p = w.Predicate(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  const uint64_t width = Ones(BitsOf(i.type));
  ForLanes(mask, [&](int l) { d[l] = (p >> l & 1 ? a[l] : b[l]) & width; });
}

// Also packs {a, b} into one register, and unpacks it.
void Move(Warp& w, const Instruction& i, Mask mask) {
  const Operand &to = i.operands[0], &from = i.operands[1];
  const int bits = BitsOf(i.type);
  const uint64_t width = Ones(bits);
  if (from.parts.empty() && to.parts.empty()) {
    const Row& a = w.Read(from);
    Row& d = w.Write(to);
    // Between a fence and its wgmma compilers move values to consecutive registers; the assembler has them there to begin with.
    if (w.fenced && to.slot >= 0) w.touched[to.slot] = w.touched[from.slot];
    ForLanes(mask, [&](int l) { d[l] = (a[l] + from.offset) & width; });
  } else if (to.parts.empty()) {
    Row packed{};
    const int each = bits / static_cast<int>(from.parts.size());
    for (size_t n = 0; n < from.parts.size(); ++n) {
      const Row& a = w.Read(from.parts[n]);
      ForLanes(mask, [&](int l) { packed[l] |= (a[l] & Ones(each)) << each * n; });
    }
    Row& d = w.Write(to);
    ForLanes(mask, [&](int l) { d[l] = packed[l]; });
  } else {
    const Row a = w.Read(from);
    const int each = bits / static_cast<int>(to.parts.size());
    for (size_t n = 0; n < to.parts.size(); ++n) {
      Row& d = w.Write(to.parts[n]);
      ForLanes(mask, [&](int l) { d[l] = a[l] >> each * n & Ones(each); });
    }
  }
}

void Prmt(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [](uint64_t a, uint64_t b, uint64_t c) {
    const uint64_t bytes = b << 32 | (a & 0xffffffff);
    uint64_t result = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t select = c >> 4 * n & 15;
      uint64_t byte = bytes >> 8 * (select & 7) & 0xff;
      if (select & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign
      result |= byte << 8 * n;
    }
    return result;
  });
}

// bfe and bfi, as the ISA writes them.
template <class T>
void ExtractField(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [](uint64_t a, uint64_t b, uint64_t c) {
    constexpr int kLast = 8 * sizeof(T) - 1;
    const int from = b & 0xff, length = c & 0xff;
    const uint64_t sign = std::is_signed_v<T> && length ? a >> std::min(from + length - 1, kLast) & 1 : 0;
    uint64_t field = 0;
    for (int n = 0; n <= kLast; ++n) field |= (n < length && from + n <= kLast ? a >> (from + n) & 1 : sign) << n;
    return field;
  });
}
void InsertField(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const Row &a = w.Read(o[1]), &b = w.Read(o[2]), &c = w.Read(o[3]), &length = w.Read(o[4]);
  Row& d = w.Write(o[0]);
  const uint64_t bits = BitsOf(i.type);
  ForLanes(mask, [&](int l) {
    uint64_t result = b[l];
    const uint64_t from = c[l] & 0xff;
    for (uint64_t n = 0; n < (length[l] & 0xff) && from + n < bits; ++n)
      result = (result & ~(1ull << (from + n))) | (a[l] >> n & 1) << (from + n);
    d[l] = result;
  });
}

// shf: 32 bits out of b:a.  flag: to the left; other: by 32 at most, or else modulo 32
void FunnelShift(Warp& w, const Instruction& i, Mask mask) {
  Each(w, i, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
    const uint64_t both = b << 32 | (a & 0xffffffff), by = i.other ? std::min<uint64_t>(c & 0xffffffff, 32) : c & 31;
    return (i.flag ? both << by >> 32 : both >> by) & 0xffffffff;
  });
}

// dp4a, and dp2a with 16 bits of a.  from: b's type, of 32 bits like a's; count: bits of a's parts; choice: b's first part
void DotProduct(Warp& w, const Instruction& i, Mask mask) {
  const auto part = [](uint64_t from, int n, int bits, Type type) {
    const auto shifted = static_cast<uint32_t>(from) << (32 - bits * (n + 1));
    const int64_t is_signed = static_cast<int32_t>(shifted) >> (32 - bits), is_unsigned = shifted >> (32 - bits);
    return IsSigned(type) ? is_signed : is_unsigned;
  };
  Each(w, i, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
    for (int n = 0; n < 32 / i.count; ++n) c += part(a, n, i.count, i.from) * part(b, n + i.choice, 8, i.type);
    return c & 0xffffffff;
  });
}

void Lop3(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t table = w.Read(i.operands[4])[0];  // a constant
  Each(w, i, mask, [table](uint64_t a, uint64_t b, uint64_t c) {
    uint64_t result = 0;
    for (int n = 0; n < 32; ++n) result |= (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1) << n;
    return result;
  });
}

Handler ArithmeticOf(Instruction& instruction, Modifiers& m, int operation) {
  const Type type = instruction.type;
  instruction.choice = operation;
  const Rounding way = m.Take("rz")   ? Rounding::kZero
                       : m.Take("rm") ? Rounding::kDown
                       : m.Take("rp") ? Rounding::kUp
                                      : Rounding::kNearestEven;
  const bool directed = way != Rounding::kNearestEven;
  instruction.count = static_cast<int>(way);
  if (operation >= kDiv && type == Type::kF32 && !directed) return nullptr;
  if (directed ? type != Type::kF32 && type != Type::kF64 : operation >= kDiv && (type != Type::kF64 || !m.Take("rn"))) return nullptr;
  m.Ignore("rn");
  if (type == Type::kF16 || type == Type::kBF16 || type == Type::kF16x2 || type == Type::kBF16x2) {
    instruction.flag = m.Take("relu");
    m.Ignore("ftz");
    return SmallFloats;
  }
  if (type == Type::kF64) return directed ? Directed<double> : Floats<double>;
  if (type != Type::kF32) return nullptr;
  instruction.flag = m.Take("ftz"), instruction.other = m.Take("sat");
  return directed ? Directed<float> : Floats<float>;
}

int IndexOf(std::string_view name, std::initializer_list<std::string_view> names) {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

Handler Find(Instruction& instruction, Modifiers& m) {
  const Type type = instruction.type;
  const auto is = [&](const char* n) { return instruction.name == n; };
  const int operation = IndexOf(instruction.name, {"add", "sub", "mul", "fma", "min", "max", "neg", "abs", "div", "sqrt", "rcp"});
  if (operation >= 0) {
    if (Handler found = ArithmeticOf(instruction, m, operation)) return found;
  }
  if (is("add") && (type == Type::kS16x2 || type == Type::kU16x2)) return Halves<uint16_t, Add<uint16_t>>;
  if (is("min") && type == Type::kS16x2) return Halves<int16_t, Min<int16_t>>;
  if (is("min") && type == Type::kU16x2) return Halves<uint16_t, Min<uint16_t>>;
  if (is("max") && type == Type::kS16x2) return Halves<int16_t, Max<int16_t>>;
  if (is("max") && type == Type::kU16x2) return Halves<uint16_t, Max<uint16_t>>;
  if (is("add")) return BY_TYPE(Map<T, Add<T>>);
  if (is("sub")) return BY_TYPE(Map<T, Sub<T>>);
  if (type == Type::kS32 && is("min") && m.Take("relu")) return Map<int32_t, RectifiedMin<int32_t>>;
  if (type == Type::kS32 && is("max") && m.Take("relu")) return Map<int32_t, RectifiedMax<int32_t>>;
  if (is("min")) return BY_TYPE(Map<T, Min<T>>);
  if (is("max")) return BY_TYPE(Map<T, Max<T>>);
  if (is("rem")) return BY_TYPE(Map<T, Rem<T>>);
  if (is("neg")) return BY_TYPE(Map<T, Negate<T>>);
  if (is("abs")) return IsSigned(type) ? BY_TYPE(Map<T, Absolute<T>>) : nullptr;
  if (is("copysign") && type == Type::kF32) return Map<float, CopySign<float>>;
  if (is("copysign") && type == Type::kF64) return Map<double, CopySign<double>>;
  if (is("div") && type != Type::kF32 && type != Type::kF64) return BY_TYPE(Map<T, Div<T>>);
  if (is("mul") || is("mad")) {
    const bool mad = is("mad");
    if (m.Take("lo")) return mad ? BY_TYPE(Map<T, MadLow<T>>) : BY_TYPE(Map<T, MulLow<T>>);
    if (m.Take("hi")) return mad ? BY_TYPE(Map<T, MadHigh<T>>) : BY_TYPE(Map<T, MulHigh<T>>);
    if (m.Take("wide")) return BitsOf(type) < 64 ? BY_TYPE(MulWide<T>) : nullptr;
    return mad ? ArithmeticOf(instruction, m, kFma) : nullptr;
  }
  if (const int logic = IndexOf(instruction.name, {"and", "or", "xor"}); logic >= 0) return instruction.choice = logic, Logic;
  if (is("not")) return Not;
  if (is("shl")) return BY_TYPE(ShiftLeft<T>);
  if (is("shr")) return BY_TYPE(ShiftRight<T>);
  if (is("setp")) {
    const std::string comparison = m.TakeFirst();
    instruction.choice = IndexOf(comparison, {"eq", "ne", "lt", "le", "gt", "ge", "num", "nan"});
    if (instruction.choice < 0) {
      instruction.choice = IndexOf(comparison, {"equ", "neu", "ltu", "leu", "gtu", "geu"});
      instruction.flag = true;
    }
    if (instruction.choice < 0) return nullptr;
    instruction.choice |= (m.Take("and") ? 1 : m.Take("or") ? 2 : m.Take("xor") ? 3 : 0) << 4;
    instruction.other = m.Take("ftz");
    if (type == Type::kF16 || type == Type::kBF16 || type == Type::kF64) return SetP<double>;
    return type == Type::kF32 ? SetP<float> : BY_TYPE(SetP<T>);
  }
  if (is("selp")) return SelP;
  if (is("mov")) return Move;
  if (is("prmt")) return type == Type::kB32 ? Prmt : nullptr;
  if (is("bfe")) return BY_TYPE(ExtractField<T>);
  if (is("bfi")) return InsertField;
  if (is("popc")) return BY_TYPE(Map<T, PopCount<T>>);
  if (is("lop3")) return Lop3;
  if (is("clz")) return BY_TYPE(Map<T, LeadingZeros<T>>);
  if (is("brev")) return BY_TYPE(Map<T, Reversed<T>>);
  if (is("bfind")) return m.Take("shiftamt") ? BY_TYPE(Map<T, HighestBit<T, true>>) : BY_TYPE(Map<T, HighestBit<T, false>>);
  if (is("sad")) return BY_TYPE(Map<T, SumOfDifference<T>>);
  if ((is("mul24") || is("mad24")) && (type == Type::kS32 || type == Type::kU32)) {
    const bool high = m.Take("hi");
    if (!high && !m.Take("lo")) return nullptr;
    const auto of = [&](auto zero) -> Handler {
      using T = decltype(zero);
      return is("mul24") ? (high ? Map<T, Mul24<T, 16>> : Map<T, Mul24<T, 0>>) : high ? Map<T, Mad24<T, 16>> : Map<T, Mad24<T, 0>>;
    };
    return type == Type::kS32 ? of(int32_t{}) : of(uint32_t{});
  }
  if (is("shf") && type == Type::kB32) {
    instruction.flag = m.Take("l"), instruction.other = m.Take("clamp");
    return (instruction.flag || m.Take("r")) && (instruction.other || m.Take("wrap")) ? FunnelShift : nullptr;
  }
  if (is("dp4a") || is("dp2a")) {
    instruction.from = m.TakeType(), instruction.count = is("dp4a") ? 8 : 16;
    instruction.choice = is("dp2a") && m.Take("hi") ? 2 : 0;
    m.Ignore("lo");
    return DotProduct;
  }
  instruction.flag = m.Take("ftz");
  m.Ignore("approx", "full", "rn");
  if (type == Type::kF64 && is("rsqrt")) return Approximate<[](double x) { return 1 / std::sqrt(x); }>;
  if (type == Type::kF64 && is("rcp") && instruction.flag) return Approximate<[](double x) { return 1 / x; }>;
  if (type != Type::kF32) return nullptr;
  if (is("sin")) return Function<[](double x) { return std::sin(x); }>;
  if (is("cos")) return Function<[](double x) { return std::cos(x); }>;
  if (is("div")) return Function<[](double x, double y) { return x / y; }>;
  if (is("sqrt")) return Function<[](double x) { return std::sqrt(x); }>;
  if (is("rsqrt")) return Function<[](double x) { return 1 / std::sqrt(x); }>;
  if (is("rcp")) return Function<[](double x) { return 1 / x; }>;
  if (is("ex2")) return Function<[](double x) { return std::exp2(x); }>;
  if (is("lg2")) return Function<[](double x) { return std::log2(x); }>;
  if (is("tanh")) return Function<[](double x) { return std::tanh(x); }>;
  return nullptr;
}

}  // namespace

bool DecodeScalar(Instruction& instruction) {
  Modifiers m(instruction);
  instruction.type = m.TakeType();
  if (instruction.type == Type::kNone) return false;
  const Handler handler = Find(instruction, m);
  if (handler == nullptr || !m.empty()) return false;
  instruction.handler = handler;
  return true;
}

}  // namespace ptx
