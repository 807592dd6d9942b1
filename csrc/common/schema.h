// Structs whose members have names at run time: those of XLA's attributes, of Python's keywords and of messages.  A family's header writes
// each name once.  Plain C++.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// The members of a struct, and no others, each once at most and in this order: integers, triples of integers (one for each spatial axis),
// real numbers.  `CheckFamilies` compares the names with the struct's size.
#define JAXEXT_INTEGERS(...) \
  int64_t __VA_ARGS__;       \
  static constexpr const char* kIntegers = #__VA_ARGS__;
#define JAXEXT_TRIPLES(...)           \
  std::array<int64_t, 3> __VA_ARGS__; \
  static constexpr const char* kTriples = #__VA_ARGS__;
#define JAXEXT_REALS(...) \
  double __VA_ARGS__;     \
  static constexpr const char* kReals = #__VA_ARGS__;

namespace jaxext {

enum class FieldKind { kInteger, kTriple, kReal };

struct Field {
  std::string name;
  FieldKind kind;
  int words() const { return kind == FieldKind::kTriple ? 3 : 1; }  // of 8 bytes
};

namespace schema {

template <class Struct, class = void>
constexpr const char* kIntegers = "";
template <class Struct>
constexpr const char* kIntegers<Struct, std::void_t<decltype(Struct::kIntegers)>> = Struct::kIntegers;
template <class Struct, class = void>
constexpr const char* kTriples = "";
template <class Struct>
constexpr const char* kTriples<Struct, std::void_t<decltype(Struct::kTriples)>> = Struct::kTriples;
template <class Struct, class = void>
constexpr const char* kReals = "";
template <class Struct>
constexpr const char* kReals<Struct, std::void_t<decltype(Struct::kReals)>> = Struct::kReals;

// "B, M, N" as fields; the preprocessor keeps or leaves out the blanks.
inline void Append(const std::string& names, FieldKind kind, std::vector<Field>* fields) {
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    fields->push_back({names.substr(begin, end - begin), kind});
    begin = std::min(names.find_first_not_of(", ", end), names.size());
  }
}

template <class Config, class = void>
constexpr bool kHasSplits = false;
template <class Config>
constexpr bool kHasSplits<Config, std::void_t<decltype(Config::splits)>> = true;

}  // namespace schema

// The members of these structs, one after the other.
template <class... Structs>
std::vector<Field> FieldsOf() {
  std::vector<Field> fields;
  const auto append = [&](const char* integers, const char* triples, const char* reals) {
    schema::Append(integers, FieldKind::kInteger, &fields);
    schema::Append(triples, FieldKind::kTriple, &fields);
    schema::Append(reals, FieldKind::kReal, &fields);
  };
  (append(schema::kIntegers<Structs>, schema::kTriples<Structs>, schema::kReals<Structs>), ...);
  return fields;
}

inline int WordsOf(const std::vector<Field>& fields) {
  int words = 0;
  for (const Field& field : fields) words += field.words();
  return words;
}

// The next struct of words of 8 bytes, in the order of `FieldsOf`.
template <class Struct>
Struct Read(const int64_t** words) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % 8 == 0);
  Struct made;
  std::memcpy(&made, *words, sizeof(Struct));
  *words += sizeof(Struct) / 8;
  return made;
}

// The names and values of a struct of integers.
template <class Struct>
std::vector<std::pair<std::string, int64_t>> ValuesOf(const Struct& given) {
  static_assert(*schema::kTriples<Struct> == 0 && *schema::kReals<Struct> == 0, "want integers alone");
  const std::vector<Field> fields = FieldsOf<Struct>();
  std::vector<std::pair<std::string, int64_t>> values;
  std::array<int64_t, sizeof(Struct) / 8> words;
  std::memcpy(words.data(), &given, sizeof(Struct));
  for (size_t i = 0; i < words.size(); ++i) values.push_back({fields[i].name, words[i]});
  return values;
}

// "B=1 M=2 N=3", without the fields of these names.
template <class Struct>
std::string Text(const Struct& given, std::initializer_list<const char*> without = {}) {
  std::string text;
  for (const auto& [name, value] : ValuesOf(given)) {
    bool shown = true;
    for (const char* other : without) shown = shown && name != other;
    if (shown) text += (text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  }
  return text;
}

// Whether two configs differ at most in the number of parts of a sum.
template <class Config>
bool IsSameTile(Config one, const Config& other) {
  if constexpr (schema::kHasSplits<Config>) one.splits = other.splits;
  return std::memcmp(&one, &other, sizeof(Config)) == 0;
}

}  // namespace jaxext
