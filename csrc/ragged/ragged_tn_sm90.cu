#include "ragged/ragged_sm90.cuh"

namespace jaxext {

std::vector<RaggedKernel> RaggedTN() { return sm90::RaggedKernelsOf<MatmulRole::kTN>(); }

}  // namespace jaxext
