// Of bfloat16.
#include "gram/gram_sm90.cuh"

namespace jaxext {

std::vector<GramKernel> GramBF16() { return sm90::GramKernelsOf<cutlass::bfloat16_t>(Dtype::kBF16); }

}  // namespace jaxext
