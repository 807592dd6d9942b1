// What kernels need that no CPU has, for a driver to define: shared memory, and the instructions of csrc/weight_only/weight_only_mma.cuh.
#pragma once

#include <cmath>

#include "cuda_runtime_api.h"
#include "common/pack.cuh"
#include "weight_only/weight_only_mma.cuh"
#include "weight_only/wide_weight_only.h"

// One array by all names that kernels have for it.
extern "C" {
float4 simt_shared_memory[(48 << 10) / sizeof(float4)];
}
namespace jaxext::depthwise {
extern float4 shared_memory[] __attribute__((alias("simt_shared_memory")));
}
namespace jaxext::causal {
extern float4 shared_memory[] __attribute__((alias("simt_shared_memory")));
}
namespace jaxext::weight_only {
extern float4 shared_sums[] __attribute__((alias("simt_shared_memory")));
}

namespace jaxext {

// Kernels with Hopper's instructions are not run: their launches are noted.
Status NoteWide(const weight_only::Plan& plan, const WeightOnlyOperands&, void*, LaunchStream) {
  simt::launched = {
      "WideWeightOnlyKernel<" + std::to_string(plan.bits) + ", " + std::to_string(plan.tiles) + ", " + std::to_string(plan.columns) + ">()",
      {static_cast<unsigned>(plan.grid)}};
  return {};
}

std::vector<WideWeightOnlyKernel> WideKernels(Dtype dtype) {
  std::vector<WideWeightOnlyKernel> kernels;
  for (int bits : {4, 8}) {
    for (int rows : {64, 128}) kernels.push_back({dtype, bits, {rows, 256, 1}, 0, 0, NoteWide});
  }
  return kernels;
}
std::vector<WideWeightOnlyKernel> WideWeightOnlyBF16() { return WideKernels(Dtype::kBF16); }
std::vector<WideWeightOnlyKernel> WideWeightOnlyF16() { return WideKernels(Dtype::kF16); }

// The numbers of a pair.
template <typename T>
float Half(uint32_t pair, int i) {
  return ToFloat(T{static_cast<uint16_t>(pair >> 16 * i)});
}

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
        sum += double{Half<T>(left[i / 2 + k / 2 * 2], k % 2)} * Half<T>(right[k / 2], k % 2);
      }
    }
    d[i] = static_cast<float>(sum);
  }
}

template <typename T>
uint32_t PairsMultiplyAdd(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    const float sum = std::fma(Half<T>(a, i), Half<T>(b, i), Half<T>(c, i));
    pair |= Bits(FromFloat<T>(sum)) << 16 * i;
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
