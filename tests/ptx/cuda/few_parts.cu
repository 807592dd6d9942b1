// Convolutions in place of the library's, whose parameters take 4 KB at most: the constant of csrc/conv/conv_sm90.cuh as the compiler is
// told it.
#include "conv/conv_sm90.cuh"

namespace jaxext {

template <ConvRole kRole>
std::vector<ConvKernel> One() {
  return {sm90::Convolution<kRole, 2, cutlass::bfloat16_t, 128, 64, 2, 4, 2>::Entry(Dtype::kBF16)};
}

std::vector<ConvKernel> Conv2dDgrad() { return One<ConvRole::kDgrad>(); }
std::vector<ConvKernel> Conv2dWgrad() { return One<ConvRole::kWgrad>(); }

}  // namespace jaxext
