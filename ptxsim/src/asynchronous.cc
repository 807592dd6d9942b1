// mbarrier, bulk copies by tensor maps, and fences between proxies.
#include <algorithm>
#include <utility>

#include "machine.h"

namespace ptx {

namespace {

MBarrier& MBarrierAt(Cta& cta, int64_t address) {
  auto found = cta.mbarriers.find(address);
  if (found == cta.mbarriers.end()) throw Fault("no mbarrier was initialised at ", address);
  return found->second;
}
// As above, for a warp that uses it.
MBarrier& MBarrierAt(const Warp& w, Cta& cta, int64_t address) {
  MBarrier& barrier = MBarrierAt(cta, address);
  if (!Before(w, barrier.made_by, barrier.made_at) && barrier.made_at > w.clocks.Inits(barrier.made_by))
    throw Fault("race: uses ", barrier.name, ", which another warp initialised (", Who(cta, barrier.made_by),
                "), and no barrier is between");
  return barrier;
}
void RequireOwn(const Warp& w, const Cta* cta) {
  if (cta != w.cta) throw Fault("an mbarrier of another block, at which threads can only arrive");
}

void CountBytes(MBarrier& barrier, int64_t bytes) {
  barrier.bytes += bytes;
  if (std::abs(barrier.bytes) >= 1 << 20) throw Fault(barrier.name, " expects ", barrier.bytes, " bytes");
}

void EndPhase(MBarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes < 0)
    throw Fault("all have arrived at ", barrier.name, ", and ", -barrier.bytes, " bytes more than they expect");
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  barrier.arriving.Resize(barrier.clock + 1);
  barrier.arriving.seen[barrier.clock] = barrier.phase;
  barrier.completed = std::exchange(barrier.arriving, {});
}

void Arrive(Warp& w, MBarrier& barrier, int64_t count, int64_t bytes) {
  if (barrier.pending < count) throw Fault("more arrivals at ", barrier.name, " than the ", barrier.expected, " that it expects");
  w.Release(barrier.arriving);
  CountBytes(barrier, bytes), barrier.pending -= count;
  EndPhase(barrier);
}

// The operand that is the address may be the first or, behind a result, the second.
std::pair<Cta*, int64_t> At(Warp& w, const Operand& address, int lane, int64_t bytes = 8) {
  w.lane = lane;
  return InShared(w, w.Read(address)[lane] + address.offset, bytes);
}

void Init(Warp& w, const Instruction& i, Mask mask) {
  const Row& count = w.Read(i.operands[1]);
  ForLanes(mask, [&](int l) {
    auto [cta, at] = At(w, i.operands[0], l);
    if (at % 8) throw Fault("an mbarrier at ", at, ", which is no multiple of 8");
    RequireOwn(w, cta);
    MBarrier barrier;
    barrier.expected = barrier.pending = static_cast<int64_t>(count[l] & 0xffffffff);
    if (barrier.expected < 1 || barrier.expected >= 1 << 20) throw Fault("an mbarrier for ", barrier.expected, " arrivals");
    Cluster& cluster = *cta->cluster;
    barrier.name = "the mbarrier at " + std::to_string(at) + " of block " + std::to_string(cta->rank);
    barrier.clock = cluster.clocks + static_cast<int>(cluster.mbarriers.size());
    barrier.made_by = w.clock_index, barrier.made_at = w.clocks.seen[w.clock_index];
    if (!cta->mbarriers.try_emplace(at, barrier).second) throw Fault("initialises an mbarrier that is one");
    cluster.mbarriers.emplace_back(cta->rank, at);
    MarkMBarrier(w, *cta, at);
  });
}
// mbarrier.arrive{.expect_tx} state, [address], bytes or count; choice 1: expect_tx with it, 2: expect_tx alone
void ArriveAt(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  const size_t first = o[0].address ? 0 : 1;
  ForLanes(mask, [&](int l) {
    auto [cta, at] = At(w, o[first], l);
    const int64_t value = o.size() > first + 1 ? static_cast<int64_t>(w.Read(o[first + 1])[l] & 0xffffffff) : 0;
    MBarrier& barrier = MBarrierAt(w, *cta, at);
    if (i.choice == 2)
      CountBytes(barrier, value);
    else
      Arrive(w, barrier, i.choice == 1 || !value ? 1 : value, i.choice == 1 ? value : 0);
  });
}

// Whether the phase of the parity has ended: it is the one before the current one.
void TryWait(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  Row done{};
  bool all = true;
  Row parity = w.Read(o[2]);
  ForLanes(mask, [&](int l) {
    auto [cta, at] = At(w, o[1], l);
    RequireOwn(w, cta);
    MBarrier& barrier = MBarrierAt(w, *cta, at);
    if (parity[l] > 1) throw Fault("waits for parity ", parity[l]);
    done[l] = (barrier.phase & 1) != parity[l];
    all &= done[l];
  });
  if (all || i.flag) {
    Row& d = w.Write(o[0]);
    ForLanes(mask, [&](int l) {
      auto [cta, at] = At(w, o[1], l);
      d[l] = done[l];
      if (done[l]) w.Acquire(MBarrierAt(*cta, at).completed);
    });
    return;
  }
  // Instead of turning in the kernel's loop, a lane waits; then it executes the instruction again.
  ForLanes(mask, [&](int l) {
    auto [cta, at] = At(w, o[1], l);
    w.Wait(
        l, MBarrierAt(*cta, at).name + ", parity " + std::to_string(parity[l]),
        [cta = cta, at = at, expected = parity[l]] { return (MBarrierAt(*cta, at).phase & 1) != expected; }, true);
  });
}

const TensorMap& MapAt(Warp& w, int lane, uint64_t address) {
  constexpr uint64_t kMagic = 0x70616d20726f736e;  // what the stand-in of cuTensorMapEncode* wrote, and then the index
  w.lane = lane;
  if (address % 64) throw Fault("a tensor map at ", address, ", which is no multiple of 64");
  if (Load(w, lane, Space::kGeneric, address, 8) != kMagic) throw Fault("there is no tensor map at ", address);
  return w.cta->cluster->launch->maps.at(Load(w, lane, Space::kGeneric, address + 8, 8));
}

// Elements along an axis of the box: each step takes one.  The innermost axis has no steps.
int64_t Taken(const TensorMap& map, int axis) {
  return axis == 0 || map.im2col ? map.box[axis] : (map.box[axis] + map.steps[axis] - 1) / map.steps[axis];
}

// Calls visit(offset in the box, address or 0 where it is out of bounds) for each element, in the order in which they lie in shared memory.
template <class F>
void ForBox(const TensorMap& map, const int64_t* coordinates, const int64_t* offsets, F visit) {
  const auto address = [&](const int64_t* at) -> int64_t {
    int64_t sum = map.address;
    for (int a = 0; a < map.rank; ++a) {
      if (at[a] < 0 || at[a] >= map.sizes[a]) return 0;
      sum += at[a] * map.strides[a];
    }
    return sum;
  };
  int64_t offset = 0, at[5];
  if (!map.im2col) {
    int64_t total = 1, index[5] = {};
    for (int a = 0; a < map.rank; ++a) total *= Taken(map, a);
    for (int64_t n = 0; n < total; ++n, offset += map.element_bytes) {
      for (int a = 0; a < map.rank; ++a) at[a] = coordinates[a] + index[a] * (a ? map.steps[a] : 1);
      visit(offset, address(at));
      for (int a = 0; a < map.rank && ++index[a] == Taken(map, a); ++a) index[a] = 0;
    }
    return;
  }
  // Pixels go along the width, height and so on between the corners, then to the next image.
  int64_t pixel[5];
  std::copy(coordinates, coordinates + map.rank, pixel);
  for (int64_t p = 0; p < map.box[1]; ++p) {
    for (int64_t c = 0; c < map.box[0]; ++c, offset += map.element_bytes) {
      at[0] = coordinates[0] + c, at[map.rank - 1] = pixel[map.rank - 1];
      for (int a = 1; a < map.rank - 1; ++a) at[a] = pixel[a] + offsets[a - 1];
      visit(offset, address(at));
    }
    int a = 1;
    for (; a < map.rank - 1; ++a) {
      pixel[a] += map.steps[a];
      if (pixel[a] <= map.sizes[a] - 1 + map.upper[a - 1]) break;
      pixel[a] = map.lower[a - 1];
    }
    if (a == map.rank - 1) ++pixel[a];
  }
}

int64_t BoxBytes(const TensorMap& map) {
  int64_t bytes = map.element_bytes;
  for (int a = 0; a < (map.im2col ? 2 : map.rank); ++a) bytes *= Taken(map, a);
  return bytes;
}

// 16-byte chunks of rows of the box change places by the address's higher bits.
int64_t Swizzled(const TensorMap& map, int64_t address) { return map.swizzle ? address ^ (address >> 3 & (map.swizzle - 16)) : address; }

void CheckAligned(const TensorMap& map, const char* copies, int64_t address) {
  const int64_t align = map.swizzle ? map.swizzle * 8 : 128;
  if (address % align) throw Fault(copies, address, ", which is no multiple of ", align);
}

struct Box {
  const TensorMap* map;
  int64_t coordinates[5], offsets[3] = {};
};

Box BoxOf(Warp& w, const Operand& tensor, int lane) {
  Box box{};
  box.map = &MapAt(w, lane, w.Read(tensor.parts[0])[lane] + tensor.parts[0].offset);
  const auto& at = tensor.parts[1].parts;
  if (static_cast<int64_t>(at.size()) != box.map->rank) throw Fault("a tensor map of rank ", box.map->rank);
  for (size_t a = 0; a < at.size(); ++a) box.coordinates[a] = Get<int32_t>(w.Read(at[a])[lane]);
  return box;
}

// Global memory into shared memory of one block or, with .multicast::cluster, the same place in several.  flag: multicast; other: im2col
void TensorLoad(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  Cluster& cluster = *w.cta->cluster;
  Launch& launch = *cluster.launch;
  ForLanes(mask, [&](int l) {
    Box box = BoxOf(w, o[1], l);
    const TensorMap& map = *box.map;
    if (map.im2col != i.other) throw Fault("the tensor map is of the other kind");
    size_t next = 3;
    if (i.other) {
      for (size_t a = 0; a < o[next].parts.size(); ++a) box.offsets[a] = static_cast<int64_t>(w.Read(o[next].parts[a])[l] & 0xffff);
      ++next;
    }
    const int64_t bytes = BoxBytes(map);
    auto [home, to] = At(w, o[0], l, bytes);
    auto [barrier_home, barrier] = At(w, o[2], l);
    CheckAligned(map, "copies to ", to);
    Mask blocks = 1u << home->rank;
    if (i.flag) blocks = w.Read(o[next])[l] & 0xffff;
    if (blocks >> cluster.ctas.size()) throw Fault("multicasts to blocks that the cluster has not");
    for (int rank = 0; rank < static_cast<int>(cluster.ctas.size()); ++rank) {
      if (!(blocks >> rank & 1)) continue;
      Cta& cta = *cluster.ctas[rank];
      if (cta.threads_left == 0) throw Fault("copies into shared memory of a block that has ended");
      MBarrierAt(w, cta, barrier);
      BeginAsyncWrite(w, cta, to, bytes);
      auto act = [&w, &cta, box, to = to, bytes, barrier = barrier] {
        const TensorMap& map = *box.map;
        ForBox(map, box.coordinates, box.offsets, [&](int64_t offset, int64_t address) {
          uint8_t* place = &cta.shared[Swizzled(map, to + offset)];
          if (address)
            std::memcpy(place, Global(w, address, map.element_bytes, false), map.element_bytes);
          else
            std::memset(place, map.nan_fill ? 0xff : 0, map.element_bytes);
        });
        MBarrier& b = MBarrierAt(cta, barrier);
        EndAsyncWrite(cta, to, bytes, b.clock, b.phase + 1);
        CountBytes(b, -bytes);
        EndPhase(b);
      };
      if (launch.late)
        cluster.copies.emplace_back(rank, act);
      else
        act();
    }
  });
}

// Shared memory into global memory; what lies beyond the array is not written.  CUTLASS's epilogues let a whole warp execute it: the
// machine's instruction (UTMASTG) takes uniform registers, so that equal copies of a warp are one.
void TensorStore(Warp& w, const Instruction& i, Mask mask) {
  const auto& o = i.operands;
  Launch& launch = *w.cta->cluster->launch;
  std::vector<std::pair<Box, uint64_t>> issued;
  ForLanes(mask, [&](int l) {
    const Box box = BoxOf(w, o[0], l);
    const uint64_t source = w.Read(o[1])[l];
    const bool again = std::any_of(issued.begin(), issued.end(), [&](const auto& other) {
      return other.second == source && other.first.map == box.map &&
             std::equal(box.coordinates, box.coordinates + 5, other.first.coordinates);
    });
    if (again) return;
    issued.emplace_back(box, source);
    if (box.map->im2col) throw Fault("the tensor map is of the other kind");
    const int64_t bytes = BoxBytes(*box.map);
    auto [cta, from] = At(w, o[1], l, bytes);
    CheckAligned(*box.map, "copies from ", from);
    BeginAsyncRead(w, *cta, from, bytes);
    auto act = [&w, cta = cta, box, from = from] {
      ForBox(*box.map, box.coordinates, box.offsets, [&](int64_t offset, int64_t address) {
        if (address)
          std::memcpy(Global(w, address, box.map->element_bytes, true), &cta->shared[Swizzled(*box.map, from + offset)],
                      box.map->element_bytes);
      });
    };
    if (launch.late)
      w.open_bulk[l].push_back({act, {{from, bytes}}, {}, {}});
    else
      act(), w.open_bulk[l].push_back({nullptr, {{from, bytes}}, {}, {}});
  });
}
void BulkCommit(Warp& w, const Instruction&, Mask mask) {
  ForLanes(mask, [&](int l) { w.bulk[l].push_back(std::exchange(w.open_bulk[l], {})); });
}
void BulkWait(Warp& w, const Instruction& i, Mask mask) {
  const Row most = w.Read(i.operands[0]);
  ForLanes(mask, [&](int l) {
    for (; w.bulk[l].size() > most[l]; w.bulk[l].pop_front()) {
      for (Asynchronous& copy : w.bulk[l].front()) {
        if (copy.act) copy.act();
        for (auto [address, bytes] : copy.reads) EndAsyncRead(*w.cta, address, bytes, w.clock_index, w.clocks.seen[w.clock_index]);
      }
    }
  });
}

// fence.proxy.async: what is written before it, the async proxy sees after it.
void ProxyFence(Warp& w, const Instruction&, Mask) {
  Clocks& clocks = w.clocks;
  for (size_t n = 0; n < clocks.seen.size(); ++n) clocks.fenced[n] = std::max(clocks.fenced[n], clocks.seen[n]);
  ++clocks.seen[w.clock_index];
}

// fence.mbarrier_init and others: a relaxed arrival at the cluster's barrier releases what came before them.
void InitFence(Warp& w, const Instruction&, Mask) {
  uint32_t& now = w.clocks.seen[w.clock_index];
  w.clocks.inits[w.clock_index] = now++;
}
void Fence(Warp& w, const Instruction&, Mask) { w.Release(w.released); }

// mapa: the address in another block of the cluster.  flag: of a .shared::cluster address, not of a generic one
void MapAddress(Warp& w, const Instruction& i, Mask mask) {
  const Row &a = w.Read(i.operands[1]), &rank = w.Read(i.operands[2]);
  Row& d = w.Write(i.operands[0]);
  ForLanes(mask, [&](int l) {
    w.lane = l;
    if (rank[l] >= w.cta->cluster->ctas.size()) throw Fault("no block ", rank[l], " in the cluster");
    const uint64_t window = a[l] & ~(kWindowSize - 1);
    if (window != (i.flag ? 0 : kSharedWindow)) throw Fault("mapa of an address that is not in shared memory");
    d[l] = window | (a[l] & 0xffffff) | (rank[l] + 1) << 24;
  });
}

}  // namespace

bool DecodeAsynchronous(Instruction& instruction) {
  Modifiers m(instruction);
  const std::string& name = instruction.name;
  Handler& handler = instruction.handler;
  if (name == "fence") {
    handler = m.Take("proxy") && m.Take("async") ? ProxyFence : m.Take("mbarrier_init") ? InitFence : Fence;
    m.Ignore("shared::cta", "shared::cluster", "global", "release", "acquire", "acq_rel", "sc", "cta", "cluster", "gpu", "sys");
    return m.empty();
  }
  if (name == "mapa") {
    m.Ignore("u32", "u64");
    instruction.flag = m.Take("shared::cluster");
    handler = MapAddress;
    return m.empty();
  }
  if (name == "mbarrier") {
    m.Ignore("b64", "shared", "shared::cta", "shared::cluster", "release", "acquire", "cta", "cluster");
    if (m.Take("init"))
      handler = Init;
    else if (m.Take("arrive"))
      handler = ArriveAt, instruction.choice = m.Take("expect_tx") ? 1 : 0;
    else if (m.Take("expect_tx"))
      handler = ArriveAt, instruction.choice = 2, m.Ignore("relaxed");
    else if (instruction.flag = m.Take("test_wait"); instruction.flag || m.Take("try_wait"))
      handler = m.Take("parity") ? TryWait : nullptr;
    return handler != nullptr && m.empty();
  }
  if (name != "cp" || !m.Take("async") || !m.Take("bulk")) return false;
  if (m.Take("commit_group")) return handler = BulkCommit, m.empty();
  if (m.Take("wait_group")) return m.Ignore("read"), handler = BulkWait, m.empty();
  if (m.Take("prefetch")) return handler = Nothing, true;
  if (!m.Take("tensor")) return false;
  m.TakeFirst();  // 3d
  const bool store = instruction.operands[0].parts.size() == 2;
  instruction.flag = m.Take("multicast::cluster"), instruction.other = m.Take("im2col");
  m.Ignore("tile", "global", "shared::cluster", "shared::cta", "bulk_group", "mbarrier::complete_tx::bytes", "L2::cache_hint");
  handler = store ? TensorStore : TensorLoad;
  return m.empty();
}

}  // namespace ptx
