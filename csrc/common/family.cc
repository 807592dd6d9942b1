#include "common/family.h"

#include <set>

namespace jaxext {
namespace {

std::string Text(const std::vector<int64_t>& shape) {
  std::string joined;
  for (int64_t size : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
  return "(" + joined + ")";
}

bool IsFloat(Dtype dtype) { return dtype != Dtype::kS8 && dtype != Dtype::kS32; }

}  // namespace

Array Arrays::Checked(const char* name, const Buffer* buffer, const std::vector<int64_t>& shape, std::optional<Dtype> dtype) {
  if (buffer == nullptr) {
    Refuse(Invalid(std::string(name) + " is missing: there are " + std::to_string(operands_.size()) + " operands and " +
                   std::to_string(results_.size()) + " results"));
    return {dtype.value_or(Dtype::kF32), nullptr};
  }
  if (buffer->shape != shape) Refuse(Invalid(std::string(name) + " has the shape " + Text(buffer->shape) + ", want " + Text(shape)));
  if (!buffer->dtype || (dtype ? buffer->dtype != dtype : !IsFloat(*buffer->dtype))) {
    Refuse(Invalid(std::string(name) + " is " + (buffer->dtype ? Name(*buffer->dtype) : "of another dtype") + ", want " +
                   (dtype ? Name(*dtype) : "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2")));
  }
  return {buffer->dtype.value_or(Dtype::kF32), buffer->data};
}

Status Arrays::Done() {
  if (operand_ < operands_.size() || result_ < results_.size()) {
    Refuse(Invalid(std::to_string(operands_.size()) + " operands and " + std::to_string(results_.size()) + " results, want " +
                   std::to_string(operand_) + " and " + std::to_string(result_)));
  }
  return status_;
}

Status CheckFamilies() {
  std::set<std::string> families, targets;
  for (const Family& family : Families()) {
    if (!families.insert(family.name).second) return Internal("two families are called " + family.name);
    for (const Target& target : family.targets) {
      std::set<std::string> names;
      if (!targets.insert(target.name).second) return Internal("two targets are called " + target.name);
      for (const Field& field : target.attributes) {
        if (!names.insert(field.name).second) return Internal(target.name + " has two attributes " + field.name);
      }
      if (WordsOf(target.attributes) * sizeof(int64_t) != target.bytes) return Internal(target.name + " has members without a name");
    }
  }
  return {};
}

std::vector<Family>& Families() {
  static auto* const families = new std::vector<Family>;
  return *families;
}

}  // namespace jaxext
