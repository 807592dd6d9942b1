// What csrc/launcher declares of the CUDA driver, compared with CUDA's header.
#include <cuda.h>

#include "launcher/launcher.cc"

namespace jaxext {
namespace {

static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute) && alignof(LaunchAttribute) == alignof(CUlaunchAttribute));
static_assert(offsetof(LaunchAttribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(offsetof(LaunchAttribute, value.cluster) == offsetof(CUlaunchAttribute, value.clusterDim.x));
static_assert(sizeof(LaunchAttribute::value.cluster) == sizeof(CUlaunchAttributeValue::clusterDim));

static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig) && alignof(LaunchConfig) == alignof(CUlaunchConfig));
static_assert(offsetof(LaunchConfig, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, shared) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));

static_assert(kMaxDynamicSharedSize == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(kNonPortableClusterSizeAllowed == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(kClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(int{kSuccess} == CUDA_SUCCESS && int{kInvalidValue} == CUDA_ERROR_INVALID_VALUE && int{kNotFound} == CUDA_ERROR_NOT_FOUND);
static_assert(int{kInvalidContext} == CUDA_ERROR_INVALID_CONTEXT && int{kUnsupportedPtxVersion} == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);

// The parameters of its functions are of the same number and the same sizes.
template <typename A, typename B>
struct Alike : std::false_type {};
template <typename... A, typename... B>
struct Alike<Result (*)(A...), CUresult (*)(B...)> {
  static constexpr bool kSameNumber = sizeof...(A) == sizeof...(B);
  static constexpr size_t kSizes[2][sizeof...(A)] = {{sizeof(A)...}, {sizeof(B)...}};
  static constexpr bool Same() {
    for (size_t i = 0; i < sizeof...(A); ++i) {
      if (kSizes[0][i] != kSizes[1][i]) return false;
    }
    return kSameNumber;
  }
  static constexpr bool value = Same();
};
#define ALIKE(member, function) static_assert(Alike<decltype(Driver::member), decltype(&function)>::value)
ALIKE(get_error_name, cuGetErrorName);
ALIKE(get_error_string, cuGetErrorString);
ALIKE(ctx_get_device, cuCtxGetDevice);
ALIKE(library_load_data, cuLibraryLoadData);
ALIKE(library_unload, cuLibraryUnload);
ALIKE(library_get_kernel, cuLibraryGetKernel);
ALIKE(kernel_get_function, cuKernelGetFunction);
ALIKE(kernel_set_attribute, cuKernelSetAttribute);
ALIKE(kernel_get_param_info, cuKernelGetParamInfo);
ALIKE(launch_kernel_ex, cuLaunchKernelEx);

}  // namespace
}  // namespace jaxext
