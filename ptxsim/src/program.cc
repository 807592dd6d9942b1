// The parser of PTX, as nvcc and Triton write it.
#include "program.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace ptx {
namespace {

struct Named {
  std::string_view name;
  Type type;
  int bits;
};
constexpr Named kTypes[] = {
    {"pred", Type::kPred, 1},      {"b8", Type::kB8, 8},          {"u8", Type::kU8, 8},        {"s8", Type::kS8, 8},
    {"b16", Type::kB16, 16},       {"u16", Type::kU16, 16},       {"s16", Type::kS16, 16},     {"b32", Type::kB32, 32},
    {"u32", Type::kU32, 32},       {"s32", Type::kS32, 32},       {"b64", Type::kB64, 64},     {"u64", Type::kU64, 64},
    {"s64", Type::kS64, 64},       {"b128", Type::kB128, 128},    {"f16", Type::kF16, 16},     {"f16x2", Type::kF16x2, 32},
    {"bf16", Type::kBF16, 16},     {"bf16x2", Type::kBF16x2, 32}, {"tf32", Type::kTF32, 32},   {"f32", Type::kF32, 32},
    {"f64", Type::kF64, 64},       {"e4m3", Type::kE4M3, 8},      {"e5m2", Type::kE5M2, 8},    {"e4m3x2", Type::kE4M3x2, 16},
    {"e5m2x2", Type::kE5M2x2, 16}, {"s16x2", Type::kS16x2, 32},   {"u16x2", Type::kU16x2, 32},
};

bool InName(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }

// What a block in braces declares; branches wait for its labels.
struct Scope {
  std::map<std::string, int> registers, labels;
  std::vector<std::pair<int, std::string>> branches;
};

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Module Run() {
    for (Skip(); at_ < text_.size(); Skip()) {
      const std::string word = Word();
      if (word == ".entry") {
        ParseKernel();
      } else if (word == ".global" || word == ".const") {
        ParseVariable(Where::kGlobals);
      } else if (word == ".shared" || word == ".extern") {
        if (word == ".shared" || Word() == ".shared")
          ParseVariable(Where::kShared);
        else
          at_ = text_.find(';', at_) + 1;
      } else if (word == ".section") {
        at_ = text_.find('{', at_), SkipBraces();
      } else if (word == ".func") {  // a call of it is an unknown instruction
        const size_t end = text_.find(';', at_), body = text_.find('{', at_);
        at_ = std::min(end + 1, body);
        if (at_ == body) SkipBraces();
      } else if (word != ".visible" && word != ".weak") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      }
    }
    return std::move(module_);
  }

 private:
  enum class Where { kGlobals, kShared, kLocal, kCall };

  [[noreturn]] void Stop(const std::string& why) { throw Fault("line ", Line(), ": ", why, ": ", std::string(text_.substr(at_, 100))); }
  int Line() {
    for (; counted_ < at_; ++counted_) lines_ += text_[counted_] == '\n';
    return lines_ + 1;
  }
  bool Starts(std::string_view with) { return text_.substr(at_, with.size()) == with; }
  void Skip() {
    for (;; ++at_) {
      while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
      if (Starts("//")) {
        at_ = std::min(text_.find('\n', at_), text_.size() - 1);
      } else if (Starts("/*")) {
        at_ = text_.find("*/", at_) + 1;
      } else {
        return;
      }
    }
  }
  bool Accept(char c) {
    Skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Accept(c)) Stop(std::string("expected ") + c);
  }
  void SkipBraces() {
    int depth = 0;
    do {
      depth += text_[at_] == '{', depth -= text_[at_] == '}', ++at_;
    } while (depth && at_ < text_.size());
  }
  // A name, a directive or an opcode with its modifiers; special registers have dots too.
  std::string Word() {
    Skip();
    const size_t start = at_;
    while (at_ < text_.size() && (InName(text_[at_]) || text_[at_] == '.' || Starts("::"))) at_ += Starts("::") ? 2 : 1;
    if (at_ == start) Stop("expected a name");
    return std::string(text_.substr(start, at_ - start));
  }
  int64_t Integer() {
    Skip();
    const char* start = text_.data() + at_;
    char* end = nullptr;
    const bool negative = *start == '-';
    const uint64_t value = std::strtoull(start + negative, &end, 0);
    at_ += end - start;
    if (at_ < text_.size() && text_[at_] == 'U') ++at_;
    return static_cast<int64_t>(negative ? -value : value);
  }

  // .align 16 .b8 name[1024], or = {1, 2}; several with commas.
  void ParseVariable(Where where) {
    int64_t align = 1;
    Type type = Type::kNone;
    while (type == Type::kNone) {
      const std::string word = Word();
      if (word == ".align")
        align = Integer();
      else if (word == ".attribute" || word == ".visible")
        Skip();
      else
        type = TypeOf(word.substr(1));
    }
    do {
      const std::string name = Word();
      int64_t count = 1;
      while (Accept('[')) count *= Accept(']') ? 0 : Integer(), count == 0 || (Expect(']'), true);
      const int64_t size = BitsOf(type) / 8, bytes = count * size;
      align = std::max(align, size);
      if (where == Where::kShared) {
        int64_t& end = in_kernel_ ? kernel_.shared_bytes : module_shared_;
        if (count) end = (end + align - 1) / align * align;
        symbols_[name] = count ? kSharedStart + end : -1;  // -1: dynamic, behind all static ones
        end += bytes;
      } else if (where == Where::kLocal || where == Where::kCall) {  // a call's arguments are in the thread's own memory
        kernel_.local_bytes = (kernel_.local_bytes + align - 1) / align * align;
        symbols_[name] = kernel_.local_bytes + (where == Where::kCall ? static_cast<int64_t>(kLocalWindow) : 0);
        kernel_.local_bytes += bytes;
      } else {
        auto& globals = module_.globals;
        globals.resize((globals.size() + align - 1) / align * align);
        symbols_[name] = static_cast<int64_t>(kGlobalsWindow + globals.size());
        size_t to = globals.size();
        globals.resize(globals.size() + bytes);
        if (Accept('=')) {
          const bool list = Accept('{');
          do {
            const int64_t value = Integer();
            for (int64_t i = 0; i < size; ++i) globals[to++] = static_cast<uint8_t>(value >> 8 * i);
          } while (list && Accept(','));
          if (list) Expect('}');
        }
      }
    } while (Accept(','));
    Expect(';');
  }

  void ParseKernel() {
    kernel_ = {}, scopes_.assign(1, {}), in_kernel_ = true, source_line_ = 0;
    kernel_.shared_bytes = module_shared_;
    const auto outer = symbols_;
    kernel_.name = Word();
    if (Accept('(')) {
      while (!Accept(')')) ParseParameter(), Accept(',');
    }
    for (Skip(); text_[at_] != '{'; Skip()) {
      const std::string word = Word();
      if (word == ".maxntid" || word == ".reqntid") {
        kernel_.most_threads = static_cast<int>(Integer());
        while (Accept(',')) kernel_.most_threads *= static_cast<int>(Integer());
      } else if (word != ".noreturn" && word != ".explicitcluster") {
        do Integer();
        while (Accept(','));
      }
    }
    Expect('{');
    while (!scopes_.empty()) ParseStatement();
    // Dynamic shared memory is aligned as TMA wants it, whatever the declaration says.
    const int64_t dynamic = kSharedStart + (kernel_.shared_bytes + 15) / 16 * 16;
    for (auto [index, operand] : dynamic_) kernel_.code[index].operands[operand].slot = Constant(dynamic);
    dynamic_.clear();
    module_.kernels.push_back(std::move(kernel_));
    symbols_ = outer, in_kernel_ = false;
  }

  void ParseParameter() {
    if (Word() != ".param") Stop("expected a parameter");
    int64_t align = 1, size = 0;
    std::string word = Word();
    for (; word[0] == '.'; word = Word()) {
      if (word == ".align")
        align = Integer();
      else if (TypeOf(word.substr(1)) != Type::kNone)
        size = BitsOf(TypeOf(word.substr(1))) / 8;
    }
    align = std::max(align, size);
    if (Accept('[')) size *= Integer(), Expect(']');
    const int64_t offset = (kernel_.parameter_bytes + align - 1) / align * align;
    kernel_.parameters.push_back({word, offset, size});
    symbols_[word] = offset;
    kernel_.parameter_bytes = offset + size;
  }

  void ParseStatement() {
    Skip();
    if (Accept('{')) return scopes_.emplace_back(), void();
    if (Accept('}')) return CloseScope();
    if (text_[at_] == '.') return ParseDirective();
    if (Accept(';')) return;
    const size_t start = at_;
    if (text_[at_] != '@') {
      const std::string word = Word();
      if (Accept(':')) return scopes_.back().labels[word] = static_cast<int>(kernel_.code.size()), void();
      at_ = start;
    }
    ParseInstruction();
  }

  void CloseScope() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (const auto& [index, label] : scope.branches) {
      if (auto found = scope.labels.find(label); found != scope.labels.end())
        kernel_.code[index].target = found->second;
      else if (scopes_.empty())
        Stop("no label " + label);
      else
        scopes_.back().branches.emplace_back(index, label);
    }
  }

  void ParseDirective() {
    const size_t start = at_;
    std::string word = Word();
    if (word.starts_with(".reg.")) word.resize(4), at_ = start + 4;  // .reg.b32
    if (word == ".reg") {
      const int bits = BitsOf(TypeOf(Word().substr(1)));
      do {
        const std::string name = Word();
        int64_t count = 1;
        if (Accept('<')) {
          count = Integer(), Expect('>');
          for (int64_t i = 0; i < count; ++i) Declare(name + std::to_string(i), bits);
        } else {
          Declare(name, bits);
        }
      } while (Accept(','));
      Expect(';');
    } else if (word == ".shared" || word == ".local") {
      ParseVariable(word == ".shared" ? Where::kShared : Where::kLocal);
    } else if (word == ".param") {  // of a call
      ParseVariable(Where::kCall);
    } else if (word == ".loc") {
      Integer(), source_line_ = static_cast<int>(Integer());
      at_ = std::min(text_.find('\n', at_), text_.size());
    } else if (word == ".pragma") {
      at_ = text_.find(';', at_) + 1;
    } else {
      Stop("unknown directive " + word);
    }
  }
  void Declare(const std::string& name, int bits) { scopes_.back().registers[name] = NewSlot(name, bits); }
  int NewSlot(const std::string& name, int bits) {
    kernel_.slot_names.push_back(name), kernel_.slot_bits.push_back(bits);
    return kernel_.slots++;
  }
  int Constant(uint64_t value) {
    auto [found, fresh] = kernel_.constants.try_emplace(value, kernel_.slots);
    if (fresh) NewSlot("a constant", 64);
    return found->second;
  }

  void ParseInstruction() {
    Instruction i;
    const size_t start = at_;
    i.line = Line(), i.source_line = source_line_;
    if (Accept('@')) {
      i.guard.negated = Accept('!');
      i.guard.slot = Name(Word(), nullptr);
    }
    const std::string opcode = Word();
    size_t from = opcode.find('.');
    i.name = opcode.substr(0, from);
    while (from != std::string::npos) {
      const size_t to = opcode.find('.', from + 1);
      i.modifiers.push_back(opcode.substr(from + 1, to == std::string::npos ? to : to - from - 1));
      from = to;
    }
    const int index = static_cast<int>(kernel_.code.size());
    if (i.name == "bra") {
      scopes_.back().branches.emplace_back(index, Word());
    } else if (i.name == "call") {
      at_ = text_.find(';', at_);
    } else if (Skip(), text_[at_] != ';') {
      do {
        const int operand = static_cast<int>(i.operands.size());
        ParseOperand(i.operands.emplace_back(), operand);
      } while (Accept(','));
    }
    Expect(';');
    i.text = Tidy(text_.substr(start, at_ - start - 1));
    i.known = DecodeScalar(i) || DecodeConversion(i) || DecodeMemory(i) || DecodeWarp(i) || DecodeTensor(i) || DecodeAsynchronous(i);
    if (!i.known) i.handler = [](Warp&, const Instruction&, Mask) { throw Fault("an instruction that the machine does not know"); };
    if (i.name == "call" && i.text.find("__assertfail") != std::string::npos) {
      i.known = true;
      i.handler = [](Warp&, const Instruction&, Mask) { throw Fault("an assertion of the kernel fails"); };
    }
    kernel_.code.push_back(std::move(i));
  }
  static std::string Tidy(std::string_view text) {
    std::string tidy;
    for (char c : text) {
      if (!std::isspace(static_cast<unsigned char>(c)))
        tidy += c;
      else if (!tidy.empty() && tidy.back() != ' ')
        tidy += ' ';
    }
    return tidy.size() > 200 ? tidy.substr(0, 200) + "..." : tidy;
  }

  void ParseOperand(Operand& o, int index) {
    Skip();
    if (Accept('{')) {
      do ParseOperand(o.parts.emplace_back(), -1);
      while (Accept(','));
      return Expect('}');
    }
    if (Accept('[')) {
      o.address = true;
      ParseOperand(o, index);
      if (Accept(',')) {  // [map, {x, y}]
        Operand map = std::move(o);
        map.address = false;
        o = {};
        o.address = true;
        o.parts.push_back(std::move(map));
        ParseOperand(o.parts.emplace_back(), -1);
      }
      return Expect(']');
    }
    o.negated = Accept('!');
    Skip();
    if (Starts("0f") || Starts("0d")) {
      const size_t digits = text_[at_ + 1] == 'f' ? 8 : 16;
      o.slot = Constant(std::strtoull(std::string(text_.substr(at_ + 2, digits)).c_str(), nullptr, 16));
      at_ += 2 + digits;
    } else if (std::isdigit(static_cast<unsigned char>(text_[at_])) || text_[at_] == '-') {
      o.slot = Constant(static_cast<uint64_t>(Integer()));
    } else {
      const std::string word = Word();
      if (word != "_") o.slot = Name(word, index < 0 ? nullptr : &index);
      if (Accept('|')) {
        Operand first = o;
        o = {};
        o.parts.push_back(first);
        ParseOperand(o.parts.emplace_back(), -1);
        return;
      }
    }
    if (Accept('+'))
      o.offset = Integer();
    else if (o.address && Starts("-"))
      o.offset = Integer();
  }

  // The slot of a register, a special register, a predicate's constant or a symbol's address.
  int Name(const std::string& word, const int* operand) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (auto found = scope->registers.find(word); found != scope->registers.end()) return found->second;
    }
    if (word[0] == '%') {
      auto [found, fresh] = kernel_.specials.try_emplace(word, kernel_.slots);
      if (fresh) NewSlot(word, 64);
      return found->second;
    }
    if (word == "WARP_SZ") return Constant(32);
    auto symbol = symbols_.find(word);
    if (symbol == symbols_.end()) Stop("no such name: " + word);
    if (symbol->second != -1) return Constant(static_cast<uint64_t>(symbol->second));
    if (operand == nullptr) Stop("dynamic shared memory in a list");
    dynamic_.emplace_back(static_cast<int>(kernel_.code.size()), *operand);
    return -1;
  }

  std::string_view text_;
  size_t at_ = 0, counted_ = 0;
  int lines_ = 0, source_line_ = 0;
  bool in_kernel_ = false;
  Module module_;
  Kernel kernel_;
  int64_t module_shared_ = 0;
  std::map<std::string, int64_t> symbols_;
  std::vector<Scope> scopes_;
  std::vector<std::pair<int, int>> dynamic_;  // instruction and operand that want the start of dynamic shared memory
};

}  // namespace

Type TypeOf(std::string_view name) {
  for (const Named& type : kTypes) {
    if (type.name == name) return type.type;
  }
  return Type::kNone;
}

int BitsOf(Type type) {
  for (const Named& named : kTypes) {
    if (named.type == type) return named.bits;
  }
  return 0;
}

bool IsSigned(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64 || type == Type::kS16x2;
}

bool IsFloat(Type t) { return t == Type::kF16 || t == Type::kBF16 || t == Type::kF32 || t == Type::kTF32 || t == Type::kF64; }

Format FormatOf(Type t) {
  return t == Type::kF16 || t == Type::kF16x2     ? kF16Format
         : t == Type::kBF16 || t == Type::kBF16x2 ? kBF16Format
         : t == Type::kE4M3 || t == Type::kE4M3x2 ? kE4M3Format
         : t == Type::kE5M2 || t == Type::kE5M2x2 ? kE5M2Format
         : t == Type::kTF32                       ? kTF32Format
                                                  : kF32Format;
}

int64_t IntegerIn(uint64_t bits, Type type) {
  const int unused = 64 - BitsOf(type);
  return IsSigned(type) ? static_cast<int64_t>(bits << unused) >> unused : static_cast<int64_t>(bits << unused >> unused);
}

bool Modifiers::Take(std::string_view name) {
  auto found = std::find(left_.begin(), left_.end(), name);
  if (found == left_.end()) return false;
  left_.erase(found);
  return true;
}

std::string Modifiers::TakeFirst() {
  if (left_.empty()) return "";
  std::string first = left_.front();
  left_.erase(left_.begin());
  return first;
}

Type Modifiers::TakeType() {
  const Type type = left_.empty() ? Type::kNone : TypeOf(left_.back());
  if (type != Type::kNone) left_.pop_back();
  return type;
}

Module Parse(std::string_view text) { return Parser(text).Run(); }

}  // namespace ptx
