#include "weight_only_launch.cuh"

namespace jaxext::weight_only {

template cudaError_t Launch<__half>(const Plan&, const WeightOnlyOperands&, void*, cudaStream_t);

}  // namespace jaxext::weight_only
