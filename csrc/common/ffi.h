// Shared by the handlers: targets, dtypes, shapes and errors.  Included by *_ffi.cc alone; it must not know Python or any kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/problem.h"
#include "common/status.h"
#include "common/targets.h"
#include "xla/ffi/api/ffi.h"

namespace jaxext {

namespace ffi = ::xla::ffi;

using Stream = ffi::PlatformStream<cudaStream_t>;
using Result = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error ToError(const Status& status) {
  switch (status.code) {
    case Status::kOk:
      return ffi::Error::Success();
    case Status::kInvalid:
      return ffi::Error::InvalidArgument(status.message);
    case Status::kInternal:
      return ffi::Error::Internal(status.message);
  }
  return ffi::Error::Internal("a status without a meaning");
}

inline std::optional<Dtype> DtypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return Dtype::kF32;
    case ffi::BF16:
      return Dtype::kBF16;
    case ffi::F16:
      return Dtype::kF16;
    case ffi::F8E4M3FN:
      return Dtype::kE4M3;
    case ffi::F8E5M2:
      return Dtype::kE5M2;
    default:
      return std::nullopt;
  }
}

// An error unless `buffer`, named `name`, has this shape.
inline Status CheckShape(const std::string& name, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& shape) {
  const auto text = [](const auto& sizes) {
    std::string joined;
    for (int64_t size : sizes) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
    return "(" + joined + ")";
  };
  const std::vector<int64_t> sizes(buffer.dimensions().begin(), buffer.dimensions().end());
  if (sizes == shape) return {};
  return Invalid(name + " has the shape " + text(sizes) + ", want " + text(shape));
}

inline Status WrongDtype(const std::string& name, const ffi::AnyBuffer& buffer, const std::string& want) {
  std::ostringstream got;
  got << buffer.element_type();
  return Invalid(name + " is " + got.str() + ", want " + want);
}

// The same, and the buffer has a dtype of the kernels, which is stored in `dtype`.
inline Status Check(const std::string& name, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& shape, Dtype* dtype) {
  if (Status s = CheckShape(name, buffer, shape); !s.ok()) return s;
  const std::optional<Dtype> known = DtypeOf(buffer.element_type());
  if (!known) return WrongDtype(name, buffer, "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
  *dtype = *known;
  return {};
}

// The same, and the buffer is of int32.
inline Status CheckIntegers(const std::string& name, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& shape) {
  if (Status s = CheckShape(name, buffer, shape); !s.ok()) return s;
  return buffer.element_type() == ffi::S32 ? Status{} : WrongDtype(name, buffer, "S32");
}

// Both operands have one dtype in all kernels.
inline Status CheckSame(Dtype first, Dtype second) {
  if (first == second) return {};
  return Invalid(std::string("the operands are ") + Name(first) + " and " + Name(second) + ", want one dtype");
}

// The shape of a result in `splits` parts.
inline std::vector<int64_t> InParts(std::vector<int64_t> shape, int64_t splits) {
  if (splits > 1) shape.insert(shape.begin(), splits);
  return shape;
}

using Three = ffi::Span<const int64_t>;

// The attributes of a convolution's call by XLA.
struct ConvAttributes {
  int64_t B, N, G, C, K;
  Three input, filter, output, stride, low, input_dilation, filter_dilation;
};

inline Status ProblemOf(const ConvAttributes& attributes, ConvProblem* problem) {
  *problem = {attributes.B, attributes.N, attributes.G, attributes.C, attributes.K, {}, {}, {}, {}, {}, {}, {}};
  const struct {
    const char* name;
    Three from;
    std::array<int64_t, 3>& to;
  } arrays[] = {
      {"input", attributes.input, problem->input},
      {"filter", attributes.filter, problem->filter},
      {"output", attributes.output, problem->output},
      {"stride", attributes.stride, problem->stride},
      {"low", attributes.low, problem->low},
      {"input_dilation", attributes.input_dilation, problem->input_dilation},
      {"filter_dilation", attributes.filter_dilation, problem->filter_dilation},
  };
  for (const auto& array : arrays) {
    if (array.from.size() != 3) {
      return Invalid(std::string(array.name) + " has " + std::to_string(array.from.size()) + " entries, want 3");
    }
    std::copy(array.from.begin(), array.from.end(), array.to.begin());
  }
  return {};
}

// An error unless the buffers are the operands and the result of `role`, in the order of slots (x, w, y without the open one).
inline Status CheckConv(ConvRole role, const ConvProblem& p, int64_t splits, const ffi::AnyBuffer& first, const ffi::AnyBuffer& second,
                        const ffi::AnyBuffer& out, Dtype* operands, Dtype* result) {
  const struct Slot {
    const char* name;
    std::vector<int64_t> shape;
  } x = {"x", {p.B, p.N, p.input[0], p.input[1], p.input[2], p.G, p.C}},
    w = {"w", {p.B, p.G, p.K, p.filter[0], p.filter[1], p.filter[2], p.C}},
    y = {"y", {p.B, p.N, p.output[0], p.output[1], p.output[2], p.G, p.K}};
  const Slot& open = role == ConvRole::kFprop ? y : role == ConvRole::kDgrad ? x : w;
  const Slot& one = role == ConvRole::kDgrad ? w : x;
  const Slot& other = role == ConvRole::kFprop ? w : y;
  Dtype second_operand;
  if (Status s = Check(one.name, first, one.shape, operands); !s.ok()) return s;
  if (Status s = Check(other.name, second, other.shape, &second_operand); !s.ok()) return s;
  if (Status s = Check(open.name, out, InParts(open.shape, splits), result); !s.ok()) return s;
  return CheckSame(*operands, second_operand);
}

// Two operands, or three, one result, and attributes.
template <class Attributes>
auto Binding() {
  return ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attrs<Attributes>();
}

template <class Attributes>
auto BindingOfThree() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attrs<Attributes>();
}

// The handler that calls `kCall` with what `kBind` binds.
template <auto kBind, auto kCall>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  static auto* handler = kBind().To(kCall, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

// The same without a stream: before a program runs, its kernels are loaded, so that none is in the capture of a CUDA graph, or beside
// collectives that wait for each other.  XLA passes what it will pass to execute, so that one binding, of the execute stage, serves both.
template <auto kBind, auto kCall>
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
  static auto* handler = kBind().To([](cudaStream_t, auto... rest) { return kCall(LaunchStream{}, rest...); }).release();
  XLA_FFI_CallFrame as_execute = *frame;
  const bool right = frame->stage == XLA_FFI_ExecutionStage_INITIALIZE;
  as_execute.stage = right ? XLA_FFI_ExecutionStage_EXECUTE : XLA_FFI_ExecutionStage_INITIALIZE;  // which it refuses
  return handler->Call(&as_execute);
}

template <auto kBind, auto kCall>
constexpr Handlers kHandlers = {&Initialize<kBind, kCall>, &Execute<kBind, kCall>};

}  // namespace jaxext

// The members of ConvAttributes, for XLA_FFI_REGISTER_STRUCT_ATTR_DECODING.
#define JAXEXT_CONV_MEMBERS                                                                                                             \
  ::xla::ffi::StructMember<int64_t>("B"), ::xla::ffi::StructMember<int64_t>("N"), ::xla::ffi::StructMember<int64_t>("G"),               \
      ::xla::ffi::StructMember<int64_t>("C"), ::xla::ffi::StructMember<int64_t>("K"), ::xla::ffi::StructMember<jaxext::Three>("input"), \
      ::xla::ffi::StructMember<jaxext::Three>("filter"), ::xla::ffi::StructMember<jaxext::Three>("output"),                             \
      ::xla::ffi::StructMember<jaxext::Three>("stride"), ::xla::ffi::StructMember<jaxext::Three>("low"),                                \
      ::xla::ffi::StructMember<jaxext::Three>("input_dilation"), ::xla::ffi::StructMember<jaxext::Three>("filter_dilation")
