// TN: the tile of a short contracted axis, and of results that would leave most of the last 256 columns empty.
#include "matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulTNPingpong() {
  return {
      sm90::Pingpong<MatmulRole::kTN, Dtype::kBF16, Dtype::kBF16, 128, 192, 64, 2>(),
  };
}

}  // namespace jaxext
