#include "ragged/ragged_sm90.cuh"

namespace jaxext {

std::vector<RaggedKernel> RaggedNT() { return sm90::RaggedKernelsOf<MatmulRole::kNT>(); }

}  // namespace jaxext
