// Loads, stores, atomic operations and cp.async.
#include <algorithm>
#include <iterator>
#include <utility>

#include "floats.h"
#include "machine.h"

namespace ptx {
namespace {

Space TakeSpace(Modifiers& m) {
  return m.Take("global")                            ? Space::kGlobal
         : m.Take("shared::cluster")                 ? Space::kCluster
         : m.Take("shared::cta") || m.Take("shared") ? Space::kShared
         : m.Take("param") || m.Take("param::entry") ? Space::kParam
         : m.Take("local")                           ? Space::kLocal
         : m.Take("const")                           ? Space::kGlobal
                                                     : Space::kGeneric;
}

void CheckAligned(Warp& w, int lane, uint64_t address, int bytes) {
  w.lane = lane;
  if (address % bytes) throw Fault("address ", address, " is no multiple of ", bytes);
}

template <class F>
void ForParts(const Operand& operand, F f) {
  if (operand.parts.empty()) return f(operand, 0);
  for (size_t n = 0; n < operand.parts.size(); ++n) f(operand.parts[n], static_cast<int>(n));
}

void Ld(Warp& w, const Instruction& i, Mask mask) {
  const Operand& address = i.operands[1];
  const int bytes = BitsOf(i.type) / 8;
  std::array<uint64_t, kLanes> from;
  const Row& base = w.Read(address);
  ForLanes(mask, [&](int l) {
    from[l] = base[l] + address.offset;
    CheckAligned(w, l, from[l], bytes * i.count);
  });
  ForParts(i.operands[0], [&](const Operand& to, int n) {
    Row& d = w.Write(to);
    const uint64_t width = Ones(to.slot < 0 ? 64 : w.kernel->slot_bits[to.slot]);  // of the register, to which a number is extended
    ForLanes(mask, [&](int l) { d[l] = IntegerIn(Load(w, l, i.space, from[l] + n * bytes, bytes), i.type) & width; });
  });
}

void St(Warp& w, const Instruction& i, Mask mask) {
  const Operand& address = i.operands[0];
  const int bytes = BitsOf(i.type) / 8;
  const Row& base = w.Read(address);
  ForLanes(mask, [&](int l) { CheckAligned(w, l, base[l] + address.offset, bytes * i.count); });
  ForParts(i.operands[1], [&](const Operand& from, int n) {
    const Row& a = w.Read(from);
    ForLanes(mask, [&](int l) { Store(w, l, i.space, base[l] + address.offset + n * bytes, bytes, a[l]); });
  });
}

enum Atomic { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
constexpr std::string_view kAtomics[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};

// What the memory holds afterwards; c: of cas.
uint64_t After(const Instruction& i, uint64_t old, uint64_t b, uint64_t c) {
  const Type type = i.type;
  const uint64_t width = Ones(BitsOf(type));
  const auto least = [&](bool less) { return less == (i.choice == kMin) ? old : b; };
  const auto half = [&](int shift) {
    const Format f = FormatOf(type);
    return static_cast<uint64_t>(Encode(Decode(old >> shift & 0xffff, f) + Decode(b >> shift & 0xffff, f), f)) << shift;
  };
  b &= width;
  switch (i.choice) {
    case kAdd:
      return type == Type::kF32                              ? BitsOfFloat(FloatOf(old) + FloatOf(b))
             : type == Type::kF64                            ? Bits(Get<double>(old) + Get<double>(b))
             : type == Type::kF16 || type == Type::kBF16     ? half(0)
             : type == Type::kF16x2 || type == Type::kBF16x2 ? half(0) | half(16)
                                                             : (old + b) & width;
    case kMin:
    case kMax:
      return IsSigned(type) ? least(IntegerIn(old, type) < IntegerIn(b, type)) : least(old < b);
    case kAnd:
      return old & b;
    case kOr:
      return old | b;
    case kXor:
      return old ^ b;
    case kExch:
      return b;
    case kCas:
      return old == b ? c & width : old;
    case kInc:
      return old >= b ? 0 : old + 1;
    default:
      return old == 0 || old > b ? b : old - 1;
  }
}

// atom and red (flag), a lane after the other
void Atom(Warp& w, const Instruction& i, Mask mask) {
  const size_t first = i.flag ? 0 : 1;
  const Operand& address = i.operands[first];
  const Row base = w.Read(address), a = w.Read(i.operands[first + 1]), c = w.Read(i.operands.back());
  const int bytes = BitsOf(i.type) / 8;
  Row* d = i.flag ? nullptr : &w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    const uint64_t at = base[l] + address.offset;
    CheckAligned(w, l, at, bytes);
    const uint64_t old = Load(w, l, i.space, at, bytes, true);
    Store(w, l, i.space, at, bytes, After(i, old, a[l], c[l]), true);
    if (d) (*d)[l] = old;
  });
}

// cp.async: bytes of the source beyond its fourth operand's count are zeros.
void CpAsync(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const Row &to = w.Read(o[0]), &from = w.Read(o[1]), &count = w.Read(o[2]);
  const Row& read = w.Read(o.size() > 3 ? o[3] : o[2]);
  ForLanes(mask, [&](int l) {
    const int bytes = static_cast<int>(count[l]), given = static_cast<int>(read[l] & 0xffffffff);
    const uint64_t address = from[l] + o[1].offset;
    if (bytes != 4 && bytes != 8 && bytes != 16) throw Fault("copies ", bytes, " bytes");
    CheckAligned(w, l, to[l] + o[0].offset, bytes);
    CheckAligned(w, l, address, bytes);
    if (given < 0 || given > bytes) throw Fault("copies ", given, " of ", bytes, " bytes");
    auto [cta, at] = InShared(w, to[l] + o[0].offset, bytes);
    if (given) Global(w, address, given, false);
    BeginAsyncWrite(w, *cta, at, bytes);
    const auto copy = [&w, cta = cta, at = at, bytes, given, address] {
      if (given) std::memcpy(&cta->shared[at], Global(w, address, given, false), given);
      std::memset(&cta->shared[at + given], 0, bytes - given);
    };
    const bool late = cta->cluster->launch->late;
    if (!late) copy();
    auto act = [&w, cta = cta, at = at, bytes, copy, late] {
      if (late) copy();
      // It is an access of the generic proxy: the warp's own, from when it has waited on.
      EndAsyncWrite(*cta, at, bytes, w.clock_index, w.clocks.seen[w.clock_index]);
    };
    w.open_copies[l].push_back({act, {}, {}, {}});
  });
}
void CommitCopies(Warp& w, const Instruction&, Mask mask) {
  ForLanes(mask, [&](int l) { w.copies[l].push_back(std::exchange(w.open_copies[l], {})); });
}
// Until no more than the given number of groups are under way.
void WaitCopies(Warp& w, const Instruction& i, Mask mask) {
  if (i.operands.empty()) CommitCopies(w, i, mask);
  ForLanes(mask, [&](int l) {
    const size_t most = i.operands.empty() ? 0 : w.Read(i.operands[0])[l];
    for (; w.copies[l].size() > most; w.copies[l].pop_front()) {
      for (auto& copy : w.copies[l].front()) copy.act();
    }
  });
}

}  // namespace

bool DecodeMemory(Instruction& instruction) {
  Modifiers m(instruction);
  const std::string& name = instruction.name;
  if (name == "cp" && m.Take("async") && !m.Take("bulk")) {
    if (m.Take("commit_group")) return instruction.handler = CommitCopies, m.empty();
    if (m.Take("wait_group") || m.Take("wait_all")) return instruction.handler = WaitCopies, m.empty();
    m.Ignore("ca", "cg", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B");
    return instruction.handler = CpAsync, m.empty();
  }
  const bool load = name == "ld" || name == "ldu", atom = name == "atom" || name == "red";
  if (!load && name != "st" && !atom) return false;
  instruction.type = m.TakeType();
  m.Ignore("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys", "cluster");
  instruction.space = TakeSpace(m);
  if (atom) {
    instruction.flag = name == "red";
    instruction.handler = Atom;
    const auto operation = std::find_if(std::begin(kAtomics), std::end(kAtomics), [&](auto n) { return m.Take(n); });
    instruction.choice = static_cast<int>(operation - kAtomics);
    m.Ignore("noftz");
    const int bits = BitsOf(instruction.type);
    const bool integer = instruction.type >= Type::kB16 && instruction.type <= Type::kS64 && bits >= (instruction.choice == kCas ? 16 : 32);
    const bool number = instruction.type >= Type::kF16 && instruction.type <= Type::kF64 && instruction.type != Type::kTF32;
    return instruction.choice <= kDec && m.empty() && (integer || (number && instruction.choice == kAdd));
  }
  instruction.count = m.Take("v2") ? 2 : m.Take("v4") ? 4 : m.Take("v8") ? 8 : 1;
  m.Ignore("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "L1::evict_normal",
           "L2::cache_hint", "L2::128B", "L2::256B", "L2::64B");
  instruction.handler = load ? Ld : St;
  return m.empty() && instruction.type != Type::kNone && BitsOf(instruction.type) <= 64;
}

}  // namespace ptx
