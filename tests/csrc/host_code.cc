// The host code of csrc/ that decides what the kernels are asked, for tests/host_code.py: what is refused, and the parts and boxes of a
// convolution.  Compiled by a C++ compiler, with a table of matrix products in place of the kernels'.  Needs no CUDA.
#include <cstring>

#include "causal/causal.h"
#include "conv/conv.h"
#include "depthwise/depthwise.h"
#include "gram/gram.h"
#include "matmul/matmul.h"
#include "pieces/pieces.h"
#include "ragged/ragged.h"
#include "ragged_scaled/ragged_scaled.h"
#include "scaled/scaled.h"
#include "weight_only/wide_weight_only.h"

namespace jaxext {
namespace {

// That of tests/backends/cuda/test_cuda_matmul.py.
std::vector<MatmulKernel> Table(MatmulRole role) {
  const auto row = [&](Dtype operands, Dtype result, MatmulConfig config) {
    return MatmulKernel{role, operands, result, /*fused=*/false, config, 0, 0, nullptr};
  };
  std::vector<MatmulKernel> rows;
  for (const MatmulConfig& tile : {MatmulConfig{128, 256, 64, 2, 0, 1}, {128, 192, 64, 2, 1, 1}, {64, 64, 64, 1, 1, 1}}) {
    rows.push_back(row(Dtype::kBF16, Dtype::kBF16, tile));
    rows.push_back(row(Dtype::kBF16, Dtype::kF32, tile));
  }
  rows.push_back(row(Dtype::kBF16, Dtype::kF32, {64, 256, 64, 2, 1, 1}));
  return rows;
}

}  // namespace

std::vector<MatmulKernel> MatmulNN() { return Table(MatmulRole::kNN); }
std::vector<MatmulKernel> MatmulNT() { return Table(MatmulRole::kNT); }
std::vector<MatmulKernel> MatmulTN() { return Table(MatmulRole::kTN); }
std::vector<MatmulKernel> MatmulNTE4M3() {
  return {{MatmulRole::kNT, Dtype::kE4M3, Dtype::kBF16, /*fused=*/false, {128, 128, 128, 2, 0, 1}, 0, 0, nullptr}};
}
std::vector<MatmulKernel> MatmulNTTF32() {
  return {{MatmulRole::kNT, Dtype::kF32, Dtype::kF32, /*fused=*/false, {128, 256, 32, 2, 0, 1}, 0, 0, nullptr}};
}
std::vector<MatmulKernel> MatmulNNFused() { return {}; }

std::vector<PiecesKernel> PiecesOfBF16() { return {{{128, 128, 2, 1}, 0, 0, nullptr}, {{128, 128, 3, 1}, 0, 0, nullptr}}; }

std::vector<RaggedKernel> RaggedNN() { return {{MatmulRole::kNN, Dtype::kBF16, {128, 256, 64, 2}, 0, 0, nullptr}}; }
std::vector<RaggedKernel> RaggedNT() { return {{MatmulRole::kNT, Dtype::kBF16, {128, 256, 64, 2}, 0, 0, nullptr}}; }
std::vector<RaggedKernel> RaggedTN() { return {{MatmulRole::kTN, Dtype::kBF16, {128, 256, 64, 2}, 0, 0, nullptr}}; }

std::vector<ScaledKernel> RaggedScaledE4M3() {
  return {{Dtype::kE4M3, Dtype::kE4M3, {128, 256, 128, 2, 1}, 0, 0, nullptr},
          {Dtype::kE5M2, Dtype::kE4M3, {64, 128, 128, 1, 1}, 0, 0, nullptr}};
}
std::vector<ScaledKernel> ScaledE4M3() { return {{Dtype::kE4M3, Dtype::kE4M3, {128, 256, 128, 2, 1}, 0, 0, nullptr}}; }
std::vector<ScaledKernel> ScaledE5M2() { return {{Dtype::kE5M2, Dtype::kE4M3, {64, 128, 128, 1, 1}, 0, 0, nullptr}}; }

std::vector<GramKernel> GramBF16() { return {{Dtype::kBF16, {128, 256, 64, 2, 1}, 0, 0, nullptr}}; }
std::vector<GramKernel> GramF16() { return {}; }

// Of these there is no kernel here, and no launcher.
const std::vector<ConvKernel>& ConvKernels() {
  static const std::vector<ConvKernel> none;
  return none;
}
const std::vector<WideWeightOnlyKernel>& WideWeightOnlyKernels() {
  static const std::vector<WideWeightOnlyKernel> none;
  return none;
}
Status LaunchConv(ConvRole, int, const ConvProblem&, const ConvConfig&, const ProductArrays&, const Epilogue*, LaunchStream) {
  return Internal("no launcher");
}
Status LaunchDepthwise(ConvRole, int, const ConvProblem&, const DepthwiseConfig&, const ProductArrays&, const Epilogue*, LaunchStream) {
  return Internal("no launcher");
}
Status LaunchCausal(CausalRole, const CausalProblem&, const CausalConfig&, const CausalOperands&, const CausalResults&, LaunchStream) {
  return Internal("no launcher");
}
Status LaunchWeightOnly(const WeightOnlyProblem&, const WeightOnlyConfig&, const WeightOnlyOperands&, void*, LaunchStream) {
  return Internal("no launcher");
}

}  // namespace jaxext

using namespace jaxext;

// Whether a target refuses a problem, and the reason.  Problems are the fields of their structs, in order; there are four dtypes.
extern "C" int Refuses(const char* name, const int64_t* problem, const char* const* dtypes, int arch, char* text) {
  for (const Family& family : Families()) {
    for (const Target& target : family.targets) {
      if (target.name != name) continue;
      const Reason reason = target.refuses(problem, {dtypes[0], dtypes[1], dtypes[2], dtypes[3]}, arch);
      if (reason) std::strncpy(text, reason->c_str(), 999);
      return reason.has_value();
    }
  }
  return -1;
}

// Whether A of a matrix product is its first operand, and then the numbers of its Gemm.
extern "C" void NumbersOfGemm(int role, const int64_t* problem, int64_t splits, int64_t* out) {
  const char operands[2] = {};
  const auto& p = *reinterpret_cast<const MatmulProblem*>(problem);
  const Gemm g = GemmOf(MatmulRole(role), p, splits, &operands[0], &operands[1], nullptr);
  *out++ = g.a == &operands[0] && g.b == &operands[1];
  for (int64_t number : {g.m, g.n, g.k, g.l, g.a_leading, g.a_batch, g.b_leading, g.b_batch}) *out++ = number;
}

extern "C" int MostParts() { return kMostParts; }
extern "C" int MostPhases() { return kMostPhases; }

// The number of parts, and the parts and their boxes; or -1, and the reason.  As csrc/conv/conv.cc asks, of operands in bfloat16.
extern "C" int Plan(int role, int rank, const int64_t* problem, const int64_t* config, int64_t* out, char* text) {
  const auto& p = *reinterpret_cast<const ConvProblem*>(problem);
  std::vector<ConvPart> parts;
  Status status;
  if (const Reason reason = ConvRefuses(ConvRole(role), rank, p, {"bf16", "bf16", "bf16"})) {
    status = Invalid("conv: " + *reason);
  } else {
    status = PlanConv(ConvRole(role), rank, p, {config[0], config[1], config[2], config[3]}, &parts);
  }
  std::strncpy(text, status.message.c_str(), 999);
  if (!status.ok()) return -1;
  for (const ConvPart& part : parts) {
    for (int64_t number : {part.N, part.x, part.w, part.y}) *out++ = number;
    for (int i = 0; i < 3; ++i) {
      const ConvBox box = BoxOf(ConvRole(role), part, i);
      for (int64_t number : {part.input[i], part.filter[i], part.output[i], part.low[i], part.high[i]}) *out++ = number;
      for (int64_t number : {part.pixel[i], part.tap[i]}) *out++ = number;
      for (int64_t number : {box.lower, box.upper, box.first_offset, box.tap_stride}) *out++ = number;
    }
  }
  return parts.size();
}
