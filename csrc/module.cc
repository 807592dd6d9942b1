// The Python module jaxext._cuda_module: the handlers of all targets, what the kernels refuse, which there are, and the facts of the build.
// It knows no family.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "common/family.h"
#include "common/ffi.h"

namespace py = pybind11;
using namespace py::literals;

namespace jaxext {
namespace {

py::dict ByTarget() {
  const auto capsule = [](Handler* handler) { return py::capsule(reinterpret_cast<void*>(handler)); };
  py::dict handlers;
  for (const auto& [name, stages] : HandlersByTarget()) {
    handlers[py::str(name)] = py::dict("initialize"_a = capsule(stages.initialize), "execute"_a = capsule(stages.execute));
  }
  return handlers;
}

template <class Named>
const Named& Find(const std::vector<Named>& all, const std::string& name, const char* what) {
  for (const Named& each : all) {
    if (each.name == name) return each;
  }
  throw py::value_error(std::string("there is no ") + what + " " + name);
}

std::vector<Target> AllTargets() {
  std::vector<Target> all;
  for (const Family& family : Families()) all.insert(all.end(), family.targets.begin(), family.targets.end());
  return all;
}

// Python's integers have no bounds.  A number beyond 64 bits is refused like the largest one of 64 bits.
int64_t Number(const py::handle& python) {
  int beyond = 0;
  const py::object integer = py::reinterpret_steal<py::object>(PyNumber_Index(python.ptr()));
  const long long number = integer ? PyLong_AsLongLongAndOverflow(integer.ptr(), &beyond) : -1;
  if (PyErr_Occurred()) throw py::error_already_set();
  return beyond == 0 ? number : beyond > 0 ? kMostInteger : -kMostInteger;
}

Reason Refuses(const std::string& name, const std::vector<std::string>& dtypes, int arch, const py::kwargs& problem) {
  static const auto* const targets = new std::vector<Target>(AllTargets());
  const Target& target = Find(*targets, name, "target");
  if (dtypes.size() != 3 && dtypes.size() != 4) throw py::value_error("want three dtypes, or four");
  std::vector<int64_t> words;
  for (const Field& field : target.problem) {
    if (!problem.contains(field.name)) throw py::type_error(name + " wants the field " + field.name);
    const py::object value = problem[field.name.c_str()];
    if (field.words() == 1) {
      words.push_back(Number(value));
    } else {
      const py::sequence sizes(value);
      if (sizes.size() != 3) throw py::value_error(field.name + " wants three numbers");
      for (const py::handle& size : sizes) words.push_back(Number(size));
    }
  }
  if (problem.size() != target.problem.size()) throw py::type_error(name + " is given a field that it has not");
  return target.refuses(words.data(), {dtypes[0], dtypes[1], dtypes[2], dtypes.size() > 3 ? dtypes[3] : ""}, arch);
}

std::vector<std::string> FamilyNames() {
  std::vector<std::string> names;
  for (const Family& family : Families()) names.push_back(family.name);
  return names;
}

py::list Kernels(const std::string& name) {
  const Family& family = Find(Families(), name, "family");
  py::list rows;
  if (!family.kernels) return rows;
  for (const Row& row : family.kernels()) {
    py::dict entries;
    for (const auto& [key, value] : row) entries[py::str(key)] = value;
    rows.append(entries);
  }
  return rows;
}

py::dict Schema() {
  py::dict schema;
  for (const Target& target : AllTargets()) {
    py::list names;
    for (const Field& field : target.attributes) names.append(field.name);
    schema[py::str(target.name)] = names;
  }
  return schema;
}

}  // namespace
}  // namespace jaxext

PYBIND11_MODULE(_cuda_module, module) {
  if (const jaxext::Status status = jaxext::CheckFamilies(); !status.ok()) throw py::import_error(status.message);
  module.doc() = "CUDA kernels behind jaxext: FFI handlers, what kernels refuse, and the facts of the build.";
  module.def("handlers", &jaxext::ByTarget, "Target name -> capsules by stage, for jax.ffi.register_ffi_target.");
  module.def("schema", &jaxext::Schema, "Target -> the names of its attributes, in order.");
  module.def("refuses", &jaxext::Refuses, "The reason why no kernel takes a target's problem, or None.", "target"_a, py::kw_only(),
             "dtypes"_a, "arch"_a);
  module.def("families", &jaxext::FamilyNames, "The names of all families, in no particular order.");
  module.def("kernels", &jaxext::Kernels, "The kernels of a family among which a config chooses, a dict for each.", "family"_a);
  module.def("ffi_version", [] { return jaxext::CompiledFfiVersion(); }, "Of the XLA headers that the handlers were compiled with.");
  module.attr("archs") = JAXEXT_CUDA_ARCHS;
  module.attr("cuda_version") = JAXEXT_CUDA_VERSION;
}
