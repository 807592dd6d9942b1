// One convolution for Hopper, as an implicit product, of CUTLASS's collectives: TMA gathers the pixels of a tile through a bounding box
// ("im2col") into a ring of shared memory, by a warp of its own, and a warp group multiplies with wgmma.
//
//     role    A (m x k)      B (k x n)      D[m, n]
//     fprop   x[NOPQ, TRSC]  w[TRSC, K]     y[NOPQ, K]     x through the box
//     dgrad   y[NDHW, TRSK]  w[TRSK, C]     x[NDHW, C]     y through the box
//     wgrad   y[K, NOPQ]     x[NOPQ, TRSC]  w[K, TRSC]     x through the box
//
// CUTLASS has one schedule for convolutions, with one block per tile, and supports neither groups nor splits.  Here the blocks of a launch
// take their arguments, strides and boxes from one of several *parts* (conv_plan.h), selected by blockIdx.z, which CUTLASS does not use for
// convolutions.  The epilogue is ours: a result is always a matrix, in dgrad with rows that need not stand equally far apart, and CUTLASS's
// epilogue for any layout took most of the time to compile.  It must not know XLA or Python.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "sm90.cuh"  // first
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/epilogue/collective/detail.hpp"
#include "cutlass/numeric_conversion.h"
#include "activation.cuh"
#include "conv.h"

namespace jaxext::sm90 {

// The epilogue of a part.  Only fprop has the space of it among its kernel's parameters.
template <bool kFuses>
struct ConvEpilogue : Epilogue {
  bool exists = false;
};
template <>
struct ConvEpilogue<false> {};

// Where the rows of a result begin, in elements.
struct EqualRows {
  int64_t leading = 0;
  CUTLASS_HOST_DEVICE int64_t Of(int row) const { return row * leading; }
};
// Those of dgrad are every pixel, or those of a phase.
template <int kRank>
struct PixelRows {
  cutlass::FastDivmod sizes[kRank];
  int64_t strides[kRank + 1] = {};  // of an image, and of each axis
  CUTLASS_HOST_DEVICE int64_t Of(int row) const {
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

// Stores D[row, tap, column], whose columns are contiguous, from the accumulators of wgmma, as Element or float.  A tile is of one tap.
template <class Element, int kTileM, int kTileN, class Rows, bool kFuses>
struct ConvStore {
  // What CUTLASS's kernel asks an epilogue for.
  using ElementC = void;
  using ElementD = Element;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  struct SharedStorage {};
  struct Arguments {
    void* out = nullptr;
    bool in_float = false;
    int rows = 0, columns = 0, taps = 1;  // columns: a multiple of 8
    bool zeros = false;                   // nothing is multiplied
    Rows places = {};
    ConvEpilogue<kFuses> epilogue = {};
  };
  using Params = Arguments;

  template <class Shape>
  static Params to_underlying_arguments(const Shape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class Shape>
  static bool can_implement(const Shape&, const Arguments&) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit ConvStore(const Params& params) : params(params) {}

  template <class Shape, class Tile, class Coordinates, class Accumulators, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(const Shape&, const Tile&, const Coordinates&, const Accumulators& accumulators, TiledMma tiled_mma,
                                 const Residue&, int thread, char*) {
    if constexpr (kFuses) {
      if (params.epilogue.exists) return StoreAs<true>(accumulators, tiled_mma, thread);
    }
    StoreAs<false>(accumulators, tiled_mma, thread);
  }

  template <bool kFused, class Accumulators, class TiledMma>
  CUTLASS_DEVICE void StoreAs(const Accumulators& accumulators, TiledMma tiled_mma, int thread) {
    if (params.in_float) {
      Store<float, kFused>(accumulators, tiled_mma, thread);
    } else {
      Store<Element, kFused>(accumulators, tiled_mma, thread);
    }
  }

  template <class Out, bool kFused, class Accumulators, class TiledMma>
  CUTLASS_DEVICE void Store(const Accumulators& accumulators, TiledMma tiled_mma, int thread) {
    const int tiles = cute::ceil_div(params.columns, kTileN);  // of one tap
    if (blockIdx.y >= tiles * params.taps) return;             // the last of a pair
    const int first_row = blockIdx.x * kTileM;
    const int first_column = blockIdx.y % tiles * kTileN;
    Out* const out = static_cast<Out*>(params.out) + int64_t(blockIdx.y / tiles) * params.columns;
    // (row, column) in the tile of each accumulator: they are neighbours two by two, and of eight columns all exist or none.
    const auto places =
        tiled_mma.get_slice(thread).partition_C(cute::make_identity_tensor(cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{}));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accumulators); i += 2) {
      const int row = first_row + cute::get<0>(places(i));
      const int column = first_column + cute::get<1>(places(i));
      if (row >= params.rows || column >= params.columns) continue;
      float pair[2] = {accumulators(i), accumulators(i + 1)};
      const int64_t at = params.places.Of(row) + column;
      if constexpr (kFused) Finish<Out>(pair, column, at);
      Write(pair, out + at);
    }
  }

  // Of a block of dgrad, by all its threads.
  static CUTLASS_DEVICE void StoreZeros(const Params& params) {
    const int chunks = params.in_float ? kTileN / 4 : kTileN / 8, wide = kTileN / chunks;  // 16 bytes each
    for (int i = threadIdx.x; i < kTileM * chunks; i += blockDim.x) {
      const int row = blockIdx.x * kTileM + i / chunks, column = blockIdx.y * kTileN + i % chunks * wide;
      if (row >= params.rows || column >= params.columns) continue;
      reinterpret_cast<uint4*>(params.out)[(params.places.Of(row) + column) / wide] = uint4{};
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
  CUTLASS_DEVICE void Finish(float (&pair)[2], int column, int64_t at) const {
    const Epilogue& epilogue = params.epilogue;
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

  Params params;
};

template <class Kernel, int kParts>
struct ConvParts {
  typename Kernel::Params part[kParts];
  static_assert(sizeof(part) <= 32764, "what CUDA lets a kernel's parameters be");
};

// TMA descriptors are read where the kernel's parameters lie, hence __grid_constant__.
template <class Kernel, int kParts, int kBlocks>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, kBlocks)
    ConvKernelOf(const __grid_constant__ ConvParts<Kernel, kParts> parts) {
  extern __shared__ char shared[];
  const typename Kernel::Params& part = parts.part[blockIdx.z];
  if constexpr (Kernel::kPhases) {  // parts of different sizes; the blocks of a cluster decide alike
    constexpr int kTogether = cute::size<0>(typename Kernel::ClusterShape{});
    if (int(blockIdx.x / kTogether * kTogether * cute::size<0>(typename Kernel::TileShape{})) >= part.epilogue.rows) return;
    if (part.epilogue.zeros) return Kernel::Zeros::StoreZeros(part.epilogue);
  }
  Kernel{}(part, shared);
}

template <ConvRole kRole, int kRank, class Element, int kTileM, int kTileN, int kCluster, int kStages, int kBlocks>
struct Convolution {
  static constexpr bool kWgrad = kRole == ConvRole::kWgrad;
  static constexpr bool kFuses = kRole == ConvRole::kFprop;
  static constexpr bool kPhases = kRole == ConvRole::kDgrad;
  static constexpr int kTileK = 64;  // 128 bytes, the widest swizzle
  // Parts of a launch.  A split wgrad has many.  Others have several only with groups, a batch label or the phases of strides; otherwise
  // the space is copied unused.
  static constexpr int kParts = kWgrad ? 30 : 8;

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

  using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kOperator, Element, Layout, 8, Element, Layout, 8, float, Tile, Cluster,
      cutlass::conv::collective::StageCount<kStages>, cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
  using Rows = cute::conditional_t<kPhases, PixelRows<kRank>, EqualRows>;
  using OurStore = ConvStore<Element, kTileM, kTileN, Rows, kFuses>;
  using Store = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<OurStore>;
  using Shape = cutlass::conv::ConvProblemShape<kOperator, kRank>;
  // A class of our own, so that the kernel goes by our name in profiles.
  struct Kernel : cutlass::gemm::kernel::GemmUniversal<Shape, Mainloop, Store> {
    static constexpr bool kPhases = Convolution::kPhases;
    using Zeros = OurStore;
  };

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

  static typename Kernel::Arguments ArgumentsOf(const ConvProblem& p, const ConvPart& part, Dtype result, const void* first,
                                                const void* second, void* out, const Epilogue* epilogue) {
    Shape shape;
    shape.mode = cutlass::conv::Mode::kCrossCorrelation;
    for (int i = 0; i < kRank; ++i) {
      const int axis = 3 - kRank + i;
      shape.lower_padding[i] = part.low[axis];
      shape.upper_padding[i] = part.high[axis];
      shape.traversal_stride[i] = kPhases ? 1 : p.stride[axis];
      shape.dilation[i] = part.dilation[axis];
    }
    shape.set_shape_stride_ABC(Sizes(part.N, part.input, p.C), Strides(p.input, p.G * p.C, part.pixel),     // x
                               Sizes(p.K, part.filter, p.C), Strides(p.filter, p.C, part.tap),              // w
                               Sizes(part.N, part.output, p.K), Strides(p.output, p.G * p.K, {1, 1, 1}));  // y

    typename Kernel::Arguments arguments{};
    arguments.problem_shape = shape;
    const auto at = [](const void* array, int64_t elements) { return static_cast<const Element*>(array) + elements; };
    const auto pixels = [&](const std::array<int64_t, 3>& axes) { return part.N * axes[0] * axes[1] * axes[2]; };
    const auto store = [&](int64_t elements, int64_t rows, int64_t columns, const Rows& places) {
      void* const begin = static_cast<char*>(out) + elements * Bytes(result);
      const int taps = kWgrad ? Taps(p.filter) : 1;
      arguments.epilogue = {begin, result == Dtype::kF32, static_cast<int>(rows), static_cast<int>(columns), taps, false, places, {}};
    };
    if constexpr (kRole == ConvRole::kFprop) {
      arguments.mainloop = {at(first, part.x), at(second, part.w)};
      store(part.y, pixels(part.output), p.K, {p.G * p.K});
      if (epilogue != nullptr) {
        const int64_t bytes = part.y * Bytes(result);
        auto& own = arguments.epilogue.epilogue;
        own = {*epilogue, true};
        if (own.bias != nullptr) own.bias += part.w / (Taps(p.filter) * p.C);
        if (own.residual != nullptr) own.residual = static_cast<const char*>(own.residual) + bytes;
        if (own.saved != nullptr) own.saved = static_cast<char*>(own.saved) + bytes;
      }
    } else if constexpr (kRole == ConvRole::kDgrad) {
      arguments.mainloop = {at(second, part.y), at(first, part.w)};
      Rows places;
      for (int i = 0; i < kRank; ++i) places.sizes[i] = cutlass::FastDivmod(shape.shape_C[i + 1]);
      for (int i = 0; i <= kRank; ++i) places.strides[i] = shape.stride_C[i];
      store(part.x, pixels(part.input), p.C, places);
      arguments.epilogue.zeros = Taps(part.filter) == 0;
    } else {
      arguments.mainloop = {at(second, part.y), at(first, part.x)};
      store(part.w, p.K, p.C, {Taps(p.filter) * p.C});
    }
    return arguments;
  }

  // CUTLASS's checks are too strict.  Its wgrad goes through the pixels of y with one stride, that of the last axis, but requires the strides
  // of an array of whole images without groups.  In dgrad a phase or a crop has padding below 0: what TMA gets are the box's corners.
  static bool CanImplement(typename Kernel::Arguments arguments) {
    Shape& shape = arguments.problem_shape;
    if constexpr (kWgrad) shape.stride_A = Shape::packed_stride_right_major(shape.shape_A);
    for (int i = 0; i < kRank && kPhases; ++i) {
      if (shape.lower_padding[i] < 0) return true;
    }
    return Kernel::can_implement(arguments);
  }

  // The parameters of a launch of `count` parts, or no: no block reads those of others.
  static bool Fill(const ConvProblem& problem, const ConvPart* parts, int count, Dtype result, const void* first, const void* second,
                   void* out, const Epilogue* epilogue, ConvParts<Kernel, kParts>* params) {
    for (int i = 0; i < count; ++i) {
      const typename Kernel::Arguments arguments = ArgumentsOf(problem, parts[i], result, first, second, out, epilogue);
      if (kPhases && Taps(parts[i].filter) == 0) {  // no descriptors
        params->part[i].epilogue = arguments.epilogue;
        continue;
      }
      if (!CanImplement(arguments)) return false;
      params->part[i] = Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
    }
    return true;
  }

  static Status Launch(const ConvProblem& problem, const std::vector<ConvPart>& parts, Dtype result, const void* first, const void* second,
                       void* out, const Epilogue* epilogue, cudaStream_t stream) {
    Device device;
    if (Status s = CurrentDevice("conv", &device); !s.ok()) return s;
    for (size_t begin = 0; begin < parts.size(); begin += kParts) {
      const int count = static_cast<int>(std::min<size_t>(kParts, parts.size() - begin));
      ForgetDescriptors();
      ConvParts<Kernel, kParts> params;
      if (!Fill(problem, &parts[begin], count, result, first, second, out, epilogue, &params)) {
        return Invalid("conv: CUTLASS refuses these sizes, strides or alignments");
      }
      int rows = 0;
      for (int i = 0; i < count; ++i) rows = std::max(rows, params.part[i].epilogue.rows);
      const int columns = cute::ceil_div(params.part[0].epilogue.columns, kTileN) * params.part[0].epilogue.taps;
      const dim3 grid(cute::round_up(cute::ceil_div(rows, kTileM), kClusterM), cute::round_up(columns, kClusterN), count);
      const Status launched = sm90::Launch("conv", ConvKernelOf<Kernel, kParts, kBlocks>, params, grid, Kernel::get_block_shape(),
                                           dim3(kClusterM, kClusterN, 1), Kernel::SharedStorageSize, stream);
      if (!launched.ok()) return launched;
    }
    return {};
  }

  static ConvKernel Entry(Dtype operands) {
    constexpr int kShared = Kernel::SharedStorageSize;
    return {kRole, kRank, operands, {kTileM, kTileN, kCluster, 1}, kTileK, kStages, kShared, &Launch};
  }
};

// The kernels of one compile unit: each tile for both 16-bit dtypes.
//
// A tile of 128 x 128 keeps 128 accumulators per thread, so one block occupies a multiprocessor, with as many stages as help.  With tiles
// of 128 x 64, for few channels, two blocks fit a multiprocessor: one multiplies while the other begins or ends, an overlap that this
// schedule lacks within a block.  Pairs of blocks, one above the other, load the filter together; in wgrad, where few tiles stand above
// each other and many taps beside, pairs side by side load y together.
template <ConvRole kRole, int kRank>
std::vector<ConvKernel> ConvKernelsOf() {
  return {Convolution<kRole, kRank, cutlass::bfloat16_t, 128, 128, 2, 6, 1>::Entry(Dtype::kBF16),
          Convolution<kRole, kRank, cutlass::bfloat16_t, 128, 64, 2, 4, 2>::Entry(Dtype::kBF16),
          Convolution<kRole, kRank, cutlass::half_t, 128, 128, 2, 6, 1>::Entry(Dtype::kF16),
          Convolution<kRole, kRank, cutlass::half_t, 128, 64, 2, 4, 2>::Entry(Dtype::kF16)};
}

}  // namespace jaxext::sm90
