// One product of scaled 8-bit floats for Hopper, in which the contracted axis is the last of both operands, as wgmma wants them.
//
//     D[m, n] = Σ_s  left[m, s] right[n, s]  Σ_k in s  A[m, k] B[n, k]
//
// CUTLASS's collective loads by TMA into a ring of shared memory.  Hopper's tensor cores keep some 14 bits of a sum of 8-bit floats: each
// step of 128 goes into sums of its own, which are scaled and added to those of all in float32 registers.  If the scales do not change
// along the sum, the result is scaled at the end.  A thread has no registers for both sums of a wide tile, so that it multiplies 128
// columns at a time, and the two warp groups take turns at the tensor cores.  Blocks are persistent.  Neighbouring blocks of a cluster
// have the same columns and load them once.
//
// A ragged product has a matrix B for each group of rows.  A tile of it is a *visit*: of rows, for one of the groups in them.  The product
// of all rows of the tile is computed, and those of the group are stored.  Blocks of a cluster have the same rows.
#pragma once

#include "common/collective_sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "common/epilogue_store.cuh"
#include "common/tile_order.cuh"
#include "scaled/scaled.h"

namespace jaxext::sm90 {

template <class ElementA, class ElementB, int kTileM, int kTileN, int kCluster, int kStages, int kBlocks, bool kRagged = false>
struct ScaledProduct {
  static constexpr const char* kName = kRagged ? "ragged_scaled" : "scaled";
  static constexpr int kTileK = kScaledStep;
  static constexpr int kMmaN = 128;                // columns that a warp group multiplies at once
  static constexpr int kAccumulators = kMmaN / 2;  // of a thread
  static constexpr int kMmaTiles = kTileN / kMmaN;
  static constexpr int kWarpGroups = kTileM / 64;  // that multiply
  static constexpr int kConsumers = 128 * kWarpGroups;
  static constexpr int kLoad = 40, kMultiply = kWarpGroups == 2 ? 232 : 208;  // registers of their threads

  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::conditional_t<kRagged, cute::Shape<cute::_1, cute::Int<kCluster>, cute::_1>,
                                      cute::Shape<cute::Int<kCluster>, cute::_1, cute::_1>>;
  // "FastAccum" is a collective that leaves sums where they are; only its loads are taken.
  using Schedule = cute::conditional_t<kWarpGroups == 2, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                                       cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, cutlass::layout::RowMajor, 16, ElementB, cutlass::layout::ColumnMajor,
      16, float, Tile, Cluster, cutlass::gemm::collective::StageCount<kStages>, Schedule>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using MmaTile = cute::Shape<cute::Int<kTileM>, cute::Int<kMmaN>, cute::Int<kTileK>>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<ElementA, ElementB, float, MmaTile, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kWarpGroups>, cute::_1, cute::_1>>{}));
  using Sums = decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kAccumulators>, cute::Int<kMmaTiles>>{}));

  // The matrix B of a visit; its rows that are sums, and those that are written, with zeros besides.
  struct Visit : TileOrigin {
    int b, first, last, low, high;
  };
  using Origin = cute::conditional_t<kRagged, Visit, TileOrigin>;

  // Of each warp: rows of the result, and the scales of columns that have one each.
  struct Scratch {
    StagedRows staged;
    float columns[kMmaN];
  };

  struct Kernel {
    static constexpr uint32_t MaxThreadsPerBlock = 128 + kConsumers;
    static constexpr uint32_t MinBlocksPerMultiprocessor = kBlocks;

    struct Params {
      typename Mainloop::Params mainloop;
      Scale left, right;
      void* d;
      int m, n, k, batch;
      int rows_of_scale, mma_tiles_of_scale;  // of a scale; no tiles: each column has one
      int steps_of_scale;                     // 0: the scales do not change along the sum
      int steps, steps_of_split, splits;
      TileOrder order;  // of clusters, in parts; of a ragged product the rows are visits
      bool f32_result;
      cute::conditional_t<kRagged, RaggedRows, cute::tuple<>> ragged;
    };

    struct alignas(1024) SharedStorage {
      typename Mainloop::TensorStorage tensors;
      Scratch scratch[4 * kWarpGroups];
      typename Mainloop::PipelineStorage pipeline;
    };

    static CUTLASS_DEVICE int FirstTile() { return kRagged ? blockIdx.x : blockIdx.y; }
    static CUTLASS_DEVICE int Clusters() { return kRagged ? gridDim.x : gridDim.y; }

    static CUTLASS_DEVICE Origin TileOf(const Params& params, int index) {
      const auto cluster = params.order[index];
      if constexpr (kRagged) {
        const RaggedRows& ragged = params.ragged;
        const int32_t* visit = ragged.visits + (int64_t(cluster.matrix / ragged.sharing_ranges) * ragged.count + cluster.row()) * 5;
        Visit tile;
        tile.batch = cluster.matrix, tile.split = 0;
        tile.row = visit[3] / kTileM * kTileM, tile.column = (cluster.column() * kCluster + int(cute::block_rank_in_cluster())) * kTileN;
        tile.b = cluster.matrix / ragged.sharing_groups * ragged.groups + cute::max(visit[0], 0);  // rows may have no group
        tile.first = visit[1], tile.last = visit[2], tile.low = visit[3], tile.high = visit[4];
        return tile;
      } else {
        const int row = cluster.row() * kCluster + int(cute::block_rank_in_cluster());
        return {cluster.matrix % params.batch, cluster.matrix / params.batch, row * kTileM, cluster.column() * kTileN};
      }
    }

    static CUTLASS_DEVICE int MatricesB(const Params& params) {
      if constexpr (kRagged) return params.ragged.matrices;
      return params.batch;
    }

    static CUTLASS_DEVICE int MatrixB(const Origin& tile) {
      if constexpr (kRagged) return tile.b;
      return tile.batch;
    }

    static CUTLASS_DEVICE int FirstStep(const Params& params, const Origin& tile) { return tile.split * params.steps_of_split; }

    static CUTLASS_DEVICE int StepsOf(const Params& params, const Origin& tile) {
      if constexpr (kRagged) {
        if (tile.first >= tile.last) return 0;
      }
      return cute::max(0, cute::min(params.steps_of_split, params.steps - FirstStep(params, tile)));
    }

    // A row of the result is a sum, or else zero; and it is written, or left to others.
    static CUTLASS_DEVICE bool IsSum(const Origin& tile, int row) {
      if constexpr (kRagged) return tile.first <= row && row < tile.last;
      return true;
    }
    static CUTLASS_DEVICE bool IsWritten(const Params& params, const Origin& tile, int row) {
      if constexpr (kRagged) return tile.low <= row && row < tile.high;
      return row < params.m;
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
        if (params.steps_of_scale > 0 && params.mma_tiles_of_scale == 0) {
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
      const auto b = params.mainloop.tma_load_b.get_tma_tensor(cute::make_shape(params.n, params.k, MatricesB(params)));
      const auto tiles = cute::make_coord(cute::_, cute::_, cute::_);
      for (int index = FirstTile(); index < params.order.tiles; index += Clusters()) {
        const Origin tile = TileOf(params, index);
        const int steps = StepsOf(params, tile);
        if (kRagged && steps == 0) continue;
        const int depth = FirstStep(params, tile) * kTileK;
        const auto of_a = cute::local_tile(cute::domain_offset(cute::make_coord(0, depth, tile.batch), a), Tile{}, tiles,
                                           cute::Step<cute::_1, X, cute::_1>{});
        const auto of_b = cute::local_tile(cute::domain_offset(cute::make_coord(0, depth, MatrixB(tile)), b), Tile{}, tiles,
                                           cute::Step<X, cute::_1, cute::_1>{});
        mainloop.load(params.mainloop, pipeline, state, cute::make_tuple(of_a, of_b),
                      cute::make_coord(tile.row / kTileM, tile.column / kTileN, cute::_, 0), cute::make_coord_iterator(steps), steps,
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

      CUTLASS_DEVICE Scales(const Params& params, const Origin& tile, int thread) : column(tile.column) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int row = cute::min(tile.row + thread / 32 * 16 + thread % 32 / 4 + i * 8, params.m - 1);
          rows[i] = params.left.data + tile.batch * params.left.batch + row / params.rows_of_scale * params.left.outer;
        }
        columns = params.right.data + MatrixB(tile) * params.right.batch;
      }

      CUTLASS_DEVICE float Row(const Params& params, int i, int block) const { return __ldg(rows[i] + block * params.left.step); }

      // That of all columns of a tile.
      CUTLASS_DEVICE float Block(const Params& params, int mma_tile, int block) const {
        const int first = cute::min(column + mma_tile * kMmaN, params.n - 1) / kMmaN;
        return __ldg(columns + first / params.mma_tiles_of_scale * params.right.outer + block * params.right.step);
      }

      // Those of four columns that have one each.
      CUTLASS_DEVICE float4 Columns(const Params& params, int mma_tile, int block, int lane) const {
        const int first = cute::min(column + mma_tile * kMmaN + lane * 4, params.n - 4);
        return __ldg(reinterpret_cast<const float4*>(columns + block * params.right.step + first));
      }
    };

    // kScalesByColumn: whether the scales change along the sum, and each column has its own.
    template <bool kScalesByColumn>
    static CUTLASS_DEVICE void Multiply(const Params& params, SharedStorage& storage, Pipeline pipeline, int thread) {
      Mma mma;
      const auto a = cute::make_tensor(cute::make_smem_ptr(storage.tensors.smem_A.data()), typename Mainloop::SmemLayoutA{});
      const auto b = cute::make_tensor(cute::make_smem_ptr(storage.tensors.smem_B.data()), typename Mainloop::SmemLayoutB{});
      const auto own = mma.get_slice(thread / 128 * 128);
      const auto lhs = own.make_fragment_A(own.partition_A(a));
      const auto rhs = own.make_fragment_B(own.partition_B(b));
      auto products = cute::partition_fragment_C(mma, cute::take<0, 2>(MmaTile{}));
      Sums sums;
      Scratch& scratch = storage.scratch[thread / 32];
      const bool scales_in_sum = kScalesByColumn || params.steps_of_scale > 0;

      typename Mainloop::PipelineState state;
      for (int index = FirstTile(); index < params.order.tiles; index += Clusters()) {
        const Origin tile = TileOf(params, index);
        const Scales scales(params, tile, thread);
        const int first = FirstStep(params, tile), last = first + StepsOf(params, tile);
        cute::clear(sums);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = first; step < last; ++step) {
          const int block = scales_in_sum ? step / params.steps_of_scale : 0;
          const float rows[] = {scales_in_sum ? scales.Row(params, 0, block) : 1.f, scales_in_sum ? scales.Row(params, 1, block) : 1.f};
          WaitForStage(pipeline, state);
          CUTLASS_PRAGMA_UNROLL
          for (int mma_tile = 0; mma_tile < kMmaTiles; ++mma_tile) {
            cute::warpgroup_fence_operand(products);
            cute::warpgroup_arrive();
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < cute::size<2>(lhs); ++k) {
              mma.accumulate_ = k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
              cute::gemm(mma, lhs(cute::_, 0, k, state.index()), rhs(cute::_, mma_tile, k, state.index()), products(cute::_, 0, 0));
            }
            cute::warpgroup_commit_batch();
            // Meanwhile the scales come.
            const float common = !kScalesByColumn && scales_in_sum ? scales.Block(params, mma_tile, block) : 1.f;
            if constexpr (kScalesByColumn) PutColumns(scratch, scales.Columns(params, mma_tile, block, thread % 32), thread % 32);
            cute::warpgroup_wait<0>();
            cute::warpgroup_fence_operand(products);
            if (mma_tile + 1 == kMmaTiles) {
              ReleaseStage(pipeline, state);
              ++state;
            }
            const float factors[] = {rows[0] * common, rows[1] * common};
            if constexpr (kScalesByColumn) {
              AddByColumns(sums, mma_tile, products, factors, scratch, thread % 32);
            } else {
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < kAccumulators; ++i) sums(i, mma_tile) += factors[i / 2 % 2] * products(i);
            }
          }
        }
        if (!scales_in_sum) ScaleAll(params, sums, scales, scratch, thread % 32);
        if (params.f32_result) {
          Store<float>(params, scratch, sums, tile, thread);
        } else {
          Store<cutlass::bfloat16_t>(params, scratch, sums, tile, thread);
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
    static CUTLASS_DEVICE void AddByColumns(Sums& sums, int mma_tile, const Products& products, const float (&rows)[2],
                                            const Scratch& scratch, int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccumulators; i += 4) {
        const float2 two = *reinterpret_cast<const float2*>(&scratch.columns[i * 2 + lane % 4 * 2]);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) sums(i + j, mma_tile) += (rows[j / 2] * (j % 2 ? two.y : two.x)) * products(i + j);
      }
    }

    static CUTLASS_DEVICE void ScaleAll(const Params& params, Sums& sums, const Scales& scales, Scratch& scratch, int lane) {
      const float rows[] = {scales.Row(params, 0, 0), scales.Row(params, 1, 0)};
      CUTLASS_PRAGMA_UNROLL
      for (int mma_tile = 0; mma_tile < kMmaTiles; ++mma_tile) {
        if (params.mma_tiles_of_scale == 0) {
          PutColumns(scratch, scales.Columns(params, mma_tile, 0, lane), lane);
        } else {
          const float common = scales.Block(params, mma_tile, 0);
          PutColumns(scratch, {common, common, common, common}, lane);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccumulators; i += 4) {
          const float2 two = *reinterpret_cast<const float2*>(&scratch.columns[i * 2 + lane % 4 * 2]);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) sums(i + j, mma_tile) *= rows[j / 2] * (j % 2 ? two.y : two.x);
        }
      }
    }

    // Through shared memory, so that a warp stores whole lines of 128 bytes.
    template <class Result>
    static CUTLASS_DEVICE void Store(const Params& params, Scratch& scratch, const Sums& sums, const Origin& tile, int thread) {
      constexpr int kLine = 128 / sizeof(Result), kVector = 16 / sizeof(Result);  // columns of a line, and of 16 bytes
      const int lane = thread % 32, first_row = tile.row + thread / 32 * 16;
      Result* const out = static_cast<Result*>(params.d) + (int64_t(tile.split) * params.batch + tile.batch) * params.m * params.n;
      auto& rows = scratch.staged.rows;
      cutlass::NumericArrayConverter<Result, float, 2> convert;
      CUTLASS_PRAGMA_UNROLL
      for (int line = 0; line < kTileN / kLine; ++line) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLine / 4; ++i) {
          const int at = line * kLine / 2 + i * 2, down = i % 2 * 8 + lane / 4;
          const bool exists = IsSum(tile, first_row + down);
          *reinterpret_cast<cutlass::Array<Result, 2>*>(rows[down] + (i / 2 * 8 + lane % 4 * 2) * sizeof(Result)) =
              convert({exists ? sums(at) : 0.f, exists ? sums(at + 1) : 0.f});
        }
        __syncwarp();
        CUTLASS_PRAGMA_UNROLL
        for (int down = lane / 8; down < 16; down += 4) {
          const int row = first_row + down, column = tile.column + line * kLine + lane % 8 * kVector;
          if (IsWritten(params, tile, row) && column < params.n) {
            *reinterpret_cast<uint4*>(out + int64_t(row) * params.n + column) = *reinterpret_cast<const uint4*>(rows[down] + lane % 8 * 16);
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
    if (Status s = Prepare(kName, cutlass::device_kernel<Kernel>, kSharedBytes, kBlocks, &device); !s.ok() || !stream) return s;
    const ScaledProblem& p = gemm.sizes;
    const auto tensor = [&](const void* array, int64_t outer, int64_t matrices, auto strides) {
      SetStrides(strides, p.K, outer * p.K);
      return cute::make_tensor(static_cast<const uint8_t*>(array),
                               cute::make_layout(cute::make_shape(int(outer), int(p.K), int(matrices)), strides));
    };
    typename Kernel::Params params = {};
    params.mainloop.tma_load_a =
        cute::make_tma_copy_A_sm90(typename Mainloop::GmemTiledCopyA{}, tensor(gemm.a, p.M, p.B, typename Mainloop::StrideA{}),
                                   typename Mainloop::SmemLayoutA{}(cute::_, cute::_, cute::_0{}), Tile{}, Cluster{});
    params.mainloop.tma_load_b = cute::make_tma_copy_B_sm90(
        typename Mainloop::GmemTiledCopyB{}, tensor(gemm.b, p.N, kRagged ? gemm.ragged.matrices : p.B, typename Mainloop::StrideB{}),
        typename Mainloop::SmemLayoutB{}(cute::_, cute::_, cute::_0{}), Tile{}, Cluster{});
    params.left = gemm.left, params.right = gemm.right;
    params.d = gemm.d, params.f32_result = gemm.wide;
    params.m = p.M, params.n = p.N, params.k = p.K, params.batch = p.B;
    params.rows_of_scale = p.M / p.I;
    params.mma_tiles_of_scale = p.J == p.N ? 0 : cute::ceil_div(p.N / p.J, kMmaN);
    params.steps_of_scale = p.S == 1 ? 0 : p.K / p.S / kTileK;
    params.splits = gemm.splits;
    params.steps = cute::ceil_div(p.K, kTileK);
    params.steps_of_split = cute::ceil_div(params.steps, gemm.splits);
    if constexpr (kRagged) {
      params.ragged = gemm.ragged;
      params.order = OrderTiles(p.B, gemm.ragged.count, cute::ceil_div(p.N, kTileN * kCluster), 8 / kCluster);
    } else {
      params.order = OrderTiles(p.B * gemm.splits, cute::ceil_div(p.M, kTileM * kCluster), cute::ceil_div(p.N, kTileN));
    }
    const int clusters = std::min(params.order.tiles, device.multiprocessors * kBlocks / kCluster);
    return Launch(kName, cutlass::device_kernel<Kernel>, params, kRagged ? dim3(clusters, kCluster, 1) : dim3(kCluster, clusters, 1),
                  dim3(Kernel::MaxThreadsPerBlock, 1, 1), kRagged ? dim3(1, kCluster, 1) : dim3(kCluster, 1, 1), kSharedBytes, *stream);
  }

  static ScaledKernel Entry(Dtype first, Dtype second) {
    return {first, second, {kTileM, kTileN, kTileK, kCluster, 1}, kStages, kSharedBytes, &Run};
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
