#include "depthwise.h"

#include "depthwise_launch.h"
#include "depthwise_plan.h"

namespace jaxext {
namespace {

using depthwise::IsEmpty;
using depthwise::LaunchGather;
using depthwise::LaunchWgrad;
using depthwise::Make;
using depthwise::Plan;

bool IsAligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// `first` and `second` in the order of the kernel's pointers.
Status Launch(const ConvProblem& problem, ConvRole role, const DepthwiseConfig& config, Dtype dtype, Dtype result, const void* first,
              const void* second, void* third, cudaStream_t stream) {
  // The filter is read, and written, element by element.
  const bool wgrad = role == ConvRole::kWgrad;
  const bool aligned = IsAligned(first, depthwise::kVectorBytes) && IsAligned(wgrad ? second : third, depthwise::kVectorBytes);
  Plan plan;
  if (Status status = Make(problem, role, config, dtype, result, aligned, &plan); !status.ok()) return status;
  if (IsEmpty(problem, role)) return {};
  if (!IsAligned(first, Bytes(dtype)) || !IsAligned(second, Bytes(dtype)) || !IsAligned(third, Bytes(result))) {
    return Invalid("depthwise: an array does not start at a multiple of its elements' size");
  }
  cudaError_t error = cudaErrorInvalidValue;
  switch (dtype) {
    case Dtype::kF32:
      error = wgrad ? LaunchWgrad<float>(plan, first, second, third, stream) : LaunchGather<float>(plan, first, second, third, stream);
      break;
    case Dtype::kBF16:
      error = wgrad ? LaunchWgrad<__nv_bfloat16>(plan, first, second, third, stream)
                    : LaunchGather<__nv_bfloat16>(plan, first, second, third, stream);
      break;
    case Dtype::kF16:
      error = wgrad ? LaunchWgrad<__half>(plan, first, second, third, stream) : LaunchGather<__half>(plan, first, second, third, stream);
      break;
    default:
      break;  // Make has refused it
  }
  if (error != cudaSuccess) return Internal(std::string("depthwise: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace

Status DepthwiseFprop(const ConvProblem& problem, const DepthwiseConfig& config, Dtype dtype, Dtype result, const void* x, const void* w,
                      void* y, cudaStream_t stream) {
  return Launch(problem, ConvRole::kFprop, config, dtype, result, x, w, y, stream);
}

Status DepthwiseDgrad(const ConvProblem& problem, const DepthwiseConfig& config, Dtype dtype, Dtype result, const void* w, const void* y,
                      void* x, cudaStream_t stream) {
  return Launch(problem, ConvRole::kDgrad, config, dtype, result, y, w, x, stream);
}

Status DepthwiseWgrad(const ConvProblem& problem, const DepthwiseConfig& config, Dtype dtype, Dtype result, const void* x, const void* y,
                      void* w, cudaStream_t stream) {
  return Launch(problem, ConvRole::kWgrad, config, dtype, result, x, y, w, stream);
}

}  // namespace jaxext
