#include "depthwise/depthwise_launch.cuh"

namespace jaxext::depthwise {

template cudaError_t LaunchMma<__half>(const Plan&, const void*, const void*, void*, const Epilogue*, LaunchStream);
template cudaError_t LaunchMmaWgrad<__half>(const Plan&, const void*, const void*, void*, LaunchStream);

}  // namespace jaxext::depthwise
