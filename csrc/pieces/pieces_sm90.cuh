// Products of float32 numbers on Hopper's tensor cores, in two or three pieces of bfloat16.
//
// A factor is the sum of its pieces, each of eight bits: x = x0 + x1 (+ x2).  The products of pieces whose numbers add up to less than
// their count make  x y ≈ Σ x_i y_j : three of two pieces, six of three.  wgmma takes the left factor from registers, so each warp group
// splits its own rows there.  It takes the right one from shared memory: a warp group of its own splits that once for both.  TMA brings
// float32.
//
// Each step of 32 of the sum goes into sums of its own, the small products first, and then to those of all in float32, since tensor cores
// cut off the last bits of what they add to.  A product of small pieces is NaN where a factor is infinite or NaN: those sums are taken as
// zero, and the product of the first pieces tells.
#pragma once

#include "common/sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "common/pipeline_sm90.cuh"
#include "common/tma_descriptor.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "matmul/matmul.h"
#include "pieces/pieces.h"

namespace jaxext::sm90 {

struct PiecesParams {
  CUtensorMap a, b;
  float* d;
  int m, n, steps;  // of the sum, 32 elements each
  int tile_rows, tile_columns;
  bool a_mn_major, b_mn_major;  // whether rows (columns) are neighbours in memory, and not elements of the sum
};

// Two neighbours in bfloat16, the first in the low half.  kDown: towards zero, so that a large number does not become infinite.
template <bool kDown>
CUTLASS_DEVICE uint32_t RoundedPair(float low, float high) {
  uint32_t pair;
  if constexpr (kDown) {
    asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// The pieces of two neighbours.  Three are the numbers exactly, but for those that are too small for a last piece.
template <int kPieces>
CUTLASS_DEVICE void Split(float low, float high, uint32_t (&pieces)[kPieces]) {
  pieces[0] = RoundedPair<kPieces == 3>(low, high);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 1; i < kPieces; ++i) {
    low -= __uint_as_float(pieces[i - 1] << 16);
    high -= __uint_as_float(pieces[i - 1] & 0xffff0000u);
    pieces[i] = RoundedPair<false>(low, high);
  }
}

template <int kPieces>
struct Pieces {
  static constexpr int kTile = 128;                                // rows, and columns, of a block
  static constexpr int kStep = 32;                                 // of the sum: 128 bytes of float32, the widest swizzle
  static constexpr int kStages = 4;                                // of both factors in float32
  static constexpr int kSlots = 3;                                 // of the right factor in pieces
  static constexpr int kThreads = 512;                             // warp groups: one loads, one splits the right factor, two multiply
  static constexpr int kLoad = 24, kSplit = 104, kMultiply = 192;  // registers of their threads
  static constexpr int kBytes = kTile * kStep * 4;
  static constexpr int kBand = 8;  // tiles, one below the other, that are computed one after the other and share columns in the L2 cache

  using Element = cutlass::bfloat16_t;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kTile>, cute::Int<kStep>>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::K>()));
  using LayoutB = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW64_Atom<Element>{},
                                               cute::make_shape(cute::Int<kTile>{}, cute::Int<kStep>{}, cute::Int<kSlots * kPieces>{})));
  using Factors = decltype(cute::make_tensor<Element>(cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_2>{}));

  struct alignas(1024) Storage {
    uint8_t a[kStages][kBytes], b[kStages][kBytes];
    Element pieces[kSlots * kPieces][kTile * kStep];
    // Of a stage: it has come, and all have read it.  Of a slot: it has the pieces, and both warp groups have multiplied.  Of a warp group:
    // the other has begun its step.
    Barrier::ValueType full[kStages], empty[kStages], ready[kSlots], free[kSlots], order[2];
  };
  static constexpr int kSharedBytes = BlockBudget<kThreads, 1, sizeof(Storage), kLoad + kSplit + 2 * kMultiply>::kSharedBytes;

  // A block's tile.
  struct BlockTile {
    int batch, row, column;

    CUTLASS_DEVICE explicit BlockTile(const PiecesParams& p) {
      const unsigned tiles = unsigned(p.tile_rows) * p.tile_columns;
      batch = int(blockIdx.x / tiles);
      const unsigned tile = blockIdx.x % tiles, of_band = unsigned(kBand) * p.tile_columns;
      const int first = int(tile / of_band) * kBand, rows = cute::min(int(kBand), p.tile_rows - first), within = int(tile % of_band);
      row = (first + within % rows) * kTile, column = within / rows * kTile;
    }
  };

  static CUTLASS_DEVICE void Run(const PiecesParams& params, Storage& storage) {
    const int warp_group = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(&params.a);
      cute::prefetch_tma_descriptor(&params.b);
      for (int i = 0; i < kStages; ++i) {
        Barrier::Init(&storage.full[i], 1);
        Barrier::Init(&storage.empty[i], 12);  // each warp that reads
      }
      for (int i = 0; i < kSlots; ++i) {
        Barrier::Init(&storage.ready[i], 4);
        Barrier::Init(&storage.free[i], 8);
      }
      for (int i = 0; i < 2; ++i) Barrier::Init(&storage.order[i], 4);
      FenceBarriers();
    }
    __syncthreads();  // the barriers are there
    const BlockTile tile(params);
    if (warp_group == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kLoad>();
      if (warp == 0 && cute::elect_one_sync()) Load(params, storage, tile);
    } else if (warp_group == 1) {
      cutlass::arch::warpgroup_reg_dealloc<kSplit>();
      SplitColumns(params, storage, threadIdx.x - 128);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiply>();
      Multiply(params, storage, tile, threadIdx.x - 256);
    }
  }

  // By one thread.
  static CUTLASS_DEVICE void Load(const PiecesParams& params, Storage& storage, const BlockTile& tile) {
    Stage<kStages> stage;
    for (int step = 0; step < params.steps; ++step, ++stage) {
      Barrier::Wait(&storage.empty[stage.index], stage.phase ^ 1);
      Barrier::ValueType* const full = &storage.full[stage.index];
      Barrier::ArriveAndExpect(full, 2 * kBytes);
      LoadFactor(params.a, params.a_mn_major, full, storage.a[stage.index], tile.row, step * kStep, tile.batch);
      LoadFactor(params.b, params.b_mn_major, full, storage.b[stage.index], tile.column, step * kStep, tile.batch);
    }
  }

  static CUTLASS_DEVICE void LoadFactor(const CUtensorMap& map, bool mn_major, Barrier::ValueType* full, uint8_t* to, int line, int depth,
                                        int batch) {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if (!mn_major) return cute::SM90_TMA_LOAD_3D::copy(&map, full, kHint, to, depth, line, batch);
    for (int i = 0; i < kTile / 32; ++i) {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, kHint, to + i * (kBytes / 4), line + i * 32, depth, batch);
    }
  }

  // Four neighbours along the sum, from `depth` on, of a row of the left factor or a column of the right one.  TMA's swizzle: 16 bytes lie
  // where their number and that of the line of 128 bytes, of eight, differ in no bit or in some.
  static CUTLASS_DEVICE float4 LoadVector(const uint8_t* factor, bool mn_major, int line, int depth) {
    if (!mn_major) return *reinterpret_cast<const float4*>(factor + line * 128 + (depth / 4 ^ line % 8) * 16);
    const uint8_t* const from = factor + line / 32 * (kBytes / 4) + line % 4 * 4;
    const auto one = [&](int k) { return *reinterpret_cast<const float*>(from + k * 128 + (line % 32 / 4 ^ k % 8) * 16); };
    return {one(depth), one(depth + 1), one(depth + 2), one(depth + 3)};
  }

  // The pieces of a column by each thread.  A thread that multiplies reads four neighbours at a time, which are what the tensor cores want
  // of it if elements 4i and 4i + 1 of each 16 come before 4i + 2 and 4i + 3.
  static CUTLASS_DEVICE void SplitColumns(const PiecesParams& params, Storage& storage, int column) {
    Stage<kStages> stage;
    Stage<kSlots> slot;
    for (int step = 0; step < params.steps; ++step, ++stage, ++slot) {
      Barrier::Wait(&storage.full[stage.index], stage.phase);
      Barrier::Wait(&storage.free[slot.index], slot.phase ^ 1);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t words[2][4][kPieces];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float4 x = LoadVector(storage.b[stage.index], params.b_mn_major, column, half * 16 + i * 4);
          Split(x.x, x.y, words[0][i]);
          Split(x.z, x.w, words[1][i]);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) {
          auto* const to = reinterpret_cast<uint8_t*>(storage.pieces[slot.index * kPieces + piece]) + column * 64;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 2; ++j) {
            const uint4 eight = {words[j][0][piece], words[j][1][piece], words[j][2][piece], words[j][3][piece]};
            *reinterpret_cast<uint4*>(to + (half * 2 + j ^ column / 2 % 4) * 16) = eight;
          }
        }
      }
      FenceWrites();  // wgmma reads what was written
      __syncwarp();
      if (column % 32 == 0) {
        Barrier::Arrive(&storage.empty[stage.index]);
        Barrier::Arrive(&storage.ready[slot.index]);
      }
    }
  }

  // The products with pieces whose numbers add up to `level`.
  template <class Right, class Sums>
  static CUTLASS_DEVICE void MultiplyLevel(Mma& mma, const Factors (&left)[kPieces], const Right& right, int slot, int level, Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i <= level; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        cute::gemm(mma, left[i](cute::_, k), right(cute::_, 0, k, slot * kPieces + level - i), sums(cute::_, 0, 0));
        mma.accumulate_ = cute::GMMA::ScaleOut::One;
      }
    }
  }

  // Zero in place of NaN.
  template <class Sums>
  static CUTLASS_DEVICE void ForgetNaN(Sums& sums) {
    constexpr int kAccumulators = decltype(cute::size(sums))::value;
    float all[4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators; ++i) all[i % 4] += sums(i);
    const float sum = (all[0] + all[1]) + (all[2] + all[3]);
    if (__any_sync(~0u, sum != sum)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccumulators; ++i) sums(i) = sums(i) == sums(i) ? sums(i) : 0.f;
    }
  }

  static CUTLASS_DEVICE void Multiply(const PiecesParams& params, Storage& storage, const BlockTile& tile, int thread) {
    const int warp_group = thread / 128, group = thread % 32 / 4, lane = thread % 4;
    // Two rows, which are neighbours to the tensor cores, are four apart, so that no two threads of a warp meet in a bank.
    const int row = thread / 32 * 16 + group / 2 + group % 2 * 4;
    Mma mma;
    const auto slice = mma.get_slice(0);
    const auto right = slice.make_fragment_B(slice.partition_B(cute::make_tensor(cute::make_smem_ptr(storage.pieces[0]), LayoutB{})));
    auto products = cute::partition_fragment_C(mma, cute::Shape<cute::_64, cute::Int<kTile>>{});
    constexpr int kAccumulators = decltype(cute::size(products))::value;
    Factors left[kPieces];
    float sums[kAccumulators] = {};

    Stage<kStages> stage;
    Stage<kSlots> slot;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < params.steps; ++step, ++stage, ++slot) {
      Barrier::Wait(&storage.full[stage.index], stage.phase);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int k = i / 2, below = i % 2;
        const float4 x = LoadVector(storage.a[stage.index], params.a_mn_major, row + below * 8, k * 16 + lane * 4);
        uint32_t first[kPieces], second[kPieces];
        Split(x.x, x.y, first);
        Split(x.z, x.w, second);
        CUTLASS_PRAGMA_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) {
          auto words = cute::recast<uint32_t>(left[piece]);
          words(below, k) = first[piece], words(2 + below, k) = second[piece];
        }
      }
      __syncwarp();
      if (thread % 32 == 0) Barrier::Arrive(&storage.empty[stage.index]);
      Barrier::Wait(&storage.ready[slot.index], slot.phase);
      // The warp groups take turns: one splits and adds while the other multiplies.
      Barrier::Wait(&storage.order[warp_group], (step & 1) ^ (warp_group ^ 1));
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) cute::warpgroup_fence_operand(left[piece]);
      cute::warpgroup_fence_operand(products);
      cute::warpgroup_arrive();
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int level = kPieces - 1; level > 0; --level) MultiplyLevel(mma, left, right, slot.index, level, products);
      cute::warpgroup_commit_batch();
      if (thread % 32 == 0) Barrier::Arrive(&storage.order[warp_group ^ 1]);
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(products);
      ForgetNaN(products);
      cute::warpgroup_fence_operand(products);
      cute::warpgroup_arrive();
      MultiplyLevel(mma, left, right, slot.index, 0, products);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(products);
      if (thread % 32 == 0) Barrier::Arrive(&storage.free[slot.index]);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccumulators; ++i) sums[i] += products(i);
    }
    // Whole sectors: a warp has 8 columns of 8 rows at a time.
    float* const d = params.d + (int64_t(tile.batch) * params.m + tile.row) * params.n;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators; i += 2) {
      const int down = row + i / 2 % 2 * 8, column = tile.column + i / 4 * 8 + lane * 2;
      float* const to = d + int64_t(down) * params.n + column;
      if (tile.row + down >= params.m || column >= params.n) continue;
      if (params.n % 2 == 0) {
        *reinterpret_cast<float2*>(to) = {sums[i], sums[i + 1]};
      } else {
        to[0] = sums[i];
        if (column + 1 < params.n) to[1] = sums[i + 1];
      }
    }
  }

  static Status Launch(MatmulRole role, const Gemm& gemm, LaunchStream stream);

  static PiecesKernel Entry() { return {{kTile, kTile, kPieces, 1}, kStages, kSharedBytes, &Launch}; }
};

// TMA descriptors are read where the kernel's parameters lie, hence __grid_constant__.
template <int kPieces>
__global__ void __launch_bounds__(Pieces<kPieces>::kThreads, 1) PiecesKernelOf(const __grid_constant__ PiecesParams params) {
  extern __shared__ char shared[];
  using Of = Pieces<kPieces>;
  Of::Run(params, *reinterpret_cast<typename Of::Storage*>(shared));
}

// An operand with `lines` rows (or columns) and `depth` elements of the sum.
inline CUtensorMap OperandDescriptor(const void* array, bool mn_major, int64_t lines, int64_t depth, int64_t batch, int64_t leading,
                                     int64_t batch_stride) {
  return TmaDescriptor(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, array, mn_major ? lines : depth, mn_major ? depth : lines, batch, leading,
                       batch_stride, mn_major ? 32 : 128);
}

template <int kPieces>
Status Pieces<kPieces>::Launch(MatmulRole role, const Gemm& gemm, LaunchStream stream) {
  Device device;
  if (Status s = Prepare("pieces", PiecesKernelOf<kPieces>, kSharedBytes, 1, &device); !s.ok() || !stream) return s;
  PiecesParams params = {};
  params.a_mn_major = role == MatmulRole::kTN, params.b_mn_major = role != MatmulRole::kNT;
  params.a = OperandDescriptor(gemm.a, params.a_mn_major, gemm.m, gemm.k, gemm.l, gemm.a_leading, gemm.a_batch);
  params.b = OperandDescriptor(gemm.b, params.b_mn_major, gemm.n, gemm.k, gemm.l, gemm.b_leading, gemm.b_batch);
  params.d = static_cast<float*>(gemm.d);
  params.m = int(gemm.m), params.n = int(gemm.n), params.steps = int(cute::ceil_div(gemm.k, int64_t{kStep}));
  params.tile_rows = int(cute::ceil_div(gemm.m, int64_t{kTile})), params.tile_columns = int(cute::ceil_div(gemm.n, int64_t{kTile}));
  const int64_t blocks = int64_t(params.tile_rows) * params.tile_columns * gemm.l;
  return sm90::Launch("pieces", PiecesKernelOf<kPieces>, params, dim3(unsigned(blocks), 1, 1), dim3(kThreads, 1, 1), dim3(1, 1, 1),
                      kSharedBytes, *stream);
}

}  // namespace jaxext::sm90
