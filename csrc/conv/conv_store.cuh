// How a block of a convolution for Hopper stores its tile: from the accumulators of wgmma through shared memory, so that a warp stores
// whole lines of 128 bytes.  A result is always a matrix, in dgrad with rows that need not stand equally far apart.
#pragma once

#include "common/sm90.cuh"  // first
#include "cutlass/fast_math.h"
#include "common/activation.cuh"
#include "common/epilogue.h"
#include "common/epilogue_store.cuh"

namespace jaxext::sm90 {

// The epilogue of a part.  Only fprop has the space of it among its kernel's parameters.
template <bool kFuses>
struct ConvEpilogue : Epilogue {
  bool exists = false;
};
template <>
struct ConvEpilogue<false> {};

// Where the rows of a result begin, in elements: equally far apart.
struct EqualRows {
  int64_t leading = 0;
  CUTLASS_HOST_DEVICE int64_t Begin(int row) const { return row * leading; }
};
// Those of dgrad are every pixel, or those of a phase.
template <int kRank>
struct PixelRows {
  cutlass::FastDivmod sizes[kRank];
  int64_t strides[kRank + 1] = {};  // of an image, and of each axis
  CUTLASS_HOST_DEVICE int64_t Begin(int row) const {
    int64_t at = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = kRank - 1; i >= 0; --i) {
      int pixel;
      sizes[i](row, pixel, row);
      at += pixel * strides[i + 1];
    }
    return at + row * strides[0];
  }
};

// Stores D[row, tap, column], whose columns are contiguous, as Element or float.  A tile is of one tap.
template <class Element, int kTileM, int kTileN, int kWarpGroups, class Rows, bool kFuses>
struct ConvStore {
  struct Params {
    void* out = nullptr;
    bool in_float = false;
    int rows = 0, columns = 0, taps = 1;  // columns: a multiple of 8
    bool zeros = false;                   // nothing is multiplied
    Rows layout = {};
    ConvEpilogue<kFuses> epilogue = {};
  };

  // `thread`: of those that multiply.
  template <class Sums>
  static CUTLASS_DEVICE void StoreSums(const Params& params, StagedRows& staged, const Sums& sums, int thread) {
    if constexpr (kFuses) {
      if (params.epilogue.exists) return StoreAs<true>(params, staged, sums, thread);
    }
    StoreAs<false>(params, staged, sums, thread);
  }

  template <bool kFused, class Sums>
  static CUTLASS_DEVICE void StoreAs(const Params& params, StagedRows& staged, const Sums& sums, int thread) {
    if (params.in_float) {
      StoreTile<float, kFused>(params, staged, sums, thread);
    } else {
      StoreTile<Element, kFused>(params, staged, sums, thread);
    }
  }

  template <class Out, bool kFused, class Sums>
  static CUTLASS_DEVICE void StoreTile(const Params& params, StagedRows& staged, const Sums& sums, int thread) {
    constexpr int kLine = 128 / sizeof(Out), kVector = 16 / sizeof(Out);           // columns of a line, and of 16 bytes
    const int lane = thread % 32, tiles = cute::ceil_div(params.columns, kTileN);  // of one tap
    if (int(blockIdx.y) >= tiles * params.taps) return;                            // the last of a pair
    const int first_column = blockIdx.y % tiles * kTileN;
    Out* const out = static_cast<Out*>(params.out) + int64_t(blockIdx.y / tiles) * params.columns;
    CUTLASS_PRAGMA_UNROLL
    for (int band = 0; band < kTileM / (64 * kWarpGroups); ++band) {
      const int first_row = blockIdx.x * kTileM + band * 64 * kWarpGroups + thread / 32 * 16;
      int64_t begins[4];  // of the rows that this thread writes
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) begins[i] = params.layout.Begin(first_row + i * 4 + lane / 8);
      CUTLASS_PRAGMA_UNROLL
      for (int line = 0; line < kTileN / kLine; ++line) {
        const int line_column = first_column + line * kLine;
        // As wgmma lays them out: a thread has two neighbours of each eight columns, in two rows.
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLine / 4; ++i) {
          const int down = i % 2 * 8 + lane / 4, across = i / 2 * 8 + lane % 4 * 2;
          const int at = band * kTileN / 2 + line * kLine / 2 + i * 2;
          float pair[2] = {sums(at), sums(at + 1)};
          if constexpr (kFused) {
            const int row = first_row + down, column = line_column + across;
            if (row < params.rows && column < params.columns) Finish<Out>(params.epilogue, pair, column, params.layout.Begin(row) + column);
          }
          Write(pair, reinterpret_cast<Out*>(staged.rows[down]) + across);
        }
        __syncwarp();
        const int column = line_column + lane % 8 * kVector;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int down = i * 4 + lane / 8;
          if (first_row + down < params.rows && column < params.columns) {
            *reinterpret_cast<uint4*>(out + begins[i] + column) = *reinterpret_cast<const uint4*>(&staged.rows[down][lane % 8 * 16]);
          }
        }
        __syncwarp();
      }
    }
  }

  // Of a block of dgrad, by all its threads.
  static CUTLASS_DEVICE void StoreZeros(const Params& params) {
    const int bytes = params.in_float ? 4 : sizeof(Element), wide = 16 / bytes, chunks = kTileN / wide;
    for (int i = threadIdx.x; i < kTileM * chunks; i += blockDim.x) {
      const int row = blockIdx.x * kTileM + i / chunks, column = blockIdx.y * kTileN + i % chunks * wide;
      if (row >= params.rows || column >= params.columns) continue;
      *reinterpret_cast<uint4*>(static_cast<char*>(params.out) + (params.layout.Begin(row) + column) * bytes) = uint4{};
    }
  }

  // Two neighbouring columns.
  template <class Out>
  static CUTLASS_DEVICE void Write(const float (&pair)[2], Out* to) {
    cutlass::NumericArrayConverter<Out, float, 2> convert;
    cutlass::AlignedArray<Out, 2> rounded;
    static_cast<cutlass::Array<Out, 2>&>(rounded) = convert({pair[0], pair[1]});
    *reinterpret_cast<cutlass::AlignedArray<Out, 2>*>(to) = rounded;
  }

  template <class Out>
  static CUTLASS_DEVICE void Finish(const Epilogue& epilogue, float (&pair)[2], int column, int64_t at) {
    if (epilogue.bias != nullptr) {
      const float2 bias = *reinterpret_cast<const float2*>(epilogue.bias + column);
      pair[0] += bias.x, pair[1] += bias.y;
    }
    if (epilogue.saved != nullptr) Write(pair, static_cast<Out*>(epilogue.saved) + at);
    Activate(epilogue.activation, pair);
    if (epilogue.residual != nullptr) {
      const auto residual = *reinterpret_cast<const cutlass::AlignedArray<Out, 2>*>(static_cast<const Out*>(epilogue.residual) + at);
      pair[0] += float(residual[0]), pair[1] += float(residual[1]);
    }
  }
};

}  // namespace jaxext::sm90
