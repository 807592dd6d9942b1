// The causal kernels, forward and backward (causal.h has the equations, causal_plan.h the numbers that kernels are given).
//
// There are only bytes to move.  A thread works on a vector of channels, which are neighbours in memory, and walks along a strip of steps
// in chunks.  Taps, the inputs that they read and, backward, the cotangents stay in registers from one chunk to the next, so that a strip
// reads each of its elements once.
//
// A tap that reads nothing, beyond the filter's J or in another sequence, is left out, not multiplied by zero.  The taps in front of a
// filter of fewer than kTaps are such ones: tap v is the filter's tap v - (kTaps - J).  So results do not depend on where strips, pieces or
// packed sequences begin.
#pragma once

#include <cstdint>

#include "common/activation_derivative.cuh"
#include "causal/causal_plan.h"
#include "common/pack.cuh"

namespace jaxext::causal {

// With these chunks kernels need no more registers than their blocks on a multiprocessor leave them, without spills.
constexpr int kSums = 32;  // floats of a chunk forward
constexpr int kChunk = 2;  // steps of a chunk backward

template <typename T>
struct Arrays {
  const T *x, *state, *dy;
  const void *weight, *bias;
  Dtype of_weight, of_bias;
  const int32_t *idx, *idx_of_states;
};

extern __shared__ float4 shared_memory[];

__device__ inline float Element(const void* array, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kF32) return static_cast<const float*>(array)[at];
  if (dtype == Dtype::kBF16) return ToFloat(static_cast<const __nv_bfloat16*>(array)[at]);
  return ToFloat(static_cast<const __half*>(array)[at]);
}

// The taps of a block's channels go to shared memory as float32, a row of channels for each, and behind `taps` of them the bias.
template <typename T>
__device__ inline float* Stage(const Params& p, const Arrays<T>& of, int taps, int first, int channels) {
  auto* staged = reinterpret_cast<float*>(shared_memory);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < (taps + 1) * channels; i += kThreads) {
    const int row = i / channels - (taps - p.J), c = first + i % channels;
    float value = 0.0f;
    if (c < p.C && row >= 0 && row < p.J) value = Element(of.weight, of.of_weight, static_cast<int64_t>(row) * p.C + c);
    if (c < p.C && row == p.J && of.bias != nullptr) value += Element(of.bias, of.of_bias, c);  // added to zero: -0 becomes 0
    staged[i] = value;
  }
  __syncthreads();  // the taps are there
  return staged;
}

template <int kRows, int kVector>
__device__ inline void ReadRows(const float* staged, int pitch, float (&rows)[kRows][kVector]) {
#pragma unroll
  for (int v = 0; v < kRows; ++v) {
    if constexpr (kVector == 1) {
      rows[v][0] = staged[v * pitch];
    } else {
#pragma unroll
      for (int k = 0; k < kVector; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(staged + v * pitch + k);
        rows[v][k] = four.x, rows[v][k + 1] = four.y, rows[v][k + 2] = four.z, rows[v][k + 3] = four.w;
      }
    }
  }
}

// A thread's channels of a sequence, and the strip of it that the thread walks along: the steps begin to end - 1.  What it knows of arrays
// stays in the kernel's parameters, which cost no registers.
template <typename T, int kVector>
struct Strip {
  const Params& p;
  const Arrays<T>& of;
  int channel, sequence;
  bool real;
  int begin, end;

  __device__ Strip(const Params& params, const Arrays<T>& arrays, int number, int first)
      : p(params), of(arrays), channel(first), sequence(number / p.strips), real(sequence < p.B && channel < p.C) {
    begin = number % p.strips * p.strip, end = min(begin + p.strip, p.T);
  }

  // The element of that step in x, y and their cotangents, and in the state.
  __device__ int64_t Place(int t) const { return (static_cast<int64_t>(sequence) * p.T + t) * p.C + channel; }
  __device__ int64_t OfState(int t) const { return (static_cast<int64_t>(sequence) * (p.J - 1) + t + p.J - 1) * p.C + channel; }
  __device__ bool Owns(int t) const { return t >= begin && t < end; }
  __device__ bool InState(int t) const { return t < 0 && t + p.J - 1 >= 0; }

  // The inputs of a step that may be in the state, or nowhere.
  __device__ Pack<T, kVector> Input(int t) const {
    if (t >= 0) return Load<T, kVector>(of.x + Place(t), t < p.T);
    if (of.state == nullptr) return {};
    return Load<T, kVector>(of.state + OfState(t), InState(t));
  }

  // The number of the sequence of that step.
  __device__ int Number(int t) const {
    if (t >= 0) return t < p.T ? of.idx[static_cast<int64_t>(sequence) * p.T + t] : 0;
    if (of.idx_of_states == nullptr || !InState(t)) return 0;
    return of.idx_of_states[static_cast<int64_t>(sequence) * (p.J - 1) + t + p.J - 1];
  }
};

// Bit v: whether tap v reads: it is there, and its input's number, numbers[v], is the step's own.
template <int kCount>
__device__ inline unsigned Reads(const int* numbers, int own, unsigned there) {
  unsigned same = 0;
#pragma unroll
  for (int v = 0; v < kCount; ++v) same |= (numbers[v] == own ? 1u : 0u) << v;
  return same & there;
}

// z[u] += Σ_v inputs[u + v] taps[v] over the taps that read.
template <typename T, int kVector, int kWidth, int kCount, bool kAll>
__device__ inline void Correlate(const Pack<T, kVector>* inputs, const float (&taps)[kCount][kVector], const unsigned* reads,
                                 float (&z)[kWidth * kVector]) {
#pragma unroll
  for (int j = 0; j < kWidth + kCount - 1; ++j) {
    float x[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[k] = Get(inputs[j], k);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (j - v < 0 || j - v >= kWidth) continue;
      if (!kAll && (reads[j - v] >> v & 1) == 0) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k) z[(j - v) * kVector + k] = fmaf(x[k], taps[v][k], z[(j - v) * kVector + k]);
    }
  }
}

template <typename T, int kVector, int kWidth>
__device__ inline void Finish(Activation activation, float (&z)[kWidth * kVector], T* at, int64_t pitch, int count) {
  Activate(activation, z);
#pragma unroll
  for (int u = 0; u < kWidth; ++u) {
    if (u >= count) return;
    float row[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) row[k] = z[u * kVector + k];
    Store(Rounded<T, kVector>(row), at + pitch * u);
  }
}

template <int kVector, int kWidth>
__device__ inline void StartWith(const float* bias, float (&z)[kWidth * kVector]) {
  float rows[1][kVector];
  ReadRows<1, kVector>(bias, 0, rows);
#pragma unroll
  for (int i = 0; i < kWidth * kVector; ++i) z[i] = rows[0][i % kVector];
}

// A strip, with at most kTaps taps: taps and inputs stay in registers.
template <typename T, int kVector, int kWidth, bool kAll>
__device__ inline void WalkFew(const Strip<T, kVector>& strip, const float* staged, int pitch, T* y) {
  const Params& p = strip.p;
  constexpr int kBefore = kTaps - 1;
  float taps[kTaps][kVector];
  ReadRows<kTaps, kVector>(staged, pitch, taps);
  Pack<T, kVector> inputs[kBefore + kWidth];
  int numbers[kBefore + kWidth] = {};
  const bool packed = !kAll && strip.of.idx != nullptr;
#pragma unroll
  for (int j = 0; j < kBefore; ++j) {
    inputs[j] = strip.Input(strip.begin - kBefore + j);
    if (packed) numbers[j] = strip.Number(strip.begin - kBefore + j);
  }
  for (int t = strip.begin; t < strip.end; t += kWidth) {
    const int64_t at = strip.Place(t);
#pragma unroll
    for (int u = 0; u < kWidth; ++u) {
      inputs[kBefore + u] = Load<T, kVector>(strip.of.x + at + static_cast<int64_t>(u) * p.C, t + u < strip.end);
      if (packed) numbers[kBefore + u] = strip.Number(t + u);
    }
    unsigned reads[kWidth];
#pragma unroll
    for (int u = 0; u < kWidth; ++u) reads[u] = kAll ? ~0u : Reads<kTaps>(numbers + u, numbers[u + kBefore], p.there);
    float z[kWidth * kVector];
    StartWith<kVector, kWidth>(staged + kTaps * pitch, z);
    Correlate<T, kVector, kWidth, kTaps, kAll>(inputs, taps, reads, z);
    Finish<T, kVector, kWidth>(p.activation, z, y + strip.Place(t), p.C, strip.end - t);
#pragma unroll
    for (int j = 0; j < kBefore; ++j) inputs[j] = inputs[kWidth + j], numbers[j] = numbers[kWidth + j];
  }
}

// A strip, with any number of taps: kTaps at a time, whose inputs come from the L1 cache again.
template <typename T, int kVector, int kWidth>
__device__ inline void WalkMany(const Strip<T, kVector>& strip, const float* staged, int pitch, T* y) {
  const Params& p = strip.p;
  const int all = kTaps * p.groups;
  const bool packed = strip.of.idx != nullptr;
  for (int t = strip.begin; t < strip.end; t += kWidth) {
    float z[kWidth * kVector];
    StartWith<kVector, kWidth>(staged + all * pitch, z);
    for (int first = 0; first < all; first += kTaps) {
      float taps[kTaps][kVector];
      ReadRows<kTaps, kVector>(staged + first * pitch, pitch, taps);
      const int from = t - (all - 1) + first;
      Pack<T, kVector> inputs[kWidth + kTaps - 1];
      int numbers[kWidth + kTaps - 1];
#pragma unroll
      for (int j = 0; j < kWidth + kTaps - 1; ++j) {
        inputs[j] = strip.Input(from + j);
        numbers[j] = packed ? strip.Number(from + j) : 0;
      }
      unsigned reads[kWidth];
#pragma unroll
      for (int u = 0; u < kWidth; ++u) {
        reads[u] = Reads<kTaps>(numbers + u, packed ? strip.Number(t + u) : 0, p.there >> first);
      }
      Correlate<T, kVector, kWidth, kTaps, false>(inputs, taps, reads, z);
    }
    Finish<T, kVector, kWidth>(p.activation, z, y + strip.Place(t), p.C, strip.end - t);
  }
}

template <typename T, int kVector, Kind kKind>
__global__ void __launch_bounds__(kThreads, kKind == Kind::kExact ? 4 : 3)
    CausalForward(const Params p, const Arrays<T> of, T* __restrict__ y) {
  constexpr int kWidth = kVector == 1 ? 8 : kSums / kVector;
  const int channels = blockDim.x * kVector, first = static_cast<int>(blockIdx.x % p.channel_blocks) * channels;
  const float* staged = Stage(p, of, kTaps * p.groups, first, channels) + threadIdx.x * kVector;
  const int channel = first + threadIdx.x * kVector;
  const int number = static_cast<int>(blockIdx.x / p.channel_blocks * blockDim.y + threadIdx.y);
  const Strip<T, kVector> strip(p, of, number, channel);
  if (!strip.real) return;
  if constexpr (kKind == Kind::kMany) {
    WalkMany<T, kVector, kWidth>(strip, staged, channels, y);
  } else {
    WalkFew<T, kVector, kWidth, kKind == Kind::kExact>(strip, staged, channels, y);
  }
}

// What a thread of the backward kernel keeps along its strips.
template <int kCount, int kVector>
struct Sums {
  float dw[kCount][kVector] = {}, db[kVector] = {};
};

// dz of a step, which is in the strip or up to kCount - 1 behind it: z again, its derivative, and nothing beyond the sequence.
template <typename T, int kVector, int kCount, bool kAll>
__device__ inline void Cotangent(Activation activation, const Pack<T, kVector>& dy, bool inside, const Pack<T, kVector>* inputs,
                                 const float (&taps)[kCount][kVector], unsigned reads, const float* bias, float (&dz)[kVector]) {
  StartWith<kVector, 1>(bias, dz);
  if (activation != Activation::kNone) Correlate<T, kVector, 1, kCount, kAll>(inputs, taps, &reads, dz);
  Differentiate(activation, dz);
#pragma unroll
  for (int k = 0; k < kVector; ++k) dz[k] = inside ? Get(dy, k) * dz[k] : 0.0f;
}

// A strip backward: at step t the taps' and the bias's sums take dz of t, and d_x of kCount - 1 steps before is complete.  The steps before
// the first are the state's.
template <typename T, int kVector, int kCount, bool kAll>
__device__ inline void WalkBack(const Strip<T, kVector>& strip, const float (&taps)[kCount][kVector], const float* bias, T* dx, T* d_state,
                                Sums<kCount, kVector>& sums) {
  const Params& p = strip.p;
  constexpr int kBefore = kCount - 1;
  const bool packed = !kAll && strip.of.idx != nullptr;
  Pack<T, kVector> inputs[kBefore + kChunk];
  float dz[kBefore + kChunk][kVector] = {};
  int numbers[kBefore + kChunk] = {};
#pragma unroll
  for (int j = 0; j < kBefore; ++j) {
    inputs[j] = strip.Input(strip.begin - kBefore + j);
    if (packed) numbers[j] = strip.Number(strip.begin - kBefore + j);
  }
  for (int t = strip.begin; t < strip.end + kBefore; t += kChunk) {
    Pack<T, kVector> dy[kChunk];
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      const int64_t at = strip.Place(t + u);
      inputs[kBefore + u] = Load<T, kVector>(strip.of.x + at, t + u < p.T);
      dy[u] = Load<T, kVector>(strip.of.dy + at, t + u < p.T);
      if (packed) numbers[kBefore + u] = strip.Number(t + u);
    }
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      const unsigned reads = kAll ? ~0u : Reads<kCount>(numbers + u, numbers[u + kBefore], p.there);
      Cotangent<T, kVector, kCount, kAll>(p.activation, dy[u], t + u < p.T, inputs + u, taps, reads, bias, dz[kBefore + u]);
      if (strip.Owns(t + u)) {
#pragma unroll
        for (int v = 0; v < kCount; ++v) {
          if (!kAll && (reads >> v & 1) == 0) continue;
#pragma unroll
          for (int k = 0; k < kVector; ++k) sums.dw[v][k] = fmaf(dz[kBefore + u][k], Get(inputs[u + v], k), sums.dw[v][k]);
        }
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums.db[k] += dz[kBefore + u][k];
      }
      float d[kVector] = {};
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        const bool read = kAll || ((p.there >> v & 1) != 0 && numbers[u] == numbers[u + kBefore - v]);
        if (!read) continue;
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] = fmaf(dz[u + kBefore - v][k], taps[v][k], d[k]);
      }
      const int s = t + u - kBefore;
      if (strip.Owns(s)) Store(Rounded<T, kVector>(d), dx + strip.Place(s));
      if (strip.begin == 0 && d_state != nullptr && strip.InState(s)) Store(Rounded<T, kVector>(d), d_state + strip.OfState(s));
    }
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
      inputs[j] = inputs[kChunk + j], numbers[j] = numbers[kChunk + j];
#pragma unroll
      for (int k = 0; k < kVector; ++k) dz[j][k] = dz[kChunk + j][k];
    }
  }
}

// The sum over a block's rows of threads, of a row of its channels.
template <int kVector>
__device__ inline void WriteSum(const float (&own)[kVector], float* parts, int count, float* sums) {
  const int channels = blockDim.x * kVector, thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // all have read the parts of the row before
#pragma unroll
  for (int k = 0; k < kVector; ++k) parts[thread * kVector + k] = own[k];
  __syncthreads();  // the parts are there
  for (int c = thread; c < min(channels, count); c += kThreads) {
    float total = 0.0f;
    for (int row = 0; row < static_cast<int>(blockDim.y); ++row) total += parts[row * channels + c];
    sums[c] = total;
  }
}

// A share of the strips of some channels, tile by tile.
template <typename T, int kVector, int kCount, bool kAll>
__global__ void __launch_bounds__(kThreads, kCount > kTaps ? 2 : 3)
    CausalBackward(const Params p, const Arrays<T> of, T* __restrict__ dx, float* __restrict__ partial, T* __restrict__ d_state) {
  const int channels = blockDim.x * kVector, first = static_cast<int>(blockIdx.x % p.channel_blocks) * channels;
  const int channel = first + threadIdx.x * kVector, split = static_cast<int>(blockIdx.x / p.channel_blocks);
  float* staged = Stage(p, of, kCount, first, channels);
  float taps[kCount][kVector];
  ReadRows<kCount, kVector>(staged + threadIdx.x * kVector, channels, taps);
  Sums<kCount, kVector> sums;
  const int end = min((split + 1) * p.share, p.tiles);
  for (int tile = split * p.share; tile < end; ++tile) {
    const Strip<T, kVector> strip(p, of, static_cast<int>(tile * blockDim.y + threadIdx.y), channel);
    if (!strip.real) continue;
    WalkBack<T, kVector, kCount, kAll>(strip, taps, staged + kCount * channels + threadIdx.x * kVector, dx, d_state, sums);
  }
  float* parts = staged + (kCount + 1) * channels;
  const int rows = p.J + (of.bias != nullptr);
  float* row = partial + static_cast<int64_t>(split) * rows * p.C + first;
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    if (v < kCount - p.J) continue;
    WriteSum(sums.dw[v], parts, p.C - first, row);
    row += p.C;
  }
  if (of.bias != nullptr) WriteSum(sums.db, parts, p.C - first, row);
}

}  // namespace jaxext::causal
