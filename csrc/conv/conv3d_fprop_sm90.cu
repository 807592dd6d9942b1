#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv3dFprop() { return sm90::ConvKernelsOf<ConvRole::kFprop, 3>(); }

}  // namespace jaxext
