// The kernels of matrices in float8_e4m3fn and rows in that or float8_e5m2, as cotangents are.
#include "scaled/scaled_sm90.cuh"

#include "ragged_scaled/ragged_scaled.h"

namespace jaxext {
namespace {

// A tile for many rows, and one for few, as in `ScaledKernelsOf`.
template <class ElementA>
std::vector<ScaledKernel> KernelsOf(Dtype first) {
  using ElementB = cutlass::float_e4m3_t;
  return {sm90::ScaledProduct<ElementA, ElementB, 128, 256, 2, 4, 1, true>::Entry(first, Dtype::kE4M3),
          sm90::ScaledProduct<ElementA, ElementB, 64, 128, 1, 4, 2, true>::Entry(first, Dtype::kE4M3)};
}

}  // namespace

std::vector<ScaledKernel> RaggedScaledE4M3() {
  return Joined({KernelsOf<cutlass::float_e4m3_t>(Dtype::kE4M3), KernelsOf<cutlass::float_e5m2_t>(Dtype::kE5M2)});
}

}  // namespace jaxext
