// In place of the launchers that the targets of csrc/ call: each does nothing, but says in its error what it was asked, and whether only to
// load it.  In place of refusals and tables: none.  Built with the targets and call_frame.cc by tests/backends/cuda/test_ffi_handlers.py;
// needs no CUDA.
#include <cstring>
#include <initializer_list>
#include <string>

#include "causal/causal.h"
#include "conv/conv.h"
#include "depthwise/depthwise.h"
#include "gram/gram.h"
#include "matmul/matmul.h"
#include "pieces/pieces.h"
#include "ragged/ragged.h"
#include "scaled/scaled.h"
#include "common/ffi.h"
#include "weight_only/weight_only.h"
#include "weight_only/wide_weight_only.h"

namespace jaxext {
namespace {

Status Say(LaunchStream stream, const std::string& launcher, std::initializer_list<int64_t> problem, std::initializer_list<int64_t> config,
           Dtype operands, Dtype result, std::initializer_list<const void*> arrays, const Epilogue* epilogue) {
  std::string text = (stream ? "" : "load ") + launcher + ":";
  for (const auto& numbers : {problem, config}) {
    for (int64_t number : numbers) text += " " + std::to_string(number);
    text += ";";
  }
  text += std::string(" ") + Name(operands) + " " + Name(result) + ";";
  const auto tell = [&](const void* array) { text += " " + std::to_string(reinterpret_cast<uintptr_t>(array)); };
  for (const void* array : arrays) tell(array);
  if (epilogue != nullptr) {
    text += "; " + std::to_string(static_cast<int>(epilogue->activation));
    for (const void* array : {static_cast<const void*>(epilogue->bias), epilogue->residual, static_cast<const void*>(epilogue->saved)})
      tell(array);
  }
  return {Status::kInternal, text};
}

Status Say(LaunchStream stream, const std::string& launcher, const ConvProblem& p, std::initializer_list<int64_t> config, Dtype operands,
           Dtype result, std::initializer_list<const void*> arrays, const Epilogue* epilogue) {
  const auto& [in, filter, out] = std::tie(p.input, p.filter, p.output);
  const auto& [stride, low, of_input, of_filter] = std::tie(p.stride, p.low, p.input_dilation, p.filter_dilation);
  return Say(stream, launcher,
             {p.B,       p.N,       p.G,         p.C,         p.K,         in[0],        in[1],        in[2],       filter[0],
              filter[1], filter[2], out[0],      out[1],      out[2],      stride[0],    stride[1],    stride[2],   low[0],
              low[1],    low[2],    of_input[0], of_input[1], of_input[2], of_filter[0], of_filter[1], of_filter[2]},
             config, operands, result, arrays, epilogue);
}

}  // namespace

Status LaunchConv(ConvRole role, int rank, const ConvProblem& p, const ConvConfig& c, const ProductArrays& a, const Epilogue* epilogue,
                  LaunchStream stream) {
  return Say(stream, "conv" + std::to_string(rank) + "d " + Name(role), p, {c.tile_m, c.tile_n, c.cluster, c.splits}, a.operands, a.result,
             {a.first, a.second, a.out}, epilogue);
}

Status LaunchDepthwise(ConvRole role, int, const ConvProblem& p, const DepthwiseConfig& c, const ProductArrays& a, const Epilogue* epilogue,
                       LaunchStream stream) {
  return Say(stream, std::string("depthwise ") + Name(role), p, {c.lanes, c.strip, c.pieces, c.lines, c.splits}, a.operands, a.result,
             {a.first, a.second, a.out}, epilogue);
}

Status LaunchMatmul(MatmulRole role, const MatmulProblem& p, const MatmulConfig& c, const ProductArrays& a, const Epilogue* epilogue,
                    LaunchStream stream) {
  return Say(stream, std::string("matmul ") + Name(role), {p.B, p.M, p.N, p.K},
             {c.tile_m, c.tile_n, c.tile_k, c.cluster_m, c.pingpong, c.splits}, a.operands, a.result, {a.first, a.second, a.out}, epilogue);
}

Status LaunchPieces(MatmulRole role, const MatmulProblem& p, const PiecesConfig& c, const ProductArrays& a, LaunchStream stream) {
  return Say(stream, std::string("pieces ") + Name(role), {p.B, p.M, p.N, p.K}, {c.tile_m, c.tile_n, c.pieces, c.splits}, a.operands,
             a.result, {a.first, a.second, a.out}, /*epilogue=*/nullptr);
}

Status LaunchRagged(MatmulRole role, const RaggedProblem& p, const RaggedConfig& c, const ProductArrays& a, const int32_t* places,
                    LaunchStream stream) {
  return Say(stream, std::string("ragged ") + Name(role), {p.B, p.P, p.R, p.M, p.N, p.K, p.G}, {c.tile_m, c.tile_n, c.tile_k, c.cluster_n},
             a.operands, a.result, {a.first, a.second, places, a.out}, /*epilogue=*/nullptr);
}

Status LaunchScaled(const ScaledProblem& p, const ScaledConfig& c, Dtype first, Dtype second, Dtype result, const void* a, const void* b,
                    const Scale& left, const Scale& right, void* d, LaunchStream stream) {
  return Say(stream, "scaled", {p.B, p.M, p.N, p.K, p.I, p.J, p.S, static_cast<int64_t>(second)},
             {c.tile_m, c.tile_n, c.tile_k, c.cluster_m, c.splits, left.batch, left.outer, left.step, right.batch, right.outer, right.step},
             first, result, {a, b, left.data, right.data, d}, /*epilogue=*/nullptr);
}

Status LaunchGram(const GramProblem& p, const GramConfig& c, Dtype dtype, Dtype result, const GramOperands& o, void* y,
                  LaunchStream stream) {
  const auto whole = [](double number) { return static_cast<int64_t>(number); };
  return Say(stream, "gram", {p.B, p.M, p.N}, {c.tile_m, c.tile_n, c.tile_k, c.cluster_m, c.splits, whole(o.scale), whole(o.of_addend)},
             dtype, result, {o.x, o.addend, y}, /*epilogue=*/nullptr);
}

Status LaunchCausal(CausalRole role, const CausalProblem& p, const CausalConfig& c, const CausalOperands& o, const CausalResults& r,
                    LaunchStream stream) {
  const int64_t of_bias = o.bias != nullptr ? static_cast<int64_t>(o.of_bias) : -1;
  return Say(stream, role == CausalRole::kForward ? "causal forward" : "causal backward", {p.B, p.T, p.C, p.J},
             {c.lanes, c.strip, c.splits, static_cast<int64_t>(o.activation), of_bias}, o.dtype, o.of_weight,
             {o.x, o.weight, o.bias, o.initial_states, o.seq_idx, o.idx_of_states, o.d_y, r.first, r.sums, r.d_initial_states},
             /*epilogue=*/nullptr);
}

Status LaunchWeightOnly(const WeightOnlyProblem& p, const WeightOnlyConfig& c, const WeightOnlyOperands& o, void* result,
                        LaunchStream stream) {
  return Say(stream, "weight_only", {p.B, p.M, p.N, p.K, p.S, p.bits}, {c.tile_m, c.tile_n, c.splits}, o.dtype, o.of_result,
             {o.x, o.q, o.scale, result}, /*epilogue=*/nullptr);
}

Reason MatmulRefuses(MatmulRole, bool, const MatmulProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason PiecesRefuses(MatmulRole, const MatmulProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason RaggedRefuses(MatmulRole, const RaggedProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason ScaledRefuses(const ScaledProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason GramRefuses(const GramProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason ConvRefuses(ConvRole, int, const ConvProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason DepthwiseRefuses(ConvRole, int, const ConvProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason CausalRefuses(CausalRole, const CausalProblem&, const Dtypes&, std::optional<int>) { return {}; }
Reason WeightOnlyRefuses(const WeightOnlyProblem&, const Dtypes&, std::optional<int>) { return {}; }

template <class Kernel>
const std::vector<Kernel>& None() {
  static const std::vector<Kernel> none;
  return none;
}
const std::vector<MatmulKernel>& MatmulKernels() { return None<MatmulKernel>(); }
const std::vector<PiecesKernel>& PiecesKernels() { return None<PiecesKernel>(); }
const std::vector<RaggedKernel>& RaggedKernels() { return None<RaggedKernel>(); }
const std::vector<ScaledKernel>& ScaledKernels() { return None<ScaledKernel>(); }
const std::vector<GramKernel>& GramKernels() { return None<GramKernel>(); }
const std::vector<ConvKernel>& ConvKernels() { return None<ConvKernel>(); }
const std::vector<WideWeightOnlyKernel>& WideWeightOnlyKernels() { return None<WideWeightOnlyKernel>(); }

}  // namespace jaxext

struct Unnamed {
  JAXEXT_INTEGERS(B, M)
  int64_t extra;
};

// What is said of the families with one more, which is broken in this way: 0 in none, 1 a member without a name, 2 a target twice, 3 an
// attribute twice.
extern "C" void CheckBroken(int32_t how, char* message) {
  using namespace jaxext;
  const auto refuses = [](const auto&, const Dtypes&, std::optional<int>) { return Reason(); };
  const auto launch = [](Arrays&, const auto&, const auto&, LaunchStream) { return Status(); };
  Target target = TargetOf<GramProblem, RaggedConfig>(how == 2 ? "gram" : "broken", refuses, launch);
  if (how == 1) target = TargetOf<Unnamed, RaggedConfig>("broken", refuses, launch);
  if (how == 3) target = TargetOf<GramProblem, GramProblem>("broken", refuses, launch);
  Families().push_back({"broken", {target}, {}});
  std::strcpy(message, CheckFamilies().message.c_str());
  Families().pop_back();
}

// The handler of that name and stage, or null.
extern "C" void* HandlerOf(const char* name, int32_t initialize) {
  for (const auto& [target, handlers] : jaxext::HandlersByTarget()) {
    if (target == name) return reinterpret_cast<void*>(initialize ? handlers.initialize : handlers.execute);
  }
  return nullptr;
}
