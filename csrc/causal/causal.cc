#include "causal/causal.h"

#include "causal/causal_launch.h"
#include "causal/causal_plan.h"

namespace jaxext {
namespace {

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
  bool vectors = true, elements = Aligned(operands.weight, Bytes(operands.of_weight)) && Aligned(operands.bias, Bytes(operands.of_bias));
  for (const void* array : of_dtype) {
    vectors = vectors && Aligned(array, causal::kVectorBytes);
    elements = elements && Aligned(array, Bytes(operands.dtype));
  }
  for (const void* array : {static_cast<const void*>(operands.seq_idx), static_cast<const void*>(operands.idx_of_states),
                            static_cast<const void*>(results.sums)}) {
    elements = elements && Aligned(array, sizeof(float));
  }
  causal::Plan plan;
  if (Status status = causal::Make(problem, role, config, operands, vectors, &plan); !status.ok()) return status;
  if (causal::IsEmpty(problem, role)) return {};
  if (!elements) return Invalid("causal: an array does not start at a multiple of its elements' size");
  // Make has refused all other dtypes.
  const auto launch = operands.dtype == Dtype::kF32   ? Launch<float>
                      : operands.dtype == Dtype::kF16 ? Launch<__half>
                                                      : Launch<__nv_bfloat16>;
  const cudaError_t error = launch(role, plan, operands, results, stream);
  if (error != cudaSuccess) return Internal(std::string("causal: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace jaxext
