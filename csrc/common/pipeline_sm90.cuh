// The warp groups of a block for Hopper, and the ring of stages in shared memory that one thread fills by TMA and that the others
// multiply from.
#pragma once

#include "common/sm90.cuh"  // first
#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace jaxext::sm90 {

// A stage of a ring, and the parity of its uses, which barriers go by.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void operator++() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

// The pipeline of a CUTLASS collective, made by all threads of a block: warp group 0 loads, and the `consumers` threads behind it multiply.
template <class Mainloop, class Cluster>
CUTLASS_DEVICE typename Mainloop::MainloopPipeline BeginPipeline(const typename Mainloop::Params& params,
                                                                 typename Mainloop::PipelineStorage& storage, int consumers) {
  using Pipeline = typename Mainloop::MainloopPipeline;
  if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) Mainloop::prefetch_tma_descriptors(params);
  typename Pipeline::Params roles;
  roles.role = cutlass::canonical_warp_group_idx() == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  roles.is_leader = threadIdx.x % 128 == 0;
  roles.num_consumers = consumers;
  roles.num_producers = 1;
  roles.transaction_bytes = params.tma_transaction_bytes;
  Pipeline pipeline(storage, roles, Cluster{});
  // The barriers of all blocks in the cluster are there before any is used.
  if constexpr (cute::size(Cluster{}) > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }
  return pipeline;
}

// Runs all threads of a block: the first warp loads, and the warp groups behind its own multiply.  kLoad and kMultiply: registers of their
// threads, or 0 as the compiler distributes them.
template <class Product>
CUTLASS_DEVICE void RunWarpGroups(const typename Product::Kernel::Params& params, char* shared) {
  using Kernel = typename Product::Kernel;
  auto& storage = *reinterpret_cast<typename Kernel::SharedStorage*>(shared);
  const int warp_group = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
  auto pipeline =
      BeginPipeline<typename Product::Mainloop, typename Product::Cluster>(params.mainloop, storage.pipeline, Product::kConsumers);
  if (warp_group == 0) {
    if constexpr (Product::kLoad > 0) cutlass::arch::warpgroup_reg_dealloc<Product::kLoad>();
    if (warp == 0) Kernel::Load(params, storage, pipeline);
  } else {
    if constexpr (Product::kMultiply > 0) cutlass::arch::warpgroup_reg_alloc<Product::kMultiply>();
    Kernel::Multiply(params, storage, pipeline, threadIdx.x - 128);
  }
}

}  // namespace jaxext::sm90
