#include "conv/conv_sm90.cuh"

namespace jaxext {

std::vector<ConvKernel> Conv1dWgrad() { return sm90::ConvKernelsOf<ConvRole::kWgrad, 1>(); }

}  // namespace jaxext
