// The handlers that XLA calls, by target.  Neither XLA's headers nor Python's.
#pragma once

#include <string>
#include <utility>
#include <vector>

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace jaxext {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

// By the stages of XLA's FFI.
struct Handlers {
  Handler *initialize, *execute;
};

// Those of all registered targets, by XLA's names for them.
std::vector<std::pair<std::string, Handlers>> HandlersByTarget();

// The version of XLA's FFI in whose headers the handlers were compiled: major, minor.
std::pair<int, int> CompiledFfiVersion();

}  // namespace jaxext
