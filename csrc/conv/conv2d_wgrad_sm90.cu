#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv2dWgrad() { return sm90::ConvKernelsOf<ConvRole::kWgrad, 2>(); }

}  // namespace jaxext
