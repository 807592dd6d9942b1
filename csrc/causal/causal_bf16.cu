#include "causal/causal_launch.cuh"

namespace jaxext::causal {

template cudaError_t LaunchForward<__nv_bfloat16>(const Plan&, const CausalOperands&, const CausalResults&, LaunchStream);
template cudaError_t LaunchBackward<__nv_bfloat16>(const Plan&, const CausalOperands&, const CausalResults&, LaunchStream);

}  // namespace jaxext::causal
