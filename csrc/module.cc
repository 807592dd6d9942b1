// The Python module jaxext._cuda_module: the handlers of all targets, what the kernels refuse, and the facts of the build.  It must not
// know any kernel's code.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "conv/conv.h"
#include "gram/gram.h"
#include "matmul/matmul.h"
#include "pieces/pieces.h"
#include "ragged/ragged.h"
#include "common/refusals.h"
#include "scaled/scaled.h"
#include "common/targets.h"
#include "weight_only/wide_weight_only.h"

namespace py = pybind11;
using namespace py::literals;

namespace jaxext {
namespace {

py::dict HandlersByTarget() {
  const auto capsule = [](Handler* handler) { return py::capsule(reinterpret_cast<void*>(handler)); };
  py::dict handlers;
  for (const auto& targets : {MatmulTargets(), PiecesTargets(), RaggedTargets(), ScaledTargets(), GramTargets(), ConvTargets(),
                              DepthwiseTargets(), CausalTargets(), WeightOnlyTargets()}) {
    for (const auto& [name, stages] : targets) {
      handlers[py::str(name)] = py::dict("initialize"_a = capsule(stages.initialize), "execute"_a = capsule(stages.execute));
    }
  }
  return handlers;
}

const char* NameOf(MatmulRole role) { return role == MatmulRole::kNN ? "nn" : role == MatmulRole::kNT ? "nt" : "tn"; }

py::list MatmulTable() {
  py::list rows;
  for (const MatmulKernel& k : MatmulKernels()) {
    rows.append(py::dict("role"_a = NameOf(k.role), "operands"_a = Name(k.operands), "result"_a = Name(k.result), "fused"_a = k.fused,
                         "tile_m"_a = k.config.tile_m, "tile_n"_a = k.config.tile_n, "tile_k"_a = k.config.tile_k,
                         "cluster_m"_a = k.config.cluster_m, "pingpong"_a = k.config.pingpong, "stages"_a = k.stages,
                         "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list PiecesTable() {
  py::list rows;
  for (const PiecesKernel& k : PiecesKernels()) {
    rows.append(py::dict("operands"_a = Name(Dtype::kF32), "pieces"_a = k.config.pieces, "tile_m"_a = k.config.tile_m,
                         "tile_n"_a = k.config.tile_n, "stages"_a = k.stages, "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list RaggedTable() {
  py::list rows;
  for (const RaggedKernel& k : RaggedKernels()) {
    rows.append(py::dict("role"_a = NameOf(k.role), "operands"_a = Name(k.dtype), "result"_a = Name(k.dtype), "tile_m"_a = k.config.tile_m,
                         "tile_n"_a = k.config.tile_n, "tile_k"_a = k.config.tile_k, "cluster_n"_a = k.config.cluster_n,
                         "stages"_a = k.stages, "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list ScaledTable() {
  py::list rows;
  for (const ScaledKernel& k : ScaledKernels()) {
    rows.append(py::dict("operands"_a = Name(k.first), "second"_a = Name(k.second), "tile_m"_a = k.config.tile_m,
                         "tile_n"_a = k.config.tile_n, "tile_k"_a = k.config.tile_k, "cluster_m"_a = k.config.cluster_m,
                         "stages"_a = k.stages, "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list GramTable() {
  py::list rows;
  for (const GramKernel& k : GramKernels()) {
    rows.append(py::dict("operands"_a = Name(k.operands), "tile_m"_a = k.config.tile_m, "tile_n"_a = k.config.tile_n,
                         "tile_k"_a = k.config.tile_k, "cluster_m"_a = k.config.cluster_m, "stages"_a = k.stages,
                         "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list ConvTable() {
  py::list rows;
  for (const ConvKernel& k : ConvKernels()) {
    const char* role = k.role == ConvRole::kFprop ? "fprop" : k.role == ConvRole::kDgrad ? "dgrad" : "wgrad";
    rows.append(py::dict("rank"_a = k.rank, "role"_a = role, "operands"_a = Name(k.operands), "tile_m"_a = k.config.tile_m,
                         "tile_n"_a = k.config.tile_n, "tile_k"_a = k.tile_k, "cluster"_a = k.config.cluster, "stages"_a = k.stages,
                         "parts"_a = k.parts, "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list WideWeightOnlyTable() {
  py::list rows;
  for (const WideWeightOnlyKernel& k : WideWeightOnlyKernels()) {
    rows.append(py::dict("operands"_a = Name(k.operands), "bits"_a = k.bits, "tile_m"_a = k.config.tile_m, "tile_n"_a = k.config.tile_n,
                         "stages"_a = k.stages, "shared"_a = k.shared_bytes));
  }
  return rows;
}

using Three = std::array<py::object, 3>;
using Names = std::array<std::string, 3>;  // of dtypes

// Python's integers have no bounds.  A number beyond 64 bits is refused like the largest one of 64 bits.
int64_t Number(const py::object& python) {
  int beyond = 0;
  const py::object integer = py::reinterpret_steal<py::object>(PyNumber_Index(python.ptr()));
  const long long number = integer ? PyLong_AsLongLongAndOverflow(integer.ptr(), &beyond) : -1;
  if (PyErr_Occurred()) throw py::error_already_set();
  return beyond == 0 ? number : beyond > 0 ? kMostInteger : -kMostInteger;
}

std::array<int64_t, 3> Numbers(const Three& python) { return {Number(python[0]), Number(python[1]), Number(python[2])}; }

template <class Role>
Role RoleOf(const std::string& name, const Names& names) {
  for (int i = 0; i < 3; ++i) {
    if (names[i] == name) return static_cast<Role>(i);
  }
  throw py::value_error("role is " + name + ", want " + names[0] + ", " + names[1] + " or " + names[2]);
}

Reason AskMatmul(const std::string& role, const py::object& B, const py::object& M, const py::object& N, const py::object& K,
                 const Names& dtypes, bool fused, int arch) {
  return MatmulRefuses(RoleOf<MatmulRole>(role, {"nn", "nt", "tn"}), {Number(B), Number(M), Number(N), Number(K)},
                       {dtypes[0], dtypes[1], dtypes[2]}, fused, arch);
}

Reason AskPieces(const std::string& role, const py::object& B, const py::object& M, const py::object& N, const py::object& K,
                 const Names& dtypes, int arch) {
  return PiecesRefuses(RoleOf<MatmulRole>(role, {"nn", "nt", "tn"}), {Number(B), Number(M), Number(N), Number(K)},
                       {dtypes[0], dtypes[1], dtypes[2]}, arch);
}

Reason AskRagged(const std::string& role, const py::object& B, const py::object& P, const py::object& R, const py::object& M,
                 const py::object& N, const py::object& K, const py::object& G, const Names& dtypes, int arch) {
  return RaggedRefuses(RoleOf<MatmulRole>(role, {"nn", "nt", "tn"}),
                       {Number(B), Number(P), Number(R), Number(M), Number(N), Number(K), Number(G)}, {dtypes[0], dtypes[1], dtypes[2]},
                       arch);
}

Reason AskScaled(const py::object& B, const py::object& M, const py::object& N, const py::object& K, const py::object& I,
                 const py::object& J, const py::object& S, const Names& dtypes, int arch) {
  return ScaledRefuses({Number(B), Number(M), Number(N), Number(K), Number(I), Number(J), Number(S)}, {dtypes[0], dtypes[1], dtypes[2]},
                       arch);
}

// `addend`: its dtype, or None.
Reason AskGram(const py::object& B, const py::object& M, const py::object& N, const Names& dtypes, const std::optional<std::string>& addend,
               int arch) {
  return GramRefuses({Number(B), Number(M), Number(N)}, {dtypes[0], dtypes[1], dtypes[2]}, addend.value_or(""), arch);
}

template <auto kRefuses>
Reason AskConv(const std::string& role, int rank, const py::object& B, const py::object& N, const py::object& G, const py::object& C,
               const py::object& K, const Three& input, const Three& filter, const Three& output, const Three& stride, const Three& low,
               const Three& input_dilation, const Three& filter_dilation, const Names& dtypes, int arch) {
  const ConvProblem problem = {Number(B),
                               Number(N),
                               Number(G),
                               Number(C),
                               Number(K),
                               Numbers(input),
                               Numbers(filter),
                               Numbers(output),
                               Numbers(stride),
                               Numbers(low),
                               Numbers(input_dilation),
                               Numbers(filter_dilation)};
  return kRefuses(RoleOf<ConvRole>(role, {"fprop", "dgrad", "wgrad"}), rank, problem, {dtypes[0], dtypes[1], dtypes[2]}, arch);
}

// `bias`: its dtype, or None.
Reason AskCausal(const std::string& role, const py::object& B, const py::object& T, const py::object& C, const py::object& J,
                 const Names& dtypes, const std::optional<std::string>& bias, int arch) {
  if (role != "forward" && role != "backward") throw py::value_error("role is " + role + ", want forward or backward");
  return CausalRefuses(role == "forward" ? CausalRole::kForward : CausalRole::kBackward, {Number(B), Number(T), Number(C), Number(J)},
                       {dtypes[0], dtypes[1], dtypes[2]}, bias.value_or(""), arch);
}

Reason AskWeightOnly(const py::object& B, const py::object& M, const py::object& N, const py::object& K, const py::object& S, int bits,
                     const Names& dtypes, int arch) {
  return WeightOnlyRefuses({Number(B), Number(M), Number(N), Number(K), Number(S), bits}, {dtypes[0], dtypes[1], dtypes[2]}, arch);
}

template <auto kRefuses>
void DefineConv(py::module_& module, const char* name, const char* doc) {
  module.def(name, &AskConv<kRefuses>, doc, py::kw_only(), "role"_a, "rank"_a, "B"_a, "N"_a, "G"_a, "C"_a, "K"_a, "input"_a, "filter"_a,
             "output"_a, "stride"_a, "low"_a, "input_dilation"_a, "filter_dilation"_a, "dtypes"_a, "arch"_a);
}

}  // namespace
}  // namespace jaxext

PYBIND11_MODULE(_cuda_module, module) {
  module.doc() = "CUDA kernels behind jaxext: FFI handlers, what kernels refuse, and the facts of the build.";
  module.def("handlers", &jaxext::HandlersByTarget, "Target name -> capsules by stage, for jax.ffi.register_ffi_target.");
  module.def("matmul_kernels", &jaxext::MatmulTable, "The kernels of matrix products, a dict for each.");
  module.def("conv_kernels", &jaxext::ConvTable, "The kernels of dense convolutions, a dict for each.");
  module.def("matmul_refuses", &jaxext::AskMatmul, "Why no kernel takes this matrix product, or None.", py::kw_only(), "role"_a, "B"_a,
             "M"_a, "N"_a, "K"_a, "dtypes"_a, "fused"_a, "arch"_a);
  module.def("pieces_kernels", &jaxext::PiecesTable, "The kernels of products in pieces, a dict for each.");
  module.def("pieces_refuses", &jaxext::AskPieces, "Why no kernel takes this product in pieces, or None.", py::kw_only(), "role"_a, "B"_a,
             "M"_a, "N"_a, "K"_a, "dtypes"_a, "arch"_a);
  module.def("ragged_kernels", &jaxext::RaggedTable, "The kernels of ragged products, a dict for each.");
  module.def("ragged_refuses", &jaxext::AskRagged, "Why no kernel takes this ragged product, or None.", py::kw_only(), "role"_a, "B"_a,
             "P"_a, "R"_a, "M"_a, "N"_a, "K"_a, "G"_a, "dtypes"_a, "arch"_a);
  module.def("scaled_kernels", &jaxext::ScaledTable, "The kernels of products of scaled numbers, a dict for each.");
  module.def("scaled_refuses", &jaxext::AskScaled, "Why no kernel takes this scaled product, or None.", py::kw_only(), "B"_a, "M"_a, "N"_a,
             "K"_a, "I"_a, "J"_a, "S"_a, "dtypes"_a, "arch"_a);
  module.def("gram_kernels", &jaxext::GramTable, "The kernels of products with an own transpose, a dict for each.");
  module.def("gram_refuses", &jaxext::AskGram, "Why no kernel takes this product with an own transpose, or None.", py::kw_only(), "B"_a,
             "M"_a, "N"_a, "dtypes"_a, "addend"_a, "arch"_a);
  jaxext::DefineConv<&jaxext::ConvRefuses>(module, "conv_refuses", "Why no kernel takes this dense convolution, or None.");
  jaxext::DefineConv<&jaxext::DepthwiseRefuses>(module, "depthwise_refuses", "Why no kernel takes this depthwise convolution, or None.");
  module.def("causal_refuses", &jaxext::AskCausal, "Why no kernel takes this causal convolution, or None.", py::kw_only(), "role"_a, "B"_a,
             "T"_a, "C"_a, "J"_a, "dtypes"_a, "bias"_a, "arch"_a);
  module.def("wide_weight_only_kernels", &jaxext::WideWeightOnlyTable, "Hopper's kernels of weight-only products, a dict for each.");
  module.def("weight_only_refuses", &jaxext::AskWeightOnly, "Why no kernel takes this weight-only product, or None.", py::kw_only(), "B"_a,
             "M"_a, "N"_a, "K"_a, "S"_a, "bits"_a, "dtypes"_a, "arch"_a);
  module.def(
      "ffi_version", [] { return py::make_tuple(jaxext::CompiledFfiVersion().major, jaxext::CompiledFfiVersion().minor); },
      "Of the XLA headers that the handlers were compiled with.");
  module.attr("archs") = JAXEXT_CUDA_ARCHS;
  module.attr("cuda_version") = JAXEXT_CUDA_VERSION;
}
