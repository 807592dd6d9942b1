// NN with an epilogue: a tile for large products, and one for a short contracted axis.
#include "matmul/matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulNNFused() {
  return {
      sm90::Fused<Dtype::kBF16, 128, 256, 64, 2, sm90::Schedule::kCooperative>(),
      sm90::Fused<Dtype::kF16, 128, 256, 64, 2, sm90::Schedule::kCooperative>(),
      sm90::Fused<Dtype::kBF16, 64, 128, 64, 1, sm90::Schedule::kPingpong>(),
      sm90::Fused<Dtype::kF16, 64, 128, 64, 1, sm90::Schedule::kPingpong>(),
  };
}

}  // namespace jaxext
