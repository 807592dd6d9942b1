// A PTX module, parsed: every name is resolved, and every operand that an instruction reads or writes is a slot of a warp's registers.
// Constants and special registers such as %tid.x have slots of their own, which are filled when a warp starts.
#pragma once

#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "floats.h"

namespace ptx {

struct Warp;
struct Instruction;
using Mask = uint32_t;  // lanes of a warp
using Handler = void (*)(Warp&, const Instruction&, Mask);

enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kB32,
  kU32,
  kS32,
  kB64,
  kU64,
  kS64,
  kB128,
  kF16,
  kF16x2,
  kBF16,
  kBF16x2,
  kTF32,
  kF32,
  kF64,
  kE4M3,
  kE5M2,
  kE4M3x2,
  kE5M2x2,
  kS16x2,
  kU16x2
};
Type TypeOf(std::string_view name);  // kNone if there is none of this name
int BitsOf(Type type);
bool IsSigned(Type type);
bool IsFloat(Type type);     // of one number, of at least 16 bits
Format FormatOf(Type type);  // of a float, or of each of a pair
inline uint64_t Ones(int bits) { return bits >= 64 ? ~0ull : (1ull << bits) - 1; }
int64_t IntegerIn(uint64_t bits, Type type);  // the number in the low bits

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kCluster, kParam, kLocal };

struct Operand {
  int slot = -1;               // -1: `_`, or what has parts alone
  int64_t offset = 0;          // of an address: bytes beyond what the slot holds
  bool negated = false;        // a predicate, as in !%p1
  bool address = false;        // in brackets
  std::vector<Operand> parts;  // of {a, b}, of p|q, and of [map, {x, y}]
};

struct Instruction {
  Handler handler = nullptr;
  bool known = true;
  Operand guard;  // its slot is -1 if there is none
  std::vector<Operand> operands;
  std::string name;                    // up to the first dot
  std::vector<std::string> modifiers;  // what stands between dots after it
  std::string text;
  int line = 0;         // in the module's text
  int source_line = 0;  // in the kernel's source, by .loc
  int target = -1;      // of a branch
  // What the modifiers say, set by the decoder of the instruction.
  Type type = Type::kNone, from = Type::kNone;
  Space space = Space::kGeneric;
  int count = 1;   // of elements of a vector, or of matrices
  int choice = 0;  // one of an enumeration that the decoder and the handler share
  bool flag = false, other = false;
};

struct Parameter {
  std::string name;
  int64_t offset, size;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  int64_t parameter_bytes = 0;
  int64_t shared_bytes = 0;  // static; dynamic shared memory begins after them
  int64_t local_bytes = 0;   // of a thread
  int slots = 0;
  std::map<uint64_t, int> constants;    // value -> slot
  std::map<std::string, int> specials;  // %tid.x and its like -> slot
  std::vector<std::string> slot_names;  // for messages
  std::vector<int> slot_bits;           // widths of registers
  int most_threads = 1024;
};

struct Module {
  std::vector<Kernel> kernels;
  std::vector<uint8_t> globals;  // .global and .const variables
};

// Shared memory begins here: the first KiB is the system's on sm_90, and a null pointer stays invalid.
constexpr int64_t kSharedStart = 1024;
// Generic addresses of what is not global memory.
constexpr uint64_t kParamWindow = 0x7f01ull << 40, kLocalWindow = 0x7f02ull << 40, kSharedWindow = 0x7f03ull << 40,
                   kGlobalsWindow = 0x7f04ull << 40, kWindowSize = 1ull << 40;

// Texts and numbers, put together.
template <class... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

struct Fault : std::runtime_error {
  template <class... Parts>
  explicit Fault(const Parts&... parts) : std::runtime_error(Text(parts...)) {}
};

Module Parse(std::string_view text);

// The modifiers that a decoder has not taken yet; what is left in the end is an instruction that the machine does not know.
class Modifiers {
 public:
  explicit Modifiers(Instruction& instruction) : left_(instruction.modifiers) {}
  bool Take(std::string_view name);
  template <class... Names>
  void Ignore(Names... names) {
    (Take(names), ...);
  }
  std::string TakeFirst();  // "" if none is left
  Type TakeType();          // the last one, if it is a type
  bool empty() const { return left_.empty(); }

 private:
  std::vector<std::string> left_;
};

// Each decodes the instructions of its file, by setting the handler, and says whether the instruction is one of them.
bool DecodeScalar(Instruction& instruction);
bool DecodeConversion(Instruction& instruction);
bool DecodeMemory(Instruction& instruction);
bool DecodeWarp(Instruction& instruction);
bool DecodeTensor(Instruction& instruction);
bool DecodeAsynchronous(Instruction& instruction);

}  // namespace ptx
