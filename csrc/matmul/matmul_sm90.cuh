// One matrix product for Hopper, of CUTLASS's collectives: TMA loads into a ring of shared memory by a warp of their own, wgmma by two warp
// groups, persistent blocks, and clusters that load what they share once.
//
// The roles differ only in the majors of their operands.  wgmma takes both of 16-bit operands, and of others the contracted axis last:
//
//     role  A            B                D[m, n]
//     nn    a[M,K]       b[K,N]           c[M,N]    A: contracted axis last; B: first
//     nt    c[M,N]       b[K,N]           a[M,K]    both last
//     tn    a[M,K]       c[M,N]           b[K,N]    both first
//
#pragma once

#include "common/collective_sm90.cuh"  // first
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/kernel/gemm_universal_decl.h"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp"
#include "common/activation.cuh"
#include "matmul/matmul.h"

namespace jaxext::sm90 {

template <Dtype>
struct ElementOf;
template <>
struct ElementOf<Dtype::kF32> {
  using type = float;
};
template <>
struct ElementOf<Dtype::kBF16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<Dtype::kF16> {
  using type = cutlass::half_t;
};
template <>
struct ElementOf<Dtype::kE4M3> {
  using type = cutlass::float_e4m3_t;
};

enum class Schedule { kCooperative, kPingpong };

struct FinishArguments {
  Activation activation = Activation::kNone;
  bool residual = false;  // without one its registers hold anything
};

// y of z and the residual, in float32.
template <class Sums>
struct Finish {
  using Arguments = FinishArguments;

  CUTLASS_DEVICE Sums operator()(const Sums& z, const Sums& residual, const Arguments& arguments) const {
    float y[Sums::kElements];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Sums::kElements; ++i) y[i] = z[i];
    Activate(arguments.activation, y);
    Sums finished;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Sums::kElements; ++i) finished[i] = arguments.residual ? y[i] + residual[i] : y[i];
    return finished;
  }
};

// The residual, which TMA loads only if there is one.
template <class Element>
struct Residual : cutlass::epilogue::fusion::Sm90SrcFetch<Element> {
  struct SharedStorage {};
  struct Arguments {
    bool exists = false;
  };
  using Params = Arguments;

  template <class Shape>
  static constexpr Params to_underlying_arguments(const Shape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class Shape>
  static bool can_implement(const Shape&, const Arguments&) {
    return true;
  }
  template <class Shape>
  static size_t get_workspace_size(const Shape&, const Arguments&) {
    return 0;
  }
  template <class Shape>
  static cutlass::Status initialize_workspace(const Shape&, const Arguments&, void*, cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE Residual() {}
  CUTLASS_HOST_DEVICE Residual(const Params& params, const SharedStorage&) : exists(params.exists) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return exists; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return exists; }

  bool exists = false;
};

// finish(save(sum + bias), residual)
template <class Tile, class Result, class Schedule>
struct Visitors {
  using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<Tile, cutlass::epilogue::collective::EpilogueTileAuto,
                                                                               Result, Result, Schedule>;
  using Saved = cutlass::epilogue::collective::detail::AuxStoreDescriptor<Descriptor, cutlass::layout::RowMajor, Result>;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  template <class Node, class... Children>
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Node, Children...>;

  using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, cute::_1, int64_t>>;
  using Z =
      Tree<cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, float, float, kRound>, Bias, cutlass::epilogue::fusion::Sm90AccFetch>;
  using Store = cutlass::epilogue::fusion::Sm90AuxStore<Saved::Stages, typename Descriptor::EpilogueTile, Result, kRound,
                                                        typename Saved::Stride, typename Saved::SmemLayoutAtom, typename Saved::CopyOpR2S>;
  using Y = Tree<cutlass::epilogue::fusion::Sm90Compute<Finish, Result, float, kRound>, Tree<Store, Z>, Residual<Result>>;
};

template <MatmulRole kRole, Dtype kOperands, Dtype kResult, int kTileM, int kTileN, int kTileK, int kClusterM, Schedule kSchedule,
          bool kFused = false>
struct Matmul {
  using Element = typename ElementOf<kOperands>::type;
  using Result = typename ElementOf<kResult>::type;
  static constexpr int kAligned = 16 / sizeof(Element);  // elements that TMA reads at once
  static constexpr int kAlignedResult = 16 / sizeof(Result);
  static constexpr bool kPingpong = kSchedule == Schedule::kPingpong;

  // CUTLASS's names for A (m x k) and B (k x n): RowMajor has k last in A, n last in B.
  using LayoutA = cute::conditional_t<kRole == MatmulRole::kTN, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using LayoutB = cute::conditional_t<kRole == MatmulRole::kNT, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::_1, cute::_1>;

  using StoreSchedule =
      cute::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized, cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using Source = cute::conditional_t<kFused, Result, void>;
  using Fusion = cute::conditional_t<kFused, typename Visitors<Tile, Result, StoreSchedule>::Y,
                                     cutlass::epilogue::fusion::LinearCombination<Result, float, Source, float>>;
  using Store = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      Source, cutlass::layout::RowMajor, kAlignedResult, Result, cutlass::layout::RowMajor, kAlignedResult, StoreSchedule,
      Fusion>::CollectiveOp;
  using LoadAndMultiply = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, kAligned, Element, LayoutB, kAligned, float, Tile, Cluster,
      // as many stages as shared memory holds beside the epilogue
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Store::SharedStorage))>,
      cute::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperative>>::CollectiveOp;
  // A tile begins at a multiple of 1 KiB, after which swizzles repeat: TMA and wgmma go by the bits of its address.  CUTLASS puts it behind
  // the storage of the epilogue, whose own swizzles are narrower, and aligns it to 128 bytes.
  struct Mainloop : LoadAndMultiply {
    using LoadAndMultiply::LoadAndMultiply;
    struct alignas(1024) TensorStorage : LoadAndMultiply::TensorStorage {};
  };
  // A class of our own, so that the kernel goes by our name in profiles.
  struct Kernel : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Store> {};
  static constexpr int kSharedBytes = BlockBudget<Kernel::MaxThreadsPerBlock, 1, Kernel::SharedStorageSize, 0>::kSharedBytes;

  static Status Run(const Gemm& gemm, LaunchStream stream) {
    Device device;
    if (Status s = Prepare("matmul", cutlass::device_kernel<Kernel>, kSharedBytes, 1, &device); !s.ok() || !stream) return s;
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = cute::make_shape(int(gemm.m), int(gemm.n), int(gemm.k), int(gemm.l));
    arguments.mainloop.ptr_A = static_cast<const Element*>(gemm.a);
    arguments.mainloop.ptr_B = static_cast<const Element*>(gemm.b);
    SetStrides(arguments.mainloop.dA, gemm.a_leading, gemm.a_batch);
    SetStrides(arguments.mainloop.dB, gemm.b_leading, gemm.b_batch);
    arguments.epilogue.ptr_D = static_cast<Result*>(gemm.d);
    SetStrides(arguments.epilogue.dD, gemm.n, gemm.m * gemm.n);
    if constexpr (kFused) {
      const Epilogue& epilogue = gemm.epilogue;
      const bool residual = epilogue.residual != nullptr;
      // Without a residual there is a descriptor nonetheless, through which nothing is read.
      arguments.epilogue.ptr_C = residual ? static_cast<const Result*>(epilogue.residual) : arguments.epilogue.ptr_D;
      SetStrides(arguments.epilogue.dC, gemm.n, gemm.m * gemm.n);
      auto& [saved, of_residual, finish] = arguments.epilogue.thread;
      auto& [z, save] = saved;
      auto& [bias, sum, plus] = z;
      bias.ptr_row = epilogue.bias;
      cute::get<2>(bias.dRow) = gemm.n;
      save.ptr_aux = static_cast<Result*>(epilogue.saved);
      SetStrides(save.dAux, gemm.n, gemm.m * gemm.n);
      of_residual.exists = residual;
      finish = {epilogue.activation, residual};
    } else {
      arguments.epilogue.thread.alpha = 1;
      arguments.epilogue.thread.beta = 0;
    }
    arguments.hw_info.device_id = device.number;
    arguments.hw_info.sm_count = device.multiprocessors;
    arguments.scheduler.max_swizzle_size =
        BandOf(cute::ceil_div(gemm.m, kTileM), cute::ceil_div(gemm.n, kTileN), kClusterM, gemm.l, device.multiprocessors);
    if (!Kernel::can_implement(arguments)) return Invalid("matmul: CUTLASS refuses these sizes, strides or alignments");
    if (Kernel::get_workspace_size(arguments) != 0) return Internal("matmul: the kernel wants a workspace, and there is none");

    const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
    return Launch("matmul", cutlass::device_kernel<Kernel>, params, Kernel::get_grid_shape(params), Kernel::get_block_shape(),
                  dim3(kClusterM, 1, 1), kSharedBytes, *stream);
  }

  static MatmulKernel Entry() {
    return {kRole,        kOperands, kResult, kFused, {kTileM, kTileN, kTileK, kClusterM, kPingpong, 1}, Mainloop::DispatchPolicy::Stages,
            kSharedBytes, &Run};
  }
};

template <MatmulRole kRole, Dtype kOperands, Dtype kResult, int kTileM, int kTileN, int kTileK, int kClusterM>
MatmulKernel Cooperative() {
  return Matmul<kRole, kOperands, kResult, kTileM, kTileN, kTileK, kClusterM, Schedule::kCooperative>::Entry();
}

template <MatmulRole kRole, Dtype kOperands, Dtype kResult, int kTileM, int kTileN, int kTileK, int kClusterM>
MatmulKernel Pingpong() {
  return Matmul<kRole, kOperands, kResult, kTileM, kTileN, kTileK, kClusterM, Schedule::kPingpong>::Entry();
}

// The tiles of 16-bit operands, into their own dtype and into float32.  benchmarks/notes/gpu.md says what each is expected to gain, and
// which others were left out.
template <MatmulRole kRole, Dtype kOperands>
std::vector<MatmulKernel> TilesOf() {
  return {
      Cooperative<kRole, kOperands, kOperands, 128, 256, 64, 2>(),    // large products
      Cooperative<kRole, kOperands, Dtype::kF32, 128, 256, 64, 2>(),  // and long sums
      Pingpong<kRole, kOperands, kOperands, 128, 192, 64, 2>(),       // short sums, and results that would leave most
      Pingpong<kRole, kOperands, Dtype::kF32, 128, 192, 64, 2>(),     // of the last 256 columns empty
      Pingpong<kRole, kOperands, Dtype::kF32, 64, 256, 64, 2>(),      // at most 128 rows
      Pingpong<kRole, kOperands, kOperands, 64, 64, 64, 1>(),         // many small products
      Pingpong<kRole, kOperands, Dtype::kF32, 64, 64, 64, 1>(),       // and narrow results of long sums
  };
}

template <MatmulRole kRole>
std::vector<MatmulKernel> Tiles() {
  std::vector<MatmulKernel> tiles = TilesOf<kRole, Dtype::kBF16>();
  const std::vector<MatmulKernel> others = TilesOf<kRole, Dtype::kF16>();
  tiles.insert(tiles.end(), others.begin(), others.end());
  return tiles;
}

template <Dtype kOperands, int kTileM, int kTileN, int kTileK, int kClusterM, Schedule kSchedule>
MatmulKernel Fused() {
  return Matmul<MatmulRole::kNN, kOperands, kOperands, kTileM, kTileN, kTileK, kClusterM, kSchedule, true>::Entry();
}

}  // namespace jaxext::sm90
