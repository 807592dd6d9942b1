// Products by CUTLASS's own collectives and kernels, with nothing of ours: linked with csrc/cuda_runtime.cc, which writes down what they
// launch.
#include <cutlass/cluster_launch.hpp>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

namespace {

using cute::Int;

// row-major rows x depth times column-major depth x columns
template <class Element, class Sum, int kAligned, class Cluster, class Mainloop, class Store>
struct Product {
  using Tile = cute::Shape<cute::_128, cute::_64, Int<128 / sizeof(Element)>>;
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile,
                                                                             Cluster, cutlass::epilogue::collective::EpilogueTileAuto, Sum,
                                                                             Sum, void, Row, 4, Sum, Row, 4, Store>::CollectiveOp;
  using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, kAligned, Element, Column, kAligned, Sum, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>, Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Collective, Epilogue>;

  static int Launch(int rows, int columns, int depth, const void* a, const void* b, void* c) {
    const auto packed = [](auto stride, int size, int length) { return cutlass::make_cute_packed_stride(stride, {size, length, 1}); };
    typename Kernel::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                         {rows, columns, depth, 1},
                                         {static_cast<const Element*>(a), packed(typename Kernel::StrideA{}, rows, depth),
                                          static_cast<const Element*>(b), packed(typename Kernel::StrideB{}, columns, depth)},
                                         {{}, nullptr, {}, static_cast<Sum*>(c), packed(typename Kernel::StrideD{}, rows, columns)}};
    arguments.hw_info.sm_count = 132;
    auto params = Kernel::to_underlying_arguments(arguments, nullptr);
    const auto kernel = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
    const dim3 cluster(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1);
    void* given[] = {&params};
    const auto status = cutlass::ClusterLauncher::launch(Kernel::get_grid_shape(params), cluster, Kernel::get_block_shape(),
                                                         Kernel::SharedStorageSize, nullptr, kernel, given);
    return status != cutlass::Status::kSuccess;
  }
};

}  // namespace

extern "C" {

int ProductS8(int rows, int columns, int depth, const void* a, const void* b, void* c) {
  return Product<int8_t, int32_t, 16, cute::Shape<cute::_1, cute::_1, cute::_1>, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                 cutlass::epilogue::TmaWarpSpecialized>::Launch(rows, columns, depth, a, b, c);
}
int ProductTf32(int rows, int columns, int depth, const void* a, const void* b, void* c) {
  return Product<cutlass::tfloat32_t, float, 4, cute::Shape<cute::_2, cute::_1, cute::_1>,
                 cutlass::gemm::KernelTmaWarpSpecializedCooperative, cutlass::epilogue::TmaWarpSpecializedCooperative>::Launch(rows,
                                                                                                                               columns,
                                                                                                                               depth, a, b,
                                                                                                                               c);
}

}  // extern "C"
