// One product of scaled 8-bit floats for Hopper, in which the contracted axis is the last of both operands, as wgmma wants them.
//
//     D[m, n] = Σ_s  left[m, s] right[n, s]  Σ_k in s  A[m, k] B[n, k]
//
// CUTLASS's collective loads by TMA into a ring of shared memory.  Hopper's tensor cores keep some 14 bits of a sum of 8-bit floats: each
// step of 128 goes into sums of its own, which are scaled and added to those of all in float32 registers.  If the scales do not change
// along the sum, the result is scaled at the end.  A thread has no registers for both sums of a wide tile, so that it multiplies 128
// columns at a time, and the two warp groups take turns at the tensor cores.  Blocks are persistent.  Neighbouring blocks of a cluster
// have the same columns and load them once.  It must not know XLA or Python.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#include "cutlass/numeric_conversion.h"
#include "common/pipeline_sm90.cuh"
#include "scaled/scaled.h"

namespace jaxext::sm90 {

constexpr int kStep = kScaledStep;
constexpr int kHalf = 128;         // columns that a warp group multiplies at once
constexpr int kOwn = kHalf / 2;    // of its sums, a thread's
constexpr int kColumnsOfBand = 8;  // tiles side by side that follow each other, so that they share rows in the L2 cache

template <class ElementA, class ElementB, int kTileM, int kTileN, int kClusterM, int kStages, int kBlocks>
struct ScaledProduct {
  static constexpr int kWarpGroups = kTileM / 64;  // that multiply
  static constexpr int kConsumers = 128 * kWarpGroups;
  static constexpr int kLoad = 40, kMultiply = kWarpGroups == 2 ? 232 : 208;  // registers of their threads
  static constexpr int kHalves = kTileN / kHalf;

  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kStep>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::_1, cute::_1>;
  // "FastAccum" is a collective that leaves sums where they are; only its loads are taken.
  using Schedule = cute::conditional_t<kWarpGroups == 2, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                                       cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, cutlass::layout::RowMajor, 16, ElementB, cutlass::layout::ColumnMajor,
      16, float, Tile, Cluster, cutlass::gemm::collective::StageCount<kStages>, Schedule>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using Half = cute::Shape<cute::Int<kTileM>, cute::Int<kHalf>, cute::Int<kStep>>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<ElementA, ElementB, float, Half, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kWarpGroups>, cute::_1, cute::_1>>{}));
  using Sums = decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kOwn>, cute::Int<kHalves>>{}));

  // Of each warp: 16 rows of 128 bytes on their way to memory, 16 bytes apart in the banks, and the scales of columns that have one each.
  struct alignas(16) Scratch {
    char rows[16][128 + 16];
    float columns[kHalf];
  };

  // A tile of the result.
  struct Work {
    int batch, split, row, column;  // where it begins
  };

  struct Kernel {
    static constexpr uint32_t MaxThreadsPerBlock = 128 + kConsumers;
    static constexpr uint32_t MinBlocksPerMultiprocessor = kBlocks;

    struct Params {
      typename Mainloop::Params mainloop;
      Scale left, right;
      void* d;
      int m, n, k, batch;
      int rows_of_block, halves_of_block;  // of a scale; no halves: each column has one
      int steps_of_block;                  // 0: the scales do not change along the sum
      int steps, steps_of_split, splits;
      int down, across, band;  // of a part: clusters one below the other, tiles side by side, those of a band
      int works;               // of all clusters
      bool wide;
    };

    struct alignas(1024) SharedStorage {
      typename Mainloop::TensorStorage tensors;
      Scratch scratch[4 * kWarpGroups];
      typename Mainloop::PipelineStorage pipeline;
    };

    static CUTLASS_DEVICE Work WorkOf(const Params& params, int index) {
      const int of_part = params.down * params.across;
      const int part = index / of_part, rest = index % of_part;
      const int first = rest / (params.down * params.band) * params.band;  // column of the band
      const int inside = rest - first * params.down, width = cute::min(params.band, params.across - first);
      const int row = inside / width * kClusterM + int(cute::block_rank_in_cluster());
      return {part % params.batch, part / params.batch, row * kTileM, (first + inside % width) * kTileN};
    }

    static CUTLASS_DEVICE int FirstStep(const Params& params, const Work& work) { return work.split * params.steps_of_split; }

    static CUTLASS_DEVICE int StepsOf(const Params& params, const Work& work) {
      return cute::max(0, cute::min(params.steps_of_split, params.steps - FirstStep(params, work)));
    }

    CUTLASS_DEVICE void operator()(const Params& params, char* shared) {
      auto& storage = *reinterpret_cast<SharedStorage*>(shared);
      const int warp_group = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
      Pipeline pipeline = BeginPipeline<Mainloop, Cluster>(params.mainloop, storage.pipeline, kConsumers);

      if (warp_group == 0) {
        cutlass::arch::warpgroup_reg_dealloc<kLoad>();
        if (warp == 0) Load(params, storage, pipeline);
      } else {
        cutlass::arch::warpgroup_reg_alloc<kMultiply>();
        if (params.steps_of_block > 0 && params.halves_of_block == 0) {
          Multiply<true>(params, storage, pipeline, threadIdx.x - 128);
        } else {
          Multiply<false>(params, storage, pipeline, threadIdx.x - 128);
        }
      }
    }

    static CUTLASS_DEVICE void Load(const Params& params, SharedStorage& storage, Pipeline pipeline) {
      using X = cute::Underscore;
      Mainloop mainloop;
      auto state = cutlass::make_producer_start_state<Pipeline>();
      const auto a = params.mainloop.tma_load_a.get_tma_tensor(cute::make_shape(params.m, params.k, params.batch));
      const auto b = params.mainloop.tma_load_b.get_tma_tensor(cute::make_shape(params.n, params.k, params.batch));
      const auto tiles = cute::make_coord(cute::_, cute::_, cute::_);
      for (int index = blockIdx.y; index < params.works; index += gridDim.y) {
        const Work work = WorkOf(params, index);
        const int steps = StepsOf(params, work);
        const auto from = cute::make_coord(0, FirstStep(params, work) * kStep, work.batch);
        const auto of_a = cute::local_tile(cute::domain_offset(from, a), Tile{}, tiles, cute::Step<cute::_1, X, cute::_1>{});
        const auto of_b = cute::local_tile(cute::domain_offset(from, b), Tile{}, tiles, cute::Step<X, cute::_1, cute::_1>{});
        mainloop.load(params.mainloop, pipeline, state, cute::make_tuple(of_a, of_b),
                      cute::make_coord(work.row / kTileM, work.column / kTileN, cute::_, 0), cute::make_coord_iterator(steps), steps,
                      threadIdx.x, cute::block_rank_in_cluster(), storage.tensors);
        state.advance(steps);
      }
      mainloop.load_tail(pipeline, state);  // blocks of a cluster end together
    }

    // The scales of a thread's two rows, and of the columns of a tile.  What lies beyond the end has that of the last.
    struct Scales {
      const float* rows[2];
      const float* columns;
      int column;  // where the tile begins

      CUTLASS_DEVICE Scales(const Params& params, const Work& work, int thread) : column(work.column) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int row = cute::min(work.row + thread / 32 * 16 + thread % 32 / 4 + i * 8, params.m - 1);
          rows[i] = params.left.data + work.batch * params.left.batch + row / params.rows_of_block * params.left.outer;
        }
        columns = params.right.data + work.batch * params.right.batch;
      }

      CUTLASS_DEVICE float Row(const Params& params, int i, int block) const { return __ldg(rows[i] + block * params.left.step); }

      // Of all columns of a half.
      CUTLASS_DEVICE float Half(const Params& params, int half, int block) const {
        const int first = cute::min(column + half * kHalf, params.n - 1) / kHalf;
        return __ldg(columns + first / params.halves_of_block * params.right.outer + block * params.right.step);
      }

      // Of four columns that have one each.
      CUTLASS_DEVICE float4 Four(const Params& params, int half, int block, int lane) const {
        const int first = cute::min(column + half * kHalf + lane * 4, params.n - 4);
        return __ldg(reinterpret_cast<const float4*>(columns + block * params.right.step + first));
      }
    };

    // kEach: whether the scales change along the sum, and each column has its own.
    template <bool kEach>
    static CUTLASS_DEVICE void Multiply(const Params& params, SharedStorage& storage, Pipeline pipeline, int thread) {
      Mma mma;
      const auto a = cute::make_tensor(cute::make_smem_ptr(storage.tensors.smem_A.data()), typename Mainloop::SmemLayoutA{});
      const auto b = cute::make_tensor(cute::make_smem_ptr(storage.tensors.smem_B.data()), typename Mainloop::SmemLayoutB{});
      const auto own = mma.get_slice(thread / 128 * 128);
      const auto lhs = own.make_fragment_A(own.partition_A(a));
      const auto rhs = own.make_fragment_B(own.partition_B(b));
      auto of_step = cute::partition_fragment_C(mma, cute::take<0, 2>(Half{}));
      Sums sums;
      Scratch& scratch = storage.scratch[thread / 32];
      const bool in_steps = kEach || params.steps_of_block > 0;

      typename Mainloop::PipelineState state;
      for (int index = blockIdx.y; index < params.works; index += gridDim.y) {
        const Work work = WorkOf(params, index);
        const Scales scales(params, work, thread);
        const int first = FirstStep(params, work), last = first + StepsOf(params, work);
        cute::clear(sums);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = first; step < last; ++step) {
          const int block = in_steps ? step / params.steps_of_block : 0;
          const float rows[] = {in_steps ? scales.Row(params, 0, block) : 1.f, in_steps ? scales.Row(params, 1, block) : 1.f};
          WaitForStage(pipeline, state);
          CUTLASS_PRAGMA_UNROLL
          for (int half = 0; half < kHalves; ++half) {
            cute::warpgroup_fence_operand(of_step);
            cute::warpgroup_arrive();
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < cute::size<2>(lhs); ++k) {
              mma.accumulate_ = k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
              cute::gemm(mma, lhs(cute::_, 0, k, state.index()), rhs(cute::_, half, k, state.index()), of_step(cute::_, 0, 0));
            }
            cute::warpgroup_commit_batch();
            // Meanwhile the scales come.
            const float common = !kEach && in_steps ? scales.Half(params, half, block) : 1.f;
            if constexpr (kEach) PutColumns(scratch, scales.Four(params, half, block, thread % 32), thread % 32);
            cute::warpgroup_wait<0>();
            cute::warpgroup_fence_operand(of_step);
            if (half + 1 == kHalves) {
              ReleaseStage(pipeline, state);
              ++state;
            }
            const float factors[] = {rows[0] * common, rows[1] * common};
            if constexpr (kEach) {
              AddByColumns(sums, half, of_step, factors, scratch, thread % 32);
            } else {
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < kOwn; ++i) sums(i, half) += factors[i / 2 % 2] * of_step(i);
            }
          }
        }
        if (!in_steps) ScaleAll(params, sums, scales, scratch, thread % 32);
        if (params.wide) {
          Store<float>(params, scratch, sums, work, thread);
        } else {
          Store<cutlass::bfloat16_t>(params, scratch, sums, work, thread);
        }
      }
    }

    static CUTLASS_DEVICE void PutColumns(Scratch& scratch, const float4& four, int lane) {
      __syncwarp();  // after all have read what was there
      *reinterpret_cast<float4*>(&scratch.columns[lane * 4]) = four;
      __syncwarp();
    }

    // As wgmma lays them out: a thread has two neighbours of each eight columns, in two rows.
    template <class Products>
    static CUTLASS_DEVICE void AddByColumns(Sums& sums, int half, const Products& products, const float (&rows)[2], const Scratch& scratch,
                                            int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwn; i += 4) {
        const float2 two = *reinterpret_cast<const float2*>(&scratch.columns[i * 2 + lane % 4 * 2]);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) sums(i + j, half) += (rows[j / 2] * (j % 2 ? two.y : two.x)) * products(i + j);
      }
    }

    static CUTLASS_DEVICE void ScaleAll(const Params& params, Sums& sums, const Scales& scales, Scratch& scratch, int lane) {
      const float rows[] = {scales.Row(params, 0, 0), scales.Row(params, 1, 0)};
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        if (params.halves_of_block == 0) {
          PutColumns(scratch, scales.Four(params, half, 0, lane), lane);
        } else {
          const float common = scales.Half(params, half, 0);
          PutColumns(scratch, {common, common, common, common}, lane);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOwn; i += 4) {
          const float2 two = *reinterpret_cast<const float2*>(&scratch.columns[i * 2 + lane % 4 * 2]);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) sums(i + j, half) *= rows[j / 2] * (j % 2 ? two.y : two.x);
        }
      }
    }

    // Through shared memory, so that a warp stores whole lines of 128 bytes.
    template <class Result>
    static CUTLASS_DEVICE void Store(const Params& params, Scratch& scratch, const Sums& sums, const Work& work, int thread) {
      constexpr int kPiece = 128 / sizeof(Result), kVector = 16 / sizeof(Result);  // columns of a line, and of 16 bytes
      const int lane = thread % 32, first_row = work.row + thread / 32 * 16;
      Result* const out = static_cast<Result*>(params.d) + (int64_t(work.split) * params.batch + work.batch) * params.m * params.n;
      cutlass::NumericArrayConverter<Result, float, 2> convert;
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kTileN / kPiece; ++piece) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPiece / 4; ++i) {
          const int at = piece * kPiece / 2 + i * 2;
          *reinterpret_cast<cutlass::Array<Result, 2>*>(scratch.rows[i % 2 * 8 + lane / 4] + (i / 2 * 8 + lane % 4 * 2) * sizeof(Result)) =
              convert({sums(at), sums(at + 1)});
        }
        __syncwarp();
        CUTLASS_PRAGMA_UNROLL
        for (int down = lane / 8; down < 16; down += 4) {
          const int row = first_row + down, column = work.column + piece * kPiece + lane % 8 * kVector;
          if (row < params.m && column < params.n) {
            *reinterpret_cast<uint4*>(out + int64_t(row) * params.n + column) =
                *reinterpret_cast<const uint4*>(scratch.rows[down] + lane % 8 * 16);
          }
        }
        __syncwarp();
      }
    }
  };

  static constexpr int kSharedBytes = BlockBudget<Kernel::MaxThreadsPerBlock, kBlocks, sizeof(typename Kernel::SharedStorage),
                                                  kLoad + kWarpGroups * kMultiply>::kSharedBytes;

  static Status Run(const ScaledGemm& gemm, LaunchStream stream) {
    Device device;
    if (Status s = Prepare("scaled", cutlass::device_kernel<Kernel>, kSharedBytes, kBlocks, &device); !s.ok() || !stream) return s;
    const ScaledProblem& p = gemm.sizes;
    const auto tensor = [&](const void* array, int64_t outer) {
      const typename Mainloop::StrideA strides = {p.K, cute::_1{}, outer * p.K};
      return cute::make_tensor(static_cast<const uint8_t*>(array),
                               cute::make_layout(cute::make_shape(int(outer), int(p.K), int(p.B)), strides));
    };
    typename Kernel::Params params = {};
    params.mainloop.tma_load_a =
        cute::make_tma_copy_A_sm90(typename Mainloop::GmemTiledCopyA{}, tensor(gemm.a, p.M),
                                   typename Mainloop::SmemLayoutA{}(cute::_, cute::_, cute::_0{}), Tile{}, Cluster{});
    params.mainloop.tma_load_b =
        cute::make_tma_copy_B_sm90(typename Mainloop::GmemTiledCopyB{}, tensor(gemm.b, p.N),
                                   typename Mainloop::SmemLayoutB{}(cute::_, cute::_, cute::_0{}), Tile{}, Cluster{});
    params.left = gemm.left, params.right = gemm.right;
    params.d = gemm.d, params.wide = gemm.wide;
    params.m = p.M, params.n = p.N, params.k = p.K, params.batch = p.B;
    params.rows_of_block = p.M / p.I;
    params.halves_of_block = p.J == p.N ? 0 : cute::ceil_div(p.N / p.J, kHalf);
    params.steps_of_block = p.S == 1 ? 0 : p.K / p.S / kStep;
    params.splits = gemm.splits;
    params.steps = cute::ceil_div(p.K, kStep);
    params.steps_of_split = cute::ceil_div(params.steps, gemm.splits);
    params.down = cute::ceil_div(p.M, kTileM * kClusterM);
    params.across = cute::ceil_div(p.N, kTileN);
    params.band = std::min(params.across, kColumnsOfBand);
    params.works = p.B * gemm.splits * params.down * params.across;
    const int clusters = std::min(params.works, device.multiprocessors * kBlocks / kClusterM);
    return Launch("scaled", cutlass::device_kernel<Kernel>, params, dim3(kClusterM, clusters, 1), dim3(Kernel::MaxThreadsPerBlock, 1, 1),
                  dim3(kClusterM, 1, 1), kSharedBytes, *stream);
  }

  static ScaledKernel Entry(Dtype first, Dtype second) {
    return {first, second, {kTileM, kTileN, kStep, kClusterM, 1}, kStages, kSharedBytes, &Run};
  }
};

// The kernels of two dtypes.
//
// A tile of 128 x 256 occupies a multiprocessor alone, and pairs of blocks share their columns.  With tiles of 64 x 128, for few rows, two
// blocks fit a multiprocessor: one multiplies while the other scales or stores.
template <class ElementA, class ElementB>
std::vector<ScaledKernel> ScaledKernelsOf(Dtype first, Dtype second) {
  return {ScaledProduct<ElementA, ElementB, 128, 256, 2, 4, 1>::Entry(first, second),
          ScaledProduct<ElementA, ElementB, 64, 128, 1, 4, 2>::Entry(first, second)};
}

}  // namespace jaxext::sm90
