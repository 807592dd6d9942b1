// The instructions of warps and of pairs of 16-bit floats that C++ has no words for, and how small integers become such floats.  Another
// compiler than CUDA's takes the instructions from whoever simulates them (tests/csrc/simt_mma.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxext {

// d[16,8] = a[16,16] b[16,8] + c[16,8] by a warp, in float32.  Thread 4 g + t has of a, in pairs of neighbours along the sum, (g, 2t),
// (g+8, 2t), (g, 2t+8) and (g+8, 2t+8); of b (2t, g) and (2t+8, g); of c and d (g, 2t), (g, 2t+1), (g+8, 2t) and (g+8, 2t+1).
template <typename T>
__device__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, const float (&c)[4]);

// a b + c of pairs of T.
template <typename T>
__device__ uint32_t PairsMultiplyAdd(uint32_t a, uint32_t b, uint32_t c);

// (a & mask) ^ turned.  The compiler makes two instructions of it where both are constants.
__device__ uint32_t Masked(uint32_t a, uint32_t mask, uint32_t turned);

// Brings the line there into the L2 cache.
__device__ void Prefetch(const void* global);

#ifdef __CUDACC__
template <typename T>
__device__ inline void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, const float (&c)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

template <typename T>
__device__ inline uint32_t PairsMultiplyAdd(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

__device__ inline uint32_t Masked(uint32_t a, uint32_t mask, uint32_t turned) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(turned));
  return d;
}

__device__ inline void Prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
#endif

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, __half>;

// The integers of `kBits` in the lowest bits of both halves of `pairs`, as T.  Higher bits are ignored.
//
// A float of the exponent's bits in `kAbove` and an integer in its fraction is that number more.  In two's complement the highest bit
// counts down: turned over it counts up from the least integer.  bfloat16 has no place for all bits of an int8, so its highest bit becomes
// another number: the exponent's last bit, 128 or 256.
template <typename T, int kBits>
__device__ inline uint32_t ToFloats(uint32_t pairs) {
  constexpr uint32_t kOne = kIsHalf<T> ? 0x3C003C00u : 0x3F803F80u, kSigns = 0x80008000u;
  constexpr uint32_t kBase = kIsHalf<T> ? 0x64006400u : 0x43004300u;  // 1024 or 128
  if constexpr (kBits == 8 && !kIsHalf<T>) {
    return PairsMultiplyAdd<T>(Masked(pairs, 0x007F007Fu, kBase), kOne, Masked(pairs, 0x00800080u, kBase | kSigns));
  } else {
    constexpr uint32_t kMask = kBits == 8 ? 0x00FF00FFu : 0x000F000Fu, kAbove = kBase | (kBits == 8 ? 0x00800080u : 0x00080008u);
    return PairsMultiplyAdd<T>(Masked(pairs, kMask, kAbove), kOne, kAbove | kSigns);
  }
}

}  // namespace jaxext
