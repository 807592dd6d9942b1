// What Python calls: ../ptxsim/module.py.
#include <algorithm>
#include <string>

#include "machine.h"

using namespace ptx;

namespace {

int32_t Say(char* to, int64_t room, const std::string& what) {
  std::strncpy(to, what.c_str(), room - 1);
  to[room - 1] = 0;
  return 1;
}

}  // namespace

extern "C" {

// A module, or null and the message.
void* PtxParse(const char* text, char* message, int64_t room) {
  try {
    return new Module(Parse(text));
  } catch (const std::exception& error) {
    Say(message, room, error.what());
    return nullptr;
  }
}
void PtxFree(void* module) { delete static_cast<Module*>(module); }

// Of each kernel a line: name, bytes of parameters, bytes of static shared memory, most threads, and offset:bytes of each parameter.
int32_t PtxKernels(void* module, char* out, int64_t room) {
  std::string text;
  for (const Kernel& kernel : static_cast<Module*>(module)->kernels) {
    text += kernel.name + " " + std::to_string(kernel.parameter_bytes) + " " + std::to_string(kernel.shared_bytes) + " " +
            std::to_string(kernel.most_threads);
    for (const Parameter& p : kernel.parameters) text += " " + std::to_string(p.offset) + ":" + std::to_string(p.size);
    text += "\n";
  }
  return static_cast<int64_t>(text.size()) < room ? Say(out, room, text), 0 : 1;
}

// Of each instruction of a kernel a line: opcode with all modifiers, whether the machine knows it, and the text, with tabs between.
int32_t PtxInstructions(void* module, int32_t kernel, char* out, int64_t room) {
  std::string text;
  for (const Instruction& i : static_cast<Module*>(module)->kernels[kernel].code) {
    text += i.name;
    for (const std::string& modifier : i.modifiers) text += "." + modifier;
    text += std::string("\t") + (i.known ? "known" : "unknown") + "\t" + i.text + "\n";
  }
  return static_cast<int64_t>(text.size()) < room ? Say(out, room, text), 0 : 1;
}

// sizes: grid, block, cluster, dynamic shared memory, most instructions.  Arrays: address, bytes.  0, or 1 and the message.
int32_t PtxRun(void* module, int32_t kernel, const int64_t* sizes, const uint8_t* parameters, int32_t arrays, const int64_t* places,
               uint8_t** data, uint8_t** written, int32_t maps, const TensorMap* map, int32_t late, uint8_t* executed, int64_t* steps,
               char* message, int64_t room) {
  Launch launch;
  launch.module = static_cast<Module*>(module);
  launch.kernel = &launch.module->kernels[kernel];
  for (int a = 0; a < 3; ++a) {
    launch.grid[a] = static_cast<uint32_t>(sizes[a]), launch.block[a] = static_cast<uint32_t>(sizes[3 + a]);
    launch.cluster[a] = static_cast<uint32_t>(sizes[6 + a]);
  }
  launch.dynamic_shared = sizes[9], launch.most_steps = sizes[10];
  launch.parameters.assign(parameters, parameters + launch.kernel->parameter_bytes);
  for (int n = 0; n < arrays; ++n) launch.regions.push_back({static_cast<uint64_t>(places[2 * n]), places[2 * n + 1], data[n], written[n]});
  launch.maps.assign(map, map + maps);
  launch.late = late;
  int32_t status = 0;
  try {
    Run(launch);
  } catch (const std::exception& error) {
    status = Say(message, room, launch.kernel->name + ": " + error.what());
  }
  std::copy(launch.executed.begin(), launch.executed.end(), executed);
  *steps = launch.steps;
  return status;
}

}  // extern "C"
