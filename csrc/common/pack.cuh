// Neighbouring channels of one thread: how they are loaded, converted to float32, rounded and stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxext {

// Neighbouring channels as they lie in memory.
template <typename T, int kVector>
struct alignas(sizeof(T) * kVector) Pack {
  using Word = std::conditional_t<sizeof(T) * kVector == 2, uint16_t, uint32_t>;
  Word words[sizeof(T) * kVector / sizeof(Word)];
};

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline float FromFloat(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 FromFloat(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half FromFloat(float x) {
  return __float2half_rn(x);
}

__device__ inline uint32_t Bits(float x) { return __float_as_uint(x); }
__device__ inline uint32_t Bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
__device__ inline uint32_t Bits(__half x) { return __half_as_ushort(x); }

// Channel k.
template <int kVector>
__device__ inline float Get(const Pack<float, kVector>& pack, int k) {
  return __uint_as_float(pack.words[k]);
}
template <int kVector>
__device__ inline float Get(const Pack<__nv_bfloat16, kVector>& pack, int k) {
  const uint32_t word = pack.words[k / 2];
  return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
}
template <int kVector>
__device__ inline float Get(const Pack<__half, kVector>& pack, int k) {
  const uint32_t word = pack.words[k / 2];
  return __half2float(__ushort_as_half(static_cast<uint16_t>(k % 2 == 0 ? word : word >> 16)));
}

template <typename T, int kVector>
__device__ inline Pack<T, kVector> Rounded(const float (&values)[kVector]) {
  constexpr int kPerWord = sizeof(typename Pack<T, kVector>::Word) / sizeof(T);
  Pack<T, kVector> pack{};
#pragma unroll
  for (int k = 0; k < kVector; ++k) pack.words[k / kPerWord] |= Bits(FromFloat<T>(values[k])) << (k % kPerWord * 16);
  return pack;
}

// Zeros, without an access, where there is nothing inside.
template <typename T, int kVector>
__device__ inline Pack<T, kVector> Load(const T* at, bool inside) {
  Pack<T, kVector> pack{};
  if (inside) pack = *reinterpret_cast<const Pack<T, kVector>*>(at);
  return pack;
}

// CUDA's own function keeps a vector in one piece; of plain assignments the compiler makes four stores each, here and there.
template <typename T, int kVector>
__device__ inline void Store(const Pack<T, kVector>& pack, T* at) {
  if constexpr (sizeof pack == sizeof(uint4)) {
    __stwb(reinterpret_cast<uint4*>(at), uint4{pack.words[0], pack.words[1], pack.words[2], pack.words[3]});
  } else if constexpr (sizeof pack == sizeof(uint2)) {
    __stwb(reinterpret_cast<uint2*>(at), uint2{pack.words[0], pack.words[1]});
  } else {
    *reinterpret_cast<Pack<T, kVector>*>(at) = pack;
  }
}

}  // namespace jaxext
