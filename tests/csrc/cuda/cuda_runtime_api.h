// In place of CUDA's: a device that runs kernels through simt.h, and has only what our launchers need.  One that allocated, waited or set
// attributes would not compile.
#pragma once

#include <utility>

#include "../simt.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorUnknown = 999 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1, cudaStreamCaptureModeRelaxed = 2 };

namespace simt {

struct Runtime {
  cudaStream_t stream = nullptr;  // the only one that may be used
  cudaError_t last = cudaSuccess;
  cudaError_t refusal = cudaSuccess;                                 // of every launch
  cudaStreamCaptureMode capture = cudaStreamCaptureModeThreadLocal;  // XLA's
};

inline Runtime runtime;

// What every device refuses.
inline bool Launches(const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  const int64_t threads = int64_t{block.x} * block.y * block.z;
  return min({grid.x, grid.y, grid.z}) > 0 && grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535 && threads > 0 && threads <= 1024 &&
         config.dynamicSmemBytes <= 48 << 10;  // without an attribute
}

}  // namespace simt

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, simt::runtime.capture);
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return std::exchange(simt::runtime.last, cudaSuccess); }

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorInvalidConfiguration ? "invalid configuration" : "?"; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  if (config->stream != simt::runtime.stream) simt::Fail("a launch on another stream");
  if (simt::runtime.capture != cudaStreamCaptureModeRelaxed)
    simt::Fail("a launch, which may load its kernel, in a capture that forbids it");
  const cudaError_t error = simt::Launches(*config) ? simt::runtime.refusal : cudaErrorInvalidConfiguration;
  if (error != cudaSuccess) return simt::runtime.last = error;
  simt::Run(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { kernel(arguments...); });
  return cudaSuccess;
}
