// Kernels whose results are known, for the interpreter of PTX: none has anything of ours.  test_small_kernels.py runs them.
#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>

#include <cuda/ptx>

namespace ptx = cuda::ptx;

// One block after the other adds its sum to `total`, which is zero before.
extern "C" __global__ void Sum(const float* values, int count, float* total) {
  __shared__ float of_warps[32];
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) sum += values[i];
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_down_sync(0xffffffff, sum, lanes);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : 0;
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  if (threadIdx.x == 0) atomicAdd(total, sum);
}

extern "C" __global__ void Zero(int* values, int count) {
  if (blockIdx.x * blockDim.x + threadIdx.x < count) values[blockIdx.x * blockDim.x + threadIdx.x] = 0;
}

// rows x columns to columns x rows, in tiles of 32 x 32 by blocks of 32 x 8.
extern "C" __global__ void Transpose(const int* from, int rows, int columns, int* to) {
  __shared__ int tile[32][33];
  const int row = blockIdx.y * 32, column = blockIdx.x * 32;
  for (int i = threadIdx.y; i < 32; i += 8) {
    if (row + i < rows && column + threadIdx.x < columns) tile[i][threadIdx.x] = from[(row + i) * columns + column + threadIdx.x];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += 8) {
    if (column + i < columns && row + threadIdx.x < rows) to[(column + i) * rows + row + threadIdx.x] = tile[threadIdx.x][i];
  }
}

// Keeps the even numbers of one block's, in order, and counts them.
extern "C" __global__ void Compact(const int* from, int* to, int* count) {
  __shared__ int before[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, value = from[threadIdx.x];
  const unsigned kept = __ballot_sync(0xffffffff, value % 2 == 0);
  if (lane == 0) before[warp] = __popc(kept);
  __syncthreads();
  int place = __popc(kept & ((1u << lane) - 1));
  for (int other = 0; other < warp; ++other) place += before[other];
  if (value % 2 == 0) to[place] = value;
  if (threadIdx.x == blockDim.x - 1) *count = place + (value % 2 == 0);
}

// `counts` are zero before.
extern "C" __global__ void Histogram(const unsigned char* values, int count, unsigned* counts) {
  __shared__ unsigned here[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) here[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) atomicAdd(&here[values[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&counts[i], here[i]);
}

// Threads go round their loops a different number of times, and meet again.
extern "C" __global__ void Collatz(const unsigned* from, unsigned* steps, unsigned* longest) {
  unsigned value = from[threadIdx.x], count = 0;
  while (value != 1) {
    value = value % 2 ? 3 * value + 1 : value / 2;
    ++count;
  }
  steps[threadIdx.x] = count;
  const unsigned most = __reduce_max_sync(0xffffffff, count);
  if (threadIdx.x % 32 == 0) longest[threadIdx.x / 32] = most;
}

// Sums of three neighbours, of tiles of 128 that cp.async brings ahead of their use.  One block; `count` is a multiple of 128.
extern "C" __global__ void Stencil(const float* from, int count, float* to) {
  __shared__ alignas(16) float tile[2][128];
  __shared__ float last;
  const int tiles = count / 128, at = threadIdx.x;
  const auto bring = [&](int n) {
    if (n < tiles && at < 32) __pipeline_memcpy_async(&tile[n % 2][4 * at], from + n * 128 + 4 * at, 16);
    __pipeline_commit();
  };
  bring(0);
  if (at == 0) last = 0;
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    bring(n + 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    const float left = at ? tile[n % 2][at - 1] : last;
    const float right = at < 127 ? tile[n % 2][at + 1] : n + 1 < tiles ? from[n * 128 + 128] : 0;
    to[n * 128 + at] = left + tile[n % 2][at] + right;
    __syncthreads();
    if (at == 127) last = tile[n % 2][at];
    __syncthreads();
  }
}

// Twice the tiles of 16 x 32 of a matrix, read and written by TMA, each with its own map; the block's tile is `blockIdx`.
extern "C" __global__ void Twice(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to) {
  __shared__ alignas(128) float tile[16][32];
  __shared__ uint64_t arrived;
  const int x = blockIdx.x * 32, y = blockIdx.y * 16;
  const int32_t corner[] = {x, y};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&arrived, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile, &from, corner, &arrived);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &arrived, sizeof(tile));
  }
  while (!ptx::mbarrier_try_wait_parity(&arrived, 0)) {
  }
  for (int i = threadIdx.x; i < 512; i += blockDim.x) (&tile[0][0])[i] *= 2;
  ptx::fence_proxy_async(ptx::space_shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &to, corner, tile);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
  }
}

// Each block of a cluster of four gives its number's square to all; every block writes the sum, and what the next one gave.
extern "C" __global__ void __cluster_dims__(4) Neighbours(int* sums, int* next) {
  namespace cg = cooperative_groups;
  __shared__ int given[4];
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = cluster.block_rank();
  if (threadIdx.x < 4) cluster.map_shared_rank(given, threadIdx.x)[rank] = blockIdx.x * blockIdx.x;
  cluster.sync();
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = given[0] + given[1] + given[2] + given[3];
    next[blockIdx.x] = *cluster.map_shared_rank(&given[rank], (rank + 1) % 4);
  }
  cluster.sync();  // no block ends while another reads of it
}

// A float32 number as the narrow types round it, back in float32: bfloat16, float16, e4m3 and e5m2 (the latter two end at their largest).
extern "C" __global__ void Narrow(const float* from, int count, float* to) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  to[4 * i] = __bfloat162float(__float2bfloat16_rn(from[i]));
  to[4 * i + 1] = __half2float(__float2half_rn(from[i]));
  to[4 * i + 2] = static_cast<float>(__nv_fp8_e4m3(from[i]));
  to[4 * i + 3] = static_cast<float>(__nv_fp8_e5m2(from[i]));
}
