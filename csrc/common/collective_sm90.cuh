// CUTLASS's collective of a matrix product for Hopper, and the strides of its operands.
#pragma once

#include "common/pipeline_sm90.cuh"  // first
// The parts for Hopper alone: the umbrella headers would bring every architecture's, and twice the time to compile.
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"

namespace jaxext::sm90 {

// Sets the strides that are not known to be 1: of the rows (or of depth), and of the batch.
template <class Stride>
void SetStrides(Stride& stride, int64_t leading, int64_t batch) {
  if constexpr (cute::is_static_v<cute::remove_cvref_t<decltype(cute::get<0>(stride))>>) {
    cute::get<1>(stride) = leading;
  } else {
    cute::get<0>(stride) = leading;
  }
  cute::get<2>(stride) = batch;
}

}  // namespace jaxext::sm90
