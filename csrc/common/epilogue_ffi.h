// Shared by the handlers of operations with an epilogue.  Included by *_ffi.cc alone; it must not know Python or any kernel.
#pragma once

#include <string>
#include <vector>

#include "common/epilogue.h"
#include "common/ffi.h"

namespace jaxext {

// The epilogue's attributes.  Its arrays are the bias and the residual after the factors, and the saved sum after the result, if they
// exist.
struct EpilogueAttributes {
  int64_t activation;             // `Activation`
  int64_t bias, residual, saves;  // 1 or 0: whether it exists
};

// Two operands and the epilogue's, the result and the saved sum, and attributes.
template <class Attributes>
auto EpilogueBinding() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .Ret<ffi::AnyBuffer>()
      .RemainingRets()
      .Attrs<Attributes>();
}

// Of a result of this shape and dtype.
inline Status EpilogueOf(const EpilogueAttributes& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         const std::vector<int64_t>& bias, const std::vector<int64_t>& shape, Dtype dtype, Epilogue* epilogue) {
  if (attributes.activation < 0 || attributes.activation >= kActivations) {
    return Invalid("activation is " + std::to_string(attributes.activation) + ", want 0 to " + std::to_string(kActivations - 1));
  }
  const struct {
    const char* name;
    int64_t flag;
  } flags[] = {{"bias", attributes.bias}, {"residual", attributes.residual}, {"saves", attributes.saves}};
  for (const auto& [name, flag] : flags) {
    if (flag != 0 && flag != 1) return Invalid(std::string(name) + " is " + std::to_string(flag) + ", want 0 or 1");
  }
  if (static_cast<int64_t>(operands.size()) != attributes.bias + attributes.residual ||
      static_cast<int64_t>(results.size()) != attributes.saves) {
    return Invalid(std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) +
                   " results beside those of the product, want " + std::to_string(attributes.bias + attributes.residual) + " and " +
                   std::to_string(attributes.saves));
  }
  const auto check = [&](const char* name, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& wanted, Dtype of) {
    Dtype got;
    if (Status s = Check(name, buffer, wanted, &got); !s.ok()) return s;
    return got == of ? Status{} : Invalid(std::string(name) + " is " + Name(got) + ", want " + Name(of));
  };
  epilogue->activation = static_cast<Activation>(attributes.activation);
  if (attributes.bias != 0) {
    const ffi::AnyBuffer buffer = *operands.get<ffi::AnyBuffer>(0);
    if (Status s = check("bias", buffer, bias, Dtype::kF32); !s.ok()) return s;
    epilogue->bias = static_cast<const float*>(buffer.untyped_data());
  }
  if (attributes.residual != 0) {
    const ffi::AnyBuffer buffer = *operands.get<ffi::AnyBuffer>(attributes.bias);
    if (Status s = check("residual", buffer, shape, dtype); !s.ok()) return s;
    epilogue->residual = buffer.untyped_data();
  }
  if (attributes.saves != 0) {
    Result buffer = *results.get<ffi::AnyBuffer>(0);
    if (Status s = check("saved", *buffer, shape, dtype); !s.ok()) return s;
    epilogue->saved = buffer->untyped_data();
  }
  return {};
}

// Of the forward convolution with an epilogue: its arrays are right, and this is what they are.
inline Status CheckConvBiasAct(const ConvAttributes& conv, const EpilogueAttributes& added, int64_t splits, const ffi::AnyBuffer& first,
                               const ffi::AnyBuffer& second, ffi::RemainingArgs operands, const ffi::AnyBuffer& out,
                               ffi::RemainingRets results, ConvProblem* problem, Dtype* dtype, Dtype* result, Epilogue* epilogue) {
  if (Status s = ProblemOf(conv, problem); !s.ok()) return s;
  if (Status s = CheckConv(ConvRole::kFprop, *problem, splits, first, second, out, dtype, result); !s.ok()) return s;
  const ConvProblem& p = *problem;
  return EpilogueOf(added, operands, results, {p.B, p.G, p.K}, {p.B, p.N, p.output[0], p.output[1], p.output[2], p.G, p.K}, *result,
                    epilogue);
}

}  // namespace jaxext

// The members of EpilogueAttributes, for XLA_FFI_REGISTER_STRUCT_ATTR_DECODING.
#define JAXEXT_EPILOGUE_MEMBERS                                                               \
  ::xla::ffi::StructMember<int64_t>("activation"), ::xla::ffi::StructMember<int64_t>("bias"), \
      ::xla::ffi::StructMember<int64_t>("residual"), ::xla::ffi::StructMember<int64_t>("saves")
