// From a configuration to its kernel.
#include "conv/conv.h"

#include <cstdint>
#include <string>

#include "common/refusals.h"

namespace jaxext {
namespace {

const ConvKernel* Find(ConvRole role, int rank, const ConvConfig& config, Dtype operands) {
  for (const ConvKernel& kernel : ConvKernels()) {
    const ConvConfig& c = kernel.config;
    if (kernel.role == role && kernel.rank == rank && kernel.operands == operands && c.tile_m == config.tile_m &&
        c.tile_n == config.tile_n && c.cluster == config.cluster) {
      return &kernel;
    }
  }
  return nullptr;
}

}  // namespace

const std::vector<ConvKernel>& ConvKernels() {
  static const std::vector<ConvKernel>* const kernels = [] {
    auto* all = new std::vector<ConvKernel>;
    for (const auto& part : {Conv1dFprop(), Conv1dDgrad(), Conv1dWgrad(), Conv2dFprop(), Conv2dDgrad(), Conv2dWgrad(), Conv3dFprop(),
                             Conv3dDgrad(), Conv3dWgrad()}) {
      all->insert(all->end(), part.begin(), part.end());
    }
    return all;
  }();
  return *kernels;
}

Status Conv(ConvRole role, int rank, const ConvProblem& problem, const ConvConfig& config, Dtype operands, Dtype result, const void* first,
            const void* second, void* out, const Epilogue* epilogue, LaunchStream stream) {
  if (epilogue != nullptr && role != ConvRole::kFprop) return Invalid("conv: an epilogue of another role, want fprop");
  if (const Reason reason = ConvRefuses(role, rank, problem, {ShortName(operands), ShortName(operands), ShortName(result)})) {
    return Invalid("conv: " + *reason);
  }
  const ConvKernel* kernel = Find(role, rank, config, operands);
  if (kernel == nullptr) {
    return Invalid("conv: no kernel of tiles " + std::to_string(config.tile_m) + "x" + std::to_string(config.tile_n) + " in clusters of " +
                   std::to_string(config.cluster) + " takes " + Name(operands) + " operands in this role");
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
