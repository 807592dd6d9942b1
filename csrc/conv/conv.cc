// From a configuration to its kernel.
#include "conv/conv.h"

#include <cstdint>
#include <string>

#include "common/refusals.h"

namespace jaxext {

const std::vector<ConvKernel>& ConvKernels() {
  static const auto* const kernels =
      new std::vector<ConvKernel>(Joined({Conv1dFprop(), Conv1dDgrad(), Conv1dWgrad(), Conv2dFprop(), Conv2dDgrad(), Conv2dWgrad(),
                                          Conv3dFprop(), Conv3dDgrad(), Conv3dWgrad()}));
  return *kernels;
}

Status LaunchConv(ConvRole role, int rank, const ConvProblem& problem, const ConvConfig& config, const ProductArrays& arrays,
                  const Epilogue* epilogue, LaunchStream stream) {
  const auto& [operands, result, first, second, out] = arrays;
  if (epilogue != nullptr && role != ConvRole::kFprop) return Invalid("conv: an epilogue of another role, want fprop");
  if (const Reason reason = ConvRefuses(role, rank, problem, {ShortName(operands), ShortName(operands), ShortName(result)})) {
    return Invalid("conv: " + *reason);
  }
  const ConvKernel* kernel =
      Find(ConvKernels(), config, [&](const ConvKernel& k) { return k.role == role && k.rank == rank && k.operands == arrays.operands; });
  if (kernel == nullptr) {
    return Invalid("conv: no kernel with " + Text(config) + " takes " + Name(operands) + " operands in this role");
  }
  if (config.splits > 1 && result != Dtype::kF32) {
    return Invalid(std::string("conv: partial results are ") + Name(result) + ", want float32");
  }
  std::vector<ConvPart> parts;
  if (Status status = PlanConv(role, rank, problem, config, &parts); !status.ok()) return status;
  if (parts.empty()) return {};
  const Epilogue none, &added = epilogue != nullptr ? *epilogue : none;
  if (Reason reason = CheckAligned({first, second, out, added.bias, added.residual, added.saved})) return Invalid("conv: " + *reason);
  return kernel->launch(problem, parts, result, first, second, out, epilogue, stream);
}

}  // namespace jaxext
