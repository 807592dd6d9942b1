// Control flow, barriers, and what lanes of a warp exchange.
#include <algorithm>
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

void Branch(Warp& w, const Instruction& i, Mask mask) {
  if (mask == w.active) {
    w.next = i.target;
    return;
  }
  if (i.flag) throw Fault("lanes disagree on bra.uni");
  w.Diverge();
  ForLanes(mask, [&](int l) { w.pc[l] = i.target; });
}

void Complete(Barrier& barrier) {
  barrier.held = std::exchange(barrier.holds, 0), barrier.voted = barrier.arrived;
  barrier.arrived = 0;
  ++barrier.generation;
  barrier.completed = std::exchange(barrier.arriving, {});
}

// Until the generation of arrivals is complete; `then` is done behind it.
template <class F>
void Await(Warp& w, Mask mask, Barrier& barrier, uint32_t generation, const std::string& what, F then) {
  const auto complete = [&w, &barrier, generation, then] {
    if (barrier.generation == generation) return false;
    w.Acquire(barrier.completed);
    then();
    return true;
  };
  if (!complete()) ForLanes(mask, [&](int l) { w.Wait(l, what, complete, false); });
}

// ret and exit
void End(Warp& w, const Instruction&, Mask mask) {
  if (!w.open_wgmma.empty() || !w.wgmma_groups.empty()) throw Fault("ends while a wgmma is under way");
  w.Diverge();
  Cta& cta = *w.cta;
  ForLanes(mask, [&](int l) {
    w.lane = l;
    for (auto& group : w.bulk[l]) {
      for (auto& copy : group) {
        if (!copy.reads.empty()) throw Fault("ends while a bulk copy out of shared memory is under way");
      }
    }
    if (!w.open_bulk[l].empty()) throw Fault("ends with a bulk copy that no group has");
    w.state[l] = State::kEnded;
    --cta.threads_left;
  });
  for (Barrier& barrier : cta.barriers) {  // those that want all threads want those that are left
    if (barrier.wanted < 0 && barrier.arrived && barrier.arrived >= cta.threads_left) Complete(barrier);
  }
  Barrier& barrier = cta.cluster->barrier;
  if (w.cluster_waits != static_cast<int64_t>(barrier.generation)) {  // these threads will not arrive any more
    barrier.wanted -= __builtin_popcount(mask);
    if (barrier.arrived && barrier.arrived == barrier.wanted) Complete(barrier);
  }
}

// bar.sync, bar.arrive (flag) and bar.red (choice: popc, and, or), barrier with them.  Operands: red's result, number, threads, and
// red's predicate
void Bar(Warp& w, const Instruction& i, Mask mask) {
  if (!w.Together(kAll)) return;
  const bool red = i.choice != 0;
  const size_t counts = i.operands.size() - 2 * red;
  const auto operand = [&](size_t n) { return static_cast<int64_t>(w.Read(i.operands[n + red])[__builtin_ctz(mask)]); };
  const int64_t number = counts == 0 ? 0 : operand(0);
  if (number < 0 || number > 15) throw Fault("barrier ", number);
  Cta& cta = *w.cta;
  Barrier& barrier = cta.barriers[number];
  const bool all = counts < 2;
  const int64_t wanted = all ? -1 : operand(1);
  if (barrier.arrived && barrier.wanted != wanted)
    throw Fault("barrier ", number, " for ", wanted, " threads, and others wait at it for ", barrier.wanted);
  if (!all && (wanted <= 0 || wanted % kLanes)) throw Fault("a barrier of ", wanted, " threads");
  barrier.wanted = wanted;
  barrier.arrived += all ? __builtin_popcount(mask) : kLanes;
  if (red) barrier.holds += __builtin_popcount(w.Predicate(i.operands.back()) & mask);
  w.Release(barrier.arriving);
  const int64_t limit = all ? cta.threads_left : wanted;
  if (barrier.arrived > limit) throw Fault("more threads than wanted at barrier ", number);
  const uint32_t generation = barrier.generation;
  if (barrier.arrived == limit) Complete(barrier);
  if (i.flag) return;
  const auto result = [&w, &i, &barrier, mask] {
    const int64_t value = i.choice == 1 ? barrier.held : i.choice == 2 ? barrier.held == barrier.voted : barrier.held > 0;
    Row& d = w.Write(i.operands[0]);
    ForLanes(mask, [&](int l) { d[l] = static_cast<uint64_t>(value); });
  };
  const std::string what = Text("barrier ", number, " (", barrier.arrived, " threads have come)");
  if (red)
    Await(w, mask, barrier, generation, what, result);
  else
    Await(w, mask, barrier, generation, what, [] {});
}

// One of some lanes counts for all.
void BarWarp(Warp& w, const Instruction& i, Mask mask) {
  if (w.Together(static_cast<Mask>(w.Read(i.operands[0])[__builtin_ctz(mask)]))) w.Tick();
}

// barrier.cluster.arrive and wait: each thread remembers for which generation it has arrived, in the order of the program.
void ClusterArrive(Warp& w, const Instruction& i, Mask mask) {
  if (!w.Together(kAll)) return;
  Cluster& cluster = *w.cta->cluster;
  Barrier& barrier = cluster.barrier;
  if (i.flag)  // .relaxed orders only what a fence before it did
    barrier.arriving.Join(w.released), barrier.arriving.JoinInits(w.clocks);
  else
    w.Release(barrier.arriving);
  if (w.cluster_waits >= 0) throw Fault("arrives twice at the cluster's barrier");
  w.cluster_waits = barrier.generation;
  if ((barrier.arrived += __builtin_popcount(mask)) == barrier.wanted) Complete(barrier);
}
void ClusterWait(Warp& w, const Instruction&, Mask mask) {
  if (!w.Together(kAll)) return;
  Barrier& barrier = w.cta->cluster->barrier;
  if (w.cluster_waits < 0) throw Fault("waits at the cluster's barrier, where it has not arrived");
  const uint32_t generation = static_cast<uint32_t>(std::exchange(w.cluster_waits, -1));
  Await(w, mask, barrier, generation, "the cluster's barrier", [] {});
}

Mask MaskOperand(Warp& w, const Operand& operand, Mask mask) { return static_cast<Mask>(w.Read(operand)[__builtin_ctz(mask)]); }

// shfl.sync d|p, a, b, c, membermask.  choice: up, down, bfly, idx
void Shuffle(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  if (!w.Together(MaskOperand(w, o[4], mask))) return;
  const Row a = w.Read(o[1]), b = w.Read(o[2]), c = w.Read(o[3]);
  Mask inside = 0;
  std::array<int, kLanes> source;
  ForLanes(mask, [&](int l) {
    const int clamp = c[l] & 31, segment = c[l] >> 8 & 31, by = b[l] & 31;
    const int last = (l & segment) | (clamp & ~segment), first = l & segment;
    int from;
    bool ok;
    switch (i.choice) {
      case 0:
        from = l - by, ok = from >= last;
        break;  // c is the lowest lane here
      case 1:
        from = l + by, ok = from <= last;
        break;
      case 2:
        from = l ^ by, ok = from <= last;
        break;
      default:
        from = first | (by & ~segment), ok = from <= last;
    }
    if (!ok) from = l;
    w.lane = l;
    if (!(mask >> from & 1)) throw Fault("shuffles from lane ", from, ", which does not take part");
    source[l] = from;
    inside |= static_cast<Mask>(ok) << l;
  });
  WriteOneOrTwo(w, o[0], mask, [&](int l) { return a[source[l]] & 0xffffffff; }, [&](int l) { return inside >> l & 1; });
}

// vote.sync.{ballot, any, all, uni} d, p, membermask
void Vote(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  if (!w.Together(MaskOperand(w, o[2], mask))) return;
  const Mask p = w.Predicate(o[1]) & mask;
  const uint64_t result = i.choice == 0 ? p : i.choice == 1 ? p != 0 : i.choice == 2 ? p == mask : p == mask || p == 0;
  Row& d = w.Write(o[0]);
  ForLanes(mask, [&](int l) { d[l] = result; });
}

// match.any.sync d, a, membermask: lanes with the same value; match.all (flag) d|p: all if all have it
void Match(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  if (!w.Together(MaskOperand(w, o[2], mask))) return;
  const Row a = w.Read(o[1]);
  const uint64_t width = Ones(BitsOf(i.type));
  std::array<Mask, kLanes> same{};
  ForLanes(mask, [&](int l) { ForLanes(mask, [&](int k) { same[l] |= static_cast<Mask>(((a[l] ^ a[k]) & width) == 0) << k; }); });
  WriteOneOrTwo(w, o[0], mask, [&](int l) { return i.flag && same[l] != mask ? 0 : same[l]; }, [&](int l) { return same[l] == mask; });
}

void Redux(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  if (!w.Together(MaskOperand(w, o[2], mask))) return;
  const Row a = w.Read(o[1]);
  bool first = true;
  int64_t result = 0;
  ForLanes(mask, [&](int l) {
    const int64_t x = IsSigned(i.type) ? Get<int32_t>(a[l]) : static_cast<int64_t>(a[l] & 0xffffffff);
    result = first           ? x
             : i.choice == 0 ? result + x
             : i.choice == 1 ? std::min(result, x)
             : i.choice == 2 ? std::max(result, x)
             : i.choice == 3 ? result & x
             : i.choice == 4 ? result | x
                             : result ^ x;
    first = false;
  });
  Row& d = w.Write(o[0]);
  ForLanes(mask, [&](int l) { d[l] = result & 0xffffffff; });
}

// elect.sync d|p, membermask: the lowest lane
void Elect(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  if (!w.Together(MaskOperand(w, o[1], mask))) return;
  const int leader = __builtin_ctz(mask);
  WriteOneOrTwo(w, o[0], mask, [&](int) { return leader; }, [&](int l) { return l == leader; });
}

void ActiveMask(Warp& w, const Instruction& i, Mask mask) {
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) { d[l] = mask; });
}

// Registers move between the warp groups of a block; together they have no more than there are.
void SetMaxNReg(Warp& w, const Instruction& i, Mask mask) {
  if (!w.Together(kAll)) return;
  const int64_t registers = static_cast<int64_t>(w.Read(i.operands[0])[__builtin_ctz(mask)]);
  if (registers < 24 || registers > 256 || registers % 8) throw Fault("setmaxnreg ", registers);
  w.registers = static_cast<int>(registers);
  int64_t sum = 0;
  for (auto& other : w.cta->warps) sum += other->registers * kLanes;
  if (sum > 65536) throw Fault("setmaxnreg: warps of the block have ", sum, " registers, more than 65536");
}

void Trap(Warp&, const Instruction&, Mask) { throw Fault("the kernel traps"); }

}  // namespace

bool DecodeWarp(Instruction& instruction) {
  Modifiers m(instruction);
  const std::string& name = instruction.name;
  Handler& handler = instruction.handler;
  if (name == "bra") {
    instruction.flag = m.Take("uni");
    handler = Branch;
  } else if (name == "ret" || name == "exit") {
    m.Ignore("uni");
    handler = End;
  } else if (name == "trap" || name == "brkpt") {
    handler = Trap;
  } else if (name == "bar" || name == "barrier") {
    if (m.Take("cluster")) {
      instruction.flag = m.Take("relaxed");
      m.Ignore("aligned", "release", "acquire");
      handler = m.Take("arrive") ? ClusterArrive : m.Take("wait") ? ClusterWait : nullptr;
    } else if (m.Take("warp")) {
      handler = m.Take("sync") ? BarWarp : nullptr;
    } else {
      m.Ignore("cta", "aligned");
      instruction.flag = m.Take("arrive");
      if (m.Take("red")) {
        instruction.choice = m.Take("popc") ? 1 : m.Take("and") ? 2 : (m.Take("or"), 3);
        m.Ignore("u32", "pred");
      }
      handler = instruction.flag || instruction.choice || m.Take("sync") ? Bar : nullptr;
    }
  } else if (name == "shfl" && m.Take("sync")) {
    instruction.choice = m.Take("up") ? 0 : m.Take("down") ? 1 : m.Take("bfly") ? 2 : (m.Take("idx"), 3);
    handler = m.Take("b32") ? Shuffle : nullptr;
  } else if (name == "vote" && m.Take("sync")) {
    instruction.choice = m.Take("ballot") ? 0 : m.Take("any") ? 1 : m.Take("all") ? 2 : (m.Take("uni"), 3);
    m.Ignore("b32", "pred");
    handler = Vote;
  } else if (name == "match" && m.Take("sync")) {
    instruction.type = m.TakeType(), instruction.flag = m.Take("all");
    handler = instruction.flag || m.Take("any") ? Match : nullptr;
  } else if (name == "redux" && m.Take("sync")) {
    instruction.type = m.TakeType();
    instruction.choice = m.Take("add")   ? 0
                         : m.Take("min") ? 1
                         : m.Take("max") ? 2
                         : m.Take("and") ? 3
                         : m.Take("or")  ? 4
                                         : (m.Take("xor"), 5);
    handler = Redux;
  } else if (name == "elect" && m.Take("sync")) {
    handler = Elect;
  } else if (name == "activemask") {
    m.Ignore("b32");
    handler = ActiveMask;
  } else if (name == "setmaxnreg") {
    m.Ignore("inc", "dec", "sync", "aligned", "u32");
    handler = SetMaxNReg;
  } else if (name == "membar" || name == "griddepcontrol" || name == "nanosleep" || name == "pmevent" || name == "prefetch" ||
             name == "prefetchu" || name == "discard" || name == "applypriority") {
    return handler = Nothing, true;
  }
  return handler != nullptr && m.empty();
}

}  // namespace ptx
