// The targets of depthwise convolutions.  All ranks call the same kernels; their names tell them apart in profiles.
#include "depthwise/depthwise.h"

namespace jaxext {
namespace {

const Registered registered({"depthwise", ConvTargets<DepthwiseConfig>("depthwise", DepthwiseRefuses, LaunchDepthwise), {}});

}  // namespace
}  // namespace jaxext
