// TN: the tile of large products.
#include "matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulTNLarge() {
  return {
      sm90::Cooperative<MatmulRole::kTN, Dtype::kBF16, Dtype::kBF16, 128, 256, 64, 2>(),
      sm90::Cooperative<MatmulRole::kTN, Dtype::kF16, Dtype::kF16, 128, 256, 64, 2>(),
  };
}

}  // namespace jaxext
