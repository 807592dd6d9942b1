#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv1dDgrad() { return sm90::ConvKernelsOf<ConvRole::kDgrad, 1>(); }

}  // namespace jaxext
