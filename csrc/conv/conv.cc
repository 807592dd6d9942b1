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

Status LaunchConv(ConvRole role, int rank, const ConvProblem& problem, const ConvConfig& config, Dtype operands, Dtype result,
                  const void* first, const void* second, void* out, const Epilogue* epilogue, LaunchStream stream) {
  if (epilogue != nullptr && role != ConvRole::kFprop) return Invalid("conv: an epilogue of another role, want fprop");
  if (const Reason reason = ConvRefuses(role, rank, problem, {ShortName(operands), ShortName(operands), ShortName(result)})) {
    return Invalid("conv: " + *reason);
  }
  const ConvKernel* kernel =
      Find(ConvKernels(), config, [&](const ConvKernel& k) { return k.role == role && k.rank == rank && k.operands == operands; });
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
  for (const void* array : {first, second, static_cast<const void*>(out), static_cast<const void*>(added.bias), added.residual,
                            static_cast<const void*>(added.saved)}) {
    if (!Aligned(array)) return Invalid("conv: an operand or a result does not begin at a multiple of 16 bytes");
  }
  return kernel->launch(problem, parts, result, first, second, out, epilogue, stream);
}

}  // namespace jaxext
