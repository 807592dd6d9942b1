// The depthwise kernels of wgrad (depthwise.h has the equations, depthwise_common.cuh what a thread does).
#pragma once

#include "depthwise/depthwise_common.cuh"

namespace jaxext::depthwise {

constexpr int kWgradWidth = 4;  // targets of a chunk

// A piece of the filter: kTaps taps of a row, and the phases that see them.
struct Piece {
  int t, r, first, piece;  // the taps first + step·(kTaps·piece + v) of row r of plane t
  bool real;

  __device__ Piece(const Params& p, int number) {
    piece = number % p.row_pieces;
    const int rows = number / p.row_pieces, planes = rows / p.classes;
    first = rows % p.classes, r = planes % p.h.R, t = planes / p.h.R;
    real = t < p.d.R;
  }
};

// sums[v] += Σ_u sources[u + v] targets[u], where kShared neighbours in a vector of targets share a channel of the sources.
template <typename T, int kVector, int kShared, int kWidth, int kTaps>
__device__ inline void Outer(const Pack<T, kVector / kShared> (&sources)[kWidth + kTaps - 1], const Pack<T, kVector> (&targets)[kWidth],
                             float (&sums)[kTaps][kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    float y[kWidth];
#pragma unroll
    for (int u = 0; u < kWidth; ++u) y[u] = Get(targets[u], k);
#pragma unroll
    for (int j = 0; j < kWidth + kTaps - 1; ++j) {
      const float x = Get(sources[j], k / kShared);
#pragma unroll
      for (int v = 0; v < kTaps; ++v) {
        if (0 <= j - v && j - v < kWidth) sums[v][k] = fmaf(x, y[j - v], sums[v][k]);
      }
    }
  }
}

// Add the contributions of a strip's targets, on the line `y`, to the sums of kTaps taps; the first tap of target i meets place + hop·i of
// `x`. Targets beyond the strip must not be read, not even multiplied by zero, so the last ones are handled one by one.
template <typename T, int kVector, int kShared, int kTaps, bool kWindow>
__device__ inline void Contract(const Line<T>& x, int x_place, int hop, const Line<T>& y, int y_place, int count,
                                float (&sums)[kTaps][kVector]) {
  constexpr int kFew = kVector / kShared;
  int i = 0;
  if constexpr (kWindow) {
    Pack<T, kFew> window[kWgradWidth + kTaps - 1];
    Pack<T, kVector> targets[kWgradWidth];
    if (count >= kWgradWidth) x.template Read<kFew, kTaps - 1>(x_place, window);
    for (; i + kWgradWidth <= count; i += kWgradWidth) {
      x.template Read<kFew, kWgradWidth>(x_place + x.stride * (i + kTaps - 1), window + kTaps - 1);
      y.template Read<kVector, kWgradWidth>(y_place + y.stride * i, targets);
      Outer<T, kVector, kShared, kWgradWidth, kTaps>(window, targets, sums);
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) window[j] = window[kWgradWidth + j];
    }
  }
  for (; i < count; ++i) {
    Pack<T, kFew> sources[kTaps];
    Pack<T, kVector> target[1];
    x.template Read<kFew, kTaps>(x_place + x.stride * hop * i, sources);
    y.template Read<kVector, 1>(y_place + y.stride * i, target);
    Outer<T, kVector, kShared, 1, kTaps>(sources, target, sums);
  }
}

// The sums of a thread, of filters from `filter` on, over its strips among those of the block's split.
template <typename T, int kVector, int kTaps, bool kWindow, bool kMany>
__device__ inline void SumStrips(const Params& p, const Piece& piece, int filter, const T* sources, const T* targets,
                                 float (&sums)[kTaps][kVector]) {
  const int fd = Least(p.d.first_target, piece.t % p.d.step), fh = Least(p.h.first_target, piece.r % p.h.step);
  const int fw = Least(p.w.first_target, piece.first);
  if (!piece.real || filter >= p.filters || fd == kNone || fh == kNone || fw == kNone) return;
  const Phase d = MakePhase(p.d, fd), h = MakePhase(p.h, fh), w = MakePhase(p.w, fw);
  const int strip_lanes = static_cast<int>(blockDim.y) / p.pieces, strip_lane = static_cast<int>(threadIdx.y) / p.pieces;
  const int first_tile = static_cast<int>(blockIdx.y) * p.share, end = min(first_tile + p.share, p.tiles);
  sources += filter / p.source_share, targets += filter;
  for (int tile = first_tile; tile < end; ++tile) {
    const Strip strip = MakeStrip(p, d, h, w, tile * strip_lanes + strip_lane, true);
    const int sd = d.origin + p.d.target_stride * strip.plane + p.d.tap_stride * (piece.t / p.d.step);
    const int sh = h.origin + p.h.target_stride * strip.line + p.h.tap_stride * (piece.r / p.h.step);
    if (strip.begin == strip.end || !Inside(sd, p.d.S) || !Inside(sh, p.h.S)) continue;
    const int64_t image = static_cast<int64_t>(blockIdx.z) * p.N + strip.n;
    const int64_t of_x = (image * p.d.S + sd) * p.h.S + sh;
    const int64_t of_y = (image * p.d.T + fd + p.d.period * strip.plane) * p.h.T + fh + p.h.period * strip.line;
    const Line<T> x{sources + of_x * p.w.S * p.source_channels, p.w.S, p.w.tap_stride, p.source_channels};
    const Line<T> y{targets + of_y * p.w.T * p.target_channels, p.w.T, p.w.period * p.spacing, p.target_channels};
    const int j = strip.Number(p, strip.begin), count = strip.end - strip.begin;
    const int place = w.origin + p.w.target_stride * j + p.w.tap_stride * kTaps * piece.piece;
    WithConstant<kMany ? kVector : 1>(p.source_share, [&](auto shared) {
      Contract<T, kVector, decltype(shared)::value, kTaps, kWindow>(x, place, p.hop, y, fw + p.w.period * j, count, sums);
    });
  }
}

// The sums of all strips in shared memory, [strip lane][piece][filter], become one tap, number v, of each of the block's pieces.
template <typename T, int kTaps>
__device__ inline void WriteTap(const Params& p, const float* parts, int first_piece, int v, int first, int channels, void* filters) {
  const int64_t part = static_cast<int64_t>(blockIdx.y) * gridDim.z + blockIdx.z;
  const int count = p.pieces * channels, strip_lanes = static_cast<int>(blockDim.y) / p.pieces;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += kThreads) {
    const Piece piece(p, first_piece + i / channels);
    const int s = piece.first + p.w.step * (kTaps * piece.piece + v), filter = first + i % channels;
    if (!piece.real || s >= p.w.R || filter >= p.filters) continue;
    float total = 0.0f;
    for (int lane = 0; lane < strip_lanes; ++lane) total += parts[lane * count + i];
    const int64_t at = (((part * p.filters + filter) * p.d.R + piece.t) * p.h.R + piece.r) * p.w.R + s;
    if (p.float_result) {
      static_cast<float*>(filters)[at] = total;
    } else {
      static_cast<T*>(filters)[at] = FromFloat<T>(total);
    }
  }
}

// A block sums, for its filters and pieces of them, over the strips of its split: every thread over some, and then all together.  kMany:
// several filters share a channel of x.
template <typename T, int kVector, int kTaps, bool kWindow, bool kMany>
__global__ void __launch_bounds__(kThreads, 3)
    Wgrad(const Params p, const T* __restrict__ sources, const T* __restrict__ targets, void* __restrict__ filters) {
  const int channels = blockDim.x * kVector, first = static_cast<int>(blockIdx.x % p.channel_blocks) * channels;
  const int first_piece = static_cast<int>(blockIdx.x / p.channel_blocks) * p.pieces;
  float sums[kTaps][kVector] = {};
  SumStrips<T, kVector, kTaps, kWindow, kMany>(p, Piece(p, first_piece + threadIdx.y % p.pieces), first + threadIdx.x * kVector, sources,
                                               targets, sums);
  float* parts = reinterpret_cast<float*>(shared_memory);
#pragma unroll
  for (int v = 0; v < kTaps; ++v) {
    __syncthreads();  // all have read the parts of the tap before
#pragma unroll
    for (int k = 0; k < kVector; ++k) parts[(threadIdx.y * blockDim.x + threadIdx.x) * kVector + k] = sums[v][k];
    __syncthreads();  // the parts are there
    WriteTap<T, kTaps>(p, parts, first_piece, v, first, channels, filters);
  }
}

template <typename T>
using WgradFunction = void (*)(Params, const T*, const T*, void*);

// The kernel of a plan.
template <typename T>
WgradFunction<T> WgradKernel(const Plan& plan) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  if (!plan.vector) return Wgrad<T, 1, kFewWgradTaps, false, false>;
  if (plan.many) return plan.window ? Wgrad<T, kVector, kFewWgradTaps, true, true> : Wgrad<T, kVector, kFewWgradTaps, false, true>;
  if (!plan.window) return Wgrad<T, kVector, kFewWgradTaps, false, false>;
  if (plan.taps == 2) return Wgrad<T, kVector, 2, true, false>;
  if (plan.taps == 3) return Wgrad<T, kVector, 3, true, false>;
  if (plan.taps == 4) return Wgrad<T, kVector, 4, true, false>;
  if (plan.taps == 5) return Wgrad<T, kVector, 5, true, false>;
  return Wgrad<T, kVector, kWgradTaps, true, false>;
}

}  // namespace jaxext::depthwise
