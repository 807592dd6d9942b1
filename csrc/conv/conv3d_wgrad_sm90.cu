#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv3dWgrad() { return sm90::ConvKernelsOf<ConvRole::kWgrad, 3>(); }

}  // namespace jaxext
