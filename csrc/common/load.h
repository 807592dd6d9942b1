// Loads kernels, once for each device.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <utility>

namespace jaxext {

// The attributes that a kernel needs before its first launch on a device.
struct KernelNeeds {
  int shared_bytes = 0;                         // dynamic shared memory, where that is more than 48 KB
  int carveout = cudaSharedmemCarveoutDefault;  // percent of the L1 cache to be shared memory, where several blocks are to fit
};

// During its lifetime the thread may load a kernel although XLA is capturing it into a CUDA graph, in a mode that forbids such calls of
// CUDA.
class RelaxedCapture {
 public:
  RelaxedCapture() { Exchange(); }
  ~RelaxedCapture() { Exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void Exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The first call for a device loads the kernel and sets its attributes; later calls only look it up.  XLA makes the first one before a
// program runs, in the handlers' initialize stage.  Where nobody does, the first launch does.
inline cudaError_t Load(const void* kernel, const KernelNeeds& needs) {
  static auto* const mutex = new std::mutex;
  static auto* const loaded = new std::set<std::pair<int, const void*>>;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    const std::lock_guard<std::mutex> lock(*mutex);
    if (loaded->count({device, kernel}) > 0) return cudaSuccess;
  }
  // Without the lock: loading may wait for the device, whose kernels may wait for those of another thread's device.
  const RelaxedCapture relaxed;
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);  // which loads it
  if (error == cudaSuccess && needs.shared_bytes > 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, needs.shared_bytes);
  }
  if (error == cudaSuccess && needs.carveout != cudaSharedmemCarveoutDefault) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, needs.carveout);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // so that the next call does not report it again
    return error;
  }
  const std::lock_guard<std::mutex> lock(*mutex);
  loaded->insert({device, kernel});
  return cudaSuccess;
}

}  // namespace jaxext
