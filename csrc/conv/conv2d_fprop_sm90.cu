#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv2dFprop() { return sm90::ConvKernelsOf<ConvRole::kFprop, 2>(); }

}  // namespace jaxext
