// How a kernel of CUTLASS 3 is launched on Hopper.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "common/tensor_map.h"  // before CUTLASS's
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/device_kernel.h"
#include "cutlass/version.h"
#include "common/load.h"
#include "common/status.h"

namespace jaxext::sm90 {

inline Status Check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // so that the next call does not report it again
  return Internal(what + ": " + cudaGetErrorString(error));
}

// Kernels take collectives of CUTLASS apart, whose members another version may have changed.
static_assert(CUTLASS_MAJOR == 4 && CUTLASS_MINOR == 2, "want CUTLASS 4.2");

// What a block takes of a multiprocessor, checked when its kernel is compiled.  kRegisters: the sum over its warp groups of what setmaxnreg
// gives a thread; 0 where registers stay as the compiler distributes them.
template <int kThreads, int kBlocks, size_t kShared, int kRegisters>
struct BlockBudget {
  static constexpr int kLaunched = std::min(248, 65536 / (kThreads * kBlocks) / 8 * 8);  // registers of a thread, in units of 8
  static_assert(kShared <= 232448, "a block has 227 KB of shared memory at most");
  static_assert((kShared + 1024) * kBlocks <= 233472, "a multiprocessor has 228 KB, of which each block takes 1 KB besides");
  static_assert(kRegisters * 128 <= kLaunched * kThreads, "a warp group would wait for registers that no other gives up");
  static constexpr int kSharedBytes = kShared;
};

struct Device {
  int number = 0, multiprocessors = 0;
};

// The current device, if it is one that these kernels run on.  A device is asked once.
inline Status CurrentDevice(const std::string& name, Device* device) {
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::map<int, Device>;
  if (Status s = Check(cudaGetDevice(&device->number), name + ": cudaGetDevice"); !s.ok()) return s;
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    if (const auto found = known->find(device->number); found != known->end()) {
      *device = found->second;
      return {};
    }
  }
  int major = 0, minor = 0;
  const auto ask = [&](cudaDeviceAttr attribute, int* value) {
    return Check(cudaDeviceGetAttribute(value, attribute, device->number), name + ": cudaDeviceGetAttribute");
  };
  if (Status s = ask(cudaDevAttrMultiProcessorCount, &device->multiprocessors); !s.ok()) return s;
  if (Status s = ask(cudaDevAttrComputeCapabilityMajor, &major); !s.ok()) return s;
  if (Status s = ask(cudaDevAttrComputeCapabilityMinor, &minor); !s.ok()) return s;
  if (major != 9 || minor != 0) {
    return Invalid(name + ": compute capability of the device is " + std::to_string(major) + "." + std::to_string(minor) + ", want 9.0");
  }
  const std::lock_guard<std::mutex> lock(*mutex);
  (*known)[device->number] = *device;
  return {};
}

// Clear earlier errors.
inline void ForgetDescriptors() { descriptor_error = CUDA_SUCCESS; }

// The beginning of each launcher: its kernel is loaded on the current device.  Several blocks that are to share a multiprocessor have its
// L1 cache as shared memory.
template <class Params>
Status Prepare(const std::string& name, void (*kernel)(Params), int shared_bytes, int blocks, Device* device) {
  if (Status s = CurrentDevice(name, device); !s.ok()) return s;
  ForgetDescriptors();
  const KernelNeeds needs = {shared_bytes, blocks > 1 ? cudaSharedmemCarveoutMaxShared : cudaSharedmemCarveoutDefault};
  return Check(Load(reinterpret_cast<const void*>(kernel), needs), name + ": the kernel does not load");
}

// Launches with parameters whose TMA descriptors were made since ForgetDescriptors.  They travel with the parameters, and nothing is
// allocated or awaited, so that the launch can be captured into a CUDA graph.
template <class Params>
Status Launch(const std::string& name, void (*kernel)(Params), const Params& params, dim3 grid, dim3 block, dim3 cluster, int shared_bytes,
              cudaStream_t stream) {
  if (descriptor_error != CUDA_SUCCESS) {
    return Internal(name + ": the driver refuses a TMA descriptor, CUDA error " + std::to_string(descriptor_error));
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster.x;
  attribute.val.clusterDim.y = cluster.y;
  attribute.val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return Check(cudaLaunchKernelEx(&config, kernel, params), name + ": cudaLaunchKernelEx");
}

}  // namespace jaxext::sm90
