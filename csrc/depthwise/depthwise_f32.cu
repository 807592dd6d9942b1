#include "depthwise/depthwise_launch.cuh"

namespace jaxext::depthwise {

template cudaError_t LaunchGather<float>(const Plan&, const void*, const void*, void*, const Epilogue*, LaunchStream);
template cudaError_t LaunchWgrad<float>(const Plan&, const void*, const void*, void*, LaunchStream);

}  // namespace jaxext::depthwise
