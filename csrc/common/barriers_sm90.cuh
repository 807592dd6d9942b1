// Barriers and fences of CUTLASS, across which the compiler moves no access of memory.  CUTLASS's own have no "memory" clobber: they order
// its assembly, but not plain C++ that reads or writes shared memory beside them.  All kernels take them from here.
#pragma once

#include "common/sm90.cuh"  // first
#include "cutlass/arch/barrier.h"

namespace jaxext::sm90 {

CUTLASS_DEVICE void KeepOrder() { asm volatile("" ::: "memory"); }

struct Barrier {
  using Wrapped = cutlass::arch::ClusterTransactionBarrier;
  using ValueType = Wrapped::ValueType;

  static CUTLASS_DEVICE void Init(ValueType* barrier, uint32_t arrivals) { Wrapped::init(barrier, arrivals); }

  static CUTLASS_DEVICE void Wait(ValueType* barrier, uint32_t phase) {
    Wrapped::wait(barrier, phase);
    KeepOrder();
  }

  static CUTLASS_DEVICE void Arrive(ValueType* barrier) {
    KeepOrder();
    Wrapped::arrive(barrier);
  }

  static CUTLASS_DEVICE void ArriveAndExpect(ValueType* barrier, uint32_t bytes) {
    KeepOrder();
    Wrapped::arrive_and_expect_tx(barrier, bytes);
  }
};

// Of so many threads, which are not all of the block.
CUTLASS_DEVICE void SyncThreads(uint32_t threads, uint32_t number) {
  KeepOrder();
  cutlass::arch::NamedBarrier::sync(threads, number);
  KeepOrder();
}

// Barriers that were made are there for TMA and for other blocks of the cluster, after the next synchronisation.
CUTLASS_DEVICE void FenceBarriers() {
  KeepOrder();
  cutlass::arch::fence_barrier_init();
}

// What was written to shared memory is there for wgmma and TMA, which read it by another proxy.
CUTLASS_DEVICE void FenceWrites() {
  KeepOrder();
  cutlass::arch::fence_view_async_shared();
}

// Of a CUTLASS pipeline: a stage has come, and has been read.
template <class Pipeline, class State>
CUTLASS_DEVICE void WaitForStage(Pipeline& pipeline, const State& state) {
  pipeline.consumer_wait(state);
  KeepOrder();
}

template <class Pipeline, class State>
CUTLASS_DEVICE void ReleaseStage(Pipeline& pipeline, const State& state) {
  KeepOrder();
  pipeline.consumer_release(state);
}

}  // namespace jaxext::sm90
