// The depthwise kernel of wgrad on tensor cores (depthwise.h has the equations), for filters of unit steps in 16 bits.
//
// For one channel and one filter row u, a warp multiplies 16 lines of sources with 16 lines of targets, the lines that row meets:
//
//     C[a, b] = Σ_t x[t, a] y[t, b]      of 16 sources a and 8 targets b
//
// The tap v of the row is the sum of a diagonal, Σ_b C[b + v, b]: 8 targets meet at most 9 taps.  As in depthwise_mma.cuh, the 16 lines lie
// in different images, or in different parts of an image, and the warp walks down all of them in step.  Each line of sources serves all
// filter rows, since the targets of the last lines stay in registers.
//
// A block has 16 channels, two for each warp, and sums over its share of the *walks*, each of which is 16 lines and 8 columns.  A register
// of the tensor cores has two neighbours along the sum, which are two lines here.  So each thread loads 8 channels of a source in two
// lines, and 4 of a target, one step ahead, and puts pairs into shared memory, by channels.  The lines that are kAhead steps away are
// brought into the L2 cache.
//
// Targets beyond an image are zeros, and the tensor cores multiply them with sources that other targets meet.  So a sum that is not finite
// is computed anew, of the products that it has alone.
#pragma once

#include <cmath>

#include "depthwise/depthwise_mma.cuh"

namespace jaxext::depthwise {

constexpr int kAhead = 4;

// What a block has of a step in shared memory, for each channel: sources as [half of the 16][pair of lines][source], and behind them
// targets as [pair][target].  Gaps make neighbouring threads meet different banks.
constexpr int kTargetVector = kMmaVector / 2;  // channels of an access to targets
constexpr int kPairs = kMmaLines / 2, kTargetWords = kPairs * kMmaTargets, kHalfWords = kTargetWords + 8,
              kTargetsAt = kHalfWords + kTargetWords;
constexpr int kChannelWords = kTargetsAt + kTargetWords + 2, kStepWords = kMmaChannels * kChannelWords;
static_assert((2 * kStepWords + kPairs * kMmaWgradSteps) * sizeof(uint32_t) == kMmaWgradSharedBytes);

// The line of that number of a walk: its image, and the lines of targets that it walks along.
struct WalkLine {
  int64_t image;
  int first, count;  // targets of its part, none if it is beyond the last

  __device__ WalkLine(const MmaParams& p, int walk, int number) {
    const int part = walk / p.column_blocks * kMmaLines + number;
    image = static_cast<int64_t>(blockIdx.z) * p.images + part / p.parts;
    first = part % p.parts * p.lines;
    count = part < p.images * p.parts ? min(p.h.T - first, p.lines) : 0;
  }
};

// What a thread loads, step by step: kVector channels at one column of two lines.
template <typename T, int kVector>
struct LinePair {
  unsigned at[2];  // the next ones, in vectors
  Pack<T, kVector> loaded[2];

  // Bit i of `there` is for line i, and bit i + 2 for that line kAhead steps later, of which one is prefetched at most: threads that load
  // from the same sector of the cache have one each.
  __device__ void Load(const T* all, unsigned there, unsigned pitch) {
    if (there >> 2 != 0) Prefetch(all + int64_t{((there >> 3 & 1) != 0 ? at[1] : at[0]) + kAhead * pitch} * kVector);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      loaded[i] = jaxext::Load<T, kVector>(all + int64_t{at[i]} * kVector, (there >> i & 1) != 0);
      at[i] += pitch;
    }
  }

  // Both lines of each channel beside each other.
  __device__ void Put(uint32_t* words) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      words[k * kChannelWords] = __byte_perm(loaded[0].words[k / 2], loaded[1].words[k / 2], k % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
};

// Of the walks of a block: the lines of a thread, one walk after the other.
template <typename T>
struct WalkLoader {
  const MmaWgradParams& p;
  const T *sources, *targets;
  LinePair<T, kMmaVector> x;
  LinePair<T, kTargetVector> y;
  const uint32_t* next;  // of the warp's lines: which of them are there at the next step, 4 bits for x and 4 for y
  uint32_t columns;      // the same bits: those of the columns that are there

  __device__ WalkLoader(const MmaWgradParams& params, const T* of_x, const T* of_y) : p(params), sources(of_x), targets(of_y) {}

  __device__ static uint32_t* Steps() { return reinterpret_cast<uint32_t*>(shared_memory) + 2 * kStepWords + Pair() * kMmaWgradSteps; }

  __device__ static int Vector() { return threadIdx.x % 2; }
  __device__ static int Half() { return threadIdx.x / 16 % 2; }  // of the vector, that is loaded of a target
  __device__ static int Source() { return threadIdx.x / 2 % kMmaSources; }
  __device__ static int Target() { return threadIdx.x / 2 % kMmaTargets; }
  __device__ static int Pair() { return threadIdx.x / kWarp; }

  // After a barrier the first step of a walk is next.
  __device__ void Begin(int walk, int last) {
    const MmaParams& of = p.geometry;
    const int column = walk % of.column_blocks * kMmaTargets, source = column + of.w.origin + Source(), target = column + Target();
    const unsigned vectors = of.channels / kMmaVector, vector = 2 * blockIdx.x + Vector();
    x.loaded[0] = x.loaded[1] = {}, y.loaded[0] = y.loaded[1] = {};
    uint32_t there[2] = {};  // at the steps of this thread, the number of its lane and 32 more
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const WalkLine own(of, walk, Pair() + i * kPairs);
      const int count = walk < last ? own.count : 0, first = own.first + of.h.origin;
      const int end = count > 0 ? min(count + of.h.taps - 1, of.h.S - first) : 0;
      const auto image = static_cast<unsigned>(own.image);
      x.at[i] = (image * of.h.S + first) * p.source_pitch + source * vectors + vector;
      y.at[i] = (image * of.h.T + own.first) * p.target_pitch + 2 * (target * vectors + vector) + Half();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = threadIdx.x % kWarp + j / 2 * kWarp + j % 2 * kAhead;
        there[j / 2] |= (-first <= at && at < end ? 0x01u : 0u) << (2 * (j % 2) + i) | (at < count ? 0x10u : 0u) << (2 * (j % 2) + i);
      }
    }
    uint32_t* steps = Steps() + threadIdx.x % kWarp;
    steps[0] = there[0];
    if (threadIdx.x % kWarp + kWarp < kMmaWgradSteps) steps[kWarp] = there[1];
    next = Steps();
    columns = 0x33u | 0x44u << Vector();
    if (vector >= vectors || Source() >= kMmaTargets + of.w.taps - 1 || !Inside(source, of.w.S)) columns &= 0xF0u;
    if (vector >= vectors || target >= of.w.T) columns &= 0x0Fu;
  }

  __device__ void Load() {
    const uint32_t there = *next++ & columns;
    x.Load(sources, there & 0xFu, p.source_pitch);
    y.Load(targets, there >> 4, p.target_pitch);
  }

  __device__ void Put(uint32_t* words) const {
    uint32_t* own = words + Vector() * kMmaVector * kChannelWords + Pair() * kMmaTargets;
    x.Put(own + Source() / kMmaTargets * kHalfWords + Source() % kMmaTargets);
    y.Put(own + Half() * kTargetVector * kChannelWords + kTargetsAt + Target());
  }
};

// The sum of the tap (u, v) of a channel over the walks of a block.
template <typename T>
__device__ float SumOfTap(const MmaWgradParams& p, const T* sources, const T* targets, int channel, int u, int v) {
  const MmaParams& of = p.geometry;
  float sum = 0.0f;
  const int begin = blockIdx.y * p.share, end = min(begin + p.share, p.walks);
#pragma unroll 1
  for (int i = begin * kMmaLines; i < end * kMmaLines; ++i) {
    const int walk = i / kMmaLines, column = walk % of.column_blocks * kMmaTargets;
    const WalkLine own(of, walk, i % kMmaLines);
#pragma unroll 1
    for (int j = 0; j < own.count * kMmaTargets; ++j) {
      const int line = own.first + j / kMmaTargets, target = column + j % kMmaTargets;
      const int source_line = line + of.h.origin + u, source = target + of.w.origin + v;
      if (target >= of.w.T || !Inside(source_line, of.h.S) || !Inside(source, of.w.S)) continue;
      const T x = sources[(own.image * of.h.S + source_line) * of.source_pitch + static_cast<int64_t>(source) * of.channels + channel];
      const T y = targets[(own.image * of.h.T + line) * of.target_pitch + static_cast<int64_t>(target) * of.channels + channel];
      sum = fmaf(ToFloat(x), ToFloat(y), sum);
    }
  }
  return sum;
}

// The taps of a block's channels, of their sums [channel][row][column].
template <typename T>
__device__ void StoreTaps(const MmaWgradParams& p, const float* sums, const T* sources, const T* targets, void* filters) {
  const int rows = p.geometry.h.taps, columns = p.geometry.w.taps, first = blockIdx.x * kMmaChannels;
  const int64_t part = static_cast<int64_t>(blockIdx.y) * gridDim.z + blockIdx.z;
#pragma unroll 1
  for (int i = threadIdx.x; i < kMmaChannels * rows * columns; i += kMmaThreads) {
    const int c = i / columns / rows, u = i / columns % rows, v = i % columns;
    if (first + c >= p.geometry.channels) return;
    float sum = sums[(c * kMmaRows + u) * kMmaColumns + v];
    if (!std::isfinite(sum)) sum = SumOfTap(p, sources, targets, first + c, u, v);
    const int64_t tap = (part * p.geometry.channels + first) * rows * columns + i;
    if (p.float_result != 0) {
      static_cast<float*>(filters)[tap] = sum;
    } else {
      static_cast<T*>(filters)[tap] = FromFloat<T>(sum);
    }
  }
}

// All threads reach each barrier; those that have nothing to load have zeros.
template <typename T, int kRows>
__global__ void __launch_bounds__(kMmaThreads, kMmaResident)
    WgradMma(const MmaWgradParams p, const T* __restrict__ sources, const T* __restrict__ targets, void* __restrict__ filters) {
  const int warp = threadIdx.x / kWarp, thread = threadIdx.x % kWarp, group = thread / 4, lane = thread % 4;
  uint32_t* words = reinterpret_cast<uint32_t*>(shared_memory);
  WalkLoader<T> loader(p, sources, targets);
  int walk = blockIdx.y * p.share;
  const int last_walk = min(walk + p.share, p.walks);
  loader.Begin(walk, last_walk);
  __syncthreads();  // the steps of a walk are there
  loader.Load();
  loader.Put(words);
  loader.Load();
  __syncthreads();  // the first lines are there
  float sums[2][kRows][4] = {};
  uint32_t last[2][kRows][2] = {};  // targets, those of the step i at i modulo kRows
  const int own = 2 * warp * kChannelWords + lane * kMmaTargets + group;
#pragma unroll 1
  for (int i = 0, buffer = 0; walk < last_walk; i += kRows) {
    const bool ends = i + kRows == p.geometry.steps;  // with this walk's last step, which has no lines
#pragma unroll
    for (int now = 0; now < kRows; ++now, buffer = kStepWords - buffer) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t *x = words + buffer + own + c * kChannelWords, *y = x + kTargetsAt;
        const uint32_t a[4] = {x[0], x[kHalfWords], x[kTargetWords / 2], x[kHalfWords + kTargetWords / 2]};
        last[c][now][0] = y[0], last[c][now][1] = y[kTargetWords / 2];
#pragma unroll
        for (int u = 0; u < kRows; ++u) MultiplyAdd<T>(sums[c][u], a, last[c][(now + kRows - u) % kRows], sums[c][u]);
      }
      loader.Put(words + kStepWords - buffer);
      if (now == kRows - 3 && ends) {  // two steps are loaded
        loader.Begin(walk + 1, last_walk);
      } else {
        loader.Load();
      }
      __syncthreads();  // the next lines are there, and all have done with these
    }
    if (ends) ++walk, i = -kRows;
  }
  // A warp's sums of one row of one channel, 16 sources by 8 targets, and those of the diagonals, [channel][row][column].
  float* all = reinterpret_cast<float*>(words) + warp * kMmaSources * kMmaTargets;
  float* diagonals = reinterpret_cast<float*>(words) + kMmaThreads / kWarp * kMmaSources * kMmaTargets;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      auto* at = reinterpret_cast<SumPair*>(all + group * kMmaTargets) + lane;
      at[0] = {sums[c][u][0], sums[c][u][1]};
      at[kMmaTargets * kMmaTargets / 2] = {sums[c][u][2], sums[c][u][3]};
      __syncthreads();  // the sums of the warp are there
      if (thread < kMmaColumns) {
        float sum = 0.0f;
        for (int b = 0; b < kMmaTargets; ++b) sum += all[(b + thread) * kMmaTargets + b];
        diagonals[((2 * warp + c) * kMmaRows + u) * kMmaColumns + thread] = sum;
      }
      __syncthreads();  // the warp has read them, and at last all diagonals are there
    }
  }
  StoreTaps(p, diagonals, sources, targets, filters);
}

template <typename T>
using MmaWgradFunction = void (*)(MmaWgradParams, const T*, const T*, void*);

// The kernel of a plan.
template <typename T>
MmaWgradFunction<T> MmaWgradKernel(const Plan& plan) {
  if (plan.rows == 3) return WgradMma<T, 3>;
  if (plan.rows == 5) return WgradMma<T, 5>;
  return WgradMma<T, kMmaRows>;
}

}  // namespace jaxext::depthwise
