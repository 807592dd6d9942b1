// The state of a running kernel: memory with what is known of each byte, barriers, warps, and the clusters that run one after another.
//
// Warps run one at a time, each until it must wait, and the order proves nothing.  What proves is kept beside it: vector clocks say which
// access happens before which, so that a missing barrier is found in any order; every byte knows whether it was written, and whether a
// copy or a wgmma that is still under way reads or writes it.  Clocks are those of warps.  Lanes of a warp are ordered by a tick of its
// clock, as bar.warp.sync and barriers make one; in global memory they always count as ordered.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>

#include "program.h"

namespace ptx {

constexpr int kLanes = 32;
constexpr Mask kAll = 0xffffffff;
using Row = std::array<uint64_t, kLanes>;

// What happened before: of each clock of the cluster up to which time; of those writes, which the async proxy sees; and which mbarriers
// are known to be initialised.  Behind the clocks of warps and of warp groups' wgmma comes one for each mbarrier: its copies.
struct Clocks {
  std::vector<uint32_t> seen, fenced, inits;
  void Resize(size_t size);  // at least this
  void Join(const Clocks& other);
  void JoinInits(const Clocks& other);
  uint32_t Seen(size_t clock) const { return clock < seen.size() ? seen[clock] : 0; }
  uint32_t Inits(size_t clock) const { return clock < inits.size() ? inits[clock] : 0; }
};

// Who wrote a byte of global memory in this launch, by no atomic operation.
struct Writer {
  int32_t cluster = -1;
  int32_t clock = 0;
  uint32_t at = 0;
};

// An array in global memory, at an address of the caller's choice.
struct Region {
  uint64_t address;
  int64_t bytes;
  uint8_t* data;
  uint8_t* written;                  // for each byte how often it was written, at most 255; null: an input, which may not be written
  std::vector<Writer> writers = {};  // of each byte, once there is one
  std::map<int64_t, std::map<std::pair<int32_t, int32_t>, uint32_t>> atomics = {};  // byte -> cluster and clock -> when, since then
};

// cuTensorMapEncodeTiled's and cuTensorMapEncodeIm2col's arguments, innermost axis first.
struct TensorMap {
  int64_t im2col, element_bytes, rank, address;
  int64_t sizes[5], strides[5];  // in elements; in bytes, the first being the element's
  int64_t box[5];                // tiled: elements along each axis; im2col: channels and pixels
  int64_t steps[5];
  int64_t lower[3], upper[3];  // im2col: corners of the box of pixels
  int64_t swizzle;             // bytes of the swizzled rows: 0, 32, 64 or 128
  int64_t nan_fill;
};

// What is known of some bytes of shared memory: as many as the smallest that the kernel stores at once.
struct Cell {
  int16_t writer = -1;      // clock of the cluster, but for atomic operations; -1: nobody
  int16_t reading = 0;      // asynchronous reads under way: nothing may overwrite it
  bool arriving = false;    // an asynchronous write is under way: nothing may access it
  bool atomic = false;      // since the last other access there were atomic operations: its readers are those
  bool mbarrier = false;    // it is part of one
  int8_t lane = -1;         // of the writer; -1: several, or no thread
  int16_t reader = -1;      // clock of the warp that read it last
  uint32_t written_at = 0;  // the writer's clock
  uint32_t read_at = 0;     // the reader's clock, and the lanes that have read it since that time
  Mask read_by = 0;
};

struct MBarrier {
  std::string name;                              // for messages
  int64_t expected = 0, pending = 0, bytes = 0;  // arrivals of a phase; those that are missing; bytes of transactions that are missing
  uint32_t phase = 0;
  Clocks arriving, completed;  // of this phase, of the one before
  int clock = 0;               // of copies: those of phase n have the time n + 1
  int made_by = 0;             // the warp's clock
  uint32_t made_at = 0;
};

struct Barrier {
  int64_t wanted = 0, arrived = 0;
  uint32_t generation = 0;
  Clocks arriving, completed;
  int64_t holds = 0, held = 0, voted = 0;  // bar.red: threads whose predicate holds; those of the generation before, and all of its threads
};

struct Warp;
struct Cluster;
struct Launch;

struct Cta {
  Cluster* cluster;
  int rank;  // in the cluster
  std::array<uint32_t, 3> index;
  std::vector<uint8_t> shared, initialised;
  std::vector<Cell> cells;
  std::vector<uint32_t> readers;  // cell x clock of the cluster: when it last read
  std::map<int64_t, MBarrier> mbarriers;
  std::array<Barrier, 16> barriers;
  std::vector<std::unique_ptr<Warp>> warps;
  int64_t threads_left = 0;
};

// A copy or a product that has been issued: what it does when it takes effect, and the shared memory that it reads until then.
struct Asynchronous {
  std::function<void()> act;
  std::vector<std::pair<int64_t, int64_t>> reads;  // begin, bytes
  std::vector<int> registers, taken;               // wgmma: the slots that it writes and reads
  bool done = false;
};
using Group = std::vector<Asynchronous>;

enum class State : uint8_t { kReady, kWaits, kEnded };

struct Warp {
  Cta* cta;
  const Kernel* kernel;
  int index = 0;        // in the CTA
  int clock_index = 0;  // in the cluster
  std::vector<Row> rows;
  std::array<int, kLanes> pc{};
  std::array<State, kLanes> state{};
  std::array<std::function<bool()>, kLanes> ready;  // of a lane that waits: whether it can go on; it then repeats or passes its instruction
  std::array<std::string, kLanes> waits_for;
  std::array<bool, kLanes> parked{};  // waits for other lanes of the warp at the same instruction
  Mask active = 0;                    // lanes that execute now
  int at = 0, next = 0;               // their instruction, and the one behind it
  bool moved = false;                 // lanes went different ways: each has its pc, and new ones are to be chosen
  Mask alive_when_parked = 0;
  int lane = -1;  // whose access is being checked, for messages
  Clocks clocks;
  Clocks released;  // by the last fence, for a relaxed arrival at the cluster's barrier

  Group open_wgmma;                // since the last commit
  std::deque<Group> wgmma_groups;  // that this warp has not waited for
  size_t committed = 0;            // of them and those before them
  std::vector<uint8_t> in_flight;  // slot -> how many wgmma under way write it
  std::vector<uint8_t> taken;      // slot -> how many wgmma under way read it
  int flights = 0;
  std::vector<uint32_t> touched;                     // slot -> count of fences when it was last written by something else
  uint32_t fences = 1;                               // wgmma.fence
  bool fenced = false;                               // no wgmma was issued since the last one
  int registers = 0;                                 // that setmaxnreg gave; 0: it was not executed
  int64_t cluster_waits = -1;                        // generation of the cluster's barrier at which the warp has arrived; -1: none
  std::array<Group, kLanes> open_copies, open_bulk;  // cp.async; bulk copies out of shared memory
  std::array<std::deque<Group>, kLanes> copies, bulk;
  std::array<std::vector<uint8_t>, kLanes> local;

  const Row& Read(const Operand& operand) {
    if (flights) CheckFlight(operand.slot);
    return rows[operand.slot];
  }
  Row& Write(const Operand& operand) {
    if (operand.slot < 0) return sink;
    if (flights) CheckFlight(operand.slot), CheckTaken(operand.slot);
    touched[operand.slot] = fences;
    return rows[operand.slot];
  }
  void CheckFlight(int slot);
  void CheckTaken(int slot);
  Mask Predicate(const Operand& operand);  // lanes in which it holds, negation included
  uint64_t Address(const Operand& operand, int lane) { return rows[operand.slot][lane] + operand.offset; }
  // Whether the lanes of `wanted` are all here; if not, those that are here wait, and the instruction is executed when the others have
  // come.
  bool Together(Mask wanted);
  Mask Alive() const;
  void Diverge();  // all active lanes go on behind this instruction, but for what is set after this
  // The lane waits until the condition holds; then it goes on behind this instruction, or repeats it.
  void Wait(int lane, std::string what, std::function<bool()> condition, bool repeat);
  void Release(Clocks& into);  // what this warp did happens before what acquires
  void Tick() { ++clocks.seen[clock_index]; }
  void Acquire(const Clocks& from);
  Row sink;
};

struct Cluster {
  Launch* launch;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::pair<int, std::function<void()>>> copies;  // into shared memory, under way: the CTA that must stay, and the copy
  Barrier barrier;
  int clocks = 0;                                  // of all warps, and behind them of the wgmma of all warp groups
  std::vector<std::pair<int, int64_t>> mbarriers;  // block and address of each that was made: their clocks come behind those
  int cell = 4;                                    // bytes of a Cell
  int number = 0;                                  // in the launch
};

struct Launch {
  const Module* module;
  const Kernel* kernel;
  std::array<uint32_t, 3> grid, block, cluster;
  int64_t dynamic_shared;
  std::vector<uint8_t> parameters;
  std::vector<Region> regions;
  std::vector<TensorMap> maps;
  std::vector<uint8_t> globals;
  bool late;           // asynchronous work becomes visible as late as it may, or else at once
  int64_t most_steps;  // instructions of warps, before a loop counts as endless
  int64_t steps = 0;
  std::vector<uint8_t> executed;  // of each instruction of the kernel
};

// What a thread reads and writes, with all checks.
uint64_t Load(Warp& warp, int lane, Space space, uint64_t address, int bytes, bool atomic = false);  // at most 8
void Store(Warp& warp, int lane, Space space, uint64_t address, int bytes, uint64_t value, bool atomic = false);
// A pointer to global memory, an input or one that may be written.
uint8_t* Global(const Warp& warp, uint64_t address, int64_t bytes, bool write, bool atomic = false);
// For .shared::cta and .shared::cluster addresses: the CTA, and the address in it.
std::pair<Cta*, int64_t> InShared(Warp& warp, uint64_t address, int64_t bytes);

// Asynchronous accesses of shared memory, checked as of the warp that issues them.
void BeginAsyncRead(Warp& issuer, Cta& cta, int64_t address, int64_t bytes);
void EndAsyncRead(Cta& cta, int64_t address, int64_t bytes, int clock, uint32_t when);
void BeginAsyncWrite(Warp& issuer, Cta& cta, int64_t address, int64_t bytes);
void EndAsyncWrite(Cta& cta, int64_t address, int64_t bytes, int clock, uint32_t when);  // seen by what has seen the clock
void MarkMBarrier(Warp& warp, Cta& cta, int64_t address);
bool Before(const Warp& warp, int clock, uint32_t when);
std::string Who(const Cta& cta, int clock);

void Run(Launch& launch);

// Values in registers: the low bits are the value, and the rest is zero.
template <class T>
T Get(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
uint64_t Bits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class F>
void ForLanes(Mask mask, F f) {
  for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

// Results of lanes: of d, or of both of d|p.
template <class F, class G>
void WriteOneOrTwo(Warp& w, const Operand& to, Mask mask, F first, G second) {
  Row& d = w.Write(to.parts.empty() ? to : to.parts[0]);
  ForLanes(mask, [&](int l) { d[l] = first(l); });
  if (to.parts.empty()) return;
  Row& p = w.Write(to.parts[1]);
  ForLanes(mask, [&](int l) { p[l] = second(l); });
}

inline void Nothing(Warp&, const Instruction&, Mask) {}

}  // namespace ptx
