// The derivatives of the activations of epilogues, on sums in registers; at kinks they are those of jax.nn.
#pragma once

#include "common/activation.cuh"

namespace jaxext::activations {

// With e = exp(-|z|):  sigmoid'(z) = e / (1 + e)².
__device__ __forceinline__ float OfSigmoid(float z) {
  const float e = expf(-fabsf(z)), inverse = __fdividef(1.0f, 1.0f + e);
  return e * inverse * inverse;
}

__device__ __forceinline__ float OfNone(float) { return 1.0f; }
__device__ __forceinline__ float OfRelu(float z) { return z > 0.0f ? 1.0f : 0.0f; }
__device__ __forceinline__ float OfRelu6(float z) { return z > 0.0f && z < 6.0f ? 1.0f : z == 0.0f || z == 6.0f ? 0.5f : 0.0f; }
__device__ __forceinline__ float OfSquaredRelu(float z) { return 2.0f * Relu(z); }
__device__ __forceinline__ float OfLeakyRelu(float z) { return z < 0.0f ? 0.01f : 1.0f; }
__device__ __forceinline__ float OfTanh(float z) { return 4.0f * OfSigmoid(2.0f * z); }
__device__ __forceinline__ float OfSilu(float z) {
  const float e = expf(-fabsf(z)), inverse = __fdividef(1.0f, 1.0f + e), small = e * inverse;
  return fmaf(z, small * inverse, z >= 0.0f ? inverse : small);
}
__device__ __forceinline__ float OfGelu(float z) { return fmaf(0.39894228f * z, expf(-0.5f * z * z), 0.5f * erfcf(-0.70710678f * z)); }

// Beyond 12 the second term is nothing, and there z² might overflow.
__device__ __forceinline__ float OfGeluTanh(float z) {
  const float near = z > 12.0f ? 12.0f : z < -12.0f ? -12.0f : z, square = near * near;
  const float u = near * fmaf(0.07135481f, square, 1.59576912f);
  return fmaf(near * OfSigmoid(u), fmaf(0.21406444f, square, 1.59576912f), Sigmoid(u));
}

}  // namespace jaxext::activations

namespace jaxext {

// Each sum becomes the activation's derivative there.
template <int kCount>
__device__ __forceinline__ void Differentiate(Activation activation, float (&z)[kCount]) {
  using namespace activations;
  switch (activation) {
    case Activation::kNone:
      return Each<OfNone>(z);
    case Activation::kRelu:
      return Each<OfRelu>(z);
    case Activation::kRelu6:
      return Each<OfRelu6>(z);
    case Activation::kGelu:
      return Each<OfGelu>(z);
    case Activation::kGeluTanh:
      return Each<OfGeluTanh>(z);
    case Activation::kSilu:
      return Each<OfSilu>(z);
    case Activation::kSigmoid:
      return Each<OfSigmoid>(z);
    case Activation::kTanh:
      return Each<OfTanh>(z);
    case Activation::kLeakyRelu:
      return Each<OfLeakyRelu>(z);
    case Activation::kSquaredRelu:
      return Each<OfSquaredRelu>(z);
  }
}

}  // namespace jaxext
