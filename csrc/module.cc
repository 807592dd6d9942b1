// The Python module jaxext._cuda_module: the handlers of all targets, and the facts of the build.  It must not know any kernel's code.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "conv.h"
#include "matmul.h"
#include "targets.h"

namespace py = pybind11;
using namespace py::literals;

namespace jaxext {
namespace {

py::dict Handlers() {
  py::dict handlers;
  for (const auto& targets : {MatmulTargets(), ConvTargets(), DepthwiseTargets()}) {
    for (const Target& target : targets) handlers[py::str(target.name)] = py::capsule(reinterpret_cast<void*>(target.handler));
  }
  return handlers;
}

py::list MatmulTable() {
  py::list rows;
  for (const MatmulKernel& k : MatmulKernels()) {
    const char* role = k.role == MatmulRole::kNN ? "nn" : k.role == MatmulRole::kNT ? "nt" : "tn";
    rows.append(py::dict("role"_a = role, "operands"_a = Name(k.operands), "result"_a = Name(k.result), "tile_m"_a = k.config.tile_m,
                         "tile_n"_a = k.config.tile_n, "tile_k"_a = k.config.tile_k, "cluster_m"_a = k.config.cluster_m,
                         "pingpong"_a = k.config.pingpong, "stages"_a = k.stages, "shared"_a = k.shared_bytes));
  }
  return rows;
}

py::list ConvTable() {
  py::list rows;
  for (const ConvKernel& k : ConvKernels()) {
    const char* role = k.role == ConvRole::kFprop ? "fprop" : k.role == ConvRole::kDgrad ? "dgrad" : "wgrad";
    rows.append(py::dict("rank"_a = k.rank, "role"_a = role, "operands"_a = Name(k.operands), "tile_m"_a = k.config.tile_m,
                         "tile_n"_a = k.config.tile_n, "tile_k"_a = k.tile_k, "cluster_m"_a = k.config.cluster_m, "stages"_a = k.stages,
                         "shared"_a = k.shared_bytes));
  }
  return rows;
}

}  // namespace
}  // namespace jaxext

PYBIND11_MODULE(_cuda_module, module) {
  module.doc() = "CUDA kernels behind jaxext: FFI handlers and the facts of the build.";
  module.def("handlers", &jaxext::Handlers, "Target name -> capsule, for jax.ffi.register_ffi_target.");
  module.def("matmul_kernels", &jaxext::MatmulTable, "The kernels of matrix products, a dict for each.");
  module.def("conv_kernels", &jaxext::ConvTable, "The kernels of dense convolutions, a dict for each.");
  module.def(
      "ffi_version", [] { return py::make_tuple(jaxext::CompiledFfiVersion().major, jaxext::CompiledFfiVersion().minor); },
      "Of the XLA headers that the handlers were compiled with.");
  module.attr("archs") = JAXEXT_CUDA_ARCHS;
  module.attr("cuda_version") = JAXEXT_CUDA_VERSION;
}
