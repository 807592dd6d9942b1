// The handlers that the module hands out, by the names under which XLA calls them.  It must not know XLA or Python.
#pragma once

#include <string>
#include <vector>

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace jaxext {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

// By the stages of XLA's FFI.
struct Handlers {
  Handler *initialize, *execute;
};

struct Target {
  std::string name;  // with a version: exported programs outlive releases
  Handlers handlers;
};

std::vector<Target> MatmulTargets();
std::vector<Target> PiecesTargets();
std::vector<Target> RaggedTargets();
std::vector<Target> ScaledTargets();
std::vector<Target> GramTargets();
std::vector<Target> ConvTargets();
std::vector<Target> DepthwiseTargets();
std::vector<Target> CausalTargets();
std::vector<Target> WeightOnlyTargets();

// The version of XLA's FFI in whose headers the handlers were compiled: (major, minor).
struct FfiVersion {
  int major, minor;
};
FfiVersion CompiledFfiVersion();

}  // namespace jaxext
