#include "causal/causal.h"

#include "causal/causal_launch.h"
#include "causal/causal_plan.h"

namespace jaxext {
namespace {

bool IsAligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <typename T>
cudaError_t Launch(CausalRole role, const causal::Plan& plan, const CausalOperands& operands, const CausalResults& results,
                   LaunchStream stream) {
  return role == CausalRole::kForward ? causal::LaunchForward<T>(plan, operands, results, stream)
                                      : causal::LaunchBackward<T>(plan, operands, results, stream);
}

}  // namespace

Status LaunchCausal(CausalRole role, const CausalProblem& problem, const CausalConfig& config, const CausalOperands& operands,
                    const CausalResults& results, LaunchStream stream) {
  const void* const of_dtype[] = {operands.x, operands.initial_states, operands.d_y, results.first, results.d_initial_states};
  bool vectors = true,
       elements = IsAligned(operands.weight, Bytes(operands.of_weight)) && IsAligned(operands.bias, Bytes(operands.of_bias));
  for (const void* array : of_dtype) {
    vectors = vectors && IsAligned(array, causal::kVectorBytes);
    elements = elements && IsAligned(array, Bytes(operands.dtype));
  }
  for (const void* array : {static_cast<const void*>(operands.seq_idx), static_cast<const void*>(operands.idx_of_states),
                            static_cast<const void*>(results.sums)}) {
    elements = elements && IsAligned(array, sizeof(float));
  }
  causal::Plan plan;
  if (Status status = causal::Make(problem, role, config, operands, vectors, &plan); !status.ok()) return status;
  if (causal::IsEmpty(problem, role)) return {};
  if (!elements) return Invalid("causal: an array does not start at a multiple of its elements' size");
  cudaError_t error = cudaErrorInvalidValue;
  switch (operands.dtype) {
    case Dtype::kF32:
      error = Launch<float>(role, plan, operands, results, stream);
      break;
    case Dtype::kBF16:
      error = Launch<__nv_bfloat16>(role, plan, operands, results, stream);
      break;
    case Dtype::kF16:
      error = Launch<__half>(role, plan, operands, results, stream);
      break;
    default:
      break;  // Make has refused it
  }
  if (error != cudaSuccess) return Internal(std::string("causal: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace jaxext
