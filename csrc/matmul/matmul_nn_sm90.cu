// NN of 16-bit operands.
#include "matmul/matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulNN() { return sm90::Tiles<MatmulRole::kNN>(); }

}  // namespace jaxext
