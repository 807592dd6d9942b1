// The weight-only kernel (weight_only.h has the equation, weight_only_plan.h the numbers that kernels are given).
//
// There is little to do but to load the weight, which lies in memory as its user has it, and each of whose bytes is loaded once.  Thread
// 4 g + t of a warp takes `columns` neighbours, the g-th such group of a row, in rows 8 t to 8 t + 7 of a step: four rows of whole sectors
// in each access.  The tensor cores take the weight as their left factor, its columns as their rows, so that 8 rows of x fill a product.
// They add up in any order of rows, if x has the same, so a thread multiplies just the rows that it has loaded:
//
//     the pair 2t, 2t+1 and the pair 2t+8, 2t+9 of a product are a step's rows 8t, 8t+1 and 8t+2, 8t+3, and of its second one 8t+4 to 8t+7
//     rows g and g+8 of the tile j are the columns 2j and 2j+1 of the g-th group
//
// Two rows' integers come beside each other by one permutation for two columns (int8) or four (int4), and become floats by three operations
// for each pair: a mask and an exclusive or, which make 1024 + q (float16) or 128 + q (bfloat16), and a subtraction.
//
// The warps of a block share its rows and columns, and take turns along the sum; their sums are added in a fixed order.
#pragma once

#include <cstdint>

#include "common/pack.cuh"
#include "weight_only/weight_only_mma.cuh"
#include "weight_only/weight_only_plan.h"

namespace jaxext::weight_only {

extern __shared__ float4 shared_sums[];

// Neighbouring columns of a row.
template <int kWords>
struct Row {
  uint32_t words[kWords];
};

template <int kWords>
__device__ inline Row<kWords> LoadRow(const uint8_t* at, bool inside) {
  Row<kWords> row{};
  if (!inside) return row;
  if constexpr (kWords == 4) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(at));
    row.words[0] = four.x, row.words[1] = four.y, row.words[2] = four.z, row.words[3] = four.w;
  } else if constexpr (kWords == 2) {
    const uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
    row.words[0] = two.x, row.words[1] = two.y;
  } else {
    row.words[0] = __ldg(reinterpret_cast<const unsigned*>(at));
  }
  return row;
}

// A thread's place in a block, and what it loads and multiplies.
template <typename T, int kBits, int kTiles, int kColumns>
struct Worker {
  static constexpr int kWords = kColumns * kBits / 32;  // of a row
  static constexpr int kSteps = kWords == 1 ? 2 : 1;    // loaded together: 64 bytes by each thread, or more
  static constexpr int kRows = 8;                       // of a step
  static constexpr int kWarpsN = kTiles, kWarpsK = kWarps / kTiles;
  using Chunk = Row<kWords>[kSteps][kRows];
  using Sums = float[kColumns / 2][kTiles][4];

  const Params& p;
  int warp, group, lane;  // of a warp's lanes four are a group
  int batch, split, row, column;
  bool real;
  const uint8_t* q;
  const float* scale;
  const T* x;

  __device__ Worker(const Params& params, const T* all_x, const uint8_t* all_q, const float* all_scales) : p(params) {
    warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, lane = threadIdx.x % 4;
    unsigned rest = blockIdx.x;
    row = static_cast<int>(rest % p.row_blocks) * kTiles * kRowsOfTile, rest /= p.row_blocks;
    const int first = static_cast<int>(rest % p.column_blocks) * kWarpsN * 8 * kColumns;
    rest /= p.column_blocks;
    split = static_cast<int>(rest % p.splits), batch = static_cast<int>(rest / p.splits);
    column = first + (warp % kWarpsN * 8 + group) * kColumns;
    real = column < p.N;
    q = all_q + (static_cast<int64_t>(batch) * p.K * p.N + static_cast<int64_t>(kRows * lane) * p.N + column) * kBits / 8;
    scale = all_scales + static_cast<int64_t>(batch) * p.S * p.N + column;
    x = all_x + static_cast<int64_t>(batch) * p.M * p.K + kRows * lane;
  }

  __device__ void Load(int step, int end, Chunk& chunk) const {
    const int64_t pitch = static_cast<int64_t>(p.N) * kBits / 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint8_t* at = q + (step + s) * kStep * pitch;
#pragma unroll
      for (int r = 0; r < kRows; ++r, at += pitch) chunk[s][r] = LoadRow<kWords>(at, real && step + s < end);
    }
  }

  __device__ const float* ScalesOf(int step) const {
    return scale + static_cast<int64_t>(p.of_scale == 0 ? step : __umulhi(step, p.of_scale)) * p.N;
  }

  // The rows of a step of one tile of x: four pairs.
  __device__ Row<4> LoadX(int step, int tile) const {
    const int m = row + tile * kRowsOfTile + group;
    return LoadRow<4>(reinterpret_cast<const uint8_t*>(x + static_cast<int64_t>(m) * p.K + step * kStep), m < p.M);
  }

  // sums += scale Σ over the step.
  __device__ void Multiply(int step, const Row<kWords> (&rows)[kRows], Sums& sums) const {
    Row<4> b[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) b[i] = LoadX(step, i);
    const float* scales = ScalesOf(step);
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) {
      float4 of_column{};
      if (real) of_column = __ldg(reinterpret_cast<const float4*>(scales + c));
      MultiplyTile(c, rows, b, of_column.x, of_column.y, sums[c / 2]);
      MultiplyTile(c + 2, rows, b, of_column.z, of_column.w, sums[c / 2 + 1]);
    }
  }

  // Of the columns c and c + 1.
  __device__ void MultiplyTile(int c, const Row<kWords> (&rows)[kRows], const Row<4> (&b)[kTiles], float scale, float next_scale,
                               float (&sums)[kTiles][4]) const {
    const int word = c * kBits / 32, half = c * kBits / 16 % 2, bit = c * kBits % 16;
    uint32_t a[2][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t both = __byte_perm(rows[2 * pair].words[word], rows[2 * pair + 1].words[word], half == 0 ? 0x5410 : 0x7632);
      a[pair / 2][pair % 2 * 2] = ToFloats<T, kBits>(both >> bit);
      a[pair / 2][pair % 2 * 2 + 1] = ToFloats<T, kBits>(both >> (bit + kBits));
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float first[4], products[4];
      MultiplyAdd<T>(first, a[0], b[i].words, {0.0f, 0.0f, 0.0f, 0.0f});
      MultiplyAdd<T>(products, a[1], b[i].words + 2, first);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[i][k] = fmaf(products[k], k < 2 ? scale : next_scale, sums[i][k]);
    }
  }

  // All sums of a block's warps along the sum come to the first ones: half of the warps give theirs to the other half, and so on.
  __device__ void AddWarps(Sums& sums) const {
    const int along = warp / kWarpsN;
    float4* own = shared_sums + threadIdx.x % kWarp;
#pragma unroll
    for (int half = kWarpsK / 2; half > 0; half /= 2) {
      __syncthreads();  // all have read what lies here
      const int slot = along >= half ? warp - half * kWarpsN : warp;
      float4* at = own + slot * (kColumns / 2 * kTiles * kWarp);
      if (along >= half && along < 2 * half) {
#pragma unroll
        for (int j = 0; j < kColumns / 2 * kTiles; ++j) {
          const float* four = sums[j / kTiles][j % kTiles];
          at[j * kWarp] = float4{four[0], four[1], four[2], four[3]};
        }
      }
      __syncthreads();  // the sums are there
      if (along < half) {
#pragma unroll
        for (int j = 0; j < kColumns / 2 * kTiles; ++j) {
          const float4 others = at[j * kWarp];
          float* four = sums[j / kTiles][j % kTiles];
          four[0] += others.x, four[1] += others.y, four[2] += others.z, four[3] += others.w;
        }
      }
    }
  }

  template <typename R>
  __device__ void StoreAs(const Sums& sums, R* y) const {
    constexpr int kVector = 16 / sizeof(R);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int m = row + i / 2 * kRowsOfTile + 2 * lane + i % 2;
      if (m >= p.M) continue;
      R* at = y + ((static_cast<int64_t>(split) * p.B + batch) * p.M + m) * p.N + column;
#pragma unroll
      for (int c = 0; c < kColumns; c += kVector) {
        float values[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) values[k] = sums[(c + k) / 2][i / 2][(c + k) % 2 * 2 + i % 2];
        Store(Rounded<R, kVector>(values), at + c);
      }
    }
  }
};

// Blocks on a multiprocessor, which their registers allow: a thread has 2 columns tiles sums, and two chunks.
constexpr int Resident(int bits, int tiles, int columns) { return tiles > 1 || columns * bits == 128 ? 1 : 2; }

template <typename T, int kBits, int kTiles, int kColumns>
__global__ void __launch_bounds__(kThreads, Resident(kBits, kTiles, kColumns))
    WeightOnlyKernel(const Params p, const T* __restrict__ x, const uint8_t* __restrict__ q, const float* __restrict__ scale,
                     void* __restrict__ y) {
  using Of = Worker<T, kBits, kTiles, kColumns>;
  const Of worker(p, x, q, scale);
  typename Of::Sums sums = {};
  const int begin = worker.split * p.share, end = min(begin + p.share, p.steps);
  const int first = begin + worker.warp / Of::kWarpsN * Of::kSteps;
  constexpr int kStride = Of::kWarpsK * Of::kSteps;
  typename Of::Chunk chunk, next;
  worker.Load(first, end, chunk);
  for (int step = first; step < end; step += kStride) {
    worker.Load(step + kStride, end, next);  // is under way while the chunk before it is multiplied, and so are its scales
    if (worker.real && step + kStride < end) Prefetch(worker.ScalesOf(step + kStride));
#pragma unroll
    for (int s = 0; s < Of::kSteps; ++s) {
      if (step + s < end) worker.Multiply(step + s, chunk[s], sums);
#pragma unroll
      for (int r = 0; r < Of::kRows; ++r) chunk[s][r] = next[s][r];
    }
  }
  worker.AddWarps(sums);
  if (worker.warp / Of::kWarpsN != 0 || !worker.real) return;
  if (p.wide != 0) {
    worker.StoreAs(sums, static_cast<float*>(y));
  } else {
    worker.StoreAs(sums, static_cast<T*>(y));
  }
}

}  // namespace jaxext::weight_only
