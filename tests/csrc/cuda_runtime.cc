// A CUDA runtime that runs nothing: it writes down what our host code asks of it, and fails where it is told to.  It has the functions that
// the kernels' library needs, and no other, so that a library which allocates or waits does not load.  Its devices are those of kDevices.
// Built with our host code by tests/cuda_launches.py, whose calls enter at the end.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/family.h"
#include "matmul/matmul.h"

namespace {

struct FakeDevice {
  int multiprocessors, major, minor;
};
constexpr FakeDevice kDevices[] = {{132, 9, 0}, {78, 9, 0}, {108, 8, 0}, {2, 9, 0}};  // of every four

// Of all threads: names of kernels, and what was set for which device.
std::mutex mutex;
std::map<const void*, std::string>& Names() {
  static auto* names = new std::map<const void*, std::string>;
  return *names;
}
struct Loaded {
  int shared = 0, carveout = cudaSharedmemCarveoutDefault;
};
std::map<std::pair<int, const void*>, Loaded> loaded;
std::map<std::string, std::vector<size_t>> parameters_of;  // name of a kernel -> bytes of its parameters, for those that were told

// Of one thread, as in CUDA.
thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string failing;      // a function, "" for none
thread_local bool only_loads = false;  // launchers get no stream
thread_local std::string asked;        // JSON, comma-separated: descriptors and launches
thread_local std::string prepared;     // and what comes before them
thread_local uint64_t descriptors = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeThreadLocal;  // XLA's
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration configuration;

cudaError_t Answer(const char* function) {
  if (failing != function) return cudaSuccess;
  return last_error = cudaErrorNotPermitted;
}

template <class T>
std::string List(const T* values, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return "[" + text + "]";
}

void Note(const std::string& entry, std::string& to = asked) { to += (to.empty() ? "" : ", ") + ("{" + entry + "}"); }

bool Relaxed() { return capture_mode == cudaStreamCaptureModeRelaxed; }

// Of a kernel on the current device, with the lock.
void NotePrepared(const char* what, const void* kernel, int value) {
  Note("\"" + std::string(what) + "\": " + std::to_string(value) + ", \"kernel\": \"" + Names()[kernel] +
           "\", \"relaxed\": " + (Relaxed() ? "true" : "false"),
       prepared);
}

std::string Sizes(dim3 d) {
  const unsigned sizes[] = {d.x, d.y, d.z};
  return List(sizes, 3);
}

// In hexadecimal digits, one after the other.
std::string Parameters(const std::string& name, void** arguments) {
  std::string text;
  size_t n = 0;
  for (const size_t bytes : parameters_of[name]) {
    const auto* from = static_cast<const unsigned char*>(arguments[n++]);
    for (size_t i = 0; i < bytes; ++i) text += "0123456789abcdef"[from[i] >> 4], text += "0123456789abcdef"[from[i] & 15];
    text += ' ';
  }
  return text;
}

cudaError_t NoteLaunch(const void* kernel, const Configuration& c, dim3 cluster, void** arguments) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded.count({device, kernel}) == 0) return last_error = cudaErrorStreamCaptureUnsupported;  // it would be loaded now
  Note("\"kernel\": \"" + Names()[kernel] + "\", \"device\": " + std::to_string(device) + ", \"grid\": " + Sizes(c.grid) +
       ", \"block\": " + Sizes(c.block) + ", \"cluster\": " + Sizes(cluster) + ", \"shared\": " + std::to_string(c.shared) +
       ", \"allowed\": " + std::to_string(loaded[{device, kernel}].shared) + ", \"carveout\": " +
       std::to_string(loaded[{device, kernel}].carveout) + ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(c.stream)) +
       ", \"parameters\": \"" + Parameters(Names()[kernel], arguments) + "\"");
  return cudaSuccess;
}

void NoteDescriptor(const char* kind, CUtensorMap* map, CUtensorMapDataType type, unsigned rank, void* address, const cuuint64_t* sizes,
                    const cuuint64_t* strides, const std::string& box, const cuuint32_t* steps, CUtensorMapSwizzle swizzle) {
  // What ptxsim/src/asynchronous.cc looks for, and which descriptor of the call it is.
  const uint64_t content[16] = {0x70616d20726f736e, descriptors++};
  std::memcpy(map, content, sizeof(*map));
  Note(std::string("\"descriptor\": \"") + kind + "\", \"aligned\": " + (reinterpret_cast<uintptr_t>(map) % 64 ? "false" : "true") +
       ", \"type\": " + std::to_string(type) + ", \"address\": " + std::to_string(reinterpret_cast<uintptr_t>(address)) +
       ", \"sizes\": " + List(sizes, rank) + ", \"strides\": " + List(strides, rank - 1) + ", " + box +
       ", \"steps\": " + List(steps, rank) + ", \"swizzle\": " + std::to_string(swizzle));
}

CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                     const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (failing == "cuTensorMapEncodeTiled") return CUDA_ERROR_INVALID_VALUE;
  NoteDescriptor("tiled", map, type, rank, address, sizes, strides, "\"box\": " + List(box, rank), steps, swizzle);
  return CUDA_SUCCESS;
}

CUresult EncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const int* lower, const int* upper, cuuint32_t channels, cuuint32_t pixels,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill) {
  if (failing == "cuTensorMapEncodeIm2col") return CUDA_ERROR_INVALID_VALUE;
  const cuuint32_t box[] = {channels, pixels};
  NoteDescriptor("im2col", map, type, rank, address, sizes, strides,
                 "\"box\": " + List(box, 2) + ", \"lower\": " + List(lower, rank - 2) + ", \"upper\": " + List(upper, rank - 2), steps,
                 swizzle);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// What nvcc's host code calls.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Names()[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = const_cast<cudaKernel_t>(static_cast<const CUkern_st*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  const cudaError_t error = Answer("cudaLaunchKernelEx");
  return error != cudaSuccess ? error : NoteLaunch(kernel, {grid, block, shared, stream}, {1, 1, 1}, arguments);
}

// What our code and CUTLASS's call.
cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return Answer("cudaGetDevice");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  const FakeDevice& d = kDevices[number % 4];
  *value = attribute == cudaDevAttrMultiProcessorCount      ? d.multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? d.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? d.minor
                                                            : -1;
  Note("\"asks\": " + std::to_string(attribute), prepared);
  return Answer("cudaDeviceGetAttribute");
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  const cudaError_t error = Answer("cudaFuncGetAttributes");
  if (error != cudaSuccess) return error;
  NotePrepared("load", kernel, device);
  loaded[{device, kernel}];
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::lock_guard<std::mutex> lock(mutex);
  const cudaError_t error = Answer("cudaFuncSetAttribute");
  if (error != cudaSuccess) return error;
  const bool shared = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
  NotePrepared(shared ? "shared" : "carveout", kernel, value);
  (shared ? loaded[{device, kernel}].shared : loaded[{device, kernel}].carveout) = value;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  dim3 cluster = {1, 1, 1};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttributeValue& value = config->attrs[i].val;
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
  }
  const cudaError_t error = Answer("cudaLaunchKernelEx");
  const Configuration launch = {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream};
  return error != cudaSuccess ? error : NoteLaunch(kernel, launch, cluster, arguments);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function =
      std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(EncodeTiled) : reinterpret_cast<void*>(EncodeIm2col);
  *status = cudaDriverEntryPointSuccess;
  Note("\"finds\": \"" + std::string(symbol) + "\"", prepared);
  return Answer("cudaGetDriverEntryPointByVersion");
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorNotPermitted ? "not permitted, says the test" : "?"; }

// What the tests call: from Begin to Told all that is asked of CUDA is written down, as JSON.
void Begin(int32_t on_device, const char* fail) { device = on_device, failing = fail, asked.clear(), prepared.clear(), descriptors = 0; }
void Told(char* answer, int64_t room) { std::strncpy(answer, ("[" + asked + "]").c_str(), room - 1); }

// What came before the descriptors and launches: kernels loaded, attributes set, and what CUDA was asked for.
void Prepared(char* answer, int64_t room) { std::strncpy(answer, ("[" + prepared + "]").c_str(), room - 1); }

// From now on this thread's calls only load their kernels, or launch them.
void OnlyLoad(int32_t only) { only_loads = only; }

jaxext::LaunchStream StreamAt(int64_t address) { return only_loads ? jaxext::LaunchStream() : reinterpret_cast<cudaStream_t>(address); }

// The status, and its message or, if there is none, what was asked of CUDA.
int32_t Conclude(const jaxext::Status& status, char* answer, int64_t room) {
  if (status.ok()) {
    Told(answer, room);
  } else {
    std::strncpy(answer, status.message.c_str(), room - 1);
  }
  return status.code;
}

// The answer of a target.  `attributes` are 8 bytes each, as its fields are.  Arrays, operands before results, are rows of 8 bytes: dtype,
// address, rank and sizes.
int32_t CallTarget(const char* name, int32_t on_device, const char* fail, const int64_t* attributes, int32_t operands, int32_t results,
                   const int64_t* arrays, int64_t stream, char* answer, int64_t room) {
  using namespace jaxext;
  Begin(on_device, fail);
  std::vector<Buffer> given[2];
  for (int i = 0; i < operands + results; ++i) {
    const int64_t rank = arrays[2];
    given[i < operands ? 0 : 1].push_back(
        {static_cast<Dtype>(arrays[0]), {arrays + 3, arrays + 3 + rank}, reinterpret_cast<void*>(arrays[1])});
    arrays += 3 + rank;
  }
  for (const Family& family : Families()) {
    for (const Target& target : family.targets) {
      if (target.name != name) continue;
      Arrays taken(given[0], given[1]);
      return Conclude(target.launch(attributes, taken, StreamAt(stream)), answer, room);
    }
  }
  return Conclude(Internal(std::string("there is no target ") + name), answer, room);
}

// From now on the parameters of this kernel's launches are written down too.
void TellParameters(const char* name, int32_t count, const int64_t* bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  parameters_of[name].assign(bytes, bytes + count);
}

int32_t BandOf(int64_t rows, int64_t columns, int64_t cluster_m, int64_t batch, int64_t multiprocessors) {
  return jaxext::BandOf(rows, columns, cluster_m, batch, multiprocessors);
}

// As the thread captures outside of launches.
int32_t CapturesRelaxed() { return Relaxed(); }

// Whether the thread remembers an error that was told, and that the next launch would be blamed for.
int32_t Remembers() { return last_error != cudaSuccess; }

}  // extern "C"
