#include "causal/causal_launch.cuh"

namespace jaxext::causal {

template cudaError_t LaunchForward<__half>(const Plan&, const CausalOperands&, const CausalResults&, LaunchStream);
template cudaError_t LaunchBackward<__half>(const Plan&, const CausalOperands&, const CausalResults&, LaunchStream);

}  // namespace jaxext::causal
