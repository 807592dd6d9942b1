// cvt and cvta.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "machine.h"

namespace ptx {
namespace {

bool IsFloat(Type t) { return t == Type::kF16 || t == Type::kBF16 || t == Type::kF32 || t == Type::kF64 || t == Type::kTF32; }
Format FormatOf(Type t) {
  switch (t) {
    case Type::kF16:
    case Type::kF16x2:
      return kF16Format;
    case Type::kBF16:
    case Type::kBF16x2:
      return kBF16Format;
    case Type::kE4M3:
    case Type::kE4M3x2:
      return kE4M3Format;
    case Type::kTF32:
      return kTF32Format;
    default:
      return kE5M2Format;
  }
}

double FloatIn(uint64_t bits, Type type) {
  if (type == Type::kF32) return FloatOf(bits);
  if (type == Type::kF64) return Get<double>(bits);
  return Decode(static_cast<uint32_t>(bits & 0xffff), FormatOf(type));
}

int64_t IntegerIn(uint64_t bits, Type type) {
  const int width = BitsOf(type);
  if (width == 64) return static_cast<int64_t>(bits);
  const uint64_t low = bits & ((1ull << width) - 1);
  return IsSigned(type) && low >> (width - 1) ? static_cast<int64_t>(low | ~0ull << width) : static_cast<int64_t>(low);
}

// A narrow result in a wider register is extended as its type says.
uint64_t Extended(uint64_t bits, Type type) { return BitsOf(type) < 32 ? IntegerIn(bits, type) & 0xffffffff : bits; }

uint64_t Narrow(int64_t value, Type to) { return BitsOf(to) == 64 ? value : value & ((1ull << BitsOf(to)) - 1); }

double Rounded(double value, int rounding) {
  switch (static_cast<Rounding>(rounding)) {
    case Rounding::kZero:
      return std::trunc(value);
    case Rounding::kDown:
      return std::floor(value);
    case Rounding::kUp:
      return std::ceil(value);
    default:
      return std::nearbyint(value);
  }
}

// A float to f32 in a given way: double holds more, so that the neighbours of the nearest one are looked at.
float ToFloat(double value, int rounding) {
  float nearest = static_cast<float>(value);
  const auto way = static_cast<Rounding>(rounding);
  if (std::isnan(value) || way == Rounding::kNearestEven || static_cast<double>(nearest) == value) return nearest;
  const bool too_far = static_cast<double>(nearest) > value;
  if (way == Rounding::kDown || (way == Rounding::kZero && value > 0)) return too_far ? std::nextafter(nearest, -INFINITY) : nearest;
  return too_far ? nearest : std::nextafter(nearest, INFINITY);
}

// An integer as a double.  If another rounding follows and this one is not exact, its last bit is odd, so that two roundings are one.
double FloatOfInteger(uint64_t bits, bool is_signed, bool again) {
  const bool negative = is_signed && static_cast<int64_t>(bits) < 0;
  uint64_t size = negative ? -bits : bits;
  if (again && size >> 53) size = (size & ~0x7ffull) | (size & 0x7ff ? 0x800 : 0);
  const auto value = static_cast<double>(size);
  return negative ? -value : value;
}

constexpr int kWhole = 8, kFlush = 16;

float Flushed(double value) {
  const auto narrow = static_cast<float>(value);
  return std::fpclassify(narrow) == FP_SUBNORMAL ? std::copysign(0.0f, narrow) : narrow;
}

// One value.  choice: the rounding, with kWhole for .rni and its like between floats, and kFlush; flag: saturate; other: relu.
void Convert(Warp& w, const Instruction& i, Mask mask) {
  const Row& a = w.Read(i.operands[1]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const bool from_float = IsFloat(i.from), to_float = IsFloat(i.type);
    if (!from_float && !to_float) {
      int64_t value = IntegerIn(a[l], i.from);
      if (i.flag) {
        const int bits = BitsOf(i.type);
        const __int128 low = IsSigned(i.type) ? -(static_cast<__int128>(1) << (bits - 1)) : 0,
                       high = (static_cast<__int128>(1) << (bits - IsSigned(i.type))) - 1;
        const __int128 wide = BitsOf(i.from) == 64 && !IsSigned(i.from) ? static_cast<__int128>(a[l]) : value;
        value = static_cast<int64_t>(std::clamp(wide, low, high));
      }
      d[l] = Extended(Narrow(value, i.type), i.type);
      return;
    }
    double value;
    if (from_float)
      value = FloatIn(a[l], i.from);
    else
      value = FloatOfInteger(static_cast<uint64_t>(IntegerIn(a[l], i.from)), IsSigned(i.from), i.type != Type::kF64);
    if (i.choice & kFlush && i.from == Type::kF32) value = Flushed(value);
    if (i.other && !(value > 0) && !std::isnan(value)) value = 0;
    if (!to_float) {
      const double whole = Rounded(value, i.choice & 7);
      const int bits = BitsOf(i.type);
      const double low = IsSigned(i.type) ? -std::ldexp(1, bits - 1) : 0, high = std::ldexp(1, bits - IsSigned(i.type));
      if (std::isnan(whole))
        d[l] = bits == 64 || i.from == Type::kF64 ? 1ull << (bits - 1) : 0;
      else if (whole >= high)
        d[l] = Narrow(IsSigned(i.type) ? static_cast<int64_t>((1ull << (bits - 1)) - 1) : -1, i.type);
      else if (whole < low)
        d[l] = Narrow(IsSigned(i.type) ? static_cast<int64_t>(~0ull << (bits - 1)) : 0, i.type);
      else
        d[l] = Narrow(IsSigned(i.type) ? static_cast<int64_t>(whole) : static_cast<int64_t>(static_cast<uint64_t>(whole)), i.type);
      return;
    }
    if (i.choice & kWhole) value = Rounded(value, i.choice & 7);
    if (i.flag) value = value > 0 ? std::min(value, 1.0) : 0;
    if (i.type == Type::kF32 && i.choice & kFlush)
      d[l] = BitsOfFloat(Flushed(ToFloat(value, i.choice & 7)));
    else if (i.type == Type::kF32)
      d[l] = BitsOfFloat(ToFloat(value, i.choice & 7));
    else if (i.type == Type::kF64)
      d[l] = Bits(value);
    else if (i.type == Type::kTF32)
      d[l] = static_cast<uint64_t>(Encode(value, kTF32Format, static_cast<Rounding>(i.choice & 7))) << 13;
    else
      d[l] = Encode(value, FormatOf(i.type), static_cast<Rounding>(i.choice & 7));
  });
}

// Two values into one register: the first operand is the upper half.
void ConvertPair(Warp& w, const Instruction& i, Mask mask) {
  const Row &high = w.Read(i.operands[1]), &low = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  const int bits = BitsOf(i.type) / 2;
  ForLanes(mask, [&](int l) {
    const auto half = [&](uint64_t from) {
      double value = FloatOf(from);
      if (i.other && !(value > 0) && !std::isnan(value)) value = 0;
      return static_cast<uint64_t>(Encode(value, FormatOf(i.type), static_cast<Rounding>(i.choice & 7), i.flag));
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
      double value = Decode(static_cast<uint32_t>(a[l] >> from * n & ((1u << from) - 1)), FormatOf(i.from));
      if (i.other && !(value > 0) && !std::isnan(value)) value = 0;
      return static_cast<uint64_t>(Encode(value, FormatOf(i.type), Rounding::kNearestEven, i.flag));
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
  instruction.flag = m.Take("sat") | m.Take("satfinite"), instruction.other = m.Take("relu");
  const bool pair_from = instruction.from == Type::kE4M3x2 || instruction.from == Type::kE5M2x2 || instruction.from == Type::kF16x2;
  const Type to = instruction.type;
  if (m.Take("ftz")) instruction.choice |= kFlush;
  const auto is_one = [](Type t) {
    return IsFloat(t) || (t >= Type::kU8 && t <= Type::kS64 && t != Type::kB16 && t != Type::kB32 && t != Type::kB64);
  };
  if (pair_from)
    instruction.handler = ConvertHalves;
  else if (to == Type::kF16x2 || to == Type::kBF16x2 || to == Type::kE4M3x2 || to == Type::kE5M2x2)
    instruction.handler = ConvertPair;
  else
    instruction.handler = is_one(to) && is_one(instruction.from) ? Convert : nullptr;
  return instruction.handler != nullptr && m.empty();
}

}  // namespace ptx
