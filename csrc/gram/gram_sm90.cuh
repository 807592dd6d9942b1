// One product of a matrix with its own transpose for Hopper, by half of the work:
//
//     y[i, j] = scale Σ_k x[i, k] x[j, k] + of_addend addend[i, j]
//
// CUTLASS's collective loads by TMA into a ring of shared memory and multiplies, both factors from the same array.  A cluster has two
// tiles, one below the other, that load their columns' rows of x once.  Only the clusters that touch the lower triangle are computed.  Each
// tile stores what lies on or below the diagonal, in squares of 8 x 8, and the same numbers mirrored above it; the squares on the diagonal
// are made symmetric before, so that y is symmetric to the last bit.  Blocks are persistent.  It must not know XLA or Python.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"  // first
#include "common/barriers_sm90.cuh"
#include "cute/arch/copy_sm90.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#include "cutlass/numeric_conversion.h"
#include "gram/gram.h"
#include "common/pipeline_sm90.cuh"

namespace jaxext::sm90 {

constexpr int kDepth = 64;         // of a stage: 128 bytes, the widest swizzle
constexpr int kClusterM = 2;       // tiles of a cluster, one below the other
constexpr int kColumnsOfBand = 8;  // tiles side by side that follow each other, so that they share rows in the L2 cache
constexpr int kSquare = 8;         // what is on the diagonal is made symmetric in squares of so many rows and columns
constexpr int kLine = 128 + 16;    // bytes that a line of 128 takes in shared memory: lines are 16 bytes apart in the banks

template <class Element, int kTileM, int kTileN, int kStages>
struct GramProduct {
  static constexpr int kWarpGroups = kTileM / 64;  // that multiply
  static constexpr int kConsumers = 128 * kWarpGroups;
  static constexpr int kLoad = kWarpGroups == 3 ? 32 : 40, kMultiply = kWarpGroups == 3 ? 160 : 232;  // registers of their threads
  static constexpr int kRows = kClusterM * kTileM;                                                    // of a cluster

  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kDepth>>;
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

  // Of each warp group: 64 rows of a piece of the tile, or its columns of 64 rows.
  struct alignas(16) Scratch {
    char lines[64 * kLine];
  };

  // The squares of clusters along the diagonal: a band is so many rows of clusters high as it is wide, and in its i-th there are
  // `ColumnsOf(i)` tiles side by side that touch the lower triangle.
  static constexpr int kRowsOfBand = kColumnsOfBand * kTileN / kRows;
  static_assert(kRowsOfBand * kRows == kColumnsOfBand * kTileN);
  static constexpr CUTLASS_HOST_DEVICE int ColumnsOf(int i) { return ((i + 1) * kRows + kTileN - 1) / kTileN; }
  static constexpr CUTLASS_HOST_DEVICE int OfTriangle() {
    int clusters = 0;
    for (int i = 0; i < kRowsOfBand; ++i) clusters += ColumnsOf(i);
    return clusters;
  }

  // A tile of the result: where it begins.
  struct Work {
    int batch, split, row, column;
  };

  struct Kernel {
    static constexpr uint32_t MaxThreadsPerBlock = 128 + kConsumers;
    static constexpr uint32_t MinBlocksPerMultiprocessor = 1;

    struct Params {
      typename Mainloop::Params mainloop;
      const void* addend;
      void* y;
      float scale, of_addend;
      int rows, depth, batch;
      int steps, steps_of_split;
      int down, of_matrix;  // rows of clusters, and clusters of a matrix
      int works;            // of all clusters
      bool wide;
    };

    struct alignas(1024) SharedStorage {
      typename Mainloop::TensorStorage tensors;
      Scratch scratch[kWarpGroups];
      typename Mainloop::PipelineStorage pipeline;
    };

    // Bands of columns follow each other, each from the diagonal down.
    static CUTLASS_DEVICE Work WorkOf(const Params& params, int index) {
      constexpr int kTriangle = OfTriangle();
      const int part = index / params.of_matrix;
      int rest = index % params.of_matrix, band = 0;
      for (int below = params.down - kRowsOfBand; below > 0; below -= kRowsOfBand) {
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
      const int tile = (band * kRowsOfBand + row) * kClusterM + int(cute::block_rank_in_cluster());
      return {part % params.batch, part / params.batch, tile * kTileM, (band * kColumnsOfBand + rest) * kTileN};
    }

    static CUTLASS_DEVICE int SplitOf(const Params& params, int index) { return index / params.of_matrix / params.batch; }

    static CUTLASS_DEVICE int StepsOf(const Params& params, int split) {
      return cute::min(params.steps_of_split, params.steps - split * params.steps_of_split);
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
        Multiply(params, storage, pipeline, threadIdx.x - 128);
      }
    }

    static CUTLASS_DEVICE void Load(const Params& params, SharedStorage& storage, Pipeline pipeline) {
      Mainloop mainloop;
      auto state = cutlass::make_producer_start_state<Pipeline>();
      const auto tiles = mainloop.load_init(cute::make_tuple(params.rows, params.rows, params.depth, params.batch), params.mainloop);
      for (int index = blockIdx.y; index < params.works; index += gridDim.y) {
        const Work work = WorkOf(params, index);
        const int steps = StepsOf(params, work.split);
        mainloop.load(params.mainloop, pipeline, state, tiles,
                      cute::make_coord(work.row / kTileM, work.column / kTileN, cute::_, work.batch),
                      cute::make_coord_iterator(work.split * params.steps_of_split, params.steps), steps, threadIdx.x,
                      cute::block_rank_in_cluster(), storage.tensors);
        state.advance(steps);
      }
      mainloop.load_tail(pipeline, state);  // blocks of a cluster end together
    }

    static CUTLASS_DEVICE void Multiply(const Params& params, SharedStorage& storage, Pipeline pipeline, int thread) {
      Mainloop mainloop;
      Sums sums;
      typename Mainloop::PipelineState state;
      for (int index = blockIdx.y; index < params.works; index += gridDim.y) {
        const int steps = StepsOf(params, SplitOf(params, index));
        mainloop.mma(pipeline, state, sums, steps, thread, storage.tensors, params.mainloop);
        mainloop.mma_tail(pipeline, state, steps);
        state.advance(steps);
        const Work work = WorkOf(params, index);  // not before: it would take registers
        if (params.wide) {
          Store<float>(params, storage.scratch[thread / 128], sums, work, thread);
        } else {
          Store<Element>(params, storage.scratch[thread / 128], sums, work, thread);
        }
      }
    }

    static CUTLASS_DEVICE void SyncGroup(int thread) { SyncThreads(128, uint32_t(thread / 128)); }

    // The rows of a warp group, 128 bytes of each at a time.  They go through shared memory, so that a warp stores whole lines: of rows,
    // and then of columns.
    template <class Result>
    static CUTLASS_DEVICE void Store(const Params& params, Scratch& scratch, const Sums& sums, const Work& work, int thread) {
      constexpr int kPiece = 128 / sizeof(Result), kVector = 16 / sizeof(Result);  // columns of a line, and of 16 bytes
      constexpr int kPairs = kPiece / 4;                                           // of a thread, in a piece
      using Pair = cutlass::Array<Result, 2>;
      const int lane = thread % 32, warp = thread % 128 / 32;
      const int top = work.row + thread / 128 * 64, first_row = top + warp * 16;
      const int64_t size = int64_t(params.rows) * params.rows;
      Result* const y = static_cast<Result*>(params.y) + (int64_t(work.split) * params.batch + work.batch) * size;
      const Result* const addend = static_cast<const Result*>(params.addend) + work.batch * size;
      char* const own = scratch.lines + warp * 16 * kLine;  // the warp's lines
      cutlass::NumericArrayConverter<Result, float, 2> convert;
      cutlass::NumericArrayConverter<float, Result, 2> widen;

      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kTileN / kPiece; ++piece) {
        const int column = work.column + piece * kPiece;
        if (column >= top + 64 || column >= params.rows) break;  // all is above the diagonal, or beyond the end
        if (params.addend != nullptr) {
          const int at = column + lane % 8 * kVector;
          const Result* from = addend + int64_t(first_row + lane / 8) * params.rows + at;
#pragma unroll 2  // more in flight would take registers that there are not
          for (int down = 0; down < 16; down += 4, from += 4 * params.rows) {
            uint4 vector = {};
            if (first_row + down + lane / 8 < params.rows && at < params.rows) vector = __ldg(reinterpret_cast<const uint4*>(from));
            *reinterpret_cast<uint4*>(own + (down + lane / 8) * kLine + lane % 8 * 16) = vector;
          }
          __syncwarp();
        }
        Pair results[kPairs];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          const int at = piece * kPiece / 2 + i * 2;
          Pair& shared = *reinterpret_cast<Pair*>(own + (i % 2 * 8 + lane / 4) * kLine + (i / 2 * 8 + lane % 4 * 2) * sizeof(Result));
          cutlass::Array<float, 2> two = {params.scale * sums(at), params.scale * sums(at + 1)};
          if (params.addend != nullptr) {
            const auto added = widen(shared);
            two[0] += params.of_addend * added[0], two[1] += params.of_addend * added[1];
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
                *reinterpret_cast<const uint4*>(own + down * kLine + lane % 8 * 16);
          }
        }
        SyncGroup(thread);  // all rows are read
        Turn(scratch, results, lane, warp);
        SyncGroup(thread);
        constexpr int kVectors = 64 / kVector, kTurned = 64 * sizeof(Result) + 16;  // of a column, and its bytes
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = thread % 128; i < kPiece * kVectors; i += 128) {
          const int row = column + i / kVectors, at = top + i % kVectors * kVector;  // of the mirrored one
          if (row < params.rows && at < params.rows && at / kSquare > row / kSquare) {
            *reinterpret_cast<uint4*>(y + int64_t(row) * params.rows + at) =
                *reinterpret_cast<const uint4*>(scratch.lines + i / kVectors * kTurned + i % kVectors * 16);
          }
        }
        SyncGroup(thread);  // before the next piece's rows come
      }
    }

    // In the warp's rows, the squares on the diagonal: what is above it becomes what is below.
    template <class Result>
    static CUTLASS_DEVICE void MakeSymmetric(char* own, int first_row, int column, int lane) {
      constexpr int kPiece = 128 / sizeof(Result);
      if (first_row + 16 <= column || first_row >= column + kPiece) return;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = lane; i < 2 * kSquare * kSquare; i += 32) {
        const int down = i / (kSquare * kSquare) * kSquare, a = i / kSquare % kSquare, b = i % kSquare;
        const int left = first_row + down - column;  // where the square begins in its lines
        const auto element = [&](int row, int at) -> Result& {
          return *reinterpret_cast<Result*>(own + (down + row) * kLine + (left + at) * sizeof(Result));
        };
        if (left >= 0 && left < kPiece && a < b) element(a, b) = element(b, a);
      }
      __syncwarp();
    }

    // A piece's columns become lines: of 16 bits by pairs of rows of the tensor cores' squares, of 32 bits one by one.
    template <class Pair, int kPairs>
    static CUTLASS_DEVICE void Turn(Scratch& scratch, const Pair (&results)[kPairs], int lane, int warp) {
      using Result = typename Pair::value_type;
      constexpr int kTurned = 64 * sizeof(Result) + 16;
      if constexpr (sizeof(Result) == 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; i += 4) {  // two squares, one below the other, twice
          const auto bits = [&](int j) { return reinterpret_cast<const uint32_t&>(results[i + j]); };
          char* const line = scratch.lines + (i / 2 * 8 + lane / 16 * 8 + lane % 8) * kTurned + (warp * 16 + lane / 8 % 2 * 8) * 2;
          cute::SM90_U16x8_STSM_T::copy(bits(0), bits(1), bits(2), bits(3), *reinterpret_cast<cute::uint128_t*>(line));
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 2; ++j) {
            char* const line = scratch.lines + (i / 2 * 8 + lane % 4 * 2 + j) * kTurned;
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
    params.scale = gram.operands.scale, params.of_addend = gram.operands.of_addend;
    params.rows = p.M, params.depth = p.N, params.batch = p.B;
    params.steps = cute::ceil_div(p.N, kDepth);
    params.steps_of_split = cute::ceil_div(params.steps, gram.splits);
    params.down = cute::ceil_div(p.M, kRows);
    params.of_matrix = GramClusters(p.M, Entry({}).config);
    params.works = p.B * gram.splits * params.of_matrix;
    params.wide = gram.wide;
    const int clusters = std::min(params.works, device.multiprocessors / kClusterM);
    return Launch("gram", cutlass::device_kernel<Kernel>, params, dim3(kClusterM, clusters, 1), dim3(Kernel::MaxThreadsPerBlock, 1, 1),
                  dim3(kClusterM, 1, 1), kSharedBytes, *stream);
  }

  static GramKernel Entry(Dtype operands) { return {operands, {kTileM, kTileN, kDepth, kClusterM, 1}, kStages, kSharedBytes, &Run}; }
};

// The kernels of a dtype.  Which of their tiles leaves the fewest multiprocessors without work depends on the number of rows.
template <class Element>
std::vector<GramKernel> GramKernelsOf(Dtype dtype) {
  return {GramProduct<Element, 128, 256, 4>::Entry(dtype), GramProduct<Element, 192, 192, 4>::Entry(dtype),
          GramProduct<Element, 128, 192, 4>::Entry(dtype)};
}

}  // namespace jaxext::sm90
