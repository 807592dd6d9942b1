// How the warp groups of a block for Hopper begin: with the ring of shared memory that one thread fills by TMA, and that the others
// multiply from.  It must not know matmul or convolutions, XLA or Python.
#pragma once

#include "common/sm90.cuh"  // first
#include "cute/arch/cluster_sm90.hpp"

namespace jaxext::sm90 {

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

}  // namespace jaxext::sm90
