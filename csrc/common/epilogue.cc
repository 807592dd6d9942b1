#include "common/epilogue.h"

namespace jaxext {

Activation TakeActivation(Arrays& arrays, int64_t activation, const std::vector<std::pair<std::string, int64_t>>& flags) {
  if (activation < 0 || activation >= kActivations) {
    arrays.Refuse(Invalid("activation is " + std::to_string(activation) + ", want 0 to " + std::to_string(kActivations - 1)));
  }
  for (const auto& [name, flag] : flags) {
    if (flag != 0 && flag != 1) arrays.Refuse(Invalid(name + " is " + std::to_string(flag) + ", want 0 or 1"));
  }
  return static_cast<Activation>(activation);
}

Epilogue TakeEpilogue(Arrays& arrays, const EpilogueOptions& options, const std::vector<int64_t>& bias, const std::vector<int64_t>& shape,
                      Dtype dtype) {
  Epilogue epilogue;
  epilogue.activation =
      TakeActivation(arrays, options.activation, {{"bias", options.bias}, {"residual", options.residual}, {"saves", options.saves}});
  if (options.bias != 0) epilogue.bias = static_cast<const float*>(arrays.Operand("bias", bias, Dtype::kF32).data);
  if (options.residual != 0) epilogue.residual = arrays.Operand("residual", shape, dtype).data;
  if (options.saves != 0) epilogue.saved = arrays.Result("saved", shape, dtype).data;
  return epilogue;
}

}  // namespace jaxext
