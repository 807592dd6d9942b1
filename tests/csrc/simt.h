// Runs a CUDA kernel on a CPU, compiled by a plain C++ compiler: a block's threads are fibres that take turns at every __syncthreads.
//
// What goes unseen on a GPU is to show here.  A thread runs alone from one barrier to the next, in an order that the caller chooses, so
// that a missing barrier changes the result; a barrier that some threads do not reach ends the program; shared memory starts as NaN and
// ends, for AddressSanitizer, where the launch says.  Shared memory is the one array that a kernel declares `extern __shared__`; static
// shared variables are not supported.  What a warp does together is an `Exchange`, and nothing else.  It must not know any kernel.
#pragma once

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __syncthreads() simt::Barrier(__LINE__)

struct alignas(16) float4 {
  float x, y, z, w;
};

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

inline float __fdividef(float x, float y) { return x / y; }

// UBSan sees whether they are aligned.
inline void __stwb(uint2* at, uint2 value) { *at = value; }
inline void __stwb(uint4* at, uint4 value) { *at = value; }
template <typename T>
T __ldg(const T* at) {
  return *at;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }

// The bytes of b above a that the digits of `places` number.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t places) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> (places >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}

// The 16-bit floats by their bits; conversions round to the nearest, ties to even.
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

namespace simt {

template <typename To, typename From>
To As(From x) {
  To bits;
  static_assert(sizeof x == sizeof bits);
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

}  // namespace simt

inline float __uint_as_float(uint32_t bits) { return simt::As<float>(bits); }
inline uint32_t __float_as_uint(float x) { return simt::As<uint32_t>(x); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }

inline float __bfloat162float(__nv_bfloat16 x) { return simt::As<float>(uint32_t{x.bits} << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = simt::As<uint32_t>(x);
  if (std::isnan(x)) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

inline float __half2float(__half x) { return simt::As<_Float16>(x.bits); }
inline __half __float2half_rn(float x) { return {simt::As<uint16_t>(static_cast<_Float16>(x))}; }

namespace simt {

enum class Order { kForward, kBackward, kShuffled };

// What launches run on.
struct Machine {
  void* shared = nullptr;  // the kernel's extern array
  size_t shared_bytes = 0;
  Order order = Order::kForward;
  int64_t blocks = INT64_MAX;  // of a grid that has more only so many are run, the last ones
};

inline Machine machine;

constexpr size_t kStackBytes = 256 << 10;
constexpr int kRunning = -1, kExchanging = -2, kDone = 0;  // otherwise the line of the barrier at which a thread waits
constexpr int kWarp = 32;
constexpr int kMostWords = 8;  // that a thread gives in an exchange

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* fake_stack = nullptr;  // AddressSanitizer's
  dim3 index;
  int number = 0, state = kDone;
  uint32_t given[2][kMostWords];  // in this exchange and in that before, which others may still read
  unsigned exchanges = 0;
};

struct Scheduler {
  ucontext_t context;
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  std::vector<std::unique_ptr<Fibre>> fibres;
  Fibre* current = nullptr;
  std::function<void()> kernel;
};

inline Scheduler scheduler;

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "simt: %s\n", what);
  std::exit(3);
}

inline void Resume(Fibre* fibre) {
  scheduler.current = fibre;
  threadIdx = fibre->index;
  __sanitizer_start_switch_fiber(&scheduler.fake_stack, fibre->stack.get(), kStackBytes);
  swapcontext(&scheduler.context, &fibre->context);
  __sanitizer_finish_switch_fiber(scheduler.fake_stack, nullptr, nullptr);
}

inline void Wait(int state) {
  Fibre* own = scheduler.current;
  own->state = state;
  __sanitizer_start_switch_fiber(&own->fake_stack, scheduler.stack, scheduler.stack_bytes);
  swapcontext(&own->context, &scheduler.context);
  __sanitizer_finish_switch_fiber(own->fake_stack, &scheduler.stack, &scheduler.stack_bytes);
}

inline void Barrier(int line) { Wait(line); }

// Gives `count` words to the others of the warp; what lane i gave is `Given(i)` afterwards.  All of a warp must take part.
inline void Exchange(const uint32_t* words, int count) {
  Fibre* own = scheduler.current;
  std::copy(words, words + count, own->given[++own->exchanges % 2]);
  Wait(kExchanging);
}

inline const uint32_t* Given(int lane) {
  const Fibre* own = scheduler.current;
  return scheduler.fibres[own->number / kWarp * kWarp + lane]->given[own->exchanges % 2];
}

inline void Enter() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_bytes);
  scheduler.kernel();
  scheduler.current->state = kDone;
  __sanitizer_start_switch_fiber(nullptr, scheduler.stack, scheduler.stack_bytes);
  setcontext(&scheduler.context);
}

// Those of `turns` that wait for an exchange, for which all of their warps are there.
inline std::vector<int> Exchanging(const std::vector<int>& turns) {
  std::vector<int> waiting;
  for (int i : turns) {
    if (scheduler.fibres[i]->state == kExchanging) waiting.push_back(i);
  }
  for (int i : waiting) {
    for (int lane = 0; lane < kWarp; ++lane) {
      const size_t other = i / kWarp * kWarp + lane;
      if (other >= scheduler.fibres.size()) Fail("an exchange of a warp that is not full");
      if (scheduler.fibres[other]->state != kExchanging) Fail("some threads of a warp exchange what others do not");
    }
  }
  return waiting;
}

// All threads go on to their next barrier, which must be the same for all, or to the end.
inline bool RunToBarrier(std::vector<int>& turns, Order order, std::mt19937& random) {
  if (order == Order::kShuffled) std::shuffle(turns.begin(), turns.end(), random);
  for (int i : turns) Resume(scheduler.fibres[i].get());
  for (std::vector<int> rest = Exchanging(turns); !rest.empty(); rest = Exchanging(rest)) {
    for (int i : rest) Resume(scheduler.fibres[i].get());
  }
  const int state = scheduler.fibres[turns[0]]->state;
  for (int i : turns) {
    if (scheduler.fibres[i]->state != state) Fail("some threads wait at a barrier that others do not reach");
  }
  return state != kDone;
}

inline void RunBlock(int threads, size_t shared_bytes, std::mt19937& random) {
  std::memset(machine.shared, 0xFF, shared_bytes);
  while (static_cast<int>(scheduler.fibres.size()) < threads) scheduler.fibres.push_back(std::make_unique<Fibre>());
  std::vector<int> turns(threads);
  std::iota(turns.begin(), turns.end(), 0);
  for (int i : turns) {
    Fibre& fibre = *scheduler.fibres[i];
    const unsigned thread = i;
    fibre.index = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
    fibre.number = i, fibre.state = kRunning;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = kStackBytes;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, Enter, 0);
  }
  if (machine.order == Order::kBackward) std::reverse(turns.begin(), turns.end());
  while (RunToBarrier(turns, machine.order, random)) {
  }
}

// kernel<<<grid, block, shared_bytes>>>(...), with the call given as `kernel`; the blocks one after another, in the machine's order too.
inline void Run(dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> kernel) {
  if (shared_bytes > machine.shared_bytes) Fail("more shared memory than there is");
  ASAN_UNPOISON_MEMORY_REGION(machine.shared, machine.shared_bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(machine.shared) + shared_bytes, machine.shared_bytes - shared_bytes);
  gridDim = grid, blockDim = block;
  scheduler.kernel = std::move(kernel);
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z, count = min(blocks, machine.blocks);
  std::mt19937 random(7);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t b = machine.order == Order::kBackward ? blocks - 1 - i : blocks - count + i;
    blockIdx = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y), static_cast<unsigned>(b / grid.x / grid.y)};
    RunBlock(block.x * block.y * block.z, shared_bytes, random);
  }
  ASAN_UNPOISON_MEMORY_REGION(machine.shared, machine.shared_bytes);
}

}  // namespace simt
