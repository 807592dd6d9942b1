// NT of 16-bit operands.
#include "matmul/matmul_sm90.cuh"

namespace jaxext {

std::vector<MatmulKernel> MatmulNT() { return sm90::Tiles<MatmulRole::kNT>(); }

}  // namespace jaxext
