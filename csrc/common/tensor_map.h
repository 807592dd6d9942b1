// The driver's functions that make TMA descriptors.  Included before all other headers of CUTLASS and CuTe, which call the driver through
// the macro at the end.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "cutlass/cuda_host_adapter.hpp"

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

// The function of that name, or null.  CUTLASS looks it up for each descriptor.
template <class Function>
Function* DriverFunction(const char* name) {
  static std::atomic<Function*> known = nullptr;
  if (Function* const function = known) return function;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return known = reinterpret_cast<Function*>(found);
}

}  // namespace jaxext::sm90

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(func)                                              \
  ([](auto... arguments) {                                                                  \
    auto* const function = ::jaxext::sm90::DriverFunction<decltype(func)>(#func);           \
    return ::jaxext::sm90::Noted(function ? function(arguments...) : CUDA_ERROR_NOT_FOUND); \
  })
