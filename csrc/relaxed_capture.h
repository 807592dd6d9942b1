// For launchers of kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxext {

// During its lifetime the thread may load a kernel, as the first launch does, although XLA is capturing the launch into a CUDA graph.  XLA
// captures kernels that have never run, in a mode that forbids such calls of CUDA.
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
