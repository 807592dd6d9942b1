// TN of 16-bit operands.
#include "matmul/matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulTN() { return sm90::Tiles<MatmulRole::kTN>(); }

}  // namespace jaxext
