// Families of kernels and their targets, by which XLA and Python know them.  A family registers itself, so no list has its name.  Plain
// C++: XLA's side is common/ffi.cc, Python's module.cc.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "common/problem.h"
#include "common/refusals.h"
#include "common/schema.h"
#include "common/status.h"

namespace jaxext {

// An array as XLA gives it.  Its dtype is none if no kernel knows it.
struct Buffer {
  std::optional<Dtype> dtype;
  std::vector<int64_t> shape;
  void* data;
};

// The same, of the right shape.
struct Array {
  Dtype dtype;
  void* data;
};

// The operands and results of a call, which are taken in their order.  The first that is not as it should be is the status of all.
class Arrays {
 public:
  Arrays(std::vector<Buffer> operands, std::vector<Buffer> results) : operands_(std::move(operands)), results_(std::move(results)) {}

  // The next one: of this shape, and of this dtype or of any floating-point dtype.
  Array Operand(const char* name, const std::vector<int64_t>& shape, std::optional<Dtype> dtype = {}) {
    return Checked(name, operands_left() > 0 ? &operands_[operand_++] : nullptr, shape, dtype);
  }
  Array Result(const char* name, const std::vector<int64_t>& shape, std::optional<Dtype> dtype = {}) {
    return Checked(name, result_ < results_.size() ? &results_[result_++] : nullptr, shape, dtype);
  }
  // The next one, whatever it is, which stays the next one; or null.
  const Buffer* PeekOperand() const { return operands_left() > 0 ? &operands_[operand_] : nullptr; }
  size_t operands_left() const { return operands_.size() - operand_; }

  void Refuse(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  bool ok() const { return status_.ok(); }
  // The first refusal, also of arrays that are left.
  Status Done();

 private:
  Array Checked(const char* name, const Buffer* buffer, const std::vector<int64_t>& shape, std::optional<Dtype> dtype);

  std::vector<Buffer> operands_, results_;
  size_t operand_ = 0, result_ = 0;
  Status status_;
};

// The shape of a result in `splits` parts.
inline std::vector<int64_t> InParts(std::vector<int64_t> shape, int64_t splits) {
  if (splits > 1) shape.insert(shape.begin(), splits);
  return shape;
}

// A kernel that was compiled: its dtypes, the numbers of its config, and the limits of a call, by name.
using Row = std::vector<std::pair<std::string, std::variant<std::string, int64_t>>>;

template <class Config>
Row RowOf(Row row, const Config& config, int stages, int shared_bytes) {
  for (const auto& [name, value] : ValuesOf(config)) {
    if (name != "splits") row.push_back({name, value});
  }
  row.push_back({"stages", int64_t{stages}});
  row.push_back({"shared", int64_t{shared_bytes}});
  return row;
}

// The rows of a table, of which `facts(kernel)` gives what its config lacks.
template <class Kernel, class Facts>
std::vector<Row> RowsOf(const std::vector<Kernel>& kernels, Facts facts) {
  std::vector<Row> rows;
  for (const Kernel& k : kernels) rows.push_back(RowOf(facts(k), k.config, k.stages, k.shared_bytes));
  return rows;
}

// What can be called.  Exported programs hold the name, with a version, and the fields, so both outlive releases.
struct Target {
  std::string name;                        // such as "gram": XLA calls it jaxext_gram_v1
  std::vector<Field> problem, attributes;  // the attributes are the problem, the config, and what else a call has
  size_t bytes;                            // of the attributes' structs
  std::function<Reason(const int64_t* problem, const Dtypes&, std::optional<int> arch)> refuses;
  std::function<Status(const int64_t* attributes, Arrays&, LaunchStream)> launch;
};

// `refuses(problem, dtypes, arch)`; `launch(arrays, problem, others..., stream)`.
template <class Problem, class... Others, class Refuses, class Launch>
Target TargetOf(std::string name, Refuses refuses, Launch launch) {
  return {std::move(name),
          FieldsOf<Problem>(),
          FieldsOf<Problem, Others...>(),
          (sizeof(Problem) + ... + sizeof(Others)),
          [refuses](const int64_t* words, const Dtypes& dtypes, std::optional<int> arch) {
            return refuses(Read<Problem>(&words), dtypes, arch);
          },
          [launch](const int64_t* words, Arrays& arrays, LaunchStream stream) {
            const auto given = std::tuple<Problem, Others...>{Read<Problem>(&words), Read<Others>(&words)...};  // in this order
            return std::apply([&](const auto&... each) { return launch(arrays, each..., stream); }, given);
          }};
}

// The target of a role: `refuses(role, problem, dtypes, arch)`; `launch(role, arrays, problem, others..., stream)`.
template <class... Structs, class Role, class Refuses, class Launch>
Target TargetOfRole(std::string name, Role role, Refuses refuses, Launch launch) {
  return TargetOf<Structs...>(
      std::move(name), [=](const auto&... given) { return refuses(role, given...); },
      [=](Arrays& arrays, const auto&... given) { return launch(role, arrays, given...); });
}

struct Family {
  std::string name;
  std::vector<Target> targets;
  std::function<std::vector<Row>()> kernels;  // those among which the caller chooses, if it does
};

// All families, in no particular order.
std::vector<Family>& Families();

// An error if two families, two targets or two attributes of a target have one name, or if a struct has members without a name.
Status CheckFamilies();

struct Registered {
  explicit Registered(Family family) { Families().push_back(std::move(family)); }
};

// The compiled kernel of this config, whatever its splits, that `fits`; or null.
template <class Kernel, class Config, class Fits>
const Kernel* Find(const std::vector<Kernel>& kernels, const Config& config, Fits fits) {
  for (const Kernel& kernel : kernels) {
    if (fits(kernel) && IsSameTile(kernel.config, config)) return &kernel;
  }
  return nullptr;
}

// The parts of a table, of several compile units.
template <class Kernel>
std::vector<Kernel> Joined(std::initializer_list<std::vector<Kernel>> parts) {
  std::vector<Kernel> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace jaxext
