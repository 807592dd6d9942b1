// The instructions of warps and of pairs of 16-bit floats that C++ has no words for.  Another compiler than CUDA's takes them from whoever
// simulates them (tests/csrc/simt_mma.h).  It must not know any kernel.
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

}  // namespace jaxext
