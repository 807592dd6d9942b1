#include "weight_only/weight_only.h"

#include "weight_only/weight_only_launch.h"
#include "weight_only/weight_only_plan.h"
#include "weight_only/wide_weight_only.h"

namespace jaxext {

const std::vector<WideWeightOnlyKernel>& WideWeightOnlyKernels() {
  static const auto* const kernels = new std::vector<WideWeightOnlyKernel>(Joined({WideWeightOnlyBF16(), WideWeightOnlyF16()}));
  return *kernels;
}

namespace {

Status LaunchWide(const weight_only::Plan& plan, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, void* result,
                  LaunchStream stream) {
  for (const WideWeightOnlyKernel& kernel : WideWeightOnlyKernels()) {
    if (kernel.operands == operands.dtype && kernel.bits == plan.bits && kernel.config.tile_m == config.tile_m) {
      return kernel.launch(plan, operands, result, stream);
    }
  }
  return Internal("weight_only: no kernel was compiled for this tile");
}

}  // namespace

Status LaunchWeightOnly(const WeightOnlyProblem& problem, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, void* result,
                        LaunchStream stream) {
  weight_only::Plan plan;
  if (Status status = weight_only::Make(problem, config, operands, &plan); !status.ok()) return status;
  if (weight_only::IsEmpty(problem)) return {};
  const std::pair<const char*, const void*> arrays[] = {{"x", operands.x}, {"w", operands.q}, {"the scale", operands.scale}, {"y", result}};
  for (const auto& [name, array] : arrays) {
    if (!Aligned(array)) return Invalid(std::string("weight_only: ") + name + " does not start at a multiple of 16 bytes");
  }
  if (plan.wide) return LaunchWide(plan, config, operands, result, stream);
  const cudaError_t error = operands.dtype == Dtype::kF16 ? weight_only::Launch<__half>(plan, operands, result, stream)
                                                          : weight_only::Launch<__nv_bfloat16>(plan, operands, result, stream);
  if (error != cudaSuccess) return Internal(std::string("weight_only: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace jaxext
