// One convolution for Hopper, as an implicit product, of CUTLASS's collectives: TMA gathers the pixels of a tile through a bounding box
// ("im2col") into a ring of shared memory, by a warp of its own, and one or two warp groups multiply with wgmma.
//
//     role    A (m x k)      B (k x n)      D[m, n]
//     fprop   x[NOPQ, TRSC]  w[TRSC, K]     y[NOPQ, K]     x through the box
//     dgrad   y[NDHW, TRSK]  w[TRSK, C]     x[NDHW, C]     y through the box
//     wgrad   y[K, NOPQ]     x[NOPQ, TRSC]  w[K, TRSC]     x through the box
//
// CUTLASS has one schedule for convolutions, with one warp group that multiplies, and supports neither groups nor splits.  Here the blocks
// of a launch take their arguments, strides and boxes from one of several *parts* (conv_plan.h), selected by blockIdx.z; schedule and
// stores are ours.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/sm90.cuh"  // first
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/kernel_hardware_info.hpp"  // before what forgets it
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/detail.hpp"
#include "conv/conv.h"
#include "conv/conv_store.cuh"
#include "common/pipeline_sm90.cuh"

namespace jaxext::sm90 {

// Bytes that the parameters of a launch take at most.  With 4096, CUDA's limit before 12.1, no TMA descriptor lies further behind in them:
// convolutions of several parts then take more launches, of four parts each.
#ifndef JAXEXT_PARAMETER_BYTES
#define JAXEXT_PARAMETER_BYTES 32764
#endif

template <class Kernel, int kParts>
struct ConvParts {
  typename Kernel::Params part[kParts];
  static_assert(sizeof(part) <= JAXEXT_PARAMETER_BYTES);
};

// TMA descriptors are read where the kernel's parameters lie, hence __grid_constant__.
template <class Kernel, int kParts, int kBlocks>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, kBlocks)
    ConvKernelOf(const __grid_constant__ ConvParts<Kernel, kParts> parts) {
  extern __shared__ char shared[];
  Kernel::Run(parts.part[blockIdx.z], shared);
}

template <ConvRole kRole, int kRank, class Element, int kTileM, int kTileN, int kCluster, int kStages, int kBlocks>
struct Convolution {
  static constexpr bool kWgrad = kRole == ConvRole::kWgrad;
  static constexpr bool kFuses = kRole == ConvRole::kFprop;
  static constexpr bool kPhases = kRole == ConvRole::kDgrad;
  static constexpr int kTileK = 64;  // 128 bytes, the widest swizzle

  static constexpr auto kOperator = kRole == ConvRole::kFprop   ? cutlass::conv::Operator::kFprop
                                    : kRole == ConvRole::kDgrad ? cutlass::conv::Operator::kDgrad
                                                                : cutlass::conv::Operator::kWgrad;
  using Layout = cute::conditional_t<kRank == 1, cutlass::layout::TensorNWC,
                                     cute::conditional_t<kRank == 2, cutlass::layout::TensorNHWC, cutlass::layout::TensorNDHWC>>;
  // A nested shape is that of the first of several axes: tiles do not reach from one tap into the next.
  using TileN = cute::conditional_t<kWgrad, cute::Shape<cute::Int<kTileN>>, cute::Int<kTileN>>;
  using Tile = cute::Shape<cute::Int<kTileM>, TileN, cute::Shape<cute::Int<kTileK>>>;
  static constexpr int kClusterM = kWgrad ? 1 : kCluster, kClusterN = kWgrad ? kCluster : 1;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;

  static constexpr int kWarpGroups = kTileM * kTileN > 128 * 128 ? 2 : 1;  // that multiply, with 128 sums in a thread
  static constexpr int kConsumers = 128 * kWarpGroups;
  static constexpr int kLoad = 40, kMultiply = 232;  // registers of their threads, if there are two

  // CUTLASS builds it for one warp group; two take turns with 64 rows.
  using Built = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kOperator, Element, Layout, 8, Element, Layout, 8, float, Tile, Cluster,
      cutlass::conv::collective::StageCount<kStages>, cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
  template <class Copy, class Shared>
  using Traits = cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<Copy, Shared>;
  using Mainloop = cutlass::conv::collective::CollectiveConv<
      typename Built::DispatchPolicy, Tile, Element, Element,
      cute::TiledMMA<typename Built::TiledMma::Atom, cute::Layout<cute::Shape<cute::Int<kWarpGroups>, cute::_1, cute::_1>>>,
      Traits<typename Built::GmemTiledCopyA, typename Built::SmemLayoutA>,
      Traits<typename Built::GmemTiledCopyB, typename Built::SmemLayoutB>>;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using Rows = cute::conditional_t<kPhases, PixelRows<kRank>, EqualRows>;
  using Store = ConvStore<Element, kTileM, kTileN, kWarpGroups, Rows, kFuses>;
  using Shape = cutlass::conv::ConvProblemShape<kOperator, kRank>;

  struct Kernel {
    static constexpr int MaxThreadsPerBlock = 128 + kConsumers;

    struct Params {
      decltype(Mainloop::get_problem_shape_MNKL(Shape{})) shape;
      typename Mainloop::Params mainloop;
      typename Store::Params store;
    };

    struct alignas(1024) SharedStorage {
      typename Mainloop::TensorStorage tensors;
      StagedRows staged[kConsumers / 32];
      typename Mainloop::PipelineStorage pipeline;
    };

    static CUTLASS_DEVICE void Run(const Params& params, char* shared) {
      if constexpr (kPhases) {  // parts of different sizes; the blocks of a cluster decide alike
        if (int(blockIdx.x / kClusterM * kClusterM * kTileM) >= params.store.rows) return;
        if (params.store.zeros) return Store::StoreZeros(params.store);
      }
      auto& storage = *reinterpret_cast<SharedStorage*>(shared);
      const int warp_group = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
      Pipeline pipeline = BeginPipeline<Mainloop, Cluster>(params.mainloop, storage.pipeline, kConsumers);

      Mainloop mainloop;
      const auto loads = mainloop.load_init(params.shape, params.mainloop);
      const auto& of_a = cute::get<0>(loads);
      const int steps = cute::size<3>(of_a);
      if (warp_group == 0) {
        if constexpr (kWarpGroups == 2) cutlass::arch::warpgroup_reg_dealloc<kLoad>();
        if (warp != 0) return;
        auto state = cutlass::make_producer_start_state<Pipeline>();
        const auto tile = cute::make_coord(cute::idx2crd(int(blockIdx.x), cute::shape<2>(of_a)),
                                           cute::idx2crd(int(blockIdx.y), cute::shape<2>(cute::get<1>(loads))), cute::_, cute::_0{});
        mainloop.load(params.mainloop, pipeline, state, loads, tile, cute::make_coord_iterator(cute::shape<3>(of_a)), steps, threadIdx.x,
                      cute::block_rank_in_cluster(), storage.tensors);
        state.advance(steps);
        mainloop.load_tail(pipeline, state);  // blocks of a cluster end together
      } else {
        if constexpr (kWarpGroups == 2) cutlass::arch::warpgroup_reg_alloc<kMultiply>();
        const int thread = threadIdx.x - 128;
        auto sums = cute::partition_fragment_C(typename Mainloop::TiledMma{}, cute::take<0, 2>(Tile{}));
        typename Mainloop::PipelineState state;
        mainloop.mma(pipeline, state, sums, steps, thread, storage.tensors, params.mainloop);
        mainloop.mma_tail(pipeline, state, steps);
        Store::StoreSums(params.store, storage.staged[thread / 32], sums, thread);
      }
    }
  };

  // The most parts of a launch.  A split wgrad has many.  Others have several only with groups, a batch label or the phases of strides;
  // otherwise the space is copied unused.
  static constexpr int kParts = std::min<int>(kWgrad ? 30 : 8, JAXEXT_PARAMETER_BYTES / sizeof(typename Kernel::Params));
  static constexpr int kRegisters = kWarpGroups == 2 ? kLoad + 2 * kMultiply : 0;
  static constexpr int kSharedBytes =
      BlockBudget<Kernel::MaxThreadsPerBlock, kBlocks, sizeof(typename Kernel::SharedStorage), kRegisters>::kSharedBytes;

  // [N, spatial axes, channels], of which the last `kRank` spatial axes are real.
  static typename Shape::TensorExtent Sizes(int64_t outer, const std::array<int64_t, 3>& axes, int64_t inner) {
    typename Shape::TensorExtent sizes;
    sizes[0] = outer;
    for (int i = 0; i < kRank; ++i) sizes[i + 1] = axes[3 - kRank + i];
    sizes[kRank + 1] = inner;
    return sizes;
  }

  static int64_t Taps(const std::array<int64_t, 3>& filter) { return filter[0] * filter[1] * filter[2]; }

  // Strides of a view of every `step`-th pixel of an array, whose pixels stand `pixel` elements apart.
  static typename Shape::TensorStride Strides(const std::array<int64_t, 3>& axes, int64_t pixel, const std::array<int64_t, 3>& step) {
    typename Shape::TensorStride strides;
    strides[kRank + 1] = 1;
    for (int i = kRank; i > 0; --i) {
      const int axis = 2 - kRank + i;
      strides[i] = pixel * step[axis];
      pixel *= axes[axis];
    }
    strides[0] = pixel;
    return strides;
  }

  static Shape ShapeOf(const ConvProblem& p, const ConvPart& part) {
    Shape shape;
    shape.mode = cutlass::conv::Mode::kCrossCorrelation;
    for (int i = 0; i < kRank; ++i) {
      const int axis = 3 - kRank + i;
      shape.lower_padding[i] = part.low[axis];
      shape.upper_padding[i] = part.high[axis];
      shape.traversal_stride[i] = kPhases ? 1 : p.stride[axis];
      shape.dilation[i] = part.dilation[axis];
    }
    shape.set_shape_stride_ABC(Sizes(part.N, part.input, p.C), Strides(p.input, p.G * p.C, part.pixel),    // x
                               Sizes(p.K, part.filter, p.C), Strides(p.filter, p.C, part.tap),             // w
                               Sizes(part.N, part.output, p.K), Strides(p.output, p.G * p.K, {1, 1, 1}));  // y
    return shape;
  }

  static typename Store::Params StoreOf(const ConvProblem& p, const ConvPart& part, const Shape& shape, Dtype result, void* out,
                                        const Epilogue* epilogue) {
    const auto pixels = [&](const std::array<int64_t, 3>& axes) { return part.N * Taps(axes); };
    typename Store::Params store;
    store.in_float = result == Dtype::kF32;
    int64_t begin, rows;
    if constexpr (kRole == ConvRole::kFprop) {
      begin = part.y, rows = pixels(part.output), store.columns = p.K;
      store.layout = {p.G * p.K};
      if (epilogue != nullptr) {
        const int64_t bytes = begin * Bytes(result);
        auto& own = store.epilogue;
        own = {*epilogue, true};
        if (own.bias != nullptr) own.bias += part.w / (Taps(p.filter) * p.C);
        if (own.residual != nullptr) own.residual = static_cast<const char*>(own.residual) + bytes;
        if (own.saved != nullptr) own.saved = static_cast<char*>(own.saved) + bytes;
      }
    } else if constexpr (kRole == ConvRole::kDgrad) {
      begin = part.x, rows = pixels(part.input), store.columns = p.C;
      for (int i = 0; i < kRank; ++i) store.layout.sizes[i] = cutlass::FastDivmod(shape.shape_C[i + 1]);
      for (int i = 0; i <= kRank; ++i) store.layout.strides[i] = shape.stride_C[i];
      store.zeros = Taps(part.filter) == 0;
    } else {
      begin = part.w, rows = p.K, store.columns = p.C, store.taps = Taps(p.filter);
      store.layout = {Taps(p.filter) * p.C};
    }
    store.rows = rows;
    store.out = static_cast<char*>(out) + begin * Bytes(result);
    return store;
  }

  // CUTLASS's checks are too strict.  Its wgrad goes through the pixels of y with one stride, that of the last axis, but requires the
  // strides of an array of whole images without groups.  In dgrad a phase or a crop has padding below 0: what TMA gets are the box's
  // corners.
  static bool CanImplement(Shape shape, const typename Mainloop::Arguments& operands) {
    if constexpr (kWgrad) shape.stride_A = Shape::packed_stride_right_major(shape.shape_A);
    for (int i = 0; i < kRank && kPhases; ++i) {
      if (shape.lower_padding[i] < 0) return true;
    }
    return Mainloop::can_implement(shape, operands);
  }

  // The parameters of a launch of `count` parts, or no: no block reads those of others.
  static bool Fill(const ConvProblem& problem, const ConvPart* parts, int count, Dtype result, const void* first, const void* second,
                   void* out, const Epilogue* epilogue, ConvParts<Kernel, kParts>* params) {
    const auto at = [](const void* array, int64_t elements) { return static_cast<const Element*>(array) + elements; };
    for (int i = 0; i < count; ++i) {
      const ConvPart& part = parts[i];
      const Shape shape = ShapeOf(problem, part);
      params->part[i].store = StoreOf(problem, part, shape, result, out, epilogue);
      if (params->part[i].store.zeros) continue;  // it reads nothing
      typename Mainloop::Arguments operands;
      if constexpr (kRole == ConvRole::kFprop) {
        operands = {at(first, part.x), at(second, part.w)};
      } else {
        operands = {at(second, part.y), at(first, kWgrad ? part.x : part.w)};
      }
      if (!CanImplement(shape, operands)) return false;
      params->part[i].shape = Mainloop::get_problem_shape_MNKL(shape);
      params->part[i].mainloop = Mainloop::to_underlying_arguments(shape, operands, /*workspace=*/nullptr);
    }
    return true;
  }

  static Status Launch(const ConvProblem& problem, const std::vector<ConvPart>& parts, Dtype result, const void* first, const void* second,
                       void* out, const Epilogue* epilogue, LaunchStream stream) {
    constexpr auto kKernel = ConvKernelOf<Kernel, kParts, kBlocks>;
    Device device;
    if (Status s = Prepare("conv", kKernel, kSharedBytes, kBlocks, &device); !s.ok() || !stream) return s;
    for (size_t begin = 0; begin < parts.size(); begin += kParts) {
      const int count = static_cast<int>(std::min<size_t>(kParts, parts.size() - begin));
      ForgetDescriptors();
      ConvParts<Kernel, kParts> params;
      if (!Fill(problem, &parts[begin], count, result, first, second, out, epilogue, &params)) {
        return Invalid("conv: CUTLASS refuses these sizes, strides or alignments");
      }
      int rows = 0;
      for (int i = 0; i < count; ++i) rows = std::max(rows, params.part[i].store.rows);
      const int columns = cute::ceil_div(params.part[0].store.columns, kTileN) * params.part[0].store.taps;
      const dim3 grid(cute::round_up(cute::ceil_div(rows, kTileM), kClusterM), cute::round_up(columns, kClusterN), count);
      const Status launched = sm90::Launch("conv", kKernel, params, grid, dim3(Kernel::MaxThreadsPerBlock, 1, 1),
                                           dim3(kClusterM, kClusterN, 1), kSharedBytes, *stream);
      if (!launched.ok()) return launched;
    }
    return {};
  }

  static ConvKernel Entry(Dtype operands) {
    return {kRole, kRank, operands, {kTileM, kTileN, kCluster, 1}, kTileK, kStages, kParts, kSharedBytes, &Launch};
  }
};

// The kernels of one compile unit: each tile for both 16-bit dtypes.
//
// A tile of 128 x 128 keeps 128 accumulators per thread, so one block occupies a multiprocessor, with as many stages as help.  With tiles
// of 128 x 64, for few channels, two blocks fit a multiprocessor: one multiplies while the other begins or ends, an overlap that this
// schedule lacks within a block.  Twice 128 x 128, by two warp groups, loads a quarter less for each product, which pays where the model of
// cuda_conv.py says so for the suite: benchmarks/notes/gpu.md has the numbers.  Pairs of blocks, one above the other, load the filter
// together; in wgrad, where few tiles stand above each other and many taps beside, pairs side by side load y together.
template <ConvRole kRole, int kRank, class Element>
void AddConvKernels(Dtype dtype, std::vector<ConvKernel>* kernels) {
  kernels->push_back(Convolution<kRole, kRank, Element, 128, 128, 2, 6, 1>::Entry(dtype));
  kernels->push_back(Convolution<kRole, kRank, Element, 128, 64, 2, 4, 2>::Entry(dtype));
  if constexpr (kRank == 1 && kRole != ConvRole::kWgrad) {
    kernels->push_back(Convolution<kRole, kRank, Element, 128, 256, 2, 4, 1>::Entry(dtype));
  } else if constexpr (kRank == 1 || (kRank == 2 && kRole != ConvRole::kWgrad)) {
    kernels->push_back(Convolution<kRole, kRank, Element, 256, 128, 2, 4, 1>::Entry(dtype));
  }
}

template <ConvRole kRole, int kRank>
std::vector<ConvKernel> ConvKernelsOf() {
  std::vector<ConvKernel> kernels;
  AddConvKernels<kRole, kRank, cutlass::bfloat16_t>(Dtype::kBF16, &kernels);
  AddConvKernels<kRole, kRank, cutlass::half_t>(Dtype::kF16, &kernels);
  return kernels;
}

}  // namespace jaxext::sm90
