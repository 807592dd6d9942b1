// NT of 8-bit floats, the only role in which wgmma takes them.  Sums are moved to float32 registers as they grow, so a thread has registers
// for tiles half as wide.
#include "matmul/matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulNTE4M3() {
  return {
      sm90::Cooperative<MatmulRole::kNT, Dtype::kE4M3, Dtype::kBF16, 128, 128, 128, 2>(),
      sm90::Cooperative<MatmulRole::kNT, Dtype::kE4M3, Dtype::kF32, 128, 128, 128, 2>(),
      sm90::Pingpong<MatmulRole::kNT, Dtype::kE4M3, Dtype::kF32, 64, 128, 128, 1>(),
  };
}

}  // namespace jaxext
