// Memory: where an address leads, and who may access it when.
#include <algorithm>
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

std::string Hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

// Cells of a range of shared memory, and the clocks of their readers.
template <class F>
void ForCells(Cta& cta, int64_t address, int64_t bytes, F f) {
  const int64_t cell = cta.cluster->cell;
  for (int64_t c = address / cell; c <= (address + bytes - 1) / cell; ++c) f(cta.cells[c], &cta.readers[c * cta.cluster->clocks]);
}

}  // namespace

std::string Who(const Cta& cta, int clock) {
  const Cluster& cluster = *cta.cluster;
  if (clock >= cluster.clocks) {
    const auto& [rank, address] = cluster.mbarriers[clock - cluster.clocks];
    return "a copy that ends at the mbarrier at " + std::to_string(address) + " of block " + std::to_string(rank) + " of the cluster";
  }
  const int warps = static_cast<int>(cta.warps.size()), blocks = static_cast<int>(cta.cluster->ctas.size()), groups = (warps + 3) / 4;
  const bool of_group = clock >= blocks * warps;
  const int at = of_group ? clock - blocks * warps : clock, each = of_group ? groups : warps;
  return (of_group ? "a wgmma of warp group " : "warp ") + std::to_string(at % each) + " of block " + std::to_string(at / each) +
         " of the cluster";
}

bool Before(const Warp& warp, int clock, uint32_t when) { return clock == warp.clock_index || when <= warp.clocks.Seen(clock); }

namespace {

void CheckWriter(Warp& warp, Cta& cta, const Cell& cell, const char* does, int64_t address) {
  if (cell.writer >= 0 && !Before(warp, cell.writer, cell.written_at))
    throw Fault("race: ", does, " shared memory at ", address, ", which ", Who(cta, cell.writer), " wrote, and no barrier is between");
}
void CheckReaders(Warp& warp, Cta& cta, const Cell& cell, const uint32_t* readers, const char* does, int64_t address) {
  for (int r = 0; r < cta.cluster->clocks; ++r) {
    if (!Before(warp, r, readers[r]))
      throw Fault("race: ", does, " shared memory at ", address, ", which ", Who(cta, r),
                  (cell.atomic ? " changes by an atomic operation" : " reads"), ", and no barrier is between");
  }
}

// Nothing that the warp has not waited for may have read or written the cell; atomic operations do not race with each other.
void CheckOverwrite(Warp& warp, Cta& cta, const Cell& cell, const uint32_t* readers, int64_t address, bool atomic = false) {
  const auto stop = [&](const char* why) { throw Fault("writes shared memory at ", address, why); };
  if (cell.mbarrier) stop(", which is an mbarrier");
  if (cell.arriving) stop(", into which a copy is under way");
  if (cell.reading) stop(", which a copy or a wgmma under way still reads");
  CheckWriter(warp, cta, cell, "writes", address);
  if (!atomic || !cell.atomic) CheckReaders(warp, cta, cell, readers, "writes", address);
}

// A thread reads what another of its warp wrote, or overwrites what another reads, and nothing orders them.
void CheckLanes(const Warp& warp, const Cell& cell, bool write, int64_t address) {
  const uint32_t now = warp.clocks.seen[warp.clock_index];
  const auto stop = [&](const char* does, const char* other) {
    throw Fault("race: ", does, " shared memory at ", address, ", which ", other, ", and no bar.warp.sync is between");
  };
  const bool written = cell.writer == warp.clock_index && cell.written_at == now && cell.lane >= 0;
  if (!write && written && cell.lane != warp.lane) stop("reads", "another lane of the warp wrote");
  const bool read = cell.reader == warp.clock_index && cell.read_at == now;
  if (write && read && cell.read_by & ~(1u << warp.lane)) stop("writes", "another lane of the warp reads");
}

void LoadShared(Warp& warp, Cta& cta, int64_t address, int bytes, bool atomic) {
  const auto stop = [&](const char* why) { throw Fault("reads shared memory at ", address, why); };
  ForCells(cta, address, bytes, [&](Cell& cell, uint32_t* readers) {
    if (cell.arriving) stop(", into which a copy is under way");
    CheckWriter(warp, cta, cell, "reads", address);
    if (atomic) return;  // the store behind it says that it was here
    if (std::exchange(cell.atomic, false)) CheckReaders(warp, cta, {.atomic = true}, readers, "reads", address);
    CheckLanes(warp, cell, /*write=*/false, address);
    const uint32_t now = readers[warp.clock_index] = warp.clocks.seen[warp.clock_index];
    if (cell.reader != warp.clock_index || cell.read_at != now) cell.reader = warp.clock_index, cell.read_at = now, cell.read_by = 0;
    cell.read_by |= 1u << warp.lane;
  });
  for (int i = 0; i < bytes; ++i) {
    if (!cta.initialised[address + i]) stop(", which nothing has written");
  }
}

}  // namespace

std::pair<Cta*, int64_t> InShared(Warp& warp, uint64_t address, int64_t bytes) {
  Cta* cta = warp.cta;
  const uint64_t block = address >> 24;  // mapa puts the rank + 1 there
  if (block) {
    if (block > cta->cluster->ctas.size()) throw Fault("no shared memory at ", Hex(address));
    cta = cta->cluster->ctas[block - 1].get();
    if (cta->threads_left == 0) throw Fault("accesses shared memory of a block that has ended");
  }
  const int64_t at = address & 0xffffff;
  if (at < kSharedStart || at + bytes > static_cast<int64_t>(cta->shared.size())) {
    throw Fault("outside of shared memory: ", at, " of ", kSharedStart, " to ", cta->shared.size());
  }
  return {cta, at};
}

// Bytes that this launch wrote: blocks of different clusters have no order, and atomic operations do not race with each other.
static void CheckRace(const Warp& warp, Region& region, int64_t at, int64_t bytes, bool write, bool atomic) {
  const Cluster& cluster = *warp.cta->cluster;
  if (region.writers.empty()) {
    if (!write) return;
    region.writers.resize(region.bytes);
  }
  const uint32_t now = warp.clocks.seen[warp.clock_index];
  for (int64_t i = at; i < at + bytes; ++i) {
    const auto check = [&](int32_t number, int32_t clock, uint32_t when) {
      if (number == cluster.number && Before(warp, clock, when)) return;
      throw Fault("race: ", (write ? "writes" : "reads"), " byte ", i, " of an array, which ",
                  (number == cluster.number ? Who(*warp.cta, clock) : "a block of another cluster"), " wrote, and no barrier is between");
    };
    Writer& writer = region.writers[i];
    if (writer.cluster >= 0) check(writer.cluster, writer.clock, writer.at);
    if (atomic) {
      if (write) region.atomics[i][{cluster.number, warp.clock_index}] = now;
      continue;
    }
    if (auto found = region.atomics.find(i); found != region.atomics.end()) {
      for (const auto& [who, when] : found->second) check(who.first, who.second, when);
    }
    if (write) writer = {cluster.number, warp.clock_index, now}, region.atomics.erase(i);
  }
}

uint8_t* Global(const Warp& warp, uint64_t address, int64_t bytes, bool write, bool atomic) {
  Launch& launch = *warp.cta->cluster->launch;
  for (Region& region : launch.regions) {
    const int64_t at = static_cast<int64_t>(address - region.address);
    if (at < 0 || at + bytes > region.bytes) continue;
    if (write) {
      if (!region.written) throw Fault("writes into an input, at byte ", at);
      for (int64_t i = 0; i < bytes; ++i) region.written[at + i] += region.written[at + i] < 255;
    } else if (region.written) {
      if (std::count(region.written + at, region.written + at + bytes, 0))
        throw Fault("reads byte ", at, " of an array, which nothing has written");
    }
    if (region.written) CheckRace(warp, region, at, bytes, write, atomic);
    return region.data + at;
  }
  std::string nearest;
  int64_t least = 1 << 30;
  for (const Region& region : launch.regions) {
    const int64_t at = static_cast<int64_t>(address - region.address), beyond = at < 0 ? -at : at - region.bytes;
    if (beyond < least) least = beyond, nearest = ", byte " + std::to_string(at) + " of an array of " + std::to_string(region.bytes);
  }
  throw Fault(write ? "writes" : "reads", " outside of all arrays: ", Hex(address), nearest);
}

// Generic addresses are those of one of the spaces.
static Space Resolve(Space space, uint64_t& address) {
  if (space != Space::kGeneric && (space != Space::kParam || address < kLocalWindow)) return space;  // a call's arguments are local
  const uint64_t window = address & ~(kWindowSize - 1);
  if (window == kSharedWindow) return address -= window, Space::kCluster;
  if (window == kParamWindow) return address -= window, Space::kParam;
  if (window == kLocalWindow) return address -= window, Space::kLocal;
  return Space::kGlobal;
}

static std::pair<Cta*, int64_t> InShared(Warp& warp, Space space, uint64_t address, int bytes) {
  auto found = InShared(warp, address, bytes);
  if (space == Space::kShared && found.first != warp.cta) throw Fault("an address of another block, and not .shared::cluster");
  return found;
}

static uint8_t* Private(std::vector<uint8_t>& memory, uint64_t address, int bytes, const char* what) {
  if (address + bytes > memory.size()) throw Fault("outside of the ", what, ": byte ", address, " of ", memory.size());
  return memory.data() + address;
}

uint64_t Load(Warp& warp, int lane, Space space, uint64_t address, int bytes, bool atomic) {
  warp.lane = lane;
  Launch& launch = *warp.cta->cluster->launch;
  const uint8_t* from;
  switch (Resolve(space, address)) {
    case Space::kParam:
      from = Private(launch.parameters, address, bytes, "parameters");
      break;
    case Space::kLocal:
      from = Private(warp.local[lane], address, bytes, "thread's own memory");
      break;
    case Space::kShared:
    case Space::kCluster: {
      auto [cta, at] = InShared(warp, space, address, bytes);
      LoadShared(warp, *cta, at, bytes, atomic);
      from = &cta->shared[at];
      break;
    }
    default:
      from = (address & ~(kWindowSize - 1)) == kGlobalsWindow
                 ? Private(launch.globals, address - kGlobalsWindow, bytes, "module's variables")
                 : Global(warp, address, bytes, false, atomic);
  }
  uint64_t value = 0;
  std::memcpy(&value, from, bytes);
  return value;
}

void Store(Warp& warp, int lane, Space space, uint64_t address, int bytes, uint64_t value, bool atomic) {
  warp.lane = lane;
  uint8_t* to;
  switch (Resolve(space, address)) {
    case Space::kParam:
      throw Fault("writes a parameter");
    case Space::kLocal:
      to = Private(warp.local[lane], address, bytes, "thread's own memory");
      break;
    case Space::kShared:
    case Space::kCluster: {
      auto [cta, at] = InShared(warp, space, address, bytes);
      // Warps that hold the same data both write it, as Triton's do.
      const bool again =
          std::count(&cta->initialised[at], &cta->initialised[at] + bytes, 1) == bytes && !std::memcmp(&cta->shared[at], &value, bytes);
      ForCells(*cta, at, bytes, [&, cta = cta, at = at](Cell& cell, uint32_t* readers) {
        const bool free = !cell.mbarrier && !cell.arriving && !cell.reading;
        if (again && free && cell.writer >= 0 && !Before(warp, cell.writer, cell.written_at)) return;
        CheckOverwrite(warp, *cta, cell, readers, at, atomic);
        if (!atomic && !again) CheckLanes(warp, cell, /*write=*/true, at);
        const uint32_t now = warp.clocks.seen[warp.clock_index];
        cell.atomic = atomic;
        if (atomic) {
          readers[warp.clock_index] = now;
        } else {
          const bool others = again && cell.writer == warp.clock_index && cell.written_at == now && cell.lane != lane;
          cell.writer = static_cast<int16_t>(warp.clock_index), cell.written_at = now, cell.lane = others ? -1 : lane;
        }
      });
      std::memset(&cta->initialised[at], 1, bytes);
      to = &cta->shared[at];
      break;
    }
    default:
      to = Global(warp, address, bytes, true, atomic);
  }
  std::memcpy(to, &value, bytes);
}

void BeginAsyncRead(Warp& issuer, Cta& cta, int64_t address, int64_t bytes) {
  const auto stop = [&](const std::string& why) { throw Fault("reads shared memory at ", address, why); };
  const auto check_fenced = [&](int clock, uint32_t when) {
    if (clock < cta.cluster->clocks && issuer.clocks.fenced[clock] < when)
      stop(" by the async proxy, and no fence.proxy.async follows the write of " + Who(cta, clock));
  };
  ForCells(cta, address, bytes, [&](Cell& cell, uint32_t* readers) {
    if (cell.arriving) stop(", into which a copy is under way");
    CheckWriter(issuer, cta, cell, "reads", address);
    if (cell.writer >= 0) check_fenced(cell.writer, cell.written_at);
    if (cell.atomic) {
      CheckReaders(issuer, cta, cell, readers, "reads", address);
      for (int r = 0; r < cta.cluster->clocks; ++r) check_fenced(r, readers[r]);
    }
    ++cell.reading;
  });
  for (int64_t i = 0; i < bytes; ++i) {
    if (!cta.initialised[address + i]) stop(" + " + std::to_string(i) + ", which nothing has written");
  }
}

void EndAsyncRead(Cta& cta, int64_t address, int64_t bytes, int clock, uint32_t when) {
  ForCells(cta, address, bytes, [&](Cell& cell, uint32_t* readers) {
    --cell.reading;
    readers[clock] = when;
  });
}

void BeginAsyncWrite(Warp& issuer, Cta& cta, int64_t address, int64_t bytes) {
  ForCells(cta, address, bytes, [&](Cell& cell, uint32_t* readers) {
    CheckOverwrite(issuer, cta, cell, readers, address);
    cell.arriving = true;
  });
}

void EndAsyncWrite(Cta& cta, int64_t address, int64_t bytes, int clock, uint32_t when) {
  ForCells(cta, address, bytes, [&](Cell& cell, uint32_t*) {
    cell.arriving = cell.atomic = false;
    cell.writer = static_cast<int16_t>(clock), cell.written_at = when, cell.lane = -1;
  });
  std::memset(&cta.initialised[address], 1, bytes);
}

void MarkMBarrier(Warp& warp, Cta& cta, int64_t address) {
  ForCells(cta, address, 8, [&](Cell& cell, uint32_t* readers) {
    CheckOverwrite(warp, cta, cell, readers, address);
    cell = {}, cell.mbarrier = true;
    cell.writer = static_cast<int16_t>(warp.clock_index), cell.written_at = warp.clocks.seen[warp.clock_index];
  });
  std::memset(&cta.initialised[address], 0, 8);
}

}  // namespace ptx
