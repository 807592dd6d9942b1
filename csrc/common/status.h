// What a launcher is asked for, and what it answers.
#pragma once

#include <optional>
#include <string>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace jaxext {

// Where a launcher launches its kernel.  Without a stream it makes the same checks, and only loads the kernel.
using LaunchStream = std::optional<CUstream_st*>;

struct Status {
  enum Code {
    kOk,
    kInvalid,   // the caller asked for what a kernel cannot do: its message says what it got and what it wants
    kInternal,  // CUDA refused or failed
  };

  Code code = kOk;
  std::string message;

  bool ok() const { return code == kOk; }
};

inline Status Invalid(std::string message) { return {Status::kInvalid, std::move(message)}; }
inline Status Internal(std::string message) { return {Status::kInternal, std::move(message)}; }

}  // namespace jaxext
