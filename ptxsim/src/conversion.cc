// cvt and cvta.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "machine.h"

namespace ptx {
namespace {

double FloatIn(uint64_t bits, Type type) {
  if (type == Type::kF32) return FloatOf(bits);
  if (type == Type::kF64) return Get<double>(bits);
  return Decode(static_cast<uint32_t>(bits & 0xffff), FormatOf(type));
}

// A narrow result in a wider register is extended as its type says.
uint64_t Extended(uint64_t bits, Type type) { return BitsOf(type) < 32 ? IntegerIn(bits, type) & 0xffffffff : bits; }

uint64_t Narrow(int64_t value, Type to) { return value & Ones(BitsOf(to)); }

double Rounded(double value, Rounding way) {
  return way == Rounding::kZero   ? std::trunc(value)
         : way == Rounding::kDown ? std::floor(value)
         : way == Rounding::kUp   ? std::ceil(value)
                                  : std::nearbyint(value);
}

// An integer as a double, whose last bit is odd if it is not exact, so that with the rounding that follows it is rounded once.
double FloatOfInteger(uint64_t bits, bool is_signed) {
  const bool negative = is_signed && static_cast<int64_t>(bits) < 0;
  uint64_t size = negative ? -bits : bits;
  if (size >> 53) size = (size & ~0x7ffull) | (size & 0x7ff ? 0x800 : 0);
  const auto value = static_cast<double>(size);
  return negative ? -value : value;
}

// A float as an integer: the nearest one that there is, and 0 for NaN, or the upper bit where one of both has 64 bits.
uint64_t IntegerOf(double value, Type type, Type from) {
  const int bits = BitsOf(type);
  const double low = IsSigned(type) ? -std::ldexp(1, bits - 1) : 0, high = std::ldexp(1, bits - IsSigned(type));
  if (std::isnan(value)) return bits == 64 || from == Type::kF64 ? 1ull << (bits - 1) : 0;
  if (value >= high) return Narrow(IsSigned(type) ? (1ull << (bits - 1)) - 1 : -1, type);
  if (value < low) return Narrow(IsSigned(type) ? ~0ull << (bits - 1) : 0, type);
  return Narrow(IsSigned(type) ? static_cast<int64_t>(value) : static_cast<int64_t>(static_cast<uint64_t>(value)), type);
}

Rounding Way(const Instruction& i) { return static_cast<Rounding>(i.choice & 7); }
constexpr int kWhole = 8, kFlush = 16;

void IntegerToDouble(Warp& w, const Instruction& i, Mask mask) {
  const RoundingMode mode(Way(i));
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const int64_t value = IntegerIn(a[l], i.from);
    d[l] = Bits(IsSigned(i.from) ? static_cast<double>(value) : static_cast<double>(static_cast<uint64_t>(value)));
  });
}

// One value.  choice: the rounding, with kWhole for .rni and its like between floats, kFlush for .ftz; flag: saturate; other: relu.
void Convert(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  const bool from_float = IsFloat(i.from), to_float = IsFloat(i.type);
  ForLanes(mask, [&](int l) {
    if (!from_float && !to_float) {
      d[l] = Extended(Narrow(IntegerIn(a[l], i.from), i.type), i.type);
      return;
    }
    double value = from_float ? FloatIn(a[l], i.from) : FloatOfInteger(IntegerIn(a[l], i.from), IsSigned(i.from));
    if (i.from == Type::kF32 && i.choice & kFlush) value = Flush(FloatOf(a[l]), true);
    value = Rectified(value, i.other);
    if (!to_float || i.choice & kWhole) value = Rounded(value, Way(i));
    if (i.flag) value = value > 0 ? std::min(value, 1.0) : 0;
    if (!to_float)
      d[l] = IntegerOf(value, i.type, i.from);
    else if (i.type == Type::kF64)
      d[l] = Bits(value);
    else if (i.type == Type::kF32 && Way(i) == Rounding::kNearestEven)
      d[l] = BitsOfFloat(static_cast<float>(value));
    else
      d[l] = static_cast<uint64_t>(Encode(value, FormatOf(i.type), Way(i))) << (i.type == Type::kTF32 ? 13 : 0);
    if (i.type == Type::kF32 && i.choice & kFlush) d[l] = BitsOfFloat(Flush(FloatOf(d[l]), true));
  });
}

// Two values into one register: the first operand is the upper half.
void ConvertPair(Warp& w, const Instruction& i, Mask mask) {
  const Row &high = w.Read(i.operands[1]), &low = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  const int bits = BitsOf(i.type) / 2;
  ForLanes(mask, [&](int l) {
    const auto half = [&](uint64_t from) {
      return static_cast<uint64_t>(Encode(Rectified(FloatOf(from), i.other), FormatOf(i.type), Way(i), i.flag));
    };
    d[l] = half(high[l]) << bits | half(low[l]);
  });
}

// Both halves of one register: e4m3x2 and e5m2x2 to f16x2 and back.
void ConvertHalves(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  const int to = BitsOf(i.type) / 2, from = BitsOf(i.from) / 2;
  ForLanes(mask, [&](int l) {
    const auto half = [&](int n) {
      const double value = Decode(static_cast<uint32_t>(a[l] >> from * n & Ones(from)), FormatOf(i.from));
      return static_cast<uint64_t>(Encode(Rectified(value, i.other), FormatOf(i.type), Rounding::kNearestEven, i.flag));
    };
    d[l] = half(1) << to | half(0);
  });
}

// cvta: choice is the window; flag: from generic to the space
void ConvertAddress(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  const uint64_t window = i.space == Space::kShared  ? kSharedWindow
                          : i.space == Space::kParam ? kParamWindow
                          : i.space == Space::kLocal ? kLocalWindow
                                                     : 0;
  ForLanes(mask, [&](int l) { d[l] = a[l] + i.operands[1].offset + (i.flag ? -window : window); });
}

}  // namespace

bool DecodeConversion(Instruction& instruction) {
  Modifiers m(instruction);
  if (instruction.name == "cvta") {
    instruction.flag = m.Take("to");
    instruction.space = m.Take("shared") || m.Take("shared::cta") ? Space::kShared
                        : m.Take("param")                         ? Space::kParam
                        : m.Take("local")                         ? Space::kLocal
                                                                  : Space::kGlobal;
    m.Ignore("global", "const", "u64");
    instruction.handler = ConvertAddress;
    return m.empty();
  }
  if (instruction.name != "cvt") return false;
  instruction.from = m.TakeType(), instruction.type = m.TakeType();
  if (instruction.from == Type::kNone || instruction.type == Type::kNone) return false;
  const auto rounding = [&](const char* name, Rounding value, int whole) {
    if (m.Take(name)) instruction.choice = static_cast<int>(value) | whole;
  };
  const bool to_float = IsFloat(instruction.type);
  rounding("rn", Rounding::kNearestEven, 0), rounding("rz", Rounding::kZero, 0), rounding("rna", Rounding::kNearestAway, 0);
  rounding("rm", Rounding::kDown, 0), rounding("rp", Rounding::kUp, 0);
  const int whole = to_float ? kWhole : 0;
  rounding("rni", Rounding::kNearestEven, whole), rounding("rzi", Rounding::kZero, whole), rounding("rmi", Rounding::kDown, whole),
      rounding("rpi", Rounding::kUp, whole);
  instruction.flag = m.Take("satfinite") || (to_float && m.Take("sat")), instruction.other = m.Take("relu");
  if (m.Take("ftz")) instruction.choice |= kFlush;
  const bool pair_from = instruction.from == Type::kE4M3x2 || instruction.from == Type::kE5M2x2 || instruction.from == Type::kF16x2;
  const Type to = instruction.type;
  const auto is_one = [](Type t) {
    return IsFloat(t) || (t >= Type::kU8 && t <= Type::kS64 && t != Type::kB16 && t != Type::kB32 && t != Type::kB64);
  };
  if (pair_from)
    instruction.handler = ConvertHalves;
  else if (to == Type::kF16x2 || to == Type::kBF16x2 || to == Type::kE4M3x2 || to == Type::kE5M2x2)
    instruction.handler = ConvertPair;
  else if (to == Type::kF64 && !IsFloat(instruction.from))
    instruction.handler = is_one(instruction.from) ? IntegerToDouble : nullptr;
  else
    instruction.handler = is_one(to) && is_one(instruction.from) ? Convert : nullptr;
  return instruction.handler != nullptr && m.empty();
}

}  // namespace ptx
