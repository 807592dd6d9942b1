#include "causal/causal_launch.cuh"

namespace jaxext::causal {

template cudaError_t LaunchForward<float>(const Plan&, const CausalOperands&, const CausalResults&, LaunchStream);
template cudaError_t LaunchBackward<float>(const Plan&, const CausalOperands&, const CausalResults&, LaunchStream);

}  // namespace jaxext::causal
