#include "depthwise/depthwise.h"

#include "depthwise/depthwise_launch.h"
#include "depthwise/depthwise_plan.h"

namespace jaxext {
namespace {

using depthwise::IsEmpty;
using depthwise::LaunchGather;
using depthwise::LaunchMma;
using depthwise::LaunchMmaWgrad;
using depthwise::LaunchWgrad;
using depthwise::Make;
using depthwise::Plan;

template <typename T>
cudaError_t LaunchOf(const Plan& plan, bool wgrad, const void* first, const void* second, void* third, const Epilogue* epilogue,
                     LaunchStream stream) {
  if constexpr (sizeof(T) == 2) {  // which tensor cores take
    if (plan.rows > 0 && wgrad) return LaunchMmaWgrad<T>(plan, first, second, third, stream);
    if (plan.rows > 0) return LaunchMma<T>(plan, first, second, third, epilogue, stream);
  }
  if (wgrad) return LaunchWgrad<T>(plan, first, second, third, stream);
  return LaunchGather<T>(plan, first, second, third, epilogue, stream);
}

}  // namespace

Status LaunchDepthwise(ConvRole role, int, const ConvProblem& problem, const DepthwiseConfig& config, const ProductArrays& arrays,
                       const Epilogue* epilogue, LaunchStream stream) {
  if (epilogue != nullptr && role != ConvRole::kFprop) return Invalid("depthwise: an epilogue of another role, want fprop");
  const auto& [dtype, result, one, other, third] = arrays;
  const bool dgrad = role == ConvRole::kDgrad;  // of (w, y) its kernel has the source y first
  const void *const first = dgrad ? other : one, *const second = dgrad ? one : other;
  // The filter is read, and written, element by element.
  const bool wgrad = role == ConvRole::kWgrad;
  const Epilogue none, &added = epilogue != nullptr ? *epilogue : none;
  const bool aligned = Aligned(first, depthwise::kVectorBytes) && Aligned(wgrad ? second : third, depthwise::kVectorBytes) &&
                       Aligned(added.residual, depthwise::kVectorBytes) && Aligned(added.saved, depthwise::kVectorBytes);
  Plan plan;
  if (Status status = Make(problem, role, config, dtype, result, aligned, &plan); !status.ok()) return status;
  if (IsEmpty(problem, role)) return {};
  if (!Aligned(first, Bytes(dtype)) || !Aligned(second, Bytes(dtype)) || !Aligned(third, Bytes(result)) ||
      !Aligned(added.bias, sizeof(float)) || !Aligned(added.residual, Bytes(result)) || !Aligned(added.saved, Bytes(result))) {
    return Invalid("depthwise: an array does not start at a multiple of its elements' size");
  }
  // Make has refused all other dtypes.
  const auto launch = dtype == Dtype::kF32 ? LaunchOf<float> : dtype == Dtype::kF16 ? LaunchOf<__half> : LaunchOf<__nv_bfloat16>;
  const cudaError_t error = launch(plan, wgrad, first, second, third, epilogue, stream);
  if (error != cudaSuccess) return Internal(std::string("depthwise: the launch failed: ") + cudaGetErrorString(error));
  return {};
}

}  // namespace jaxext
