// One product of a matrix with its own transpose for Hopper, by half of the work:
//
//     y[i, j] = scale Σ_k x[i, k] x[j, k] + addend_scale addend[i, j]
//
// CUTLASS's collective loads by TMA into a ring of shared memory and multiplies, both factors from the same array.  A cluster has two
// tiles, one below the other, that load their columns' rows of x once.  Only the clusters that touch the lower triangle are computed.  Each
// tile stores what lies on or below the diagonal, in squares of 8 x 8, and the same numbers mirrored above it; the squares on the diagonal
// are made symmetric before, so that y is symmetric to the last bit.  Blocks are persistent.
#pragma once

#include "common/collective_sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "common/tile_order.cuh"
#include "cute/arch/copy_sm90.hpp"
#include "cutlass/numeric_conversion.h"
#include "gram/gram.h"

namespace jaxext::sm90 {

template <class Element, int kTileM, int kTileN, int kStages>
struct GramProduct {
  static constexpr int kTileK = 64;                // of a stage: 128 bytes, the widest swizzle
  static constexpr int kClusterM = 2;              // tiles of a cluster, one below the other
  static constexpr int kColumnsOfBand = 8;         // tiles side by side that follow each other, so that they share rows in the L2 cache
  static constexpr int kSquare = 8;                // what is on the diagonal is made symmetric in squares of so many rows and columns
  static constexpr int kWarpGroups = kTileM / 64;  // that multiply
  static constexpr int kConsumers = 128 * kWarpGroups;
  static constexpr int kLoad = kWarpGroups == 3 ? 32 : 40, kMultiply = kWarpGroups == 3 ? 160 : 232;  // registers of their threads
  static constexpr int kRows = kClusterM * kTileM;                                                    // of a cluster

  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::_1, cute::_1>;
  using Strides = cute::Stride<int64_t, cute::_1, int64_t>;
  using Mma =
      decltype(cute::make_tiled_mma(cute::GMMA::ss_op_selector<Element, Element, float, Tile, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
                                    cute::Layout<cute::Shape<cute::Int<kWarpGroups>, cute::_1, cute::_1>>{}));
  using Atom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using Mainloop = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, cutlass::gemm::KernelTmaWarpSpecializedCooperative>, Tile,
      Element, Strides, Element, Strides, Mma, cute::SM90_TMA_LOAD, Atom, void, cute::identity, cute::SM90_TMA_LOAD_MULTICAST, Atom, void,
      cute::identity>;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using Sums = decltype(cute::partition_fragment_C(Mma{}, cute::take<0, 2>(Tile{})));

  // Of each warp group: 64 rows of 128 bytes of the tile, or as many columns of 64 rows, which lie 16 bytes apart in the banks.
  static constexpr int kPitch = 128 + 16;
  struct alignas(16) Scratch {
    char lines[64 * kPitch];
  };

  // The squares of clusters along the diagonal: a band is so many rows of clusters high as it is wide, and in its i-th there are
  // `ColumnsOf(i)` tiles side by side that touch the lower triangle.
  static constexpr int kRowsOfBand = kColumnsOfBand * kTileN / kRows;
  static_assert(kRowsOfBand * kRows == kColumnsOfBand * kTileN, "a band is not a whole number of clusters high");
  static_assert(kTileM % 64 == 0 && kTileN % 64 == 0, "tiles are stored in lines of 64 columns, either way");
  static constexpr CUTLASS_HOST_DEVICE int ColumnsOf(int i) { return ((i + 1) * kRows + kTileN - 1) / kTileN; }
  static constexpr CUTLASS_HOST_DEVICE int ClustersOfTriangle() {
    int clusters = 0;
    for (int i = 0; i < kRowsOfBand; ++i) clusters += ColumnsOf(i);
    return clusters;
  }

  struct Kernel {
    static constexpr uint32_t MaxThreadsPerBlock = 128 + kConsumers;
    static constexpr uint32_t MinBlocksPerMultiprocessor = 1;

    struct Params {
      typename Mainloop::Params mainloop;
      const void* addend;
      void* y;
      float scale, addend_scale;
      int rows, depth, batch;
      int steps, steps_of_split;
      int cluster_rows, clusters;  // of a matrix
      int tiles;                   // clusters of all matrices
      bool f32_result;
    };

    struct alignas(1024) SharedStorage {
      typename Mainloop::TensorStorage tensors;
      Scratch scratch[kWarpGroups];
      typename Mainloop::PipelineStorage pipeline;
    };

    // Bands of columns follow each other, each from the diagonal down.
    static CUTLASS_DEVICE TileOrigin TileOf(const Params& params, int index) {
      constexpr int kTriangle = ClustersOfTriangle();
      const int part = index / params.clusters;
      int rest = index % params.clusters, band = 0;
      for (int below = params.cluster_rows - kRowsOfBand; below > 0; below -= kRowsOfBand) {
        const int clusters = kTriangle + below * kColumnsOfBand;
        if (rest < clusters) break;
        rest -= clusters, ++band;
      }
      int row = 0;
      if (rest < kTriangle) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i + 1 < kRowsOfBand; ++i) {
          if (row == i && rest >= ColumnsOf(i)) rest -= ColumnsOf(i), ++row;
        }
      } else {
        row = kRowsOfBand + (rest - kTriangle) / kColumnsOfBand;
        rest = (rest - kTriangle) % kColumnsOfBand;
      }
      const int row_tile = (band * kRowsOfBand + row) * kClusterM + int(cute::block_rank_in_cluster());
      return {part % params.batch, part / params.batch, row_tile * kTileM, (band * kColumnsOfBand + rest) * kTileN};
    }

    static CUTLASS_DEVICE int SplitOf(const Params& params, int index) { return index / params.clusters / params.batch; }

    static CUTLASS_DEVICE int StepsOf(const Params& params, int split) {
      return cute::min(params.steps_of_split, params.steps - split * params.steps_of_split);
    }

    CUTLASS_DEVICE void operator()(const Params& params, char* shared) { RunWarpGroups<GramProduct>(params, shared); }

    static CUTLASS_DEVICE void Load(const Params& params, SharedStorage& storage, Pipeline pipeline) {
      Mainloop mainloop;
      auto state = cutlass::make_producer_start_state<Pipeline>();
      const auto tiles = mainloop.load_init(cute::make_tuple(params.rows, params.rows, params.depth, params.batch), params.mainloop);
      for (int index = blockIdx.y; index < params.tiles; index += gridDim.y) {
        const TileOrigin tile = TileOf(params, index);
        const int steps = StepsOf(params, tile.split);
        mainloop.load(params.mainloop, pipeline, state, tiles,
                      cute::make_coord(tile.row / kTileM, tile.column / kTileN, cute::_, tile.batch),
                      cute::make_coord_iterator(tile.split * params.steps_of_split, params.steps), steps, threadIdx.x,
                      cute::block_rank_in_cluster(), storage.tensors);
        state.advance(steps);
      }
      mainloop.load_tail(pipeline, state);  // blocks of a cluster end together
    }

    static CUTLASS_DEVICE void Multiply(const Params& params, SharedStorage& storage, Pipeline pipeline, int thread) {
      Mainloop mainloop;
      Sums sums;
      typename Mainloop::PipelineState state;
      for (int index = blockIdx.y; index < params.tiles; index += gridDim.y) {
        const int steps = StepsOf(params, SplitOf(params, index));
        mainloop.mma(pipeline, state, sums, steps, thread, storage.tensors, params.mainloop);
        mainloop.mma_tail(pipeline, state, steps);
        state.advance(steps);
        const TileOrigin tile = TileOf(params, index);  // not before: it would take registers
        if (params.f32_result) {
          Store<float>(params, storage.scratch[thread / 128], sums, tile, thread);
        } else {
          Store<Element>(params, storage.scratch[thread / 128], sums, tile, thread);
        }
      }
    }

    static CUTLASS_DEVICE void SyncGroup(int thread) { SyncThreads(128, uint32_t(thread / 128)); }

    // The rows of a warp group, 128 bytes of each at a time.  They go through shared memory, so that a warp stores whole lines: of rows,
    // and then of columns.
    template <class Result>
    static CUTLASS_DEVICE void Store(const Params& params, Scratch& scratch, const Sums& sums, const TileOrigin& tile, int thread) {
      constexpr int kLine = 128 / sizeof(Result), kVector = 16 / sizeof(Result);  // columns of a line, and of 16 bytes
      constexpr int kPairs = kLine / 4;                                           // of a thread, in a line
      using Pair = cutlass::Array<Result, 2>;
      const int lane = thread % 32, warp = thread % 128 / 32;
      const int top = tile.row + thread / 128 * 64, first_row = top + warp * 16;
      const int64_t size = int64_t(params.rows) * params.rows;
      Result* const y = static_cast<Result*>(params.y) + (int64_t(tile.split) * params.batch + tile.batch) * size;
      const Result* const addend = static_cast<const Result*>(params.addend) + tile.batch * size;
      char* const own = scratch.lines + warp * 16 * kPitch;  // the warp's lines
      cutlass::NumericArrayConverter<Result, float, 2> convert;
      cutlass::NumericArrayConverter<float, Result, 2> widen;

      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kTileN; first += kLine) {
        const int column = tile.column + first;
        if (column >= top + 64 || column >= params.rows) break;  // all is above the diagonal, or beyond the end
        if (params.addend != nullptr) {
          const int at = column + lane % 8 * kVector;
          const Result* from = addend + int64_t(first_row + lane / 8) * params.rows + at;
#pragma unroll 2  // more in flight would take registers that there are not
          for (int down = 0; down < 16; down += 4, from += 4 * params.rows) {
            uint4 vector = {};
            if (first_row + down + lane / 8 < params.rows && at < params.rows) vector = __ldg(reinterpret_cast<const uint4*>(from));
            *reinterpret_cast<uint4*>(own + (down + lane / 8) * kPitch + lane % 8 * 16) = vector;
          }
          __syncwarp();
        }
        Pair results[kPairs];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          const int at = first / 2 + i * 2;
          Pair& shared = *reinterpret_cast<Pair*>(own + (i % 2 * 8 + lane / 4) * kPitch + (i / 2 * 8 + lane % 4 * 2) * sizeof(Result));
          cutlass::Array<float, 2> two = {params.scale * sums(at), params.scale * sums(at + 1)};
          if (params.addend != nullptr) {
            const auto added = widen(shared);
            two[0] += params.addend_scale * added[0], two[1] += params.addend_scale * added[1];
          }
          results[i] = convert(two);
          shared = results[i];
        }
        __syncwarp();
        MakeSymmetric<Result>(own, first_row, column, lane);
        CUTLASS_PRAGMA_NO_UNROLL  // addresses would take registers that there are not
            for (int down = lane / 8; down < 16; down += 4) {
          const int row = first_row + down, at = column + lane % 8 * kVector;
          if (row < params.rows && at < params.rows && row / kSquare >= at / kSquare) {
            *reinterpret_cast<uint4*>(y + int64_t(row) * params.rows + at) =
                *reinterpret_cast<const uint4*>(own + down * kPitch + lane % 8 * 16);
          }
        }
        SyncGroup(thread);  // all rows are read
        Transpose(scratch, results, lane, warp);
        SyncGroup(thread);
        constexpr int kVectors = 64 / kVector, kColumnPitch = 64 * sizeof(Result) + 16;  // of a column, and its bytes
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = thread % 128; i < kLine * kVectors; i += 128) {
          const int row = column + i / kVectors, at = top + i % kVectors * kVector;  // of the mirrored one
          if (row < params.rows && at < params.rows && at / kSquare > row / kSquare) {
            *reinterpret_cast<uint4*>(y + int64_t(row) * params.rows + at) =
                *reinterpret_cast<const uint4*>(scratch.lines + i / kVectors * kColumnPitch + i % kVectors * 16);
          }
        }
        SyncGroup(thread);  // before the next lines come
      }
    }

    // In the warp's rows, the squares on the diagonal: what is above it becomes what is below.
    template <class Result>
    static CUTLASS_DEVICE void MakeSymmetric(char* own, int first_row, int column, int lane) {
      constexpr int kLine = 128 / sizeof(Result);
      if (first_row + 16 <= column || first_row >= column + kLine) return;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = lane; i < 2 * kSquare * kSquare; i += 32) {
        const int down = i / (kSquare * kSquare) * kSquare, a = i / kSquare % kSquare, b = i % kSquare;
        const int left = first_row + down - column;  // where the square begins in its lines
        const auto element = [&](int row, int at) -> Result& {
          return *reinterpret_cast<Result*>(own + (down + row) * kPitch + (left + at) * sizeof(Result));
        };
        if (left >= 0 && left < kLine && a < b) element(a, b) = element(b, a);
      }
      __syncwarp();
    }

    // Columns become lines: of 16 bits by pairs of rows of the tensor cores' squares, of 32 bits one by one.
    template <class Pair, int kPairs>
    static CUTLASS_DEVICE void Transpose(Scratch& scratch, const Pair (&results)[kPairs], int lane, int warp) {
      using Result = typename Pair::value_type;
      constexpr int kColumnPitch = 64 * sizeof(Result) + 16;
      if constexpr (sizeof(Result) == 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; i += 4) {  // two squares, one below the other, twice
          const auto bits = [&](int j) { return reinterpret_cast<const uint32_t&>(results[i + j]); };
          char* const line = scratch.lines + (i / 2 * 8 + lane / 16 * 8 + lane % 8) * kColumnPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
          cute::SM90_U16x8_STSM_T::copy(bits(0), bits(1), bits(2), bits(3), *reinterpret_cast<cute::uint128_t*>(line));
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 2; ++j) {
            char* const line = scratch.lines + (i / 2 * 8 + lane % 4 * 2 + j) * kColumnPitch;
            *reinterpret_cast<Result*>(line + (warp * 16 + i % 2 * 8 + lane / 4) * sizeof(Result)) = results[i][j];
          }
        }
      }
    }
  };

  static constexpr int kSharedBytes =
      BlockBudget<Kernel::MaxThreadsPerBlock, 1, sizeof(typename Kernel::SharedStorage), kLoad + kWarpGroups * kMultiply>::kSharedBytes;

  static Status Run(const Gram& gram, LaunchStream stream) {
    Device device;
    if (Status s = Prepare("gram", cutlass::device_kernel<Kernel>, kSharedBytes, 1, &device); !s.ok() || !stream) return s;
    const GramProblem& p = gram.sizes;
    const auto* const x = static_cast<const Element*>(gram.operands.x);
    const Strides strides = {p.N, cute::_1{}, p.M * p.N};
    typename Kernel::Params params = {};
    params.mainloop = Mainloop::to_underlying_arguments(cute::make_shape(int(p.M), int(p.M), int(p.N), int(p.B)), {x, strides, x, strides},
                                                        /*workspace=*/nullptr);
    params.addend = gram.operands.addend, params.y = gram.y;
    params.scale = gram.operands.scale, params.addend_scale = gram.operands.of_addend;
    params.rows = p.M, params.depth = p.N, params.batch = p.B;
    params.steps = cute::ceil_div(p.N, kTileK);
    params.steps_of_split = cute::ceil_div(params.steps, gram.splits);
    params.cluster_rows = cute::ceil_div(p.M, kRows);
    params.clusters = GramClusters(p.M, Entry({}).config);
    params.tiles = p.B * gram.splits * params.clusters;
    params.f32_result = gram.wide;
    const int clusters = std::min(params.tiles, device.multiprocessors / kClusterM);
    return Launch("gram", cutlass::device_kernel<Kernel>, params, dim3(kClusterM, clusters, 1), dim3(Kernel::MaxThreadsPerBlock, 1, 1),
                  dim3(kClusterM, 1, 1), kSharedBytes, *stream);
  }

  static GramKernel Entry(Dtype operands) { return {operands, {kTileM, kTileN, kTileK, kClusterM, 1}, kStages, kSharedBytes, &Run}; }
};

// The kernels of a dtype.  Which of their tiles leaves the fewest multiprocessors without work depends on the number of rows.
template <class Element>
std::vector<GramKernel> GramKernelsOf(Dtype dtype) {
  return {GramProduct<Element, 128, 256, 4>::Entry(dtype), GramProduct<Element, 192, 192, 4>::Entry(dtype),
          GramProduct<Element, 128, 192, 4>::Entry(dtype)};
}

}  // namespace jaxext::sm90
