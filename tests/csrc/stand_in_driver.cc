// A CUDA driver without a GPU, for tests/backends/test_launcher.py: it records what it is asked, and fails where it is told to.  Its
// kernels are lists of the sizes of their parameters: the image "add 8 8 4" has the kernel `add`.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Attribute {
  int id, padding;
  unsigned values[16];
};

struct Config {
  unsigned sizes[7];
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};

struct Kernel {
  std::string name;
  std::vector<size_t> sizes;
};

std::string record;
std::map<std::string, int> failures;
int device = 0;

// Records a call, and gives its result.
int Called(const std::string& function, const std::string& with = "") {
  record += function + with + "\n";
  return failures[function];
}

}  // namespace

extern "C" {

const char* StandInRecord() {
  static std::string told;
  told.swap(record), record.clear();
  return told.c_str();
}
void StandInFail(const char* function, int result) { failures[function] = result; }
void StandInDevice(int now) { device = now; }

int cuGetErrorName(int result, const char** text) {
  if (result == 999) return 1;
  static std::string name;
  *text = (name = "CUDA_ERROR_" + std::to_string(result)).c_str();
  return 0;
}
int cuGetErrorString(int result, const char** text) {
  if (result == 999) return 1;
  return *text = "what went wrong", 0;
}
int cuCtxGetDevice(int* now) { return *now = device, Called("cuCtxGetDevice"); }
int cuLibraryLoadData(void** library, const void* image, void*, void*, unsigned, void*, void*, unsigned) {
  std::istringstream text(static_cast<const char*>(image));
  auto* kernel = new Kernel;
  text >> kernel->name;
  for (size_t size; text >> size;) kernel->sizes.push_back(size);
  *library = kernel;
  return Called("cuLibraryLoadData", " " + std::string(static_cast<const char*>(image)));
}
int cuLibraryUnload(void* library) { return delete static_cast<Kernel*>(library), Called("cuLibraryUnload"); }
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  const int result = Called("cuLibraryGetKernel", std::string(" ") + name);
  if (static_cast<Kernel*>(library)->name != name) return 500;
  *kernel = library;
  return result;
}
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, Called("cuKernelGetFunction"); }
int cuKernelSetAttribute(int attribute, int value, void*, int on) {
  return Called("cuKernelSetAttribute", " " + std::to_string(attribute) + " " + std::to_string(value) + " " + std::to_string(on));
}
int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  const auto& sizes = static_cast<Kernel*>(kernel)->sizes;
  if (index >= sizes.size()) return 1;
  *offset = 0, *size = sizes[index];
  return 0;
}
int cuLaunchKernelEx(const Config* config, void* kernel, void** parameters, void**) {
  std::string with;
  for (const unsigned size : config->sizes) with += " " + std::to_string(size);
  if (config->attribute_count > 0) with += ", attribute " + std::to_string(config->attributes->id);
  for (unsigned i = 0; config->attribute_count > 0 && i < 3; ++i) with += " " + std::to_string(config->attributes->values[i]);
  with += config->stream == nullptr ? "," : ", another stream,";
  for (size_t i = 0; i < static_cast<Kernel*>(kernel)->sizes.size(); ++i) {
    with += " ";
    for (size_t j = 0; j < static_cast<Kernel*>(kernel)->sizes[i]; ++j) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char*>(parameters[i])[j]);
      with += digits;
    }
  }
  return Called("cuLaunchKernelEx", with);
}

}  // extern "C"
