#include "weight_only/weight_only_launch.cuh"

namespace jaxext::weight_only {

template cudaError_t Launch<__nv_bfloat16>(const Plan&, const WeightOnlyOperands&, void*, LaunchStream);

}  // namespace jaxext::weight_only
