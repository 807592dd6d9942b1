// The activations of epilogues, on sums in registers.  Each is within ten units in the last place of float32; those of gelu and gelu_tanh,
// far below zero, within the rounding of the exponential's and of tanh's argument.  Nothing overflows, and infinities and NaN become what
// jax.nn makes of them.
//
// All of it is inlined: across a call, the compiler lets one wgmma wait for the other.
#pragma once

#include "common/epilogue.h"

namespace jaxext::activations {

// 1 / (1 + exp(-z)).  The exact division calls a function, this one is within 2 units for a divisor from 1 to 2.
__device__ __forceinline__ float Sigmoid(float z) {
  const float e = expf(-fabsf(z));
  return __fdividef(z >= 0.0f ? 1.0f : e, 1.0f + e);
}

// Not fmaxf, which loses NaN.
__device__ __forceinline__ float Relu(float z) { return z <= 0.0f ? 0.0f : z; }
__device__ __forceinline__ float Relu6(float z) { return z >= 6.0f ? 6.0f : Relu(z); }
__device__ __forceinline__ float SquaredRelu(float z) { return Relu(z) * Relu(z); }
__device__ __forceinline__ float LeakyRelu(float z) { return z >= 0.0f ? z : 0.01f * z; }
__device__ __forceinline__ float Silu(float z) { return z * Sigmoid(z); }
__device__ __forceinline__ float Tanh(float z) { return tanhf(z); }

// z Phi(z), where Phi(-t) = exp(-t^2 / 2) u P(u) for u = 1 / (1 + 3t / 8): P is a minimax fit of the scaled erfc, within 2.3e-7 of it.  It
// has half of erfcf's instructions, with which the product of matmul_sm90.cuh took twice as long: the epilogue of a tile is unrolled.
__device__ __forceinline__ float Gelu(float z) {
  const float u = __fdividef(1.0f, fmaf(0.375f, fabsf(z), 1.0f));
  float p = -0.032911006f;
  for (float c : {0.13687974f, -0.18652086f, 0.050632063f, 0.015628106f, 0.088638172f, 0.1284457f, 0.14960459f, 0.14960338f})
    p = fmaf(p, u, c);
  const float tail = exp2f(z * (-0.72134752f * z)) * (u * p);
  return z * (z >= 0.0f ? 1.0f - tail : tail);
}

// (1 + tanh(u)) / 2 = Sigmoid(2u)
__device__ __forceinline__ float GeluTanh(float z) { return z * Sigmoid(1.59576912f * (z + 0.044715f * z * z * z)); }

template <float (*kFunction)(float), int kCount>
__device__ __forceinline__ void Each(float (&z)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) z[i] = kFunction(z[i]);
}

}  // namespace jaxext::activations

namespace jaxext {

// Of some sums of a thread: one branch for all of them.
template <int kCount>
__device__ __forceinline__ void Activate(Activation activation, float (&z)[kCount]) {
  using namespace activations;
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return Each<Relu>(z);
    case Activation::kRelu6:
      return Each<Relu6>(z);
    case Activation::kGelu:
      return Each<Gelu>(z);
    case Activation::kGeluTanh:
      return Each<GeluTanh>(z);
    case Activation::kSilu:
      return Each<Silu>(z);
    case Activation::kSigmoid:
      return Each<Sigmoid>(z);
    case Activation::kTanh:
      return Each<Tanh>(z);
    case Activation::kLeakyRelu:
      return Each<LeakyRelu>(z);
    case Activation::kSquaredRelu:
      return Each<SquaredRelu>(z);
  }
}

}  // namespace jaxext
