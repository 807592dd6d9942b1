// Arithmetic, logic and comparisons: each lane for itself.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "floats.h"
#include "machine.h"

namespace ptx {
namespace {

// One value per lane of 1 to 4 operands -> one value per lane.
template <class T, auto kFunction>
void Map1(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) { d[l] = Bits(kFunction(Get<T>(a[l]))); });
}
template <class T, auto kFunction>
void Map2(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) { d[l] = Bits(kFunction(Get<T>(a[l]), Get<T>(b[l]))); });
}
template <class T, auto kFunction>
void Map3(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]), &c = w.Read(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) { d[l] = Bits(kFunction(Get<T>(a[l]), Get<T>(b[l]), Get<T>(c[l]))); });
}

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
constexpr auto MadLow = [](T a, T b, T c) { return Add<T>(MulLow<T>(a, b), c); };
template <class T>
constexpr auto MadHigh = [](T a, T b, T c) { return Add<T>(MulHigh<T>(a, b), c); };

// Of floats: NaN only if both are, and -0 is less than 0.
template <class T>
T Least(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : std::signbit(a) == std::signbit(b) ? std::min(a, b) : std::signbit(a) ? a : b;
}
template <class T>
T Greatest(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : std::signbit(a) == std::signbit(b) ? std::max(a, b) : std::signbit(a) ? b : a;
}

// kFunction of the type, for types of integers; nullptr for others.
#define BY_INTEGER(MAP, FUNCTION)                 \
  [](Type type) -> Handler {                      \
    switch (type) {                               \
      case Type::kS16:                            \
        return MAP<int16_t, FUNCTION<int16_t>>;   \
      case Type::kU16:                            \
      case Type::kB16:                            \
        return MAP<uint16_t, FUNCTION<uint16_t>>; \
      case Type::kS32:                            \
        return MAP<int32_t, FUNCTION<int32_t>>;   \
      case Type::kU32:                            \
      case Type::kB32:                            \
        return MAP<uint32_t, FUNCTION<uint32_t>>; \
      case Type::kS64:                            \
        return MAP<int64_t, FUNCTION<int64_t>>;   \
      case Type::kU64:                            \
      case Type::kB64:                            \
        return MAP<uint64_t, FUNCTION<uint64_t>>; \
      default:                                    \
        return nullptr;                           \
    }                                             \
  }(instruction.type)

// Of both 16-bit halves of 32 bits, or of one 16-bit value.
template <class T, auto kFunction>
void Halves2(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const uint64_t low = Bits(kFunction(Get<T>(a[l]), Get<T>(b[l]))), high = Bits(kFunction(Get<T>(a[l] >> 16), Get<T>(b[l] >> 16)));
    d[l] = low | high << 16;
  });
}

// a * b + c, which the next rounding, to a smaller format, makes the nearest: odd in its last bit if it is not exact.
double FmaToOdd(double a, double b, double c) {
  const double product = a * b, sum = product + c, added = sum - product, lost = (product - (sum - added)) + (c - added);
  if (!std::isfinite(sum) || lost == 0 || (Bits(sum) & 1)) return sum;
  return std::nextafter(sum, lost > 0 ? INFINITY : -INFINITY);
}

// Floating-point operations by way of double: exact but for the last rounding, which is to the type.
enum Arithmetic { kAdd, kSub, kMul, kFma, kMin, kMax, kNeg, kAbs };
double Small(int operation, double a, double b, double c) {
  switch (operation) {
    case kAdd:
      return a + b;
    case kSub:
      return a - b;
    case kMul:
      return a * b;
    case kFma:
      return FmaToOdd(a, b, c);
    case kMin:
      return Least(a, b);
    case kMax:
      return Greatest(a, b);
    case kNeg:
      return -a;
    default:
      return std::fabs(a);
  }
}
// f16, bf16 and pairs of them; flag: relu behind it.
void SmallFloats(Warp& w, const Instruction& i, Mask mask) {
  const bool pair = i.type == Type::kF16x2 || i.type == Type::kBF16x2;
  const Format format = i.type == Type::kF16 || i.type == Type::kF16x2 ? kF16Format : kBF16Format;
  const auto& o = i.operands;
  const Row &a = w.Read(o[1]), &b = w.Read(o[std::min<size_t>(2, o.size() - 1)]), &c = w.Read(o[std::min<size_t>(3, o.size() - 1)]);
  Row& d = w.Write(o[0]);
  ForLanes(mask, [&](int l) {
    uint64_t bits = 0;
    for (int shift = 0; shift <= 16 * pair; shift += 16) {
      const auto value = [&](const Row& row) { return Decode(row[l] >> shift & 0xffff, format); };
      double result = Small(i.choice, value(a), value(b), value(c));
      if (i.flag && !(result > 0) && !std::isnan(result)) result = 0;
      bits |= static_cast<uint64_t>(Encode(result, format)) << shift;
    }
    d[l] = bits;
  });
}

template <class T>
T Flush(T value, bool flush) {
  return flush && std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(T(0), value) : value;
}

// f32 and f64; flag: .ftz; other: .sat
template <class T>
void Floats(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const Row &a = w.Read(o[1]), &b = w.Read(o[std::min<size_t>(2, o.size() - 1)]), &c = w.Read(o[std::min<size_t>(3, o.size() - 1)]);
  Row& d = w.Write(o[0]);
  ForLanes(mask, [&](int l) {
    const T x = Flush(Get<T>(a[l]), i.flag), y = Flush(Get<T>(b[l]), i.flag), z = Flush(Get<T>(c[l]), i.flag);
    T r;
    switch (i.choice) {
      case kAdd:
        r = x + y;
        break;
      case kSub:
        r = x - y;
        break;
      case kMul:
        r = x * y;
        break;
      case kFma:
        r = std::fma(x, y, z);
        break;
      case kMin:
        r = Least(x, y);
        break;
      case kMax:
        r = Greatest(x, y);
        break;
      case kNeg:
        r = -x;
        break;
      default:
        r = std::fabs(x);
    }
    r = Flush(r, i.flag);
    if (i.other) r = r > 0 ? std::min(r, T(1)) : T(0);
    d[l] = Bits(r);
  });
}

// fma.rm.f32: a sum that is exactly zero is negative, unless both of its parts are positive.
void FmaDown(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]), &c = w.Read(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const double x = Get<float>(a[l]), y = Get<float>(b[l]), z = Get<float>(c[l]), sum = FmaToOdd(x, y, z);
    const bool positive = !std::signbit(x * y) && !std::signbit(z);
    d[l] = Encode(sum == 0 && !positive ? -0.0 : sum, kF32Format, Rounding::kDown);
  });
}

// The size of b with the sign of a.
void CopySign(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) { d[l] = (b[l] & 0x7fffffff) | (a[l] & 0x80000000); });
}

template <class T, auto kFunction>
void Function(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const double x = Flush(Get<T>(a[l]), i.flag);
    d[l] = Bits(Flush(static_cast<T>(kFunction(x)), i.flag));
  });
}
template <class T>
void DivFloats(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) { d[l] = Bits(Flush(Flush(Get<T>(a[l]), i.flag) / Flush(Get<T>(b[l]), i.flag), i.flag)); });
}

// The product is twice as wide as the operands.
template <class T, class Wide>
void MulWide(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]), &c = w.Read(i.operands.back());
  Row& d = w.Write(i.operands[0]);
  const bool add = i.operands.size() == 4;
  ForLanes(mask, [&](int l) {
    const auto product =
        static_cast<Unsigned<Wide>>(static_cast<Wide>(Get<T>(a[l]))) * static_cast<Unsigned<Wide>>(static_cast<Wide>(Get<T>(b[l])));
    d[l] = Bits(static_cast<Unsigned<Wide>>(product + (add ? Get<Unsigned<Wide>>(c[l]) : 0)));
  });
}

void Logic(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  const bool predicates = i.type == Type::kPred;
  const Mask pa = predicates ? w.Predicate(i.operands[1]) : 0, pb = predicates ? w.Predicate(i.operands[2]) : 0;
  Row& d = w.Write(i.operands[0]);
  const uint64_t width = BitsOf(i.type) == 64 ? ~0ull : (1ull << BitsOf(i.type)) - 1;
  ForLanes(mask, [&](int l) {
    const uint64_t x = predicates ? pa >> l & 1 : a[l], y = predicates ? pb >> l & 1 : b[l];
    d[l] = (i.choice == 0 ? x & y : i.choice == 1 ? x | y : x ^ y) & width;
  });
}
void Not(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  const uint64_t width = BitsOf(i.type) == 64 ? ~0ull : (1ull << BitsOf(i.type)) - 1;
  ForLanes(mask, [&](int l) { d[l] = i.flag ? (a[l] & width) == 0 : ~a[l] & width; });
}

// Shifts by the type's width or more give zero, or the sign.
template <class T>
void ShiftLeft(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const uint32_t by = static_cast<uint32_t>(b[l]);
    d[l] = Bits(by >= 8 * sizeof(T) ? T(0) : static_cast<T>(static_cast<uint64_t>(Get<T>(a[l])) << by));
  });
}
template <class T>
void ShiftRight(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const uint32_t by = std::min<uint32_t>(static_cast<uint32_t>(b[l]), 8 * sizeof(T)), most = 8 * sizeof(T) - 1;
    const T x = Get<T>(a[l]);
    d[l] = Bits(by > most ? static_cast<T>(std::is_signed_v<T> && x < 0 ? -1 : 0) : static_cast<T>(x >> by));
  });
}
// shf: choice 0 left, 1 right; flag: wrap, not clamp
void FunnelShift(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]), &c = w.Read(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const uint64_t both = (b[l] & 0xffffffff) << 32 | (a[l] & 0xffffffff);
    const uint32_t count = static_cast<uint32_t>(c[l]), by = i.flag ? count & 31 : std::min(count, 32u);
    d[l] = (i.choice == 0 ? both << by >> 32 : both >> by) & 0xffffffff;
  });
}

enum Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kNan };
template <class T>
bool Compare(int comparison, bool unordered, T a, T b) {
  bool nan = false;
  if constexpr (std::is_floating_point_v<T>) nan = std::isnan(a) || std::isnan(b);
  if (comparison == kNum) return !nan;
  if (comparison == kNan) return nan;
  if (nan) return unordered;
  switch (comparison) {
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    default:
      return a >= b;
  }
}
struct HalfTag {};
// setp: choice holds the comparison and how it is combined with a predicate (0 none, 1 and, 2 or, 3 xor); flag: NaN counts; other: .ftz
template <class T>
void SetP(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const Row &a = w.Read(o[1]), &b = w.Read(o[2]);
  const int comparison = i.choice & 15, with = i.choice >> 4 & 3;
  const Mask c = with ? w.Predicate(o[3]) : 0;
  Mask first = 0, second = 0;
  ForLanes(mask, [&](int l) {
    bool holds;
    if constexpr (std::is_same_v<T, HalfTag>) {
      const Format format = i.type == Type::kF16 ? kF16Format : kBF16Format;
      holds = Compare(comparison, i.flag, Decode(a[l] & 0xffff, format), Decode(b[l] & 0xffff, format));
    } else if constexpr (std::is_floating_point_v<T>) {
      holds = Compare(comparison, i.flag, Flush(Get<T>(a[l]), i.other), Flush(Get<T>(b[l]), i.other));
    } else {
      holds = Compare(comparison, i.flag, Get<T>(a[l]), Get<T>(b[l]));
    }
    const bool p = c >> l & 1;
    const auto combined = [&](bool x) { return with == 0 ? x : with == 1 ? x && p : with == 2 ? x || p : x != p; };
    first |= static_cast<Mask>(combined(holds)) << l, second |= static_cast<Mask>(combined(!holds)) << l;
  });
  const bool two = !o[0].parts.empty();
  Row& d = w.Write(two ? o[0].parts[0] : o[0]);
  ForLanes(mask, [&](int l) { d[l] = first >> l & 1; });
  if (!two) return;
  Row& e = w.Write(o[0].parts[1]);
  ForLanes(mask, [&](int l) { e[l] = second >> l & 1; });
}

void SelP(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]);
  const Mask p = w.Predicate(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  const uint64_t width = BitsOf(i.type) == 64 ? ~0ull : (1ull << BitsOf(i.type)) - 1;
  ForLanes(mask, [&](int l) { d[l] = (p >> l & 1 ? a[l] : b[l]) & width; });
}

// Also packs {a, b} into one register, and unpacks it.
void Move(Warp& w, const Instruction& i, Mask mask) {
  const Operand &to = i.operands[0], &from = i.operands[1];
  const int bits = BitsOf(i.type);
  const uint64_t width = bits >= 64 ? ~0ull : (1ull << bits) - 1;
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
      ForLanes(mask, [&](int l) { packed[l] |= (a[l] & ((1ull << each) - 1)) << each * n; });
    }
    Row& d = w.Write(to);
    ForLanes(mask, [&](int l) { d[l] = packed[l]; });
  } else {
    const Row a = w.Read(from);
    const int each = bits / static_cast<int>(to.parts.size());
    for (size_t n = 0; n < to.parts.size(); ++n) {
      Row& d = w.Write(to.parts[n]);
      ForLanes(mask, [&](int l) { d[l] = a[l] >> each * n & ((1ull << each) - 1); });
    }
  }
}

void Prmt(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]), &c = w.Read(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const uint64_t bytes = (b[l] & 0xffffffff) << 32 | (a[l] & 0xffffffff);
    uint64_t result = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t select = c[l] >> 4 * n & 15;
      uint64_t byte = bytes >> 8 * (select & 7) & 0xff;
      if (select & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign
      result |= byte << 8 * n;
    }
    d[l] = result;
  });
}

// bfe and bfi, as the ISA writes them.
template <class T>
void ExtractField(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &b = w.Read(i.operands[2]), &c = w.Read(i.operands[3]);
  Row& d = w.Write(i.operands[0]);
  constexpr int kLast = 8 * sizeof(T) - 1;
  ForLanes(mask, [&](int l) {
    const int from = b[l] & 0xff, length = c[l] & 0xff;
    const uint64_t sign = std::is_signed_v<T> && length ? a[l] >> std::min(from + length - 1, kLast) & 1 : 0;
    uint64_t field = 0;
    for (int n = 0; n <= kLast; ++n) field |= (n < length && from + n <= kLast ? a[l] >> (from + n) & 1 : sign) << n;
    d[l] = field;
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

template <class T>
constexpr auto PopCount = [](T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); };
template <class T>
constexpr auto LeadingZeros = [](T a) { return static_cast<uint32_t>(a ? __builtin_clzll(a) - (64 - 8 * sizeof(T)) : 8 * sizeof(T)); };
template <class T>
constexpr auto Reverse = [](T a) {
  T r = 0;
  for (size_t n = 0; n < 8 * sizeof(T); ++n) r |= static_cast<T>(a >> n & 1) << (8 * sizeof(T) - 1 - n);
  return r;
};
template <class T>
constexpr auto Negate = [](T a) { return Sub<T>(0, a); };
template <class T>
constexpr auto Absolute = [](T a) { return a < 0 ? Sub<T>(0, a) : a; };

void Lop3(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const Row &a = w.Read(o[1]), &b = w.Read(o[2]), &c = w.Read(o[3]), &table = w.Read(o[4]);
  Row& d = w.Write(o[0]);
  ForLanes(mask, [&](int l) {
    uint32_t result = 0;
    for (int n = 0; n < 32; ++n) {
      const int at = static_cast<int>((a[l] >> n & 1) << 2 | (b[l] >> n & 1) << 1 | (c[l] >> n & 1));
      result |= static_cast<uint32_t>(table[l] >> at & 1) << n;
    }
    d[l] = result;
  });
}

bool IsSmallFloat(Type t) { return t == Type::kF16 || t == Type::kBF16 || t == Type::kF16x2 || t == Type::kBF16x2; }

Handler ArithmeticOf(Instruction& instruction, Modifiers& m, int operation) {
  instruction.choice = operation;
  if (operation == kFma && instruction.type == Type::kF32 && m.Take("rm")) return FmaDown;
  m.Ignore("rn");
  if (IsSmallFloat(instruction.type)) {
    instruction.flag = m.Take("relu");
    m.Ignore("ftz");
    return SmallFloats;
  }
  if (instruction.type != Type::kF32 && instruction.type != Type::kF64) return nullptr;
  instruction.flag = m.Take("ftz"), instruction.other = m.Take("sat");
  return instruction.type == Type::kF32 ? Floats<float> : Floats<double>;
}

int IndexOf(const std::string& name, std::initializer_list<const char*> names) {
  int index = 0;
  for (const char* n : names) {
    if (name == n) return index;
    ++index;
  }
  return -1;
}

Handler Find(Instruction& instruction, Modifiers& m) {
  const std::string& name = instruction.name;
  const Type type = instruction.type;
  const auto is = [&](const char* n) { return name == n; };
  if (const int small = IndexOf(name, {"add", "sub", "mul", "fma", "min", "max", "neg", "abs"}); small >= 0) {
    if (Handler found = ArithmeticOf(instruction, m, small)) return found;
  }
  if (is("add") && type == Type::kS16x2) return Halves2<int16_t, Add<int16_t>>;
  if (is("add") && type == Type::kU16x2) return Halves2<uint16_t, Add<uint16_t>>;
  if (is("min") && type == Type::kS16x2) return Halves2<int16_t, Min<int16_t>>;
  if (is("min") && type == Type::kU16x2) return Halves2<uint16_t, Min<uint16_t>>;
  if (is("max") && type == Type::kS16x2) return Halves2<int16_t, Max<int16_t>>;
  if (is("max") && type == Type::kU16x2) return Halves2<uint16_t, Max<uint16_t>>;
  if (is("add")) return BY_INTEGER(Map2, Add);
  if (is("sub")) return BY_INTEGER(Map2, Sub);
  if (is("min")) return BY_INTEGER(Map2, Min);
  if (is("max")) return BY_INTEGER(Map2, Max);
  if (is("rem")) return BY_INTEGER(Map2, Rem);
  if (is("neg")) return BY_INTEGER(Map1, Negate);
  if (is("abs")) {
    return type == Type::kS16   ? Map1<int16_t, Absolute<int16_t>>
           : type == Type::kS32 ? Map1<int32_t, Absolute<int32_t>>
           : type == Type::kS64 ? Map1<int64_t, Absolute<int64_t>>
                                : nullptr;
  }
  if (is("copysign")) return type == Type::kF32 ? CopySign : nullptr;
  if (is("div")) {
    instruction.flag = m.Take("ftz");
    m.Ignore("full", "approx", "rn");
    if (type == Type::kF32) return DivFloats<float>;
    if (type == Type::kF64) return DivFloats<double>;
    return BY_INTEGER(Map2, Div);
  }
  if (is("mul") || is("mad")) {
    const bool mad = is("mad");
    if (m.Take("lo")) return mad ? BY_INTEGER(Map3, MadLow) : BY_INTEGER(Map2, MulLow);
    if (m.Take("hi")) return mad ? BY_INTEGER(Map3, MadHigh) : BY_INTEGER(Map2, MulHigh);
    if (m.Take("wide")) {
      switch (type) {
        case Type::kS16:
          return MulWide<int16_t, int32_t>;
        case Type::kU16:
          return MulWide<uint16_t, uint32_t>;
        case Type::kS32:
          return MulWide<int32_t, int64_t>;
        case Type::kU32:
          return MulWide<uint32_t, uint64_t>;
        default:
          return nullptr;
      }
    }
    return mad ? ArithmeticOf(instruction, m, kFma) : nullptr;
  }
  if (const int logic = IndexOf(name, {"and", "or", "xor"}); logic >= 0) return instruction.choice = logic, Logic;
  if (is("not") || is("cnot")) return instruction.flag = is("cnot"), Not;
  if (is("shl")) return BitsOf(type) == 16 ? ShiftLeft<uint16_t> : BitsOf(type) == 32 ? ShiftLeft<uint32_t> : ShiftLeft<uint64_t>;
  if (is("shr")) {
    switch (type) {
      case Type::kS16:
        return ShiftRight<int16_t>;
      case Type::kS32:
        return ShiftRight<int32_t>;
      case Type::kS64:
        return ShiftRight<int64_t>;
      default:
        return BitsOf(type) == 16 ? ShiftRight<uint16_t> : BitsOf(type) == 32 ? ShiftRight<uint32_t> : ShiftRight<uint64_t>;
    }
  }
  if (is("shf")) {
    instruction.choice = m.Take("r") ? 1 : (m.Take("l"), 0);
    instruction.flag = m.Take("wrap");
    m.Ignore("clamp");
    return FunnelShift;
  }
  if (is("setp")) {
    std::string comparison = m.TakeFirst();
    instruction.choice = IndexOf(comparison, {"eq", "ne", "lt", "le", "gt", "ge", "num", "nan"});
    if (instruction.choice < 0) {
      instruction.choice = IndexOf(comparison, {"equ", "neu", "ltu", "leu", "gtu", "geu"});
      instruction.flag = true;
      if (const int same = IndexOf(comparison, {"lo", "ls", "hi", "hs"}); same >= 0) instruction.choice = same + 2;
    }
    if (instruction.choice < 0) return nullptr;
    instruction.choice |= (m.Take("and") ? 1 : m.Take("or") ? 2 : m.Take("xor") ? 3 : 0) << 4;
    instruction.other = m.Take("ftz");
    switch (type) {
      case Type::kS16:
        return SetP<int16_t>;
      case Type::kU16:
      case Type::kB16:
        return SetP<uint16_t>;
      case Type::kS32:
        return SetP<int32_t>;
      case Type::kU32:
      case Type::kB32:
        return SetP<uint32_t>;
      case Type::kS64:
        return SetP<int64_t>;
      case Type::kU64:
      case Type::kB64:
        return SetP<uint64_t>;
      case Type::kF32:
        return SetP<float>;
      case Type::kF64:
        return SetP<double>;
      case Type::kF16:
      case Type::kBF16:
        return SetP<HalfTag>;
      default:
        return nullptr;
    }
  }
  if (is("selp")) return SelP;
  if (is("mov")) return Move;
  if (is("prmt")) return type == Type::kB32 ? Prmt : nullptr;
  if (is("bfe"))
    return type == Type::kS32   ? ExtractField<int32_t>
           : type == Type::kU32 ? ExtractField<uint32_t>
           : type == Type::kS64 ? ExtractField<int64_t>
                                : ExtractField<uint64_t>;
  if (is("bfi")) return InsertField;
  if (is("popc")) return BitsOf(type) == 64 ? Map1<uint64_t, PopCount<uint64_t>> : Map1<uint32_t, PopCount<uint32_t>>;
  if (is("clz")) return BitsOf(type) == 64 ? Map1<uint64_t, LeadingZeros<uint64_t>> : Map1<uint32_t, LeadingZeros<uint32_t>>;
  if (is("brev")) return BitsOf(type) == 64 ? Map1<uint64_t, Reverse<uint64_t>> : Map1<uint32_t, Reverse<uint32_t>>;
  if (is("lop3")) return Lop3;
  instruction.flag = m.Take("ftz");
  m.Ignore("approx", "rn");
  if (type == Type::kF32) {
    if (is("sqrt")) return Function<float, [](double x) { return std::sqrt(x); }>;
    if (is("rsqrt")) return Function<float, [](double x) { return 1 / std::sqrt(x); }>;
    if (is("rcp")) return Function<float, [](double x) { return 1 / x; }>;
    if (is("ex2")) return Function<float, [](double x) { return std::exp2(x); }>;
    if (is("lg2")) return Function<float, [](double x) { return std::log2(x); }>;
    if (is("tanh")) return Function<float, [](double x) { return std::tanh(x); }>;
  }
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
