// Products of many rows with a matrix of small integers, for Hopper (weight_only.h has the equation).
//
// wgmma takes one factor from registers: the weight, whose columns are its rows, so that 64 or 128 rows of x fill a product.  TMA loads
// both into a ring of shared memory, the weight as it lies in memory.  Four threads of a warp, a group, have four neighbouring columns of
// the weight: the first two are rows g and g + 8 of a warp group's first product, where g is the group's number, the others of its second.
// A thread reads two of them in two neighbouring rows of the weight at a time, which are what the tensor cores want of it.  TMA's swizzle
// has the rows that a warp reads at a time in different banks.  Integers become floats as in weight_only.cuh.
//
// Products of integers are exact.  Each 64 elements of the sum, or 32 where scales change within, go into sums of their own, which are
// multiplied by the scale and added to those of all in float32.  While the tensor cores multiply, threads make the next factors, and two
// warp groups take turns.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "common/pipeline_sm90.cuh"
#include "common/tma_descriptor.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "common/pack.cuh"
#include "weight_only/weight_only_mma.cuh"
#include "weight_only/wide_weight_only.h"

namespace jaxext::sm90 {

struct WideWeightOnlyParams {
  CUtensorMap x, w;
  const float* scale;
  void* y;
  weight_only::Params sizes;
};

template <typename T, int kBits, int kRows>
struct WideWeightOnly {
  static constexpr int kColumns = 256;  // of a block: 128 of each warp group, in two products
  static constexpr int kDepth = 64;     // of a stage: 128 bytes of x, the widest swizzle
  static constexpr int kStep = weight_only::kStep;
  static constexpr int kThreads = 128 + 256;         // a warp group loads, two multiply
  static constexpr int kLoad = 24, kMultiply = 240;  // registers of their threads
  static constexpr int kBoxBytes = 128 * kDepth;
  static constexpr int kBoxes = kColumns * kBits / 8 / 128;  // of the weight, side by side
  static constexpr int kStageBytes = kBoxes * kBoxBytes + kRows * kDepth * int(sizeof(T));
  static constexpr int kStages = std::min(8, (192 << 10) / kStageBytes);
  static constexpr int kPair = kBits / 4;  // bytes of two columns

  using Element = cute::conditional_t<std::is_same_v<T, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kRows>, cute::Int<kDepth>>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::K>()));
  using LayoutX = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                               cute::make_shape(cute::Int<kRows>{}, cute::Int<kDepth>{}, cute::Int<kStages>{})));
  // Of a step: two instructions, each of which takes pairs of neighbours along the sum, in two columns, at two places.
  using Factors = decltype(cute::make_tensor<Element>(cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_2>{}));
  using Sums = float[2][kRows / 2];  // of a thread: its columns of both products
  using Word = std::conditional_t<kPair == 2, uint16_t, uint8_t>;

  struct alignas(1024) Storage {
    uint8_t weight[kStages][kBoxes * kBoxBytes];
    Element x[kStages][kRows * kDepth];
    Barrier::ValueType full[kStages], empty[kStages];
  };
  static constexpr int kSharedBytes = BlockBudget<kThreads, 1, sizeof(Storage), kLoad + 2 * kMultiply>::kSharedBytes;

  // A block's part of the result and of the sum, by stages.
  struct BlockTile {
    int batch, split, row, column, begin, end;

    CUTLASS_DEVICE explicit BlockTile(const weight_only::Params& p) {
      unsigned rest = blockIdx.x;
      row = int(rest % p.row_blocks) * kRows, rest /= p.row_blocks;
      column = int(rest % p.column_blocks) * kColumns, rest /= p.column_blocks;
      split = int(rest % p.splits), batch = int(rest / p.splits);
      begin = split * p.share / 2, end = cute::min(begin + p.share / 2, (p.steps + 1) / 2);
    }
  };

  // Of a step, the scales of all columns.
  static CUTLASS_DEVICE const float* ScalesOf(const WideWeightOnlyParams& params, const BlockTile& tile, int step) {
    const auto& p = params.sizes;
    const int block = cute::min(p.of_scale == 0 ? step : int(__umulhi(step, p.of_scale)), p.S - 1);  // a stage may end beyond the sum
    return params.scale + (int64_t(tile.batch) * p.S + block) * p.N;
  }

  static CUTLASS_DEVICE void Run(const WideWeightOnlyParams& params, Storage& storage) {
    const int warp_group = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(&params.x);
      cute::prefetch_tma_descriptor(&params.w);
      for (int i = 0; i < kStages; ++i) {
        Barrier::Init(&storage.full[i], 1);
        Barrier::Init(&storage.empty[i], (kThreads - 128) / 32);  // each warp that multiplies
      }
      FenceBarriers();
    }
    __syncthreads();  // the barriers are there
    const BlockTile tile(params.sizes);
    if (warp_group == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kLoad>();
      if (warp == 0) Load(params, storage, tile);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiply>();
      const auto& p = params.sizes;
      if (p.S > 1 && p.K / p.S % kDepth != 0) {
        Multiply<kStep>(params, storage, tile, threadIdx.x - 128);
      } else {
        Multiply<kDepth>(params, storage, tile, threadIdx.x - 128);
      }
    }
  }

  // By a warp, of which one thread asks TMA, and others bring the scales of the stage nearer.
  static CUTLASS_DEVICE void Load(const WideWeightOnlyParams& params, Storage& storage, const BlockTile& tile) {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const int lane = threadIdx.x % 32, column = tile.column + lane % 8 * 32;
    Stage<kStages> stage;
    for (int step = tile.begin; step < tile.end; ++step, ++stage) {
      Barrier::Wait(&storage.empty[stage.index], stage.phase ^ 1);
      if (lane == 0) {
        Barrier::ValueType* full = &storage.full[stage.index];
        Barrier::ArriveAndExpect(full, kStageBytes);
        for (int i = 0; i < kBoxes; ++i) {
          cute::SM90_TMA_LOAD_3D::copy(&params.w, full, kHint, storage.weight[stage.index] + i * kBoxBytes,
                                       tile.column * kBits / 8 + i * 128, step * kDepth, tile.batch);
        }
        cute::SM90_TMA_LOAD_3D::copy(&params.x, full, kHint, storage.x[stage.index], step * kDepth, tile.row, tile.batch);
      }
      if (lane < 16 && column < params.sizes.N) Prefetch(ScalesOf(params, tile, 2 * step + lane / 8) + column);
    }
  }

  // The factors of a step in one of both products.  `at`: where a thread's pairs of a stage begin.
  static CUTLASS_DEVICE void Convert(const uint8_t* weight, int at, int product, int step, Factors& factors) {
    auto words = cute::recast<uint32_t>(factors);
    const auto word = [&](int from) -> uint32_t { return *reinterpret_cast<const Word*>(weight + from + product * kPair); };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int from = at + (step * kStep + i * 8) * 128;
      const uint32_t both = __byte_perm(word(from), word((from ^ 16) + 128), 0x5410);  // of neighbours along the sum
      words(i % 2 * 2, i / 2) = ToFloats<T, kBits>(both);
      words(i % 2 * 2 + 1, i / 2) = ToFloats<T, kBits>(both >> kBits);
    }
  }

  // Σ over all stages.  kUnit: elements of the sum that have the same scales.
  template <int kUnit>
  static CUTLASS_DEVICE void Multiply(const WideWeightOnlyParams& params, Storage& storage, const BlockTile& tile, int thread) {
    const auto& p = params.sizes;
    const int group = thread % 32 / 4, lane = thread % 4, warp = thread / 32;
    // TMA's swizzle: 16 bytes lie where their number and that of the row, of eight, differ in no bit or in some.
    const int byte = (warp * 32 + group * 4) * kBits / 8;
    const int at = byte / 128 * kBoxBytes + 2 * lane * 128 + ((byte % 128 / 16 ^ 2 * lane) * 16 | byte % 16);
    const int column = tile.column + warp * 32 + group * 4;
    const bool real = column < p.N;

    Mma mma;
    const auto slice = mma.get_slice(0);
    const auto x = slice.make_fragment_B(slice.partition_B(cute::make_tensor(cute::make_smem_ptr(storage.x[0]), LayoutX{})));
    auto products = cute::partition_fragment_C(mma, cute::Shape<cute::_64, cute::Int<kRows>>{});
    Factors factors[2];
    Sums sums = {};
    const auto scales_of = [&](int step, int product) {
      return real ? __ldg(reinterpret_cast<const float2*>(ScalesOf(params, tile, step) + column + 2 * product)) : float2{};
    };
    float2 next = scales_of(2 * tile.begin, 0);  // comes while the unit before it is multiplied

    Stage<kStages> next_stage;
    if (tile.begin < tile.end) {
      Barrier::Wait(&storage.full[0], 0);
      Convert(storage.weight[0], at, 0, 0, factors[0]);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int index = tile.begin; index < tile.end; ++index) {
      const Stage<kStages> stage = next_stage;
      ++next_stage;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {  // the steps of the first product, and of the second
        const int product = i / 2, step = i % 2;
        const bool begins = step == 0 || kUnit == kStep, ends = step == 1 || kUnit == kStep;
        Factors& now = factors[step];
        cute::warpgroup_fence_operand(now);
        cute::warpgroup_fence_operand(products);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 2; ++k) {
          mma.accumulate_ = begins && k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
          cute::gemm(mma, now(cute::_, k), x(cute::_, 0, step * 2 + k, stage.index), products(cute::_, 0, 0));
        }
        cute::warpgroup_commit_batch();
        const float2 scales = next;
        if (ends)
          next = kUnit == kStep ? scales_of(2 * index + (i + 1) / 4 * 2 + (i + 1) % 2, (i + 1) / 2 % 2)
                                : scales_of(2 * index + product * 2, 1 - product);
        cute::warpgroup_wait<1>();  // the other factors are read
        if (i < 3) {
          Convert(storage.weight[stage.index], at, (i + 1) / 2, 1 - step, factors[1 - step]);
        } else if (index + 1 < tile.end) {
          Barrier::Wait(&storage.full[next_stage.index], next_stage.phase);
          Convert(storage.weight[next_stage.index], at, 0, 0, factors[0]);
        }
        if (!ends) continue;
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(products);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kRows / 2; ++k) sums[product][k] = fmaf(products(k), k / 2 % 2 ? scales.y : scales.x, sums[product][k]);
      }
      __syncwarp();
      if (thread % 32 == 0) Barrier::Arrive(&storage.empty[stage.index]);
    }
    if (!real) return;
    if (p.wide != 0) {
      StoreAs<float>(params, tile, sums, column, lane);
    } else {
      StoreAs<T>(params, tile, sums, column, lane);
    }
  }

  // Whole sectors: a warp has 32 columns of four rows at a time.
  template <typename R>
  static CUTLASS_DEVICE void StoreAs(const WideWeightOnlyParams& params, const BlockTile& tile, const Sums& sums, int column, int lane) {
    const auto& p = params.sizes;
    R* const y = static_cast<R*>(params.y) + (int64_t(tile.split) * p.B + tile.batch) * p.M * p.N + column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 4; ++i) {
      const int m = tile.row + i / 2 * 8 + lane * 2 + i % 2, of = i / 2 * 4 + i % 2;
      const float four[] = {sums[0][of], sums[0][of + 2], sums[1][of], sums[1][of + 2]};
      if (m < p.M) Store(Rounded<R, 4>(four), y + int64_t(m) * p.N);
    }
  }

  static Status Launch(const weight_only::Plan& plan, const WeightOnlyOperands& operands, void* result, LaunchStream stream);

  static WideWeightOnlyKernel Entry(Dtype dtype) { return {dtype, kBits, {kRows, kColumns, 1}, kStages, kSharedBytes, &Launch}; }
};

// TMA descriptors are read where the kernel's parameters lie, hence __grid_constant__.
template <typename T, int kBits, int kRows>
__global__ void __launch_bounds__(WideWeightOnly<T, kBits, kRows>::kThreads, 1)
    WideWeightOnlyKernelOf(const __grid_constant__ WideWeightOnlyParams params) {
  extern __shared__ char shared[];
  using Of = WideWeightOnly<T, kBits, kRows>;
  Of::Run(params, *reinterpret_cast<typename Of::Storage*>(shared));
}

template <typename T, int kBits, int kRows>
Status WideWeightOnly<T, kBits, kRows>::Launch(const weight_only::Plan& plan, const WeightOnlyOperands& operands, void* result,
                                               LaunchStream stream) {
  Device device;
  constexpr auto kKernel = WideWeightOnlyKernelOf<T, kBits, kRows>;
  if (Status s = Prepare("wide_weight_only", kKernel, kSharedBytes, 1, &device); !s.ok() || !stream) return s;
  const weight_only::Params& p = plan.params;
  WideWeightOnlyParams params = {};
  if (p.K > 0) {  // else nothing is read, and there is no such map
    constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    params.x = TmaDescriptor(kType, sizeof(T), operands.x, p.K, p.M, p.B, p.K, int64_t(p.K) * p.M, kRows);
    const int64_t bytes = int64_t(p.N) * kBits / 8;  // of a row
    params.w = TmaDescriptor(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, operands.q, bytes, p.K, p.B, bytes, bytes * p.K, kDepth);
  }
  params.scale = operands.scale, params.y = result, params.sizes = p;
  return sm90::Launch("wide_weight_only", kKernel, params, dim3(unsigned(plan.grid), 1, 1), dim3(kThreads, 1, 1), dim3(1, 1, 1),
                      kSharedBytes, *stream);
}

template <typename T>
std::vector<WideWeightOnlyKernel> WideWeightOnlyKernelsOf(Dtype dtype) {
  return {WideWeightOnly<T, 4, 64>::Entry(dtype), WideWeightOnly<T, 4, 128>::Entry(dtype), WideWeightOnly<T, 8, 64>::Entry(dtype),
          WideWeightOnly<T, 8, 128>::Entry(dtype)};
}

}  // namespace jaxext::sm90
