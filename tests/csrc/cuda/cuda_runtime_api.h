// In place of CUDA's: a device that runs kernels through simt.h, and has only what our launchers need.  One that allocated or waited would
// not compile.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>

#include <set>
#include <string>
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

enum cudaSharedCarveout { cudaSharedmemCarveoutDefault = -1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
struct cudaFuncAttributes {};

namespace simt {

struct Runtime {
  cudaStream_t stream = nullptr;  // the only one that may be used
  cudaError_t last = cudaSuccess;
  cudaError_t refusal = cudaSuccess;                                 // of every launch
  cudaStreamCaptureMode capture = cudaStreamCaptureModeThreadLocal;  // XLA's
};

inline Runtime runtime;
inline std::set<const void*> loaded;  // kernels, for the life of the process

struct Launched {
  std::string kernel;  // with its template arguments
  dim3 grid;
  size_t shared_bytes = 0;
};

inline Launched launched;  // the last one

inline std::string NameOf(const void* kernel) {
  Dl_info found;
  if (dladdr(kernel, &found) == 0 || found.dli_sname == nullptr) Fail("a kernel has no name");
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, nullptr), std::free);
  return name.get();
}

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

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  if (simt::runtime.capture != cudaStreamCaptureModeRelaxed) simt::Fail("a kernel is loaded, in a capture that may forbid it");
  simt::loaded.insert(kernel);
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributePreferredSharedMemoryCarveout || value < 0 || value > 100) simt::Fail("an attribute that none needs");
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  if (config->stream != simt::runtime.stream) simt::Fail("a launch on another stream");
  if (simt::loaded.count(reinterpret_cast<const void*>(kernel)) == 0) simt::Fail("a launch before its kernel is loaded");
  const cudaError_t error = simt::Launches(*config) ? simt::runtime.refusal : cudaErrorInvalidConfiguration;
  if (error != cudaSuccess) return simt::runtime.last = error;
  simt::launched = {simt::NameOf(reinterpret_cast<const void*>(kernel)), config->gridDim, config->dynamicSmemBytes};
  simt::Run(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { kernel(arguments...); });
  return cudaSuccess;
}
