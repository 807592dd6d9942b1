// The depthwise kernel of fprop and dgrad on tensor cores (depthwise.h has the equations), for filters of unit steps in 16 bits.
//
// For one channel a warp multiplies 16 lines of 16 sources with a band, a filter row on 8 diagonals, which makes 8 targets of each line.
// The 16 lines lie in different images, or in different parts of an image: the warp walks down all of them in step, and each line that it
// comes to serves all filter rows.  A target has met the rows 0 to r when its sums lie in the accumulator r: each product adds to the
// accumulator before it, so nothing is moved.
//
//     the accumulator r := line · band r + the accumulator r - 1
//
// A block has 16 channels, two for each warp, and 8 neighbouring targets of 16 lines.  In memory channels are neighbours, but a register of
// the tensor cores has two neighbouring positions of one channel.  So each thread loads two positions of 8 channels, one line ahead, and
// puts pairs into shared memory, by channels.  Sums return through shared memory as well, and each thread stores 8 channels of a target.
//
// The tensor cores multiply all sources with all targets, zeros of the band included, and an infinity or a NaN times zero is NaN.  Then the
// sums of all 8 targets are not finite.  So each sum that is not finite is computed anew, of the sources that the target meets alone.
#pragma once

#include "depthwise/depthwise_common.cuh"
#include "depthwise/depthwise_gather.cuh"
#include "weight_only/weight_only_mma.cuh"

namespace jaxext::depthwise {

// The arrays of a block in shared memory are of words by channel: sources as pairs [half of the 8 pairs][line][pair], sums as
// [line][target]. 16 words lie between the vectors of channels, so that neighbouring threads, which have one each, meet different banks.
constexpr int kPlane = kMmaLines * kMmaTargets, kVectorPlanes = kMmaVector * kPlane + 16, kArray = 2 * kVectorPlanes;
constexpr int kBuffer = 2 * kArray;  // sources, and sums behind them
static_assert(2 * kBuffer * sizeof(float) == kMmaSharedBytes);

struct alignas(8) SumPair {
  float first, second;
};

__device__ inline int Tap(const MmaAxis& axis, int number) { return axis.first_tap + axis.tap_step * number; }

// One of the 16 lines of a block: its image, and the lines of targets that it walks along.
struct MmaLine {
  int64_t image;
  int first, count;  // targets of its part, none if it is beyond the last
  int channel;       // of the thread, from which on it has a vector

  __device__ MmaLine(const MmaParams& p, int line, int vector) {
    const int number = static_cast<int>(blockIdx.x / p.channel_blocks / p.column_blocks) * kMmaLines + line;
    image = static_cast<int64_t>(blockIdx.z) * p.images + number / p.parts;
    first = number % p.parts * p.lines;
    channel = (static_cast<int>(blockIdx.x % p.channel_blocks) * 2 + vector) * kMmaVector;
    count = number < p.images * p.parts && channel < p.channels ? min(p.lines, p.h.T - first) : 0;
  }
};

__device__ inline int FirstColumn(const MmaParams& p) { return blockIdx.x / p.channel_blocks % p.column_blocks * kMmaTargets; }

// What a thread loads: two neighbouring positions of a vector of channels, line by line.
template <typename T>
struct MmaLoader {
  const T* at;    // the next line's first position
  int next, end;  // lines from 0 on are there
  bool inside[2];
  int word;
  Pack<T, kMmaVector> sources[2];

  __device__ MmaLoader(const MmaParams& p, const T* all) {
    const int thread = threadIdx.x, warp = thread / kWarp;
    const int pair = warp % 2 * 4 + thread / 2 % 4, line = warp / 2 * 4 + thread / 8 % 4, vector = thread % 2;
    const MmaLine own(p, line, vector);
    next = own.first + p.h.origin;
    end = own.count > 0 ? max(min(next + own.count + p.h.taps - 1, p.h.S), 0) : 0;
    const int column = 2 * pair, place = FirstColumn(p) + p.w.origin + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) inside[i] = column + i < kMmaTargets + p.w.taps - 1 && Inside(place + i, p.w.S);
    at = all + (own.image * p.h.S + next) * p.source_pitch + static_cast<int64_t>(place) * p.channels + own.channel;
    word = vector * kVectorPlanes + (pair / 4 * kMmaLines + line) * 4 + pair % 4;
  }

  __device__ void Load(const MmaParams& p) {
    const bool there = Inside(next, end);
#pragma unroll
    for (int i = 0; i < 2; ++i) sources[i] = jaxext::Load<T, kMmaVector>(at + i * p.channels, there && inside[i]);
    ++next, at += p.source_pitch;
  }

  // Both positions of each channel beside each other.
  __device__ void Put(uint32_t* words) const {
#pragma unroll
    for (int k = 0; k < kMmaVector; ++k) {
      words[word + k * kPlane] = __byte_perm(sources[0].words[k / 2], sources[1].words[k / 2], k % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
};

// The bands of the filter rows of two channels: that of row u is number u + kRows - taps, and those before it are zeros.
template <typename T, int kRows>
__device__ inline void LoadBands(const MmaParams& p, const T* filters, int channel, uint32_t (&bands)[2][kRows][2]) {
  const int group = threadIdx.x % kWarp / 4, lane = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const T* filter = filters + (static_cast<int64_t>(blockIdx.z) * p.channels + channel + c) * p.h.taps * p.w.taps;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int u = r + p.h.taps - kRows;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = 2 * lane + i / 2 * 8 + i % 2 - group;
        uint32_t tap = 0;
        if (channel + c < p.channels && u >= 0 && Inside(v, p.w.taps)) tap = Bits(filter[Tap(p.h, u) * p.w.taps + Tap(p.w, v)]);
        bands[c][r][i / 2] = i % 2 == 0 ? tap : bands[c][r][i / 2] | tap << 16;
      }
    }
  }
}

// What a thread stores: a vector of channels of a target, line by line.  It keeps little, since the sums fill the registers.
template <typename T, class Finish>
struct MmaStorer {
  const MmaParams& p;
  const Finish& finish;
  T* targets;
  int count;       // lines of targets
  int64_t at;      // the element of the first
  unsigned again;  // a bit for each line whose sums are not finite

  __device__ MmaStorer(const MmaParams& params, const Finish& last, T* all) : p(params), finish(last), targets(all), again(0) {
    const MmaLine own = Own();
    count = Column() < p.w.T ? own.count : 0;
    at = (own.image * p.h.T + own.first) * p.target_pitch + static_cast<int64_t>(Column()) * p.channels + own.channel;
  }

  __device__ MmaLine Own() const { return {p, static_cast<int>(threadIdx.x / 16), static_cast<int>(threadIdx.x % 2)}; }

  __device__ int Column() const { return FirstColumn(p) + static_cast<int>(threadIdx.x / 2 % kMmaTargets); }

  // Of the line `number`, if there is one, and if the sums are finite.
  __device__ void Store(int number, const float* sums) {
    if (!Inside(number, count)) return;
    const int word = threadIdx.x % 2 * kVectorPlanes + threadIdx.x / 2 % kMmaTargets + threadIdx.x / 16 * kMmaTargets;
    float z[kMmaVector], zero = 0.0f;
#pragma unroll
    for (int k = 0; k < kMmaVector; ++k) z[k] = sums[word + k * kPlane];
#pragma unroll
    for (int k = 0; k < kMmaVector; ++k) zero = fmaf(z[k], 0.0f, zero);
    if (zero == 0.0f) {
      End(number, z);
    } else {
      again |= 1u << number;
    }
  }

  // Of the lines whose sums were not finite: of the sources alone that a target meets.
  __device__ void StoreAgain(const T* sources, const T* filters) const {
    const MmaLine own = Own();
    const int taps = p.h.taps * p.w.taps;
    const T* filter = filters + (static_cast<int64_t>(blockIdx.z) * p.channels + own.channel) * taps;
#pragma unroll 1
    for (int number = 0; again >> number != 0; ++number) {
      if ((again >> number & 1) == 0) continue;
      float z[kMmaVector] = {};
#pragma unroll 1
      for (int i = 0; i < taps; ++i) {
        const int u = i / p.w.taps, v = i % p.w.taps;
        const int line = own.first + number + p.h.origin + u, place = Column() + p.w.origin + v;
        const int64_t from = (own.image * p.h.S + line) * p.source_pitch + static_cast<int64_t>(place) * p.channels + own.channel;
        if (!Inside(line, p.h.S) || !Inside(place, p.w.S)) continue;
        const Pack<T, kMmaVector> source = Load<T, kMmaVector>(sources + from, true);
#pragma unroll
        for (int k = 0; k < kMmaVector; ++k) {
          z[k] = fmaf(Get(source, k), ToFloat(filter[k * taps + Tap(p.h, u) * p.w.taps + Tap(p.w, v)]), z[k]);
        }
      }
      End(number, z);
    }
  }

 private:
  __device__ void End(int number, float (&z)[kMmaVector]) const {
    const int64_t element = at + number * p.target_pitch;
    const int64_t column = static_cast<int64_t>(blockIdx.z) * p.channels + Own().channel;
    if constexpr (Finish::kLong) {
      finish.Before(z, element, column);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {  // with fewer registers
        constexpr int kHalf = kMmaVector / 2;
        float few[kHalf];
#pragma unroll
        for (int k = 0; k < kHalf; ++k) few[k] = z[k];
        Activate(finish.activation, few);
#pragma unroll
        for (int k = 0; k < kHalf; ++k) z[k] = z[kHalf + k], z[kHalf + k] = few[k];
      }
      finish.After(z, element);
    }
    jaxext::Store(Rounded<T, kMmaVector>(z), targets + element);
  }
};

// All threads reach each barrier; those that have nothing to load or to store have zeros, or no lines.
template <typename T, int kRows, class Finish>
__global__ void __launch_bounds__(kMmaThreads, kMmaResident)
    GatherMma(const MmaParams p, const Finish finish, const T* __restrict__ sources, const T* __restrict__ filters,
              T* __restrict__ targets) {
  const int thread = threadIdx.x % kWarp, pair = 2 * (threadIdx.x / kWarp);  // of the warp, its first channel
  uint32_t* words = reinterpret_cast<uint32_t*>(shared_memory);
  uint32_t bands[2][kRows][2];
  LoadBands<T, kRows>(p, filters, static_cast<int>(blockIdx.x % p.channel_blocks) * kMmaChannels + pair, bands);
  MmaLoader<T> loader(p, sources);
  MmaStorer<T, Finish> storer(p, finish, targets);
  loader.Load(p);
  loader.Put(words);
  loader.Load(p);
  __syncthreads();  // the first line is there
  float sums[2][kRows][4] = {};
  const int own = pair / kMmaVector * kVectorPlanes + pair % kMmaVector * kPlane + thread;
#pragma unroll 1
  for (int i = 0, buffer = 0, other = kBuffer; i < p.steps; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t* line = words + buffer + own + c * kPlane;
      const uint32_t a[4] = {line[0], line[8 * 4], line[kMmaLines * 4], line[(kMmaLines + 8) * 4]};
#pragma unroll
      for (int r = kRows - 1; r > 0; --r) MultiplyAdd<T>(sums[c][r], a, bands[c][r], sums[c][r - 1]);
      MultiplyAdd<T>(sums[c][0], a, bands[c][0], {0.0f, 0.0f, 0.0f, 0.0f});
      const float (&last)[4] = sums[c][kRows - 1];
      auto* at = reinterpret_cast<SumPair*>(words + buffer + kArray + own + thread + c * kPlane);
      at[0] = {last[0], last[1]};
      at[8 * kMmaTargets / 2] = {last[2], last[3]};
    }
    loader.Put(words + other);
    loader.Load(p);
    __syncthreads();  // the next line and the sums are there, and all have done with the lines and the sums before these
    storer.Store(i + 1 - p.h.taps, reinterpret_cast<float*>(words + buffer + kArray));
    const int done = buffer;
    buffer = other, other = done;
  }
  if (storer.again != 0) storer.StoreAgain(sources, filters);
}

template <typename T, class Finish>
using MmaFunction = void (*)(MmaParams, Finish, const T*, const T*, T*);

// The kernel of a plan.
template <typename T, class Finish>
MmaFunction<T, Finish> MmaKernel(const Plan& plan) {
  if (plan.rows == 5) return GatherMma<T, 5, Finish>;
  return GatherMma<T, kMmaRows, Finish>;
}

}  // namespace jaxext::depthwise
