#include "weight_only.h"

#include "weight_only_launch.h"
#include "weight_only_plan.h"

namespace jaxext {
namespace {

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % weight_only::kAlignment == 0; }

}  // namespace

Status WeightOnly(const WeightOnlyProblem& problem, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, void* result,
                  cudaStream_t stream) {
  weight_only::Plan plan;
  if (Status status = weight_only::Make(problem, config, operands, &plan); !status.ok()) return status;
  if (weight_only::IsEmpty(problem)) return {};
  const std::pair<const char*, const void*> arrays[] = {{"x", operands.x}, {"w", operands.q}, {"the scale", operands.scale}, {"y", result}};
  for (const auto& [name, array] : arrays) {
    if (!IsAligned(array)) return Invalid(std::string("weight_only: ") + name + " does not start at a multiple of 16 bytes");
  }
  const cudaError_t error = operands.dtype == Dtype::kF16 ? weight_only::Launch<__half>(plan, operands, result, stream)
                                                          : weight_only::Launch<__nv_bfloat16>(plan, operands, result, stream);
  if (error != cudaSuccess) return Internal(std::string("weight_only: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace jaxext
