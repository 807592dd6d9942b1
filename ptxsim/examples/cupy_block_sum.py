"""A kernel as CuPy's RawKernel takes it: each block sums its part of a vector.  It runs clean, and races without one of its barriers.

nvcc compiles it, for a GPU that need not be there.  With CuPy and a GPU it would be called so:

    cupy.RawKernel(SOURCE, "block_sum")((blocks,), (THREADS,), (x, sums, numpy.int32(x.size)))
"""

import shutil
import subprocess

import numpy as np
import ptxsim

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
THREADS = 128
SOURCE = r"""
extern "C" __global__ void block_sum(const float* x, float* sums, int count) {
  __shared__ float partial[128];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  partial[threadIdx.x] = i < count ? x[i] : 0.0f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();  // before the next step reads what this one wrote
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}
"""


def block_sums(source: str, x: np.ndarray) -> np.ndarray:
    """Compile the source, and return the sums of its kernel's blocks."""
    command = [str(NVCC), "-ptx", "-arch=sm_80", "-lineinfo", "-x", "cu", "-", "-o", "-"]
    ptx = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    sums = np.zeros(-(-x.size // THREADS), np.float32)
    ptxsim.Module(ptx).run("block_sum", sums.shape, (THREADS,), [ptxsim.Input(x), ptxsim.Output(sums), np.int32(x.size)])
    return sums


def main() -> None:
    x = np.arange(300, dtype=np.float32)
    print("sums of blocks:", block_sums(SOURCE, x))
    try:
        block_sums(SOURCE.replace("    __syncthreads();  // before the next step reads what this one wrote\n", ""), x)
    except ptxsim.Fault as fault:
        print("without the barrier of the loop:", fault)


if __name__ == "__main__":
    main()
