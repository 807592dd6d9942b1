// Of float16.
#include "gram/gram_sm90.cuh"

namespace jaxext {

std::vector<GramKernel> GramF16() { return sm90::GramKernelsOf<cutlass::half_t>(Dtype::kF16); }

}  // namespace jaxext
