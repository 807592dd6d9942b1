#include "ragged/ragged_sm90.cuh"

namespace jaxext {

std::vector<RaggedKernel> RaggedNN() { return sm90::RaggedKernelsOf<MatmulRole::kNN>(); }

}  // namespace jaxext
