// NN: the tile of skinny products and of float32 results, of which partial ones are made.
#include "matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulNNSkinny() {
  return {
      sm90::Pingpong<MatmulRole::kNN, Dtype::kBF16, Dtype::kF32, 64, 128, 64, 1>(),
      sm90::Pingpong<MatmulRole::kNN, Dtype::kF16, Dtype::kF32, 64, 128, 64, 1>(),
  };
}

}  // namespace jaxext
