// The activations of epilogues, on sums in registers.  Each is within a few units in the last place of float32; that of gelu_tanh, far
// below zero, within the rounding of tanh's argument.  Nothing overflows, and infinities and NaN become what jax.nn makes of them.
//
// All of it is inlined: across a call, the compiler lets one wgmma wait for the other.
#pragma once

#include "epilogue.h"

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
__device__ __forceinline__ float Gelu(float z) { return 0.5f * z * erfcf(-0.70710678f * z); }
__device__ __forceinline__ float Silu(float z) { return z * Sigmoid(z); }
__device__ __forceinline__ float Tanh(float z) { return tanhf(z); }

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
