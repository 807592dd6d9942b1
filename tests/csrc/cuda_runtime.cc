// A CUDA runtime that runs nothing: it writes down what our host code asks of it, and fails where it is told to.  It has the functions that
// the kernels' library needs, and no other, so that a library which allocates or waits does not load.  Its devices are those of kDevices.
// Built with libjaxext_kernels.a by tests/cuda_launches.py, whose calls enter at the end.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "causal/causal.h"
#include "conv/conv.h"
#include "depthwise/depthwise.h"
#include "gram/gram.h"
#include "matmul/matmul.h"
#include "pieces/pieces.h"
#include "ragged/ragged.h"
#include "scaled/scaled.h"
#include "weight_only/weight_only.h"

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
  // What tests/ptx/asynchronous.cc looks for, and which descriptor of the call it is.
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

// Problems and configs are the fields of their structs, in order, and `epilogue` is too, or null.  Addresses are those of both operands and
// the result, the stream, and the places of a ragged product.
int32_t Call(int32_t family, int32_t rank, int32_t role, int32_t on_device, const char* fail, int32_t operands, int32_t result,
             const int64_t* problem, const int64_t* config, const int64_t* addresses, const int64_t* epilogue, char* answer, int64_t room) {
  using namespace jaxext;
  Begin(on_device, fail);
  const auto* first = reinterpret_cast<const void*>(addresses[0]);
  const auto* second = reinterpret_cast<const void*>(addresses[1]);
  auto* out = reinterpret_cast<void*>(addresses[2]);
  const jaxext::LaunchStream stream = StreamAt(addresses[3]);
  const auto dtype = static_cast<Dtype>(operands), of_result = static_cast<Dtype>(result);
  Epilogue fused;
  if (epilogue) {
    fused = {static_cast<Activation>(epilogue[0]), reinterpret_cast<const float*>(epilogue[1]), reinterpret_cast<const void*>(epilogue[2]),
             reinterpret_cast<void*>(epilogue[3])};
  }
  const Epilogue* added = epilogue ? &fused : nullptr;
  Status status;
  if (family == 0) {
    status = Matmul(static_cast<MatmulRole>(role), *reinterpret_cast<const MatmulProblem*>(problem),
                    *reinterpret_cast<const MatmulConfig*>(config), dtype, of_result, first, second, out, added, stream);
  } else if (family == 1) {
    status = Conv(static_cast<ConvRole>(role), rank, *reinterpret_cast<const ConvProblem*>(problem),
                  *reinterpret_cast<const ConvConfig*>(config), dtype, of_result, first, second, out, added, stream);
  } else if (family == 8) {
    status = Pieces(static_cast<MatmulRole>(role), *reinterpret_cast<const MatmulProblem*>(problem),
                    *reinterpret_cast<const PiecesConfig*>(config), dtype, of_result, first, second, out, stream);
  } else if (family == 3) {
    status = Ragged(static_cast<MatmulRole>(role), *reinterpret_cast<const RaggedProblem*>(problem),
                    *reinterpret_cast<const RaggedConfig*>(config), dtype, of_result, first, second,
                    reinterpret_cast<const int32_t*>(addresses[4]), out, stream);
  } else {
    status = Depthwise(static_cast<ConvRole>(role), *reinterpret_cast<const ConvProblem*>(problem),
                       *reinterpret_cast<const DepthwiseConfig*>(config), dtype, of_result, first, second, out, added, stream);
  }
  return Conclude(status, answer, room);
}

// The same of a causal convolution.  `numbers`: the dtypes of x, weight and bias, and the activation.  `addresses`: those of
// CausalOperands and CausalResults, in order, 0 for one that is not there, and the stream.
int32_t CallCausal(int32_t role, int32_t on_device, const char* fail, const int64_t* numbers, const int64_t* problem, const int64_t* config,
                   const int64_t* addresses, char* answer, int64_t room) {
  using namespace jaxext;
  Begin(on_device, fail);
  const auto at = [&](int i) { return reinterpret_cast<void*>(addresses[i]); };
  const auto dtype = [&](int i) { return static_cast<Dtype>(numbers[i]); };
  const CausalOperands operands = {dtype(0), dtype(1), dtype(2), static_cast<Activation>(numbers[3]), at(0),
                                   at(1),    at(2),    at(3),    static_cast<const int32_t*>(at(4)),  static_cast<const int32_t*>(at(5)),
                                   at(6)};
  const Status status =
      Causal(static_cast<CausalRole>(role), *reinterpret_cast<const CausalProblem*>(problem),
             *reinterpret_cast<const CausalConfig*>(config), operands, {at(7), static_cast<float*>(at(8)), at(9)}, StreamAt(addresses[10]));
  return Conclude(status, answer, room);
}

// The same of a weight-only product.  `dtypes`: of x and of the result.  `addresses`: of x, the weight, its scale and the result, and the
// stream.
int32_t CallWeightOnly(int32_t on_device, const char* fail, const int64_t* dtypes, const int64_t* problem, const int64_t* config,
                       const int64_t* addresses, char* answer, int64_t room) {
  using namespace jaxext;
  Begin(on_device, fail);
  const auto at = [&](int i) { return reinterpret_cast<void*>(addresses[i]); };
  const WeightOnlyOperands operands = {static_cast<Dtype>(dtypes[0]), static_cast<Dtype>(dtypes[1]), at(0), at(1),
                                       static_cast<const float*>(at(2))};
  const Status status = WeightOnly(*reinterpret_cast<const WeightOnlyProblem*>(problem), *reinterpret_cast<const WeightOnlyConfig*>(config),
                                   operands, at(3), StreamAt(addresses[4]));
  return Conclude(status, answer, room);
}

// The same of a scaled product.  `dtypes`: of both factors and of the result.  `strides`: of the left scale and of the right one.
// `addresses`: those of both factors, their scales, and the result, and the stream.
int32_t CallScaled(int32_t on_device, const char* fail, const int64_t* dtypes, const int64_t* problem, const int64_t* config,
                   const int64_t* strides, const int64_t* addresses, char* answer, int64_t room) {
  using namespace jaxext;
  Begin(on_device, fail);
  const auto at = [&](int i) { return reinterpret_cast<void*>(addresses[i]); };
  const auto dtype = [&](int i) { return static_cast<Dtype>(dtypes[i]); };
  const Scale left = {static_cast<const float*>(at(2)), strides[0], strides[1], strides[2]};
  const Scale right = {static_cast<const float*>(at(3)), strides[3], strides[4], strides[5]};
  const Status status = Scaled(*reinterpret_cast<const ScaledProblem*>(problem), *reinterpret_cast<const ScaledConfig*>(config), dtype(0),
                               dtype(1), dtype(2), at(0), at(1), left, right, at(4), StreamAt(addresses[5]));
  return Conclude(status, answer, room);
}

// The same of a product with an own transpose.  `dtypes`: of x and of the result.  `factors`: of the product and of the addend.
// `addresses`: of x, the addend and the result, and the stream.
int32_t CallGram(int32_t on_device, const char* fail, const int64_t* dtypes, const int64_t* problem, const int64_t* config,
                 const double* factors, const int64_t* addresses, char* answer, int64_t room) {
  using namespace jaxext;
  Begin(on_device, fail);
  const auto at = [&](int i) { return reinterpret_cast<void*>(addresses[i]); };
  const GramOperands operands = {at(0), at(1), factors[0], factors[1]};
  const Status status = LaunchGram(*reinterpret_cast<const GramProblem*>(problem), *reinterpret_cast<const GramConfig*>(config),
                                   static_cast<Dtype>(dtypes[0]), static_cast<Dtype>(dtypes[1]), operands, at(2), StreamAt(addresses[3]));
  return Conclude(status, answer, room);
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
