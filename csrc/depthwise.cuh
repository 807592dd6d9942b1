// The depthwise kernels: fprop and dgrad are one kernel that gathers, wgrad another (depthwise.h has the equations, depthwise_plan.h the
// geometry and the numbers that kernels are given).
//
// There is no contraction for tensor cores, only bytes to move.  A thread works on a vector of channels, which are contiguous in memory,
// and goes through a strip of targets along the width axis in chunks: the sources of a chunk serve all taps of a filter row from registers.
// Rows are reused through the L1 cache: threads with neighbouring `threadIdx.y` have strips on neighbouring lines and proceed side by side.
// Keeping the sums of several lines in registers would only save loads that hit the cache, and a filter of seven rows would need more
// registers than there are.
//
// All threads of a block reach its last barrier; threads without a strip have an empty one and load nothing.  This file must not know how
// it is launched.
#pragma once

#include <climits>
#include <cstdint>

#include "activation.cuh"
#include "depthwise_plan.h"
#include "pack.cuh"

namespace jaxext::depthwise {

constexpr int kNone = INT_MAX;   // no tap, or no phase
constexpr int kGatherSums = 32;  // floats of a chunk of fprop and dgrad: with them no kernel needs more than 168 registers, without spills
constexpr int kWgradWidth = 4;   // targets of a chunk of wgrad

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

// A strip: its image, its line within the phase, and its targets in line, number begin to end - 1 of those that stand `spacing` apart.
struct Strip {
  int n, line;
  int residue, begin, end;

  // The number within the phase of a target.
  __device__ int Number(const Params& p, int i) const { return residue + p.spacing * i; }
};

// Neighbouring strips are on neighbouring lines.
__device__ inline Strip MakeStrip(const Params& p, const Phase& h, const Phase& w, int number, bool wanted) {
  const int line = number % p.h.targets, place = number / p.h.targets % p.strips, n = number / p.h.targets / p.strips;
  const int residue = place % p.spacing, begin = place / p.spacing * p.strip;
  const bool real = wanted && n < p.N && line < h.targets && residue < w.targets;
  const int targets = (w.targets - residue + p.spacing - 1) / p.spacing;  // of the residue
  return {n, line, residue, begin, real ? min(begin + p.strip, targets) : begin};
}

// Loads `rows` filter rows of a block's channels into shared memory as float32, one row of channels per tap.  The taps of a channel are
// neighbours in memory, and so are those that neighbouring threads read; 4 more floats per tap keep their writes on different banks.
template <typename T>
__device__ inline void Stage(const T* w, const Params& p, const Phase& h, const Phase& v, int row, int rows, int channel, int channels,
                             float* staged) {
  const int taps = rows * v.taps;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < taps * channels; i += kThreads) {
    const int c = i / taps, tap = i % taps;
    const int r = h.first_tap + h.tap_step * (row + tap / v.taps), s = v.first_tap + v.tap_step * (tap % v.taps);
    const bool real = channel + c < p.G;
    staged[tap * (channels + 4) + c] = real ? ToFloat(w[(static_cast<int64_t>(channel + c) * p.h.R + r) * p.w.R + s]) : 0.0f;
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

// sums[u] += Σ_v sources[u + v] taps[v]
template <typename T, int kVector, int kWidth, int kTaps>
__device__ inline void Correlate(const Pack<T, kVector> (&sources)[kWidth + kTaps - 1], const float (&taps)[kTaps][kVector],
                                 float (&sums)[kWidth][kVector]) {
#pragma unroll
  for (int j = 0; j < kWidth + kTaps - 1; ++j) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float x = Get(sources[j], k);
#pragma unroll
      for (int v = 0; v < kTaps; ++v) {
        if (0 <= j - v && j - v < kWidth) sums[j - v][k] = fmaf(x, taps[v][k], sums[j - v][k]);
      }
    }
  }
}

// A row of sources on one line, `stride` apart.
template <typename T>
struct Line {
  const T* at;  // its place 0
  int size, stride, G;

  template <int kVector, int kCount>
  __device__ void Read(int place, Pack<T, kVector>* sources) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int s = place + stride * j;
      sources[j] = Load<T, kVector>(at + static_cast<int64_t>(s) * G, Inside(s, size));
    }
  }
};

// A chunk meets kTaps taps of a filter row, in a window of sources from `place` on.
template <typename T, int kVector, int kWidth, int kTaps>
__device__ inline void Window(const Line<T>& line, int place, const float* staged, int pitch, float (&sums)[kWidth][kVector]) {
  float taps[kTaps][kVector];
  ReadTaps<kTaps, kVector>(staged, pitch, taps);
  Pack<T, kVector> sources[kWidth + kTaps - 1];
  line.template Read<kVector, kWidth + kTaps - 1>(place, sources);
  Correlate<T, kVector, kWidth, kTaps>(sources, taps, sums);
}

// A chunk meets a filter row of any length, in a window or, where neighbouring targets share no sources, tap by tap.
template <typename T, int kVector, int kWidth, int kTaps, bool kWindow>
__device__ inline void Row(const Line<T>& line, int place, int hop, int count, const float* staged, int pitch,
                           float (&sums)[kWidth][kVector]) {
  if constexpr (kTaps > 0) {
    Window<T, kVector, kWidth, kTaps>(line, place, staged, pitch, sums);
  } else if constexpr (kWindow) {
    int v = 0;
    for (; v + 4 <= count; v += 4) Window<T, kVector, kWidth, 4>(line, place + line.stride * v, staged + v * pitch, pitch, sums);
    if (v + 2 <= count) Window<T, kVector, kWidth, 2>(line, place + line.stride * v, staged + v * pitch, pitch, sums), v += 2;
    if (v < count) Window<T, kVector, kWidth, 1>(line, place + line.stride * v, staged + v * pitch, pitch, sums);
  } else {
    const Line<T> apart{line.at, line.size, line.stride * hop, line.G};
    for (int v = 0; v < count; ++v) {
      float tap[1][kVector];
      ReadTaps<1, kVector>(staged + v * pitch, pitch, tap);
      Pack<T, kVector> sources[kWidth];
      apart.template Read<kVector, kWidth>(place + line.stride * v, sources);
      Correlate<T, kVector, kWidth, 1>(sources, tap, sums);
    }
  }
}

// The epilogue for a vector of sums of fprop, at the element `at` of the result and the `column` of the bias.
template <typename T>
struct Unchanged {
  template <int kVector>
  __device__ void operator()(float (&)[kVector], int64_t, int64_t) const {}
};

template <typename T>
struct Finish {
  Activation activation;
  const float* bias;
  const T* residual;
  T* saved;

  template <int kVector>
  __device__ void operator()(float (&z)[kVector], int64_t at, int64_t column) const {
    if (bias != nullptr) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) z[k] += bias[column + k];
    }
    if (saved != nullptr) Store(Rounded<T, kVector>(z), saved + at);
    Activate(activation, z);
    if (residual != nullptr) {
      const Pack<T, kVector> added = Load<T, kVector>(residual + at, true);
#pragma unroll
      for (int k = 0; k < kVector; ++k) z[k] += Get(added, k);
    }
  }
};

template <typename T, int kVector, int kWidth, class Finish>
__device__ inline void Write(const Finish& finish, float (&sums)[kWidth][kVector], int count, int64_t pitch, T* targets, int64_t at,
                             int64_t column) {
#pragma unroll
  for (int u = 0; u < kWidth; ++u) {
    if (u >= count) return;
    finish(sums[u], at + pitch * u, column);
    Store(Rounded<T, kVector>(sums[u]), targets + at + pitch * u);
  }
}

// What the threads of fprop and dgrad have in common: a block has channels, strips, a phase of each axis and an index b.
template <typename T, int kVector>
struct Gather {
  int channels, channel;  // of the block; the thread's own
  Phase h, w;
  Strip strip;
  const T* source;  // of the strip's image, from the thread's channel on
  const T* filter;
  int64_t target;  // the element of number 0 of the strip's targets
  int64_t column;  // of the first of the thread's channels among those of all b

  __device__ Gather(const Params& p, const T* sources, const T* filters) {
    channels = blockDim.x * kVector;
    const int first = static_cast<int>(blockIdx.x % p.channel_blocks) * channels;
    channel = first + threadIdx.x * kVector;
    const int fh = blockIdx.y / p.w.phases, fw = blockIdx.y % p.w.phases;
    h = MakePhase(p.h, fh), w = Ascending(p.w, MakePhase(p.w, fw));
    const int number = static_cast<int>(blockIdx.x / p.channel_blocks * blockDim.y + threadIdx.y);
    strip = MakeStrip(p, h, w, number, channel < p.G);
    const int64_t image = static_cast<int64_t>(blockIdx.z) * p.N + strip.n;
    source = sources + image * p.h.S * p.w.S * p.G + channel;
    filter = filters + static_cast<int64_t>(blockIdx.z) * p.G * p.h.R * p.w.R;
    const int64_t line = image * p.h.T + fh + p.h.period * strip.line;
    target = (line * p.w.T + fw + static_cast<int64_t>(p.w.period) * strip.residue) * p.G + channel;
    column = static_cast<int64_t>(blockIdx.z) * p.G + channel;
  }

  // Elements from one target of the strip to the next.
  __device__ int64_t Pitch(const Params& p) const { return static_cast<int64_t>(p.w.period) * p.spacing * p.G; }

  // The line of sources that the strip meets at filter row u of its phase, and whether there is one.
  __device__ bool Meets(const Params& p, int u, Line<T>* line) const {
    const int s = h.origin + p.h.target_stride * strip.line + p.h.tap_stride * u;
    *line = {source + static_cast<int64_t>(s) * p.w.S * p.G, p.w.S, abs(p.w.tap_stride), p.G};
    return Inside(s, p.h.S);
  }

  // The place of the source that the target i meets at the first tap.
  __device__ int Place(const Params& p, int i) const { return w.origin + p.w.target_stride * strip.Number(p, i); }

  __device__ void StageRows(const Params& p, int row, int rows, float* staged) const {
    Stage(filter, p, h, w, row, rows, channel - static_cast<int>(threadIdx.x) * kVector, channels, staged);
  }
};

extern __shared__ float4 shared_memory[];

// Any filter: for each chunk its rows one after another.
template <typename T, int kVector, int kTaps, bool kWindow, class Finish>
__global__ void __launch_bounds__(kThreads, 3) GatherPlane(const Params p, const Finish finish, const T* __restrict__ sources,
                                                           const T* __restrict__ filters, T* __restrict__ targets) {
  constexpr int kWidth = kVector == 1 ? 8 : kGatherSums / kVector;
  const Gather<T, kVector> own(p, sources, filters);
  float* staged = reinterpret_cast<float*>(shared_memory);
  const int pitch = own.channels + 4, row_pitch = own.w.taps * pitch;
  for (int i = 0; i < p.strip; i += kWidth) {
    const int at = own.strip.begin + i;
    float sums[kWidth][kVector] = {};
    for (int row = 0; row < own.h.taps; row += p.staged_rows) {
      const int rows = min(p.staged_rows, own.h.taps - row);
      if (i == 0 || own.h.taps > p.staged_rows) {
        __syncthreads();  // all have done with the rows that lie here
        own.StageRows(p, row, rows, staged);
        __syncthreads();  // the rows are there
      }
      for (int u = 0; u < rows && at < own.strip.end; ++u) {
        Line<T> line;
        if (!own.Meets(p, row + u, &line)) continue;
        Row<T, kVector, kWidth, kTaps, kWindow>(line, own.Place(p, at), p.hop, own.w.taps, staged + u * row_pitch + threadIdx.x * kVector,
                                                pitch, sums);
      }
    }
    Write<T, kVector, kWidth>(finish, sums, own.strip.end - at, own.Pitch(p), targets, own.target + own.Pitch(p) * at, own.column);
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
  if (!own.Meets(p, 0, &line)) line.size = 0;
  Pack<T, kVector> window[kWidth + kTaps - 1];
  line.template Read<kVector, kTaps - 1>(own.Place(p, own.strip.begin), window);
  for (int at = own.strip.begin; at < own.strip.end; at += kWidth) {
    line.template Read<kVector, kWidth>(own.Place(p, at) + line.stride * (kTaps - 1), window + kTaps - 1);
    float sums[kWidth][kVector] = {};
    Correlate<T, kVector, kWidth, kTaps>(window, taps, sums);
    Write<T, kVector, kWidth>(finish, sums, own.strip.end - at, own.Pitch(p), targets, own.target + own.Pitch(p) * at, own.column);
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) window[j] = window[kWidth + j];
  }
}

// A piece of the filter: kTaps taps of a row, and the phases that see them.
struct Piece {
  int r, first, piece;  // the taps first + step·(kTaps·piece + v) of row r
  bool real;

  __device__ Piece(const Params& p, int number) {
    piece = number % p.row_pieces, first = number / p.row_pieces % p.classes, r = number / p.row_pieces / p.classes;
    real = r < p.h.R;
  }
};

// sums[v] += Σ_u sources[u + v] targets[u]
template <typename T, int kVector, int kWidth, int kTaps>
__device__ inline void Outer(const Pack<T, kVector> (&sources)[kWidth + kTaps - 1], const Pack<T, kVector> (&targets)[kWidth],
                             float (&sums)[kTaps][kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    float y[kWidth];
#pragma unroll
    for (int u = 0; u < kWidth; ++u) y[u] = Get(targets[u], k);
#pragma unroll
    for (int j = 0; j < kWidth + kTaps - 1; ++j) {
      const float x = Get(sources[j], k);
#pragma unroll
      for (int v = 0; v < kTaps; ++v) {
        if (0 <= j - v && j - v < kWidth) sums[v][k] = fmaf(x, y[j - v], sums[v][k]);
      }
    }
  }
}

// Add the contributions of a strip's targets, on the line `y`, to the sums of kTaps taps; the first tap of target i meets place + hop·i of
// `x`. Targets beyond the strip must not be read, not even multiplied by zero, so the last ones are handled one by one.
template <typename T, int kVector, int kTaps, bool kWindow>
__device__ inline void Contract(const Line<T>& x, int x_place, int hop, const Line<T>& y, int y_place, int count,
                                float (&sums)[kTaps][kVector]) {
  int i = 0;
  if constexpr (kWindow) {
    Pack<T, kVector> window[kWgradWidth + kTaps - 1], targets[kWgradWidth];
    if (count >= kWgradWidth) x.template Read<kVector, kTaps - 1>(x_place, window);
    for (; i + kWgradWidth <= count; i += kWgradWidth) {
      x.template Read<kVector, kWgradWidth>(x_place + x.stride * (i + kTaps - 1), window + kTaps - 1);
      y.template Read<kVector, kWgradWidth>(y_place + y.stride * i, targets);
      Outer<T, kVector, kWgradWidth, kTaps>(window, targets, sums);
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) window[j] = window[kWgradWidth + j];
    }
  }
  for (; i < count; ++i) {
    Pack<T, kVector> sources[kTaps], target[1];
    x.template Read<kVector, kTaps>(x_place + x.stride * hop * i, sources);
    y.template Read<kVector, 1>(y_place + y.stride * i, target);
    Outer<T, kVector, 1, kTaps>(sources, target, sums);
  }
}

// The sums of a thread, over its strips among those of the block's split.
template <typename T, int kVector, int kTaps, bool kWindow>
__device__ inline void SumStrips(const Params& p, const Piece& piece, int channel, const T* sources, const T* targets,
                                 float (&sums)[kTaps][kVector]) {
  const int fh = Least(p.h.first_target, piece.r % p.h.step), fw = Least(p.w.first_target, piece.first);
  if (!piece.real || channel >= p.G || fh == kNone || fw == kNone) return;
  const Phase h = MakePhase(p.h, fh), w = MakePhase(p.w, fw);
  const int strip_lanes = static_cast<int>(blockDim.y) / p.pieces, strip_lane = static_cast<int>(threadIdx.y) / p.pieces;
  const int first_tile = static_cast<int>(blockIdx.y) * p.share, end = min(first_tile + p.share, p.tiles);
  for (int tile = first_tile; tile < end; ++tile) {
    const Strip strip = MakeStrip(p, h, w, tile * strip_lanes + strip_lane, true);
    const int64_t image = static_cast<int64_t>(blockIdx.z) * p.N + strip.n;
    const int sh = h.origin + p.h.target_stride * strip.line + p.h.tap_stride * (piece.r / p.h.step), th = fh + p.h.period * strip.line;
    if (strip.begin == strip.end || !Inside(sh, p.h.S)) continue;
    const Line<T> x{sources + (image * p.h.S + sh) * p.w.S * p.G + channel, p.w.S, p.w.tap_stride, p.G};
    const Line<T> y{targets + (image * p.h.T + th) * p.w.T * p.G + channel, p.w.T, p.w.period * p.spacing, p.G};
    const int j = strip.Number(p, strip.begin);
    const int place = w.origin + p.w.target_stride * j + p.w.tap_stride * kTaps * piece.piece;
    Contract<T, kVector, kTaps, kWindow>(x, place, p.hop, y, fw + p.w.period * j, strip.end - strip.begin, sums);
  }
}

// The sums of all strips in shared memory, [strip lane][piece][channel], become one tap, number v, of each of the block's pieces.
template <typename T, int kTaps>
__device__ inline void WriteTap(const Params& p, const float* parts, int first_piece, int v, int first_channel, int channels,
                                void* filters) {
  const int64_t part = static_cast<int64_t>(blockIdx.y) * gridDim.z + blockIdx.z;
  const int count = p.pieces * channels, strip_lanes = static_cast<int>(blockDim.y) / p.pieces;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += kThreads) {
    const Piece piece(p, first_piece + i / channels);
    const int s = piece.first + p.w.step * (kTaps * piece.piece + v), c = first_channel + i % channels;
    if (!piece.real || s >= p.w.R || c >= p.G) continue;
    float total = 0.0f;
    for (int lane = 0; lane < strip_lanes; ++lane) total += parts[lane * count + i];
    const int64_t at = ((part * p.G + c) * p.h.R + piece.r) * p.w.R + s;
    if (p.float_result) {
      static_cast<float*>(filters)[at] = total;
    } else {
      static_cast<T*>(filters)[at] = FromFloat<T>(total);
    }
  }
}

// A block sums, for its channels and pieces of the filter, over the strips of its split: every thread over some, and then all together.
template <typename T, int kVector, int kTaps, bool kWindow>
__global__ void __launch_bounds__(kThreads, 3)
    Wgrad(const Params p, const T* __restrict__ sources, const T* __restrict__ targets, void* __restrict__ filters) {
  const int channels = blockDim.x * kVector, first_channel = static_cast<int>(blockIdx.x % p.channel_blocks) * channels;
  const int first_piece = static_cast<int>(blockIdx.x / p.channel_blocks) * p.pieces;
  float sums[kTaps][kVector] = {};
  SumStrips<T, kVector, kTaps, kWindow>(p, Piece(p, first_piece + threadIdx.y % p.pieces), first_channel + threadIdx.x * kVector, sources,
                                        targets, sums);
  float* parts = reinterpret_cast<float*>(shared_memory);
#pragma unroll
  for (int v = 0; v < kTaps; ++v) {
    __syncthreads();  // all have read the parts of the tap before
#pragma unroll
    for (int k = 0; k < kVector; ++k) parts[(threadIdx.y * blockDim.x + threadIdx.x) * kVector + k] = sums[v][k];
    __syncthreads();  // the parts are there
    WriteTap<T, kTaps>(p, parts, first_piece, v, first_channel, channels, filters);
  }
}

template <typename T, class Finish>
using GatherFunction = void (*)(Params, Finish, const T*, const T*, T*);
template <typename T>
using WgradFunction = void (*)(Params, const T*, const T*, void*);

// The kernels of a plan.
template <typename T, class Finish>
GatherFunction<T, Finish> GatherKernel(const Plan& plan) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  if (!plan.vector) return GatherPlane<T, 1, 0, false, Finish>;
  if (!plan.window) return GatherPlane<T, kVector, 0, false, Finish>;
  if (plan.line) {
    if (plan.taps == 2) return GatherLine<T, kVector, 2, Finish>;
    if (plan.taps == 3) return GatherLine<T, kVector, 3, Finish>;
    if (plan.taps == 4) return GatherLine<T, kVector, 4, Finish>;
  }
  if (plan.taps == 3) return GatherPlane<T, kVector, 3, true, Finish>;
  if (plan.taps == 5) return GatherPlane<T, kVector, 5, true, Finish>;
  if (plan.taps == 7) return GatherPlane<T, kVector, 7, true, Finish>;
  return GatherPlane<T, kVector, 0, true, Finish>;
}

template <typename T>
WgradFunction<T> WgradKernel(const Plan& plan) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  if (!plan.vector) return Wgrad<T, 1, kNarrowWgradTaps, false>;
  if (!plan.window) return Wgrad<T, kVector, kNarrowWgradTaps, false>;
  if (plan.taps == 2) return Wgrad<T, kVector, 2, true>;
  if (plan.taps == 3) return Wgrad<T, kVector, 3, true>;
  if (plan.taps == 4) return Wgrad<T, kVector, 4, true>;
  if (plan.taps == 5) return Wgrad<T, kVector, 5, true>;
  return Wgrad<T, kVector, kWgradTaps, true>;
}

}  // namespace jaxext::depthwise
