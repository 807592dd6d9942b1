// The targets of causal convolutions: their arrays.
#include "causal/causal.h"
#include "common/refusals.h"

namespace jaxext {
namespace {

Status Launch(CausalRole role, Arrays& arrays, const CausalProblem& p, const CausalConfig& config, const CausalOptions& options,
              LaunchStream stream) {
  const auto& [B, T, C, J] = p;
  const auto& [activation, bias, initial_states, seq_idx, idx_of_states] = options;
  const bool backward = role == CausalRole::kBackward;
  CausalOperands o = {};
  CausalResults r = {};
  o.activation = TakeActivation(
      arrays, activation, {{"bias", bias}, {"initial_states", initial_states}, {"seq_idx", seq_idx}, {"idx_of_states", idx_of_states}});
  const Array x = arrays.Operand("x", {B, T, C}), weight = arrays.Operand("weight", {J, C});
  o.x = x.data, o.weight = weight.data, o.dtype = x.dtype, o.of_weight = weight.dtype;
  if (!arrays.ok()) return arrays.Done();  // flags are 0 or 1, and J is the weight's
  if (bias != 0) {
    const Array array = arrays.Operand("bias", {C});
    o.bias = array.data, o.of_bias = array.dtype;
  }
  const auto integers = [&](const char* name, int64_t steps) {
    return static_cast<const int32_t*>(arrays.Operand(name, {p.B, steps}, Dtype::kS32).data);
  };
  if (initial_states != 0) o.initial_states = arrays.Operand("initial_states", {B, Sum(J, -1), C}, o.dtype).data;
  if (seq_idx != 0) o.seq_idx = integers("seq_idx", T);
  if (idx_of_states != 0) o.idx_of_states = integers("idx_of_states", Sum(J, -1));
  if (backward) o.d_y = arrays.Operand("d_y", {B, T, C}, o.dtype).data;
  r.first = arrays.Result(backward ? "d_x" : "y", {B, T, C}, o.dtype).data;
  if (backward) r.sums = static_cast<float*>(arrays.Result("sums", {config.splits, Sum(J, bias), C}, Dtype::kF32).data);
  if (backward && initial_states != 0) r.d_initial_states = arrays.Result("d_initial_states", {B, Sum(J, -1), C}, o.dtype).data;
  if (Status status = arrays.Done(); !status.ok()) return status;
  return LaunchCausal(role, p, config, o, r, stream);
}

Target TargetOf(const char* name, CausalRole role) {
  return TargetOfRole<CausalProblem, CausalConfig, CausalOptions>(name, role, CausalRefuses, Launch);
}

const Registered registered({"causal",
                             {TargetOf("causal_conv1d", CausalRole::kForward), TargetOf("causal_conv1d_backward", CausalRole::kBackward)},
                             {}});

}  // namespace
}  // namespace jaxext
