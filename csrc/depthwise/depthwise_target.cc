// The targets of depthwise convolutions.  All ranks call the same kernels; their names tell them apart in profiles.
#include "common/conv_arrays.h"
#include "depthwise/depthwise.h"
#include "depthwise/depthwise_plan.h"

namespace jaxext {
namespace {

Status Launch(ConvRole role, int, const ConvProblem& p, const DepthwiseConfig& config, const ConvArrays& arrays, const Epilogue* epilogue,
              LaunchStream stream) {
  return LaunchDepthwise(role, p, config, arrays.operands, arrays.result, arrays.first, arrays.second, arrays.out, epilogue, stream);
}

const Registered registered({"depthwise",
                             Joined({ConvTargets<DepthwiseConfig>("depthwise", 1, DepthwiseRefuses, Launch),
                                     ConvTargets<DepthwiseConfig>("depthwise", 2, DepthwiseRefuses, Launch),
                                     ConvTargets<DepthwiseConfig>("depthwise", 3, DepthwiseRefuses, Launch)}),
                             {}});

}  // namespace
}  // namespace jaxext
