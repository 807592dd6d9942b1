// The launcher of kernels that users give as text: one handler of XLA's FFI that loads the image of a kernel, a cubin or PTX, through the
// CUDA driver and launches it.  It needs neither CUDA's headers nor its toolkit: the driver is opened when the first kernel is loaded.
//
//   image                  base64 of a cubin or of PTX
//   digest                 a text that identifies the image
//   name                   the name of the kernel in the image
//   grid, block, cluster   three int64 each; cluster 1, 1, 1: none
//   shared                 bytes of dynamic shared memory
//   parameters             two int64 for each parameter of the kernel: 0 and the index of a buffer among the operands, then the results; or
//                          1, 2, 4 or 8, the bytes of a scalar, and its bits
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxext {
namespace {

namespace ffi = ::xla::ffi;

// Those parts of cuda.h that are needed; tests/csrc/launcher_abi.cc compares.
enum Result { kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kUnsupportedPtxVersion = 222, kNotFound = 500 };
constexpr int kMaxDynamicSharedSize = 8, kNonPortableClusterSizeAllowed = 14;  // CUfunction_attribute
constexpr int kClusterDimension = 4;                                           // CUlaunchAttributeID
constexpr int kPortableClusterSize = 8;

struct LaunchAttribute {
  int id;
  union alignas(8) {
    char bytes[64];
    unsigned cluster[3];
  } value;
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  std::string missing;  // the reason why there is none
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*ctx_get_device)(int*);
  Result (*library_load_data)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*library_unload)(void*);
  Result (*library_get_kernel)(void**, void*, const char*);
  Result (*kernel_get_function)(void**, void*);
  Result (*kernel_set_attribute)(int, int, void*, int);
  Result (*kernel_get_param_info)(void*, size_t, size_t*, size_t*);  // null before CUDA 12.4
  Result (*launch_kernel_ex)(const LaunchConfig*, void*, void**, void**);
};

const Driver& TheDriver() {
  static const auto* const driver = [] {
    auto* found = new Driver{};
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const why = dlerror();
      found->missing = std::string("no CUDA driver: libcuda.so.1 does not load (") + (why != nullptr ? why : "?") + ")";
      return found;
    }
    const auto find = [&](auto& function, const char* name, bool optional = false) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr && !optional && found->missing.empty()) {
        found->missing = std::string("the CUDA driver has no ") + name + ", want one of CUDA 12.0 or newer";
      }
    };
    find(found->get_error_name, "cuGetErrorName"), find(found->get_error_string, "cuGetErrorString");
    find(found->ctx_get_device, "cuCtxGetDevice");
    find(found->library_load_data, "cuLibraryLoadData"), find(found->library_unload, "cuLibraryUnload");
    find(found->library_get_kernel, "cuLibraryGetKernel"), find(found->kernel_get_function, "cuKernelGetFunction");
    find(found->kernel_set_attribute, "cuKernelSetAttribute"), find(found->launch_kernel_ex, "cuLaunchKernelEx");
    find(found->kernel_get_param_info, "cuKernelGetParamInfo", /*optional=*/true);
    return found;
  }();
  return *driver;
}

using Numbers = ffi::Span<const int64_t>;

template <typename Values>
std::string Join(const Values& values) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return text;
}

struct Call {
  std::string_view image, digest, name;
  Numbers grid, block, cluster, parameters;
  int64_t shared = 0;

  double cluster_size() const { return 1.0 * cluster[0] * cluster[1] * cluster[2]; }

  ffi::Error Invalid(const std::string& message) const {
    return ffi::Error::InvalidArgument((name.empty() ? "jaxext_raw_v1: " : "kernel " + std::string(name) + ": ") + message);
  }

  ffi::Error Failed(const char* function, Result result, const char* hint = "") const {
    const char *code = nullptr, *text = nullptr;
    TheDriver().get_error_name(result, &code), TheDriver().get_error_string(result, &text);
    std::string message = "kernel " + std::string(name) + ": " + function + " failed with ";
    message +=
        (code != nullptr ? code : "error " + std::to_string(result)) + std::string(" (") + (text != nullptr ? text : "unknown") + ")";
    message += hint + ("; grid (" + Join(grid)) + "), block (" + Join(block) + "), cluster (" + Join(cluster) + "), ";
    return ffi::Error::Internal(message + std::to_string(shared) + " bytes of dynamic shared memory");
  }

  // The attributes of the FFI call; `buffers` is the number of operands and results.
  ffi::Error Decode(const ffi::Dictionary& given, size_t buffers) {
    std::string wrong;
    const auto get = [&](const char* field, auto* value, const char* wanted) {
      const auto found = given.get<std::remove_pointer_t<decltype(value)>>(field);
      if (found.has_value()) *value = *found;
      if (!found.has_value() && wrong.empty()) wrong = std::string("attribute ") + field + " is missing or of another type, want " + wanted;
    };
    get("name", &name, "a string"), get("digest", &digest, "a string"), get("image", &image, "a string");
    get("grid", &grid, "int64s"), get("block", &block, "int64s"), get("cluster", &cluster, "int64s");
    get("shared", &shared, "an int64"), get("parameters", &parameters, "int64s");
    if (!wrong.empty()) return Invalid(wrong);
    if (given.size() != 8) return Invalid(std::to_string(given.size()) + " attributes, want 8");
    const auto positive = [&](const char* field, const Numbers& sizes) {
      bool right = sizes.size() == 3;
      for (const int64_t size : sizes) right = right && size >= 1 && size <= INT32_MAX;
      if (!right && wrong.empty()) wrong = std::string("attribute ") + field + " is (" + Join(sizes) + "), want three positive int32";
    };
    positive("grid", grid), positive("block", block), positive("cluster", cluster);
    if (!wrong.empty()) return Invalid(wrong);
    if (shared < 0 || shared > INT32_MAX) return Invalid("attribute shared is " + std::to_string(shared) + ", want a number of bytes");
    if (parameters.size() % 2 != 0)
      return Invalid("attribute parameters has " + std::to_string(parameters.size()) + " numbers, want pairs");
    for (size_t i = 0; i < parameters.size(); i += 2) {
      const int64_t bytes = parameters[i], value = parameters[i + 1];
      const std::string which = "parameter " + std::to_string(i / 2);
      if (bytes != 0 && bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) {
        return Invalid(which + " has " + std::to_string(bytes) + " bytes, want 0 (a pointer), 1, 2, 4 or 8");
      }
      if (bytes == 0 && (value < 0 || value >= static_cast<int64_t>(buffers))) {
        return Invalid(which + " is buffer " + std::to_string(value) + ", there are " + std::to_string(buffers));
      }
    }
    return ffi::Error::Success();
  }
};

// The bytes, with a null for each padding character, which does no harm to an image; none if the text is not base64.
std::optional<std::string> DecodeBase64(std::string_view text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  signed char values[256];
  for (int i = 0; i < 256; ++i) values[i] = -1;
  for (size_t i = 0; i < kDigits.size(); ++i) values[static_cast<unsigned char>(kDigits[i])] = static_cast<signed char>(i);
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.back() != '=' ? 0 : text[text.size() - 2] != '=' ? 1 : 2;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3 + 1);
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const int value = i < text.size() - padding ? values[static_cast<unsigned char>(text[i])] : 0;
    if (value < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 == 3) bytes += {static_cast<char>(bits >> 16), static_cast<char>(bits >> 8), static_cast<char>(bits)};
  }
  return bytes;
}

struct Kernel {
  void* handle = nullptr;                    // CUkernel, which is for every device; null: not loaded
  std::optional<std::vector<size_t>> sizes;  // of its parameters, if the driver tells them
  struct Allowed {
    int64_t shared = 0;
    bool large_clusters = false;
  };
  std::map<int, Allowed> allowed;  // by device

  ffi::Error Load(const Call& call) {
    const Driver& driver = TheDriver();
    const std::optional<std::string> image = DecodeBase64(call.image);
    if (!image) return call.Invalid("attribute image is not base64");
    void* library = nullptr;
    Result result =
        driver.library_load_data(&library, image->c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);  // PTX has to end with a null
    if (result != kSuccess) {
      const bool newer = result == kUnsupportedPtxVersion;
      return call.Failed("cuLibraryLoadData", result, newer ? ": the driver is older than the compiler that made the PTX" : "");
    }
    if (result = driver.library_get_kernel(&handle, library, std::string(call.name).c_str()); result != kSuccess) {
      handle = nullptr;
      driver.library_unload(library);
      return call.Failed("cuLibraryGetKernel", result, result == kNotFound ? ": the image has no kernel of this name" : "");
    }
    return ffi::Error::Success();
  }

  // Compares the parameters with those of the kernel.
  ffi::Error Check(const Call& call) {
    const Driver& driver = TheDriver();
    if (!sizes && driver.kernel_get_param_info != nullptr) {
      std::vector<size_t> found;
      size_t offset = 0, size = 0;
      Result result;
      while ((result = driver.kernel_get_param_info(handle, found.size(), &offset, &size)) == kSuccess) found.push_back(size);
      if (result == kInvalidValue) sizes = std::move(found);  // beyond the last one
    }
    std::vector<size_t> given;
    for (size_t i = 0; i < call.parameters.size(); i += 2) given.push_back(call.parameters[i] == 0 ? sizeof(void*) : call.parameters[i]);
    if (!sizes || given == *sizes) return ffi::Error::Success();
    return call.Invalid("its parameters have (" + Join(*sizes) + ") bytes, the call gives (" + Join(given) + ")");
  }

  // Allows what the driver refuses unless it is asked.  A limit is never lowered, since other calls of this kernel rely on it.
  ffi::Error Allow(const Call& call, bool launches) {
    const bool large = call.cluster_size() > kPortableClusterSize;
    if (call.shared == 0 && !large) return ffi::Error::Success();
    const Driver& driver = TheDriver();
    int device = 0;
    if (const Result result = driver.ctx_get_device(&device); result != kSuccess) {
      return result == kInvalidContext && !launches ? ffi::Error::Success() : call.Failed("cuCtxGetDevice", result);
    }
    Allowed& now = allowed[device];
    const auto set = [&](int attribute, int64_t value) {
      return driver.kernel_set_attribute(attribute, static_cast<int>(value), handle, device);
    };
    if (call.shared > now.shared) {
      const Result result = set(kMaxDynamicSharedSize, call.shared);
      if (result != kSuccess) return call.Failed("cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)", result);
      now.shared = call.shared;
    }
    if (large && !now.large_clusters) {
      const Result result = set(kNonPortableClusterSizeAllowed, 1);
      if (result != kSuccess) return call.Failed("cuKernelSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)", result);
      now.large_clusters = true;
    }
    return ffi::Error::Success();
  }
};

// The kernel of a call, which is loaded once for the process and may be launched with the call's configuration.
ffi::Error Find(const Call& call, bool launches, void** handle) {
  static auto* const mutex = new std::mutex;  // never destroyed: at exit the driver may be gone before
  static auto* const kernels = new std::map<std::string, Kernel>;
  std::string key(call.digest);
  key.append(1, '\0').append(call.name);
  const std::lock_guard lock(*mutex);
  Kernel& kernel = (*kernels)[key];
  if (kernel.handle == nullptr) {
    if (ffi::Error error = kernel.Load(call); error.failure()) return error;
  }
  if (ffi::Error error = kernel.Check(call); error.failure()) return error;
  *handle = kernel.handle;
  return kernel.Allow(call, launches);
}

ffi::Error Run(bool launches, void* stream, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
               const ffi::Dictionary& given) {
  Call call;
  if (ffi::Error error = call.Decode(given, operands.size() + results.size()); error.failure()) return error;
  const Driver& driver = TheDriver();
  if (!driver.missing.empty()) return ffi::Error::Internal("kernel " + std::string(call.name) + ": " + driver.missing);
  void* kernel = nullptr;
  if (ffi::Error error = Find(call, launches, &kernel); error.failure()) return error;
  if (!launches) {
    void* function = nullptr;  // its code is loaded into the context now, so that a launch in the capture of a CUDA graph loads nothing
    const Result result = driver.kernel_get_function(&function, kernel);
    return result == kSuccess || result == kInvalidContext ? ffi::Error::Success() : call.Failed("cuKernelGetFunction", result);
  }
  std::vector<void*> buffers, parameters;
  buffers.reserve(operands.size() + results.size()), parameters.reserve(call.parameters.size() / 2);
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(i);
    buffers.push_back(buffer.has_value() ? buffer->untyped_data() : nullptr);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    buffers.push_back(buffer.has_value() ? (*buffer)->untyped_data() : nullptr);
  }
  for (size_t i = 0; i < call.parameters.size(); i += 2) {
    const int64_t* const value = &call.parameters[i + 1];  // of a scalar the lowest bytes count, which come first
    parameters.push_back(call.parameters[i] == 0 ? static_cast<void*>(&buffers[*value]) : const_cast<int64_t*>(value));
  }
  LaunchAttribute cluster{};
  LaunchConfig config{};
  for (int i = 0; i < 3; ++i) {
    config.grid[i] = static_cast<unsigned>(call.grid[i]), config.block[i] = static_cast<unsigned>(call.block[i]);
    cluster.value.cluster[i] = static_cast<unsigned>(call.cluster[i]);
  }
  cluster.id = kClusterDimension;
  config.shared = static_cast<unsigned>(call.shared);
  config.stream = stream;
  config.attributes = &cluster, config.attribute_count = call.cluster_size() > 1;
  const Result result = driver.launch_kernel_ex(&config, kernel, parameters.data(), nullptr);
  return result == kSuccess ? ffi::Error::Success() : call.Failed("cuLaunchKernelEx", result);
}

template <bool kLaunches>
ffi::Error Handle(void* stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary given) {
  return Run(kLaunches, stream, operands, results, given);
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().RemainingArgs().RemainingRets().Attrs(); }

}  // namespace
}  // namespace jaxext

extern "C" {

__attribute__((visibility("default"))) XLA_FFI_Error* jaxext_raw_execute(XLA_FFI_CallFrame* frame) {
  static auto* handler = jaxext::Bind().To(jaxext::Handle<true>, {jaxext::ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

// XLA passes what it will pass to execute: the binding of that stage serves this one too, as in common/ffi.cc.
__attribute__((visibility("default"))) XLA_FFI_Error* jaxext_raw_initialize(XLA_FFI_CallFrame* frame) {
  static auto* handler = jaxext::Bind().To(jaxext::Handle<false>).release();
  XLA_FFI_CallFrame as_execute = *frame;
  const bool right = frame->stage == XLA_FFI_ExecutionStage_INITIALIZE;
  as_execute.stage = right ? XLA_FFI_ExecutionStage_EXECUTE : XLA_FFI_ExecutionStage_INITIALIZE;  // which it refuses
  return handler->Call(&as_execute);
}

__attribute__((visibility("default"))) void jaxext_launcher_ffi_version(int* major, int* minor) {
  *major = XLA_FFI_API_MAJOR, *minor = XLA_FFI_API_MINOR;
}

}  // extern "C"
