// In place of the instructions of csrc/weight_only/weight_only_mma.cuh, for a driver to define them: the product of a warp, and pairs of
// floats.
#pragma once

#include <cmath>

#include "simt.h"
#include "weight_only/weight_only_mma.cuh"

namespace simt {

template <typename T>
float Half(uint32_t pair, int i) {
  const uint16_t bits = static_cast<uint16_t>(pair >> 16 * i);
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float({bits});
  } else {
    return __bfloat162float({bits});
  }
}

template <typename T>
uint32_t Rounded(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x).bits;
  } else {
    return __float2bfloat16_rn(x).bits;
  }
}

}  // namespace simt

namespace jaxext {

// Products are exact, and added in float64, rounded once.
template <typename T>
void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, const float (&c)[4]) {
  const uint32_t words[] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  simt::Exchange(words, 6);
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * pair + i % 2;
    double sum = c[i];
    for (int t = 0; t < 4; ++t) {
      const uint32_t *left = simt::Given(4 * group + t), *right = simt::Given(4 * column + t) + 4;
      for (int k = 0; k < 4; ++k) {
        sum += double{simt::Half<T>(left[i / 2 + k / 2 * 2], k % 2)} * simt::Half<T>(right[k / 2], k % 2);
      }
    }
    d[i] = static_cast<float>(sum);
  }
}

template <typename T>
uint32_t PairsMultiplyAdd(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    const float sum = std::fma(simt::Half<T>(a, i), simt::Half<T>(b, i), simt::Half<T>(c, i));
    pair |= simt::Rounded<T>(sum) << 16 * i;
  }
  return pair;
}

void Prefetch(const void* global) { static_cast<void>(*static_cast<const volatile float*>(global)); }  // it must be there

uint32_t Masked(uint32_t a, uint32_t mask, uint32_t turned) { return (a & mask) ^ turned; }

#define JAXEXT_INSTANTIATE(T)                                                                             \
  template void MultiplyAdd<T>(float (&)[4], const uint32_t (&)[4], const uint32_t*, const float (&)[4]); \
  template uint32_t PairsMultiplyAdd<T>(uint32_t, uint32_t, uint32_t);
JAXEXT_INSTANTIATE(__nv_bfloat16)
JAXEXT_INSTANTIATE(__half)
#undef JAXEXT_INSTANTIATE

}  // namespace jaxext
