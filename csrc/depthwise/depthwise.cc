#include "depthwise/depthwise.h"

#include "depthwise/depthwise_launch.h"
#include "depthwise/depthwise_plan.h"

namespace jaxext {
namespace {

using depthwise::IsEmpty;
using depthwise::LaunchGather;
using depthwise::LaunchMma;
using depthwise::LaunchWgrad;
using depthwise::Make;
using depthwise::Plan;

bool IsAligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Of a dtype that tensor cores take.
template <typename T>
cudaError_t LaunchShort(const Plan& plan, bool wgrad, const void* first, const void* second, void* third, const Epilogue* epilogue,
                        LaunchStream stream) {
  if (wgrad) return LaunchWgrad<T>(plan, first, second, third, stream);
  return plan.rows > 0 ? LaunchMma<T>(plan, first, second, third, epilogue, stream)
                       : LaunchGather<T>(plan, first, second, third, epilogue, stream);
}

// `first` and `second` in the order of the kernel's pointers.
Status Launch(const ConvProblem& problem, ConvRole role, const DepthwiseConfig& config, Dtype dtype, Dtype result, const void* first,
              const void* second, void* third, const Epilogue* epilogue, LaunchStream stream) {
  // The filter is read, and written, element by element.
  const bool wgrad = role == ConvRole::kWgrad;
  const Epilogue none, &added = epilogue != nullptr ? *epilogue : none;
  const bool aligned = IsAligned(first, depthwise::kVectorBytes) && IsAligned(wgrad ? second : third, depthwise::kVectorBytes) &&
                       IsAligned(added.residual, depthwise::kVectorBytes) && IsAligned(added.saved, depthwise::kVectorBytes);
  Plan plan;
  if (Status status = Make(problem, role, config, dtype, result, aligned, &plan); !status.ok()) return status;
  if (IsEmpty(problem, role)) return {};
  if (!IsAligned(first, Bytes(dtype)) || !IsAligned(second, Bytes(dtype)) || !IsAligned(third, Bytes(result)) ||
      !IsAligned(added.bias, sizeof(float)) || !IsAligned(added.residual, Bytes(result)) || !IsAligned(added.saved, Bytes(result))) {
    return Invalid("depthwise: an array does not start at a multiple of its elements' size");
  }
  cudaError_t error = cudaErrorInvalidValue;
  switch (dtype) {
    case Dtype::kF32:
      error = wgrad ? LaunchWgrad<float>(plan, first, second, third, stream)
                    : LaunchGather<float>(plan, first, second, third, epilogue, stream);
      break;
    case Dtype::kBF16:
      error = LaunchShort<__nv_bfloat16>(plan, wgrad, first, second, third, epilogue, stream);
      break;
    case Dtype::kF16:
      error = LaunchShort<__half>(plan, wgrad, first, second, third, epilogue, stream);
      break;
    default:
      break;  // Make has refused it
  }
  if (error != cudaSuccess) return Internal(std::string("depthwise: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace

Status LaunchDepthwise(ConvRole role, const ConvProblem& problem, const DepthwiseConfig& config, Dtype dtype, Dtype result,
                       const void* first, const void* second, void* out, const Epilogue* epilogue, LaunchStream stream) {
  if (epilogue != nullptr && role != ConvRole::kFprop) return Invalid("depthwise: an epilogue of another role, want fprop");
  const bool dgrad = role == ConvRole::kDgrad;  // of (w, y) its kernel has the source y first
  return Launch(problem, role, config, dtype, result, dgrad ? second : first, dgrad ? first : second, out, epilogue, stream);
}

}  // namespace jaxext
