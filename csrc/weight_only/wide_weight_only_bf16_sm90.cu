#include "weight_only/wide_weight_only.cuh"

namespace jaxext {

std::vector<WideWeightOnlyKernel> WideWeightOnlyBF16() { return sm90::WideWeightOnlyKernelsOf<__nv_bfloat16>(Dtype::kBF16); }

}  // namespace jaxext
