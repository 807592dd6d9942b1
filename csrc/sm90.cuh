// How a kernel of CUTLASS 3 is launched on Hopper.  It must not know matmul or convolutions, XLA or Python.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "cutlass/cuda_host_adapter.hpp"
#include "relaxed_capture.h"
#include "status.h"

namespace jaxext::sm90 {

// The driver's error if it made no TMA descriptor on this thread: CUTLASS ignores it.
inline thread_local CUresult descriptor_error = CUDA_SUCCESS;

inline CUresult Noted(CUresult result) {
  if (result != CUDA_SUCCESS) {
    descriptor_error = result;
    cudaGetLastError();  // if the runtime did not find the driver's function, the next launch would be blamed for it
  }
  return result;
}

}  // namespace jaxext::sm90

// CUTLASS calls the driver through this macro, so it must be defined before all other headers of CUTLASS and CuTe, which make
// descriptors.
#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(func) ([](auto... arguments) { return ::jaxext::sm90::Noted(cutlass::call_##func(arguments...)); })

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/device_kernel.h"

namespace jaxext::sm90 {

inline Status Check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // so that the next call does not report it again
  return Internal(what + ": " + cudaGetErrorString(error));
}

struct Device {
  int number = 0, multiprocessors = 0;
};

// The current device, if it is one that these kernels run on.
inline Status CurrentDevice(const std::string& name, Device* device) {
  int major = 0, minor = 0;
  const auto ask = [&](cudaDeviceAttr attribute, int* value) {
    return Check(cudaDeviceGetAttribute(value, attribute, device->number), name + ": cudaDeviceGetAttribute");
  };
  if (Status s = Check(cudaGetDevice(&device->number), name + ": cudaGetDevice"); !s.ok()) return s;
  if (Status s = ask(cudaDevAttrMultiProcessorCount, &device->multiprocessors); !s.ok()) return s;
  if (Status s = ask(cudaDevAttrComputeCapabilityMajor, &major); !s.ok()) return s;
  if (Status s = ask(cudaDevAttrComputeCapabilityMinor, &minor); !s.ok()) return s;
  if (major == 9 && minor == 0) return {};
  return Invalid(name + ": compute capability of the device is " + std::to_string(major) + "." + std::to_string(minor) + ", want 9.0");
}

// Clear earlier errors.
inline void ForgetDescriptors() { descriptor_error = CUDA_SUCCESS; }

// Launches with parameters whose TMA descriptors were made since ForgetDescriptors.  They travel with the parameters, and nothing is
// allocated or awaited, so that the launch can be captured into a CUDA graph.
template <class Params>
Status Launch(const std::string& name, void (*kernel)(Params), const Params& params, dim3 grid, dim3 block, dim3 cluster, int shared,
              cudaStream_t stream) {
  if (descriptor_error != CUDA_SUCCESS) {
    return Internal(name + ": the driver refuses a TMA descriptor, CUDA error " + std::to_string(descriptor_error));
  }
  const RelaxedCapture relaxed;
  // Set for the current device at each launch: a process may have several devices, and remembering them would cost more.
  if (Status s = Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), name + ": cudaFuncSetAttribute");
      !s.ok()) {
    return s;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster.x;
  attribute.val.clusterDim.y = cluster.y;
  attribute.val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return Check(cudaLaunchKernelEx(&config, kernel, params), name + ": cudaLaunchKernelEx");
}

}  // namespace jaxext::sm90
