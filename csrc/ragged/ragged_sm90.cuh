// One ragged product for Hopper: the rows of each group times a matrix of the group.
//
//     role  A            B            D[m, n]
//     nn    x[M,K]       w[g,K,N]     y[M,N]
//     nt    y[M,N]       w[g,K,N]     x[M,K]
//     tn    x[M,K]       y[M,N]       w[g,K,N]    contracted over the rows of group g
//
// CUTLASS's collective loads by TMA into a ring of shared memory; one descriptor serves all groups of an array.  `places` in memory define
// the work of a block: in NN and NT a *visit* (a tile of rows and one of the groups in it), in TN the rows of a group.  Blocks are
// persistent.  Neighbouring blocks of a cluster have the same rows and load them once.
//
// A tile of TN may reach into the rows of another group, which can be infinite or NaN: these are overwritten by zeros in shared memory, in
// both operands.  In NN and NT the tile is multiplied by the matrix of one group, and only the rows of that group are stored. It must not
// know XLA or Python.
#pragma once

#include "common/collective_sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "common/tile_order.cuh"
#include "cutlass/numeric_conversion.h"
#include "ragged/ragged.h"

namespace jaxext::sm90 {

template <MatmulRole kRole, class Element, int kTileM, int kTileN, int kClusterN, class Stages, int kBlocks>
struct RaggedProduct {
  static constexpr bool kSums = kRole == MatmulRole::kTN;
  static constexpr int kTileK = 64;                // 128 bytes, the widest swizzle
  static constexpr int kWarpGroups = kTileM / 64;  // that multiply
  static constexpr int kConsumers = 128 * kWarpGroups;
  static constexpr int kLoad = kWarpGroups == 2 ? 40 : 0, kMultiply = kWarpGroups == 2 ? 232 : 0;  // registers of their threads

  using LayoutA = cute::conditional_t<kSums, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using LayoutB = cute::conditional_t<kRole == MatmulRole::kNT, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::Shape<cute::_1, cute::Int<kClusterN>, cute::_1>;
  using Schedule =
      cute::conditional_t<kWarpGroups == 2, cutlass::gemm::KernelTmaWarpSpecializedCooperative, cutlass::gemm::KernelTmaWarpSpecialized>;
  using Mainloop =
      typename cutlass::gemm::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 8,
                                                            Element, LayoutB, 8, float, Tile, Cluster, Stages, Schedule>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;

  // 16 rows of 128 bytes of each warp on their way to memory.  Eight elements more keep rows apart in the banks.
  static constexpr int kLine = 64;
  struct alignas(16) Staging {
    Element rows[16][kLine + 8];
  };
  // A part of the contracted axis, and the matrices that it is in.
  struct KRange {
    int a, b, begin, end;
  };
  // Rows of the result: those that are sums, and those that are written, with zeros besides.
  struct RowRange {
    int first, last, low, high;
  };

  struct Kernel {
    static constexpr uint32_t MaxThreadsPerBlock = 128 + kConsumers;
    static constexpr uint32_t MinBlocksPerMultiprocessor = kBlocks;

    struct Params {
      typename Mainloop::Params mainloop;
      const int32_t* places;
      Element* d;
      int m, n, k, a_matrices, b_matrices, P, R, G;
      TileOrder order;  // of clusters; a matrix is one of rows or, in TN, of a group, and its rows are visits or, in TN, tiles
    };

    struct alignas(1024) SharedStorage {
      typename Mainloop::TensorStorage tensors;
      Staging staging[4 * kWarpGroups];
      typename Mainloop::PipelineStorage pipeline;
    };

    static CUTLASS_DEVICE TileIndex TileOf(const Params& params, int index) {
      const auto cluster = params.order[index];
      return {cluster.matrix, cluster.row(), cluster.column() * kClusterN + int(cute::block_rank_in_cluster())};
    }

    static CUTLASS_DEVICE const int32_t* VisitOf(const Params& params, const TileIndex& tile) {
      return params.places + (int64_t(tile.matrix / params.R) * params.order.rows + tile.row) * 5;
    }

    static CUTLASS_DEVICE int KRangesOf(const Params& params) { return kSums ? params.P * params.R : 1; }

    static CUTLASS_DEVICE KRange KRangeOf(const Params& params, const TileIndex& tile, int i) {
      if constexpr (kSums) {
        const int batch = tile.matrix / params.G, group = tile.matrix % params.G;
        const int32_t* rows = params.places + ((int64_t(batch) * params.P + i / params.R) * params.G + group) * 2;
        const int matrix = batch * params.P * params.R + i;
        return {matrix, matrix, rows[0], rows[1]};
      } else {
        const int32_t* visit = VisitOf(params, tile);
        const int group = tile.matrix / (params.P * params.R) * params.G + visit[0];
        return {tile.matrix, group, 0, visit[1] < visit[2] ? params.k : 0};
      }
    }

    static CUTLASS_DEVICE RowRange RowsOf(const Params& params, const TileIndex& tile) {
      if constexpr (kSums) {
        const int low = tile.row * kTileM, high = cute::min(low + kTileM, params.m);
        return {low, high, low, high};
      } else {
        const int32_t* visit = VisitOf(params, tile);
        return {visit[1], visit[2], visit[3], visit[4]};
      }
    }

    static CUTLASS_DEVICE int StepsOf(const KRange& range) { return cute::max(0, range.end - range.begin + kTileK - 1) / kTileK; }

    CUTLASS_DEVICE void operator()(const Params& params, char* shared) { RunWarpGroups<RaggedProduct>(params, shared); }

    static CUTLASS_DEVICE void Load(const Params& params, SharedStorage& storage, Pipeline pipeline) {
      using X = cute::Underscore;
      Mainloop mainloop;
      auto state = cutlass::make_producer_start_state<Pipeline>();
      const auto a = params.mainloop.tma_load_a.get_tma_tensor(cute::make_shape(params.m, params.k, params.a_matrices));
      const auto b = params.mainloop.tma_load_b.get_tma_tensor(cute::make_shape(params.n, params.k, params.b_matrices));
      for (int index = blockIdx.x; index < params.order.tiles; index += gridDim.x) {
        const TileIndex tile = TileOf(params, index);
        const int row_tile = RowsOf(params, tile).low / kTileM;
        for (int i = 0; i < KRangesOf(params); ++i) {
          const KRange range = KRangeOf(params, tile, i);
          const int steps = StepsOf(range);
          if (steps == 0) continue;
          const auto tiles = cute::make_coord(cute::_, cute::_, cute::_);
          const auto of_a = cute::local_tile(cute::domain_offset(cute::make_coord(0, range.begin, range.a), a), Tile{}, tiles,
                                             cute::Step<cute::_1, X, cute::_1>{});
          const auto of_b = cute::local_tile(cute::domain_offset(cute::make_coord(0, range.begin, range.b), b), Tile{}, tiles,
                                             cute::Step<X, cute::_1, cute::_1>{});
          mainloop.load(params.mainloop, pipeline, state, cute::make_tuple(of_a, of_b), cute::make_coord(row_tile, tile.column, cute::_, 0),
                        cute::make_coord_iterator(steps), steps, threadIdx.x, cute::block_rank_in_cluster(), storage.tensors);
          state.advance(steps);
        }
      }
      mainloop.load_tail(pipeline, state);  // blocks of a cluster end together
    }

    static CUTLASS_DEVICE void Multiply(const Params& params, SharedStorage& storage, Pipeline pipeline, int thread) {
      typename Mainloop::TiledMma mma;
      const auto a = cute::make_tensor(cute::make_smem_ptr(storage.tensors.smem_A.data()), typename Mainloop::SmemLayoutA{});
      const auto b = cute::make_tensor(cute::make_smem_ptr(storage.tensors.smem_B.data()), typename Mainloop::SmemLayoutB{});
      const auto own = mma.get_slice(thread / 128 * 128);
      const auto lhs = own.make_fragment_A(own.partition_A(a));
      const auto rhs = own.make_fragment_B(own.partition_B(b));
      auto sums = cute::partition_fragment_C(mma, cute::take<0, 2>(Tile{}));
      mma.accumulate_ = cute::GMMA::ScaleOut::One;

      typename Mainloop::PipelineState state, released;  // the stage to multiply, and the one to give back
      for (int index = blockIdx.x; index < params.order.tiles; index += gridDim.x) {
        const TileIndex tile = TileOf(params, index);
        cute::clear(sums);
        bool running = false;  // whether a product reads its stage, the last before `state`
        for (int i = 0; i < KRangesOf(params); ++i) {
          const KRange range = KRangeOf(params, tile, i);
          CUTLASS_PRAGMA_NO_UNROLL
          for (int begin = range.begin; begin < range.end; begin += kTileK) {
            WaitForStage(pipeline, state);
            if constexpr (kSums) {
              if (range.end - begin < kTileK) ClearRows(a, b, state.index(), range.end - begin, thread);
            }
            cute::warpgroup_fence_operand(sums);
            cute::warpgroup_arrive();
            cute::gemm(mma, lhs(cute::_, cute::_, cute::_, state.index()), rhs(cute::_, cute::_, cute::_, state.index()), sums);
            cute::warpgroup_commit_batch();
            ++state;
            cute::warpgroup_wait<1>();
            cute::warpgroup_fence_operand(sums);
            if (running) {
              ReleaseStage(pipeline, released);
              ++released;
            }
            running = true;
          }
        }
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(sums);
        if (running) {
          ReleaseStage(pipeline, released);
          ++released;
        }
        Store(params, storage.staging[thread / 32], sums, RowsOf(params, tile), tile, thread);
      }
    }

    // Of a stage of TN, whose rows are the contracted axis.
    template <class A, class B>
    static CUTLASS_DEVICE void ClearRows(const A& a, const B& b, int stage, int from, int thread) {
      const auto clear = [&](const auto& operand, int columns) {
        for (int i = thread; i < (kTileK - from) * columns / 8; i += kConsumers) {  // eight columns are neighbours
          *reinterpret_cast<uint4*>(&operand(i % (columns / 8) * 8, from + i / (columns / 8), stage)) = uint4{};
        }
      };
      clear(a, kTileM);
      clear(b, kTileN);
      FenceWrites();  // wgmma reads by another proxy
      SyncThreads(kConsumers, 0);
    }

    // Through shared memory, so that a warp stores whole lines of 128 bytes.
    template <class Sums>
    static CUTLASS_DEVICE void Store(const Params& params, Staging& staging, const Sums& sums, const RowRange& rows, const TileIndex& tile,
                                     int thread) {
      const int lane = thread % 32;
      const int first_row = rows.low / kTileM * kTileM + thread / 32 * 16, first_column = tile.column * kTileN;
      Element* const out = params.d + int64_t(tile.matrix) * params.m * params.n;
      cutlass::NumericArrayConverter<Element, float, 2> convert;
      CUTLASS_PRAGMA_UNROLL
      for (int line = 0; line < kTileN / kLine; ++line) {
        // As wgmma lays them out: a thread has two neighbours of each eight columns, in two rows.
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLine / 4; ++i) {
          const int down = i % 2 * 8 + lane / 4, at = line * kLine / 2 + i * 2, row = first_row + down;
          const bool exists = rows.first <= row && row < rows.last;
          const auto pair = convert({exists ? sums(at) : 0.f, exists ? sums(at + 1) : 0.f});
          *reinterpret_cast<uint32_t*>(&staging.rows[down][i / 2 * 8 + lane % 4 * 2]) = reinterpret_cast<const uint32_t&>(pair);
        }
        __syncwarp();
        CUTLASS_PRAGMA_UNROLL
        for (int down = lane / 8; down < 16; down += 4) {
          const int row = first_row + down, across = lane % 8 * 8, column = first_column + line * kLine + across;
          if (rows.low <= row && row < rows.high && column < params.n) {
            *reinterpret_cast<uint4*>(out + int64_t(row) * params.n + column) =
                *reinterpret_cast<const uint4*>(&staging.rows[down][across]);
          }
        }
        __syncwarp();
      }
    }
  };

  static constexpr int kSharedBytes = BlockBudget<Kernel::MaxThreadsPerBlock, kBlocks, sizeof(typename Kernel::SharedStorage),
                                                  kLoad + kWarpGroups * kMultiply>::kSharedBytes;

  static Status Run(const RaggedGemm& gemm, LaunchStream stream) {
    Device device;
    if (Status s = Prepare("ragged", cutlass::device_kernel<Kernel>, kSharedBytes, kBlocks, &device); !s.ok() || !stream) return s;
    const auto tensor = [](const void* array, int64_t outer, int64_t k, int64_t matrices, auto strides, int64_t leading, int64_t batch) {
      SetStrides(strides, leading, batch);
      return cute::make_tensor(static_cast<const uint16_t*>(array),
                               cute::make_layout(cute::make_shape(int(outer), int(k), int(matrices)), strides));
    };
    typename Kernel::Params params = {};
    params.mainloop.tma_load_a = cute::make_tma_copy_A_sm90(
        typename Mainloop::GmemTiledCopyA{},
        tensor(gemm.a, gemm.m, gemm.k, gemm.a_matrices, typename Mainloop::StrideA{}, gemm.a_leading, gemm.a_batch),
        typename Mainloop::SmemLayoutA{}(cute::_, cute::_, cute::_0{}), Tile{}, Cluster{});
    params.mainloop.tma_load_b = cute::make_tma_copy_B_sm90(
        typename Mainloop::GmemTiledCopyB{},
        tensor(gemm.b, gemm.n, gemm.k, gemm.b_matrices, typename Mainloop::StrideB{}, gemm.b_leading, gemm.b_batch),
        typename Mainloop::SmemLayoutB{}(cute::_, cute::_, cute::_0{}), Tile{}, Cluster{});
    params.places = gemm.places;
    params.d = static_cast<Element*>(gemm.d);
    params.m = gemm.m, params.n = gemm.n, params.k = gemm.k;
    params.a_matrices = gemm.a_matrices, params.b_matrices = gemm.b_matrices;
    params.P = gemm.P, params.R = gemm.R, params.G = gemm.G;
    params.order = OrderTiles(gemm.d_matrices, kSums ? cute::ceil_div(gemm.m, kTileM) : gemm.visits,
                              cute::ceil_div(gemm.n, kTileN * kClusterN), 8 / kClusterN);
    const int clusters = std::min(params.order.tiles, device.multiprocessors * kBlocks / kClusterN);
    return Launch("ragged", cutlass::device_kernel<Kernel>, params, dim3(clusters, kClusterN, 1), dim3(Kernel::MaxThreadsPerBlock, 1, 1),
                  dim3(1, kClusterN, 1), kSharedBytes, *stream);
  }

  static RaggedKernel Entry(Dtype dtype) {
    return {kRole, dtype, {kTileM, kTileN, kTileK, kClusterN}, Mainloop::DispatchPolicy::Stages, kSharedBytes, &Run};
  }
};

// The kernels of one compile unit: each tile for both dtypes.
//
// A tile of 128 x 256 occupies a multiprocessor alone, and pairs of blocks share their rows.  With tiles of 64 x 128, for groups of few
// rows, two blocks fit a multiprocessor: one multiplies while the other stores.
template <MatmulRole kRole, class Element>
std::vector<RaggedKernel> RaggedKernelsOf(Dtype dtype) {
  constexpr int kStaging = 8 * 16 * (128 + 16);
  return {RaggedProduct<kRole, Element, 128, 256, 2, cutlass::gemm::collective::StageCountAutoCarveout<kStaging>, 1>::Entry(dtype),
          RaggedProduct<kRole, Element, 64, 128, 1, cutlass::gemm::collective::StageCount<4>, 2>::Entry(dtype)};
}

template <MatmulRole kRole>
std::vector<RaggedKernel> RaggedKernelsOf() {
  std::vector<RaggedKernel> kernels = RaggedKernelsOf<kRole, cutlass::bfloat16_t>(Dtype::kBF16);
  for (const RaggedKernel& kernel : RaggedKernelsOf<kRole, cutlass::half_t>(Dtype::kF16)) kernels.push_back(kernel);
  return kernels;
}

}  // namespace jaxext::sm90
