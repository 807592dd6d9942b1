// Of factors that are both float8_e4m3fn.
#include "scaled/scaled_sm90.cuh"

namespace jaxext {

std::vector<ScaledKernel> ScaledE4M3() {
  return sm90::ScaledKernelsOf<cutlass::float_e4m3_t, cutlass::float_e4m3_t>(Dtype::kE4M3, Dtype::kE4M3);
}

}  // namespace jaxext
