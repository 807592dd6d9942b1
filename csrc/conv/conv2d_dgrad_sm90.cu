#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv2dDgrad() { return sm90::ConvKernelsOf<ConvRole::kDgrad, 2>(); }

}  // namespace jaxext
