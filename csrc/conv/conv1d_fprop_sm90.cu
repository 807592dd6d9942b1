#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv1dFprop() { return sm90::ConvKernelsOf<ConvRole::kFprop, 1>(); }

}  // namespace jaxext
