// One handler of XLA's FFI for each target: XLA's buffers and attributes become a call of the target's `launch`.
#include "common/ffi.h"

#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <stdexcept>

#include "common/family.h"
#include "xla/ffi/api/ffi.h"

namespace jaxext {
namespace {

namespace ffi = ::xla::ffi;

constexpr int kMostTargets = 64;

std::vector<const Target*>& Targets() {
  static auto* const targets = [] {
    auto* all = new std::vector<const Target*>;
    for (const Family& family : Families()) {
      for (const Target& target : family.targets) all->push_back(&target);
    }
    if (all->size() > kMostTargets) throw std::logic_error("there are more targets than handlers");
    return all;
  }();
  return *targets;
}

ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return status.code == Status::kInvalid ? ffi::Error::InvalidArgument(status.message) : ffi::Error::Internal(status.message);
}

std::optional<Dtype> DtypeOf(ffi::DataType type) {
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
    case ffi::S8:
      return Dtype::kS8;
    case ffi::S32:
      return Dtype::kS32;
    default:
      return std::nullopt;
  }
}

Buffer BufferOf(ffi::AnyBuffer buffer) {
  const auto sizes = buffer.dimensions();
  return {DtypeOf(buffer.element_type()), {sizes.begin(), sizes.end()}, buffer.untyped_data()};
}

// The attributes of a target, in the order of its fields.
Status Decode(const Target& target, const ffi::Dictionary& given, std::vector<int64_t>* words) {
  for (const Field& field : target.attributes) {
    const char* wrong = nullptr;
    if (field.kind == FieldKind::kInteger) {
      const auto value = given.get<int64_t>(field.name);
      value.has_value() ? words->push_back(*value) : void(wrong = "an int64");
    } else if (field.kind == FieldKind::kReal) {
      const auto value = given.get<double>(field.name);
      words->push_back(0);
      value.has_value() ? void(std::memcpy(&words->back(), &*value, sizeof(double))) : void(wrong = "a float64");
    } else {
      const auto value = given.get<ffi::Span<const int64_t>>(field.name);
      value.has_value() && value->size() == 3 ? void(words->insert(words->end(), value->begin(), value->end()))
                                              : void(wrong = "three int64");
    }
    if (wrong != nullptr) return Invalid("attribute " + field.name + " is missing or of another type, want " + wrong);
  }
  if (given.size() != target.attributes.size()) {
    return Invalid(std::to_string(given.size()) + " attributes, want " + std::to_string(target.attributes.size()));
  }
  return {};
}

template <int kIndex>
ffi::Error Call(LaunchStream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const Target& target = *Targets()[kIndex];
  std::vector<int64_t> words;
  words.reserve(32);
  if (Status status = Decode(target, attributes, &words); !status.ok()) return ToError(status);
  std::vector<Buffer> given, wanted;
  given.reserve(operands.size()), wanted.reserve(results.size());
  for (size_t i = 0; i < operands.size(); ++i) given.push_back(BufferOf(*operands.get<ffi::AnyBuffer>(i)));
  for (size_t i = 0; i < results.size(); ++i) wanted.push_back(BufferOf(**results.get<ffi::AnyBuffer>(i)));
  Arrays arrays(std::move(given), std::move(wanted));
  return ToError(target.launch(words.data(), arrays, stream));
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attrs(); }

template <int kIndex>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  static auto* handler = Bind().To(Call<kIndex>, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

// The same without a stream: before a program runs, its kernels are loaded, so that none is in the capture of a CUDA graph, or beside
// collectives that wait for each other.  XLA passes what it will pass to execute, so that one binding, of the execute stage, serves both.
template <int kIndex>
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
  static auto* handler = Bind().To([](cudaStream_t, auto... rest) { return Call<kIndex>(LaunchStream{}, rest...); }).release();
  XLA_FFI_CallFrame as_execute = *frame;
  const bool right = frame->stage == XLA_FFI_ExecutionStage_INITIALIZE;
  as_execute.stage = right ? XLA_FFI_ExecutionStage_EXECUTE : XLA_FFI_ExecutionStage_INITIALIZE;  // which it refuses
  return handler->Call(&as_execute);
}

template <int... kIndices>
std::array<Handlers, sizeof...(kIndices)> AllHandlers(std::integer_sequence<int, kIndices...>) {
  return {{{&Initialize<kIndices>, &Execute<kIndices>}...}};
}

}  // namespace

std::vector<std::pair<std::string, Handlers>> HandlersByTarget() {
  static const auto handlers = AllHandlers(std::make_integer_sequence<int, kMostTargets>());
  std::vector<std::pair<std::string, Handlers>> found;
  for (const Target* target : Targets()) found.push_back({"jaxext_" + target->name + "_v1", handlers[found.size()]});
  return found;
}

std::pair<int, int> CompiledFfiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jaxext
