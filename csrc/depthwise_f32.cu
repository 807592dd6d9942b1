#include "depthwise_launch.cuh"

namespace jaxext::depthwise {

template cudaError_t LaunchGather<float>(const Plan&, const void*, const void*, void*, const Epilogue*, cudaStream_t);
template cudaError_t LaunchWgrad<float>(const Plan&, const void*, const void*, void*, cudaStream_t);

}  // namespace jaxext::depthwise
