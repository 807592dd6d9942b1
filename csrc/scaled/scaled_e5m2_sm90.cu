// Of a factor in float8_e4m3fn and cotangents in float8_e5m2, on either side.
#include "scaled/scaled_sm90.cuh"

namespace jaxext {

std::vector<ScaledKernel> ScaledE5M2() {
  auto kernels = sm90::ScaledKernelsOf<cutlass::float_e5m2_t, cutlass::float_e4m3_t>(Dtype::kE5M2, Dtype::kE4M3);
  for (const ScaledKernel& kernel : sm90::ScaledKernelsOf<cutlass::float_e4m3_t, cutlass::float_e5m2_t>(Dtype::kE4M3, Dtype::kE5M2)) {
    kernels.push_back(kernel);
  }
  return kernels;
}

}  // namespace jaxext
