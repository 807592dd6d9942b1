#include "weight_only/wide_weight_only.cuh"

namespace jaxext {

std::vector<WideWeightOnlyKernel> WideWeightOnlyF16() { return sm90::WideWeightOnlyKernelsOf<__half>(Dtype::kF16); }

}  // namespace jaxext
