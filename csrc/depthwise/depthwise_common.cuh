// What the depthwise kernels share: the geometry of a thread's strip, and its sources (depthwise_plan.h has the equations).
//
// There is no contraction for tensor cores, only bytes to move.  A thread works on a vector of channels, which are contiguous in memory,
// and goes through a strip of targets along the last axis in chunks: the sources of a chunk serve all taps of a filter row from registers.
// Rows are reused through the L1 cache: threads with neighbouring `threadIdx.y` have strips on neighbouring lines and proceed side by side.
// Keeping the sums of several lines in registers would only save loads that hit the cache, and a filter of seven rows would need more
// registers than there are.
//
// Vectors are of channels of y, each of which has a filter.  If several filters share a channel of x, a vector meets fewer channels of x.
//
// All threads of a block reach its last barrier; threads without a strip have an empty one and load nothing.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "depthwise/depthwise_plan.h"
#include "common/pack.cuh"

namespace jaxext::depthwise {

constexpr int kNone = INT_MAX;  // no tap, or no phase

extern __shared__ float4 shared_memory[];

__device__ inline bool Inside(int place, int size) { return static_cast<unsigned>(place) < static_cast<unsigned>(size); }

__device__ inline int Least(const Congruence& c, unsigned given) {
  if (c.d == 1) return 0;
  const unsigned e = (c.minus_given * given + c.minus_offset) % c.d;  // fits: d has 16 bits
  return e % c.gcd != 0 ? kNone : static_cast<int>(c.inverse * (e / c.gcd) % (c.d / c.gcd));
}

// The targets of one phase and the taps that they meet: the target j at the tap number u meets the source
// origin + target_stride·j + tap_stride·u.
struct Phase {
  int targets;
  int taps;
  int first_tap, tap_step;
  int origin;
};

__device__ inline Phase MakePhase(const Axis& axis, int phase) {
  const int first = Least(axis.first_tap, phase);
  if (phase >= axis.T) return {};
  const int targets = (axis.T - phase + axis.period - 1) / axis.period;
  if (first >= axis.R) return {targets, 0, 0, 0, 0};
  const int taps = (axis.R - first + axis.step - 1) / axis.step;
  return {targets, taps, first, axis.step, (axis.a * phase + axis.b * first + axis.offset) / axis.d};
}

// The same with taps numbered so that their sources ascend.
__device__ inline Phase Ascending(const Axis& axis, const Phase& phase) {
  if (axis.tap_stride > 0 || phase.taps == 0) return phase;
  const int last = phase.taps - 1;
  return {phase.targets, phase.taps, phase.first_tap + phase.tap_step * last, -phase.tap_step, phase.origin + axis.tap_stride * last};
}

// A strip: its image, its plane and line within their phases, and its targets in line, number begin to end - 1 of those that stand
// `spacing` apart.
struct Strip {
  int n, plane, line;
  int residue, begin, end;

  // The number within the phase of a target.
  __device__ int Number(const Params& p, int i) const { return residue + p.spacing * i; }
};

// Neighbouring strips are on neighbouring lines.
__device__ inline Strip MakeStrip(const Params& p, const Phase& d, const Phase& h, const Phase& w, int number, bool wanted) {
  const int line = number % p.h.targets, lines = number / p.h.targets, place = lines % p.strips, lane = lines / p.strips;
  const int plane = p.d.targets == 1 ? 0 : lane % p.d.targets, n = p.d.targets == 1 ? lane : lane / p.d.targets;
  const int residue = place % p.spacing, begin = place / p.spacing * p.strip;
  const bool real = wanted && n < p.N && plane < d.targets && line < h.targets && residue < w.targets;
  const int targets = (w.targets - residue + p.spacing - 1) / p.spacing;  // of the residue
  return {n, plane, line, residue, begin, real ? min(begin + p.strip, targets) : begin};
}

// A row of sources on one line, `stride` apart.
template <typename T>
struct Line {
  const T* at;  // its place 0
  int size, stride, channels;

  template <int kVector, int kCount>
  __device__ void Read(int place, Pack<T, kVector>* sources) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int s = place + stride * j;
      sources[j] = Load<T, kVector>(at + static_cast<int64_t>(s) * channels, Inside(s, size));
    }
  }
};

// Calls `what` with the number as a constant: a power of two up to kMost.
template <int kMost, class What>
__device__ inline void WithConstant(int number, const What& what) {
  if constexpr (kMost > 1) {
    if (number < kMost) return WithConstant<kMost / 2>(number, what);
  }
  what(std::integral_constant<int, kMost>{});
}

}  // namespace jaxext::depthwise
