// For launchers of kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxext {

// While one lives, the thread may load a kernel, as its first launch does, although XLA is capturing this launch into a CUDA graph: XLA
// captures without having run the kernels before, in a mode that forbids calls of CUDA that might not be captured.
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

}  // namespace jaxext
