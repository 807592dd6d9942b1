// The launch of a portable kernel.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "common/load.h"
#include "common/status.h"

namespace jaxext {

// What was wrong on this thread before is not asked for, and a launch that CUDA refuses leaves nothing for the next who asks.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(dim3 grid, dim3 block, int shared_bytes, LaunchStream stream, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (cudaError_t error = Load(reinterpret_cast<const void*>(kernel), {}); error != cudaSuccess || !stream) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = *stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace jaxext
