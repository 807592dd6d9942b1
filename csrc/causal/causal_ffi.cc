// The handlers of causal convolutions: XLA's buffers and attributes become a call of a launcher.
#include "causal/causal.h"
#include "common/epilogue.h"
#include "common/ffi.h"

namespace jaxext {

// After x and the weight come the operands that exist, and backward d_y.  The results are y, or d_x, the partial sums and, if there is a
// state, its cotangent.
struct CausalAttributes {
  int64_t B, T, C, J;
  int64_t lanes, strip, splits;
  int64_t activation;                                    // `Activation`
  int64_t bias, initial_states, seq_idx, idx_of_states;  // 1 or 0: whether it exists
};

}  // namespace jaxext

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxext::CausalAttributes, ::xla::ffi::StructMember<int64_t>("B"),
                                      ::xla::ffi::StructMember<int64_t>("T"), ::xla::ffi::StructMember<int64_t>("C"),
                                      ::xla::ffi::StructMember<int64_t>("J"), ::xla::ffi::StructMember<int64_t>("lanes"),
                                      ::xla::ffi::StructMember<int64_t>("strip"), ::xla::ffi::StructMember<int64_t>("splits"),
                                      ::xla::ffi::StructMember<int64_t>("activation"), ::xla::ffi::StructMember<int64_t>("bias"),
                                      ::xla::ffi::StructMember<int64_t>("initial_states"), ::xla::ffi::StructMember<int64_t>("seq_idx"),
                                      ::xla::ffi::StructMember<int64_t>("idx_of_states"));

namespace jaxext {
namespace {

using Shape = std::vector<int64_t>;

Status CheckFlags(const CausalAttributes& a) {
  if (a.activation < 0 || a.activation >= kActivations) {
    return Invalid("activation is " + std::to_string(a.activation) + ", want 0 to " + std::to_string(kActivations - 1));
  }
  const std::pair<const char*, int64_t> flags[] = {
      {"bias", a.bias}, {"initial_states", a.initial_states}, {"seq_idx", a.seq_idx}, {"idx_of_states", a.idx_of_states}};
  for (const auto& [name, flag] : flags) {
    if (flag != 0 && flag != 1) return Invalid(std::string(name) + " is " + std::to_string(flag) + ", want 0 or 1");
  }
  return {};
}

// Of this shape, and of the dtype that is wanted.
Status CheckOf(const char* name, const ffi::AnyBuffer& buffer, const Shape& shape, Dtype wanted) {
  Dtype dtype;
  if (Status s = Check(name, buffer, shape, &dtype); !s.ok()) return s;
  return dtype == wanted ? Status{} : Invalid(std::string(name) + " is " + Name(dtype) + ", want " + Name(wanted));
}

// The operands beside x and the weight, in their order.
Status OperandsOf(const CausalAttributes& a, bool backward, ffi::RemainingArgs given, CausalOperands* operands) {
  const int64_t wanted = a.bias + a.initial_states + a.seq_idx + a.idx_of_states + backward;
  if (static_cast<int64_t>(given.size()) != wanted) {
    return Invalid(std::to_string(given.size()) + " operands beside x and weight, want " + std::to_string(wanted));
  }
  int next = 0;
  const auto take = [&] { return *given.get<ffi::AnyBuffer>(next++); };
  if (a.bias != 0) {
    const ffi::AnyBuffer bias = take();
    if (Status s = Check("bias", bias, {a.C}, &operands->of_bias); !s.ok()) return s;
    operands->bias = bias.untyped_data();
  }
  if (a.initial_states != 0) {
    const ffi::AnyBuffer state = take();
    if (Status s = CheckOf("initial_states", state, {a.B, a.J - 1, a.C}, operands->dtype); !s.ok()) return s;
    operands->initial_states = state.untyped_data();
  }
  if (a.seq_idx != 0) {
    const ffi::AnyBuffer idx = take();
    if (Status s = CheckIntegers("seq_idx", idx, {a.B, a.T}); !s.ok()) return s;
    operands->seq_idx = static_cast<const int32_t*>(idx.untyped_data());
  }
  if (a.idx_of_states != 0) {
    const ffi::AnyBuffer idx = take();
    if (Status s = CheckIntegers("idx_of_states", idx, {a.B, a.J - 1}); !s.ok()) return s;
    operands->idx_of_states = static_cast<const int32_t*>(idx.untyped_data());
  }
  if (backward) {
    const ffi::AnyBuffer d_y = take();
    if (Status s = CheckOf("d_y", d_y, {a.B, a.T, a.C}, operands->dtype); !s.ok()) return s;
    operands->d_y = d_y.untyped_data();
  }
  return {};
}

Status ResultsOf(const CausalAttributes& a, bool backward, Dtype dtype, ffi::RemainingRets given, CausalResults* results) {
  const int64_t wanted = backward ? 2 + a.initial_states : 1;
  if (static_cast<int64_t>(given.size()) != wanted) {
    return Invalid(std::to_string(given.size()) + " results, want " + std::to_string(wanted));
  }
  Result first = *given.get<ffi::AnyBuffer>(0);
  if (Status s = CheckOf(backward ? "d_x" : "y", *first, {a.B, a.T, a.C}, dtype); !s.ok()) return s;
  results->first = first->untyped_data();
  if (!backward) return {};
  Result sums = *given.get<ffi::AnyBuffer>(1);
  if (Status s = CheckOf("sums", *sums, {a.splits, a.J + a.bias, a.C}, Dtype::kF32); !s.ok()) return s;
  results->sums = static_cast<float*>(sums->untyped_data());
  if (a.initial_states == 0) return {};
  Result d_state = *given.get<ffi::AnyBuffer>(2);
  if (Status s = CheckOf("d_initial_states", *d_state, {a.B, a.J - 1, a.C}, dtype); !s.ok()) return s;
  results->d_initial_states = d_state->untyped_data();
  return {};
}

template <CausalRole kRole>
ffi::Error Call(LaunchStream stream, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs more, ffi::RemainingRets rets,
                CausalAttributes a) {
  constexpr bool kBackward = kRole == CausalRole::kBackward;
  CausalOperands operands = {};
  CausalResults results = {};
  if (Status s = CheckFlags(a); !s.ok()) return ToError(s);
  if (Status s = Check("x", x, {a.B, a.T, a.C}, &operands.dtype); !s.ok()) return ToError(s);
  if (Status s = Check("weight", weight, {a.J, a.C}, &operands.of_weight); !s.ok()) return ToError(s);
  operands.x = x.untyped_data(), operands.weight = weight.untyped_data();
  operands.activation = static_cast<Activation>(a.activation);
  if (Status s = OperandsOf(a, kBackward, more, &operands); !s.ok()) return ToError(s);
  if (Status s = ResultsOf(a, kBackward, operands.dtype, rets, &results); !s.ok()) return ToError(s);
  return ToError(Causal(kRole, {a.B, a.T, a.C, a.J}, {a.lanes, a.strip, a.splits}, operands, results, stream));
}

auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<CausalAttributes>();
}

}  // namespace

std::vector<Target> CausalTargets() {
  return {{"jaxext_causal_conv1d_v1", kHandlers<&Bind, &Call<CausalRole::kForward>>},
          {"jaxext_causal_conv1d_backward_v1", kHandlers<&Bind, &Call<CausalRole::kBackward>>}};
}

}  // namespace jaxext
