// The depthwise kernels of fprop and dgrad, which gather (depthwise.h has the equations, depthwise_common.cuh what a thread does).
#pragma once

#include "common/activation.cuh"
#include "depthwise/depthwise_common.cuh"

namespace jaxext::depthwise {

constexpr int kGatherSums = 32;  // floats of a chunk: with them no kernel needs more than 168 registers, without spills

// A filter row of a phase, and of the filters that a thread sums.
struct RowNumber {
  int fold, plane, line;

  __device__ void Next(const Phase& d, const Phase& h) {
    if (++line < h.taps) return;
    line = 0;
    if (++plane < d.taps) return;
    plane = 0, ++fold;
  }
};

__device__ inline RowNumber MakeRowNumber(const Phase& d, const Phase& h, int number) {
  if (number < h.taps) return {0, 0, number};
  const int planes = number / h.taps;
  return {planes / d.taps, planes % d.taps, number % h.taps};
}

// Loads `rows` filter rows of a block's vectors into shared memory as float32, one row of channels per tap; `first` is the block's first
// filter.  The taps of a filter are neighbours in memory, and so are those that neighbouring threads read; 4 more floats per tap keep their
// writes on different banks.
template <typename T, int kVector>
__device__ inline void Stage(const T* w, const Params& p, const Phase& d, const Phase& h, const Phase& v, int row, int rows, int first,
                             int channels, float* staged) {
  const int taps = rows * v.taps;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < taps * channels; i += kThreads) {
    const int c = i / taps, tap = i % taps;
    const RowNumber at = MakeRowNumber(d, h, row + tap / v.taps);
    const int owner = first + c + (c / kVector * (p.folds - 1) + at.fold) * kVector;  // of the tap
    const int t = d.first_tap + d.tap_step * at.plane, r = h.first_tap + h.tap_step * at.line;
    const int s = v.first_tap + v.tap_step * (tap % v.taps);
    const int64_t element = ((static_cast<int64_t>(owner) * p.d.R + t) * p.h.R + r) * p.w.R + s;
    staged[tap * (channels + 4) + c] = owner < p.filters ? ToFloat(w[element]) : 0.0f;
  }
}

template <int kTaps, int kVector>
__device__ inline void ReadTaps(const float* staged, int pitch, float (&taps)[kTaps][kVector]) {
#pragma unroll
  for (int v = 0; v < kTaps; ++v) {
    if constexpr (kVector == 1) {
      taps[v][0] = staged[v * pitch];
    } else {
#pragma unroll
      for (int k = 0; k < kVector; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(staged + v * pitch + k);
        taps[v][k] = four.x, taps[v][k + 1] = four.y, taps[v][k + 2] = four.z, taps[v][k + 3] = four.w;
      }
    }
  }
}

// sums[u] += Σ_v sources[u + v] taps[v], where kShared neighbours in a vector of sums share a channel of the sources.
template <typename T, int kVector, int kShared, int kWidth, int kTaps>
__device__ inline void Correlate(const Pack<T, kVector / kShared>* sources, const float (&taps)[kTaps][kVector],
                                 float (&sums)[kWidth][kVector]) {
#pragma unroll
  for (int j = 0; j < kWidth + kTaps - 1; ++j) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float x = Get(sources[j], k / kShared);
#pragma unroll
      for (int v = 0; v < kTaps; ++v) {
        if (0 <= j - v && j - v < kWidth) sums[j - v][k] = fmaf(x, taps[v][k], sums[j - v][k]);
      }
    }
  }
}

// A chunk meets a filter row of kTaps taps, in a window of sources from `place` on.
template <typename T, int kVector, int kWidth, int kTaps>
__device__ inline void Window(const Line<T>& line, int place, const float* staged, int pitch, float (&sums)[kWidth][kVector]) {
  float taps[kTaps][kVector];
  ReadTaps<kTaps, kVector>(staged, pitch, taps);
  Pack<T, kVector> sources[kWidth + kTaps - 1];
  line.template Read<kVector, kWidth + kTaps - 1>(place, sources);
  Correlate<T, kVector, 1, kWidth, kTaps>(sources, taps, sums);
}

// The same for any number of taps: the window moves along with them, and each step reads one source and one tap.
template <typename T, int kVector, int kShared, int kWidth>
__device__ inline void MovingWindow(const Line<T>& line, int place, int count, const float* staged, int pitch,
                                    float (&sums)[kWidth][kVector]) {
  constexpr int kFew = kVector / kShared;
  float window[kWidth][kFew];  // the source number j is at j mod kWidth
  const auto read = [&](int number, float (&into)[kFew]) {
    Pack<T, kFew> source[1];
    line.template Read<kFew, 1>(place + line.stride * number, source);
#pragma unroll
    for (int k = 0; k < kFew; ++k) into[k] = Get(source[0], k);
  };
#pragma unroll
  for (int j = 0; j < kWidth - 1; ++j) read(j, window[j]);
  for (int v = 0; v < count; v += kWidth) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (v + i >= count) return;
      read(v + i + kWidth - 1, window[(i + kWidth - 1) % kWidth]);
      float tap[1][kVector];
      ReadTaps<1, kVector>(staged + (v + i) * pitch, pitch, tap);
#pragma unroll
      for (int u = 0; u < kWidth; ++u) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums[u][k] = fmaf(window[(i + u) % kWidth][k / kShared], tap[0][k], sums[u][k]);
      }
    }
  }
}

// The same where neighbouring targets share no sources: tap by tap.
template <typename T, int kVector, int kShared, int kWidth>
__device__ inline void TapByTap(const Line<T>& line, int place, int hop, int count, const float* staged, int pitch,
                                float (&sums)[kWidth][kVector]) {
  const Line<T> apart{line.at, line.size, line.stride * hop, line.channels};
  for (int v = 0; v < count; ++v) {
    float tap[1][kVector];
    ReadTaps<1, kVector>(staged + v * pitch, pitch, tap);
    Pack<T, kVector / kShared> sources[kWidth];
    apart.template Read<kVector / kShared, kWidth>(place + line.stride * v, sources);
    Correlate<T, kVector, kShared, kWidth, 1>(sources, tap, sums);
  }
}

// The epilogue for a vector of sums of fprop, at the element `at` of the result and the `column` of the bias.
template <typename T>
struct Unchanged {
  static constexpr bool kLong = false;

  template <int kVector>
  __device__ void operator()(float (&)[kVector], int64_t, int64_t) const {}
};

template <typename T>
struct Finish {
  static constexpr bool kLong = true;  // some 16 KB of instructions

  Activation activation;
  const float* bias;
  const T* residual;
  T* saved;

  template <int kVector>
  __device__ void operator()(float (&z)[kVector], int64_t at, int64_t column) const {
    Before(z, at, column);
    Activate(activation, z);
    After(z, at);
  }

  template <int kVector>
  __device__ void Before(float (&z)[kVector], int64_t at, int64_t column) const {
    if (bias != nullptr) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) z[k] += bias[column + k];
    }
    if (saved != nullptr) Store(Rounded<T, kVector>(z), saved + at);
  }

  template <int kVector>
  __device__ void After(float (&z)[kVector], int64_t at) const {
    if (residual == nullptr) return;
    const Pack<T, kVector> added = Load<T, kVector>(residual + at, true);
#pragma unroll
    for (int k = 0; k < kVector; ++k) z[k] += Get(added, k);
  }
};

// Stores a vector of sums at an element of the targets, finished; or where kSummed neighbours of it are summed for a channel, their sums.
template <typename T, int kVector, int kSummed, class Finish>
__device__ inline void StoreSums(const Finish& finish, float (&sums)[kVector], T* targets, int64_t at, int64_t column) {
  if constexpr (kSummed == 1) {
    finish(sums, at, column);
    Store(Rounded<T, kVector>(sums), targets + at);
  } else {
    float totals[kVector / kSummed] = {};
#pragma unroll
    for (int k = 0; k < kVector; ++k) totals[k / kSummed] += sums[k];
    Store(Rounded<T, kVector / kSummed>(totals), targets + at);
  }
}

template <typename T, int kVector, int kSummed, int kWidth, class Finish>
__device__ inline void Write(const Finish& finish, float (&sums)[kWidth][kVector], int count, int64_t pitch, T* targets, int64_t at,
                             int64_t column) {
  if constexpr (Finish::kLong) {  // is there once, for all sums in turn, so that the library stays small
    const int present = min(count, kWidth);
#pragma unroll 1
    for (int u = 0; u < present; ++u) {
      StoreSums<T, kVector, kSummed>(finish, sums[0], targets, at + pitch * u, column);
#pragma unroll
      for (int j = 1; j < kWidth; ++j) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums[j - 1][k] = sums[j][k];
      }
    }
  } else {
#pragma unroll
    for (int u = 0; u < kWidth; ++u) {
      if (u >= count) return;
      StoreSums<T, kVector, kSummed>(finish, sums[u], targets, at + pitch * u, column);
    }
  }
}

// What the threads of fprop and dgrad have in common: a block has filters, strips, a phase of each axis and an index b.
template <typename T, int kVector>
struct Gather {
  int channels, first;  // of the block: channels side by side, and the first filter
  int filter;           // the thread's first
  Phase d, h, w;
  Strip strip;
  const T* source;  // of the strip's image, from the thread's channel on
  const T* filters;
  int64_t target;  // the element of number 0 of the strip's targets
  int64_t column;  // of the first of the thread's channels among those of all b

  __device__ Gather(const Params& p, const T* sources, const T* of_all) {
    channels = blockDim.x * kVector;
    first = static_cast<int>(blockIdx.x % p.channel_blocks) * channels * p.folds;
    filter = first + static_cast<int>(threadIdx.x) * kVector * p.folds;
    const int planes = blockIdx.y / p.w.phases, fd = planes / p.h.phases, fh = planes % p.h.phases, fw = blockIdx.y % p.w.phases;
    d = MakePhase(p.d, fd), h = MakePhase(p.h, fh), w = Ascending(p.w, MakePhase(p.w, fw));
    const int number = static_cast<int>(blockIdx.x / p.channel_blocks * blockDim.y + threadIdx.y);
    strip = MakeStrip(p, d, h, w, number, filter < p.filters);
    const int64_t image = static_cast<int64_t>(blockIdx.z) * p.N + strip.n;
    source = sources + image * p.d.S * p.h.S * p.w.S * p.source_channels + filter / p.source_share;
    filters = of_all + static_cast<int64_t>(blockIdx.z) * p.filters * p.d.R * p.h.R * p.w.R;
    const int64_t plane = image * p.d.T + fd + p.d.period * strip.plane, line = plane * p.h.T + fh + p.h.period * strip.line;
    const int channel = filter / p.target_share;
    target = (line * p.w.T + fw + static_cast<int64_t>(p.w.period) * strip.residue) * p.target_channels + channel;
    column = static_cast<int64_t>(blockIdx.z) * p.target_channels + channel;
  }

  // The filter rows of the phase.
  __device__ int Rows(const Params& p) const { return p.folds * d.taps * h.taps; }

  // Elements from one target of the strip to the next.
  __device__ int64_t Pitch(const Params& p) const { return static_cast<int64_t>(p.w.period) * p.spacing * p.target_channels; }

  // The line of sources that the strip meets at a filter row of its phase, and whether there is one.
  __device__ bool Meets(const Params& p, const RowNumber& row, Line<T>* line) const {
    const int sd = d.origin + p.d.target_stride * strip.plane + p.d.tap_stride * row.plane;
    const int sh = h.origin + p.h.target_stride * strip.line + p.h.tap_stride * row.line;
    const int64_t lines = static_cast<int64_t>(sd) * p.h.S + sh;
    *line = {source + lines * p.w.S * p.source_channels + row.fold * kVector, p.w.S, abs(p.w.tap_stride), p.source_channels};
    return Inside(sd, p.d.S) && Inside(sh, p.h.S);
  }

  // The place of the source that the target i meets at the first tap.
  __device__ int Place(const Params& p, int i) const { return w.origin + p.w.target_stride * strip.Number(p, i); }

  __device__ void StageRows(const Params& p, int row, int rows, float* staged) const {
    Stage<T, kVector>(filters, p, d, h, w, row, rows, first, channels, staged);
  }
};

// Any filter: for each chunk its rows one after another.  kMany: several filters share a channel of x.
template <typename T, int kVector, int kTaps, bool kWindow, bool kMany, class Finish>
__global__ void __launch_bounds__(kThreads, 3) GatherPlane(const Params p, const Finish finish, const T* __restrict__ sources,
                                                           const T* __restrict__ filters, T* __restrict__ targets) {
  constexpr int kWidth = kVector == 1 ? 8 : kGatherSums / kVector;
  constexpr int kMost = kMany ? kVector : 1;  // filters of a vector that share a channel
  const Gather<T, kVector> own(p, sources, filters);
  float* staged = reinterpret_cast<float*>(shared_memory);
  const int all_rows = own.Rows(p), pitch = own.channels + 4, row_pitch = own.w.taps * pitch;
  for (int i = 0; i < p.strip; i += kWidth) {
    const int at = own.strip.begin + i;
    float sums[kWidth][kVector] = {};
    RowNumber number{0, 0, 0};
    for (int row = 0; row < all_rows; row += p.staged_rows) {
      const int rows = min(p.staged_rows, all_rows - row);
      if (i == 0 || all_rows > p.staged_rows) {
        __syncthreads();  // all have done with the rows that lie here
        own.StageRows(p, row, rows, staged);
        __syncthreads();  // the rows are there
      }
      for (int u = 0; u < rows && at < own.strip.end; ++u) {
        Line<T> line;
        const bool meets = own.Meets(p, number, &line);
        number.Next(own.d, own.h);
        if (!meets) continue;
        const float* taps = staged + u * row_pitch + threadIdx.x * kVector;
        if constexpr (kTaps > 0) {
          Window<T, kVector, kWidth, kTaps>(line, own.Place(p, at), taps, pitch, sums);
        } else {
          WithConstant<kMost>(p.source_share, [&](auto shared) {
            constexpr int kShared = decltype(shared)::value;
            if constexpr (kWindow) {
              MovingWindow<T, kVector, kShared, kWidth>(line, own.Place(p, at), own.w.taps, taps, pitch, sums);
            } else {
              TapByTap<T, kVector, kShared, kWidth>(line, own.Place(p, at), p.hop, own.w.taps, taps, pitch, sums);
            }
          });
        }
      }
    }
    WithConstant<kMost>(p.target_share, [&](auto summed) {
      Write<T, kVector, decltype(summed)::value>(finish, sums, own.strip.end - at, own.Pitch(p), targets, own.target + own.Pitch(p) * at,
                                                 own.column);
    });
  }
}

// A filter of one row and kTaps taps, without phases: taps and sources stay in registers from one chunk to the next, and every source of
// a strip is loaded once.
template <typename T, int kVector, int kTaps, class Finish>
__global__ void __launch_bounds__(kThreads, 4)
    GatherLine(const Params p, const Finish finish, const T* __restrict__ sources, const T* __restrict__ filters, T* __restrict__ targets) {
  constexpr int kWidth = kGatherSums / kVector;
  const Gather<T, kVector> own(p, sources, filters);
  float* staged = reinterpret_cast<float*>(shared_memory);
  own.StageRows(p, 0, 1, staged);
  __syncthreads();  // the taps are there
  float taps[kTaps][kVector];
  ReadTaps<kTaps, kVector>(staged + threadIdx.x * kVector, own.channels + 4, taps);

  if (own.strip.begin == own.strip.end) return;
  Line<T> line;
  if (!own.Meets(p, {0, 0, 0}, &line)) line.size = 0;
  Pack<T, kVector> window[kWidth + kTaps - 1];
  line.template Read<kVector, kTaps - 1>(own.Place(p, own.strip.begin), window);
  for (int at = own.strip.begin; at < own.strip.end; at += kWidth) {
    line.template Read<kVector, kWidth>(own.Place(p, at) + line.stride * (kTaps - 1), window + kTaps - 1);
    float sums[kWidth][kVector] = {};
    Correlate<T, kVector, 1, kWidth, kTaps>(window, taps, sums);
    Write<T, kVector, 1>(finish, sums, own.strip.end - at, own.Pitch(p), targets, own.target + own.Pitch(p) * at, own.column);
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) window[j] = window[kWidth + j];
  }
}

template <typename T, class Finish>
using GatherFunction = void (*)(Params, Finish, const T*, const T*, T*);

// The kernel of a plan.
template <typename T, class Finish>
GatherFunction<T, Finish> GatherKernel(const Plan& plan) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  if (!plan.vector) return GatherPlane<T, 1, 0, false, false, Finish>;
  if (plan.many) return plan.window ? GatherPlane<T, kVector, 0, true, true, Finish> : GatherPlane<T, kVector, 0, false, true, Finish>;
  if (!plan.window) return GatherPlane<T, kVector, 0, false, false, Finish>;
  if (plan.line) {
    if (plan.taps == 2) return GatherLine<T, kVector, 2, Finish>;
    if (plan.taps == 3) return GatherLine<T, kVector, 3, Finish>;
    if (plan.taps == 4) return GatherLine<T, kVector, 4, Finish>;
  }
  if (plan.taps == 3) return GatherPlane<T, kVector, 3, true, false, Finish>;
  if (plan.taps == 5) return GatherPlane<T, kVector, 5, true, false, Finish>;
  if (plan.taps == 7) return GatherPlane<T, kVector, 7, true, false, Finish>;
  return GatherPlane<T, kVector, 0, true, false, Finish>;
}

}  // namespace jaxext::depthwise
