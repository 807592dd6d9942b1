// How warps run: which lanes execute together, who waits, and what is done when nobody can go on.
#include "machine.h"

#include <algorithm>
#include <climits>
#include <sstream>

namespace ptx {

void Clocks::Resize(size_t size) {
  if (seen.size() < size) seen.resize(size), fenced.resize(size), inits.resize(size);
}

void Clocks::Join(const Clocks& other) {
  JoinInits(other);
  for (size_t i = 0; i < other.seen.size(); ++i) {
    seen[i] = std::max(seen[i], other.seen[i]);
    fenced[i] = std::max(fenced[i], other.fenced[i]);
  }
}

void Clocks::JoinInits(const Clocks& other) {
  Resize(other.seen.size());
  for (size_t i = 0; i < other.inits.size(); ++i) inits[i] = std::max(inits[i], other.inits[i]);
}

void Warp::Release(Clocks& into) {
  into.Join(clocks);
  Tick();
}

void Warp::Acquire(const Clocks& from) {
  if (!from.seen.empty()) clocks.Join(from);
}

void Warp::CheckFlight(int slot) {
  if (in_flight[slot]) throw Fault("accesses ", kernel->slot_names[slot], ", which a wgmma under way writes");
}

void Warp::CheckTaken(int slot) {
  if (taken[slot]) throw Fault("writes ", kernel->slot_names[slot], ", which a wgmma under way reads");
}

Mask Warp::Predicate(const Operand& operand) {
  const Row& row = Read(operand);
  Mask mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) mask |= static_cast<Mask>(row[lane] & 1) << lane;
  return operand.negated ? ~mask : mask;
}

Mask Warp::Alive() const {
  Mask alive = 0;
  for (int lane = 0; lane < kLanes; ++lane) alive |= static_cast<Mask>(state[lane] != State::kEnded) << lane;
  return alive;
}

void Warp::Diverge() {
  if (moved) return;
  moved = true;
  ForLanes(active, [&](int i) { pc[i] = at + 1; });
}

void Warp::Wait(int i, std::string what, std::function<bool()> condition, bool repeat) {
  Diverge();
  pc[i] = repeat ? at : at + 1;
  state[i] = State::kWaits;
  ready[i] = std::move(condition);
  waits_for[i] = std::move(what) + ", line " + std::to_string(kernel->code[at].line);
}

bool Warp::Together(Mask wanted) {
  const Instruction& instruction = kernel->code[at];
  const Mask here = instruction.guard.slot < 0 ? active : active & Predicate(instruction.guard);
  if ((wanted & Alive() & ~here) == 0) return true;
  Diverge();
  ForLanes(here, [&](int i) {
    pc[i] = at, parked[i] = true, waits_for[i] = "other lanes of its warp, line " + std::to_string(instruction.line);
  });
  alive_when_parked = Alive();
  return false;
}

namespace {

// Chooses the lanes that stand at the lowest instruction, so that lanes meet again where their ways do.  False: none can go on.
bool Choose(Warp& w, int& others) {
  int at = INT_MAX;
  bool parked = false;
  for (int i = 0; i < kLanes; ++i) {
    if (w.state[i] == State::kWaits && w.ready[i]()) w.state[i] = State::kReady;
    if (w.state[i] != State::kReady) continue;
    if (w.parked[i])
      parked = true;
    else
      at = std::min(at, w.pc[i]);
  }
  if (at == INT_MAX && parked && w.alive_when_parked != w.Alive()) {  // those that they waited for have ended
    w.parked.fill(false);
    return Choose(w, others);
  }
  if (at == INT_MAX) return false;
  w.at = at, w.active = 0, others = INT_MAX;
  for (int i = 0; i < kLanes; ++i) {
    if (w.state[i] != State::kReady) continue;
    if (w.pc[i] == at)
      w.active |= 1u << i, w.parked[i] = false;
    else
      others = std::min(others, w.pc[i]);
  }
  return true;
}

// Runs a warp until none of its lanes can go on; whether any could.
bool RunWarp(Warp& w) {
  Launch& launch = *w.cta->cluster->launch;
  const auto& code = w.kernel->code;
  int others;
  bool progress = false;
  while (Choose(w, others)) {
    progress = true;
    w.moved = false;
    while (!w.moved) {
      if (w.at >= static_cast<int>(code.size())) throw Fault("runs behind the kernel's last instruction");
      const Instruction& instruction = code[w.at];
      if (++launch.steps > launch.most_steps) throw Fault("more than ", launch.most_steps, " instructions");
      const Mask mask = instruction.guard.slot < 0 ? w.active : w.active & w.Predicate(instruction.guard);
      w.next = w.at + 1;
      w.lane = -1;
      if (mask) launch.executed[w.at] = 1, instruction.handler(w, instruction, mask);
      if (w.moved) break;
      w.at = w.next;
      if (w.at >= others) {
        ForLanes(w.active, [&](int i) { w.pc[i] = w.at; });
        break;
      }
    }
  }
  return progress;
}

std::string Where(const Warp& w) {
  const Instruction& i = w.kernel->code[std::min<size_t>(w.at, w.kernel->code.size() - 1)];
  std::ostringstream out;
  out << "\n  at line " << i.line << ": " << i.text;
  if (i.source_line) out << "\n  of line " << i.source_line << " of the kernel's source";
  out << "\n  block (" << w.cta->index[0] << ", " << w.cta->index[1] << ", " << w.cta->index[2] << "), warp " << w.index;
  if (w.lane >= 0) out << ", thread " << w.index * kLanes + w.lane;
  return out.str();
}

std::string WhoWaits(Cluster& cluster) {
  std::ostringstream out;
  for (auto& cta : cluster.ctas) {
    for (auto& w : cta->warps) {
      std::map<std::string, Mask> waiting;
      for (int i = 0; i < kLanes; ++i) {
        if (w->state[i] != State::kEnded) waiting[w->waits_for[i]] |= 1u << i;
      }
      for (auto& [what, lanes] : waiting)
        out << "\n  block " << cta->rank << " of the cluster, warp " << w->index << ", " << __builtin_popcount(lanes) << " lanes: for "
            << what;
    }
    for (auto& [_, barrier] : cta->mbarriers) {
      if (barrier.pending == barrier.expected && barrier.bytes == 0) continue;
      out << "\n  " << barrier.name << " lacks " << barrier.pending << " of " << barrier.expected << " arrivals and " << barrier.bytes
          << " bytes";
    }
  }
  return out.str();
}

void FillSpecials(Warp& w, const Launch& launch) {
  const auto &b = launch.block, &c = launch.cluster, &g = launch.grid, &at = w.cta->index;
  std::map<std::string, uint32_t> values = {
      {"%cluster_ctarank", w.cta->rank}, {"%cluster_nctarank", c[0] * c[1] * c[2]}, {"%warpid", w.index}};
  for (int a = 0; a < 3; ++a) {
    const std::string axis{'.', "xyz"[a]};
    values["%ntid" + axis] = b[a];
    values["%ctaid" + axis] = at[a];
    values["%nctaid" + axis] = g[a];
    values["%cluster_ctaid" + axis] = at[a] % c[a];
    values["%cluster_nctaid" + axis] = c[a];
    values["%clusterid" + axis] = at[a] / c[a];
    values["%nclusterid" + axis] = g[a] / c[a];
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t thread = w.index * kLanes + lane;
    values["%tid.x"] = thread % b[0];
    values["%tid.y"] = thread / b[0] % b[1];
    values["%tid.z"] = thread / b[0] / b[1];
    values["%laneid"] = lane;
    values["%lanemask_lt"] = (1u << lane) - 1;
    values["%lanemask_le"] = static_cast<uint32_t>((2ull << lane) - 1);
    values["%lanemask_eq"] = 1u << lane;
    for (const auto& [name, slot] : w.kernel->specials) {
      const auto found = values.find(name);
      if (found == values.end()) throw Fault("unknown special register ", name);
      w.rows[slot][lane] = found->second;
    }
  }
}

std::unique_ptr<Warp> MakeWarp(Cta& cta, const Launch& launch, int index, int clock_index) {
  auto w = std::make_unique<Warp>();
  w->cta = &cta, w->kernel = launch.kernel, w->index = index, w->clock_index = clock_index;
  const int slots = launch.kernel->slots, threads = launch.block[0] * launch.block[1] * launch.block[2];
  w->rows.resize(slots);
  std::memset(w->rows.data(), 0xff, sizeof(Row) * slots);  // NaN, as what nothing has written
  for (auto [value, slot] : launch.kernel->constants) w->rows[slot].fill(value);
  w->touched.resize(slots), w->in_flight.resize(slots), w->taken.resize(slots);
  w->clocks.Resize(cta.cluster->clocks);
  w->clocks.seen[clock_index] = 1;
  for (int i = 0; i < kLanes; ++i) {
    if (index * kLanes + i >= threads)
      w->state[i] = State::kEnded;
    else
      w->local[i].resize(launch.kernel->local_bytes, 0xff);
  }
  FillSpecials(*w, launch);
  return w;
}

int SmallestStore(const Kernel& kernel) {
  int bytes = 4;
  for (const Instruction& i : kernel.code) {
    if ((i.name == "st" || i.name == "atom" || i.name == "red") && i.space != Space::kGlobal)
      bytes = std::min(bytes, std::max(1, BitsOf(i.type) / 8));
  }
  return bytes;
}

void RunCluster(Launch& launch, int number, std::array<uint32_t, 3> first) {
  Cluster cluster;
  cluster.launch = &launch, cluster.number = number;
  cluster.cell = SmallestStore(*launch.kernel);
  const int threads = launch.block[0] * launch.block[1] * launch.block[2], warps = (threads + kLanes - 1) / kLanes;
  const int blocks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  cluster.clocks = blocks * (warps + (warps + 3) / 4);
  cluster.barrier.wanted = static_cast<int64_t>(blocks) * threads;
  const int64_t shared = kSharedStart + (launch.kernel->shared_bytes + 15) / 16 * 16 + launch.dynamic_shared;
  for (int rank = 0; rank < blocks; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = &cluster, cta->rank = rank, cta->threads_left = threads;
    const uint32_t x = launch.cluster[0], y = launch.cluster[1];
    cta->index = {first[0] + rank % x, first[1] + rank / x % y, first[2] + rank / x / y};
    cta->shared.assign(shared, 0xff), cta->initialised.assign(shared, 0);
    cta->cells.resize(shared / cluster.cell + 1), cta->readers.resize(cta->cells.size() * cluster.clocks);
    for (int i = 0; i < warps; ++i) cta->warps.push_back(MakeWarp(*cta, launch, i, rank * warps + i));
    cluster.ctas.push_back(std::move(cta));
  }
  const auto all_ended = [&] {
    return std::all_of(cluster.ctas.begin(), cluster.ctas.end(), [](auto& cta) { return cta->threads_left == 0; });
  };
  while (!all_ended()) {
    bool progress = false;
    for (auto& cta : cluster.ctas) {
      for (auto& w : cta->warps) {
        try {
          progress |= RunWarp(*w);
        } catch (const Fault& fault) {
          throw Fault(fault.what(), Where(*w));
        }
      }
    }
    if (progress) continue;
    if (cluster.copies.empty()) throw Fault("deadlock: no thread can go on", WhoWaits(cluster));
    auto copy = std::move(cluster.copies.back());  // the newest: nobody may count on their order
    cluster.copies.pop_back();
    copy.second();
  }
  if (!cluster.copies.empty()) throw Fault("the blocks ended, and a copy into their shared memory is under way");
}

}  // namespace

void Run(Launch& launch) {
  launch.executed.assign(launch.kernel->code.size(), 0);
  launch.globals = launch.module->globals;
  int number = 0;
  for (uint32_t z = 0; z < launch.grid[2]; z += launch.cluster[2]) {
    for (uint32_t y = 0; y < launch.grid[1]; y += launch.cluster[1]) {
      for (uint32_t x = 0; x < launch.grid[0]; x += launch.cluster[0]) RunCluster(launch, number++, {x, y, z});
    }
  }
}

}  // namespace ptx
