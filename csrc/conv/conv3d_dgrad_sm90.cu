#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv3dDgrad() { return sm90::ConvKernelsOf<ConvRole::kDgrad, 3>(); }

}  // namespace jaxext
