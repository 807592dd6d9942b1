// Runs depthwise cases from a file on the kernels of one dtype, ELEMENT, through simt.h, and writes what comes out of them to another.
//
//     driver REQUEST RESPONSE
//
// Numbers are int64.  A request is a number of cases; a case is a Case, the bytes of both operands (x, w, y without the open slot), and
// gets a Reply, its message, and the bytes of the result.  Every array is an allocation of its own, of exactly its size, for
// AddressSanitizer; results start as NaN; a case runs with three orders of threads, which must give the same bits.
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "depthwise.cuh"
#include "simt.h"

namespace jaxext::depthwise {
float4 shared_memory[kSharedBytes / sizeof(float4)];
}

namespace {

using jaxext::ConvProblem;
using jaxext::ConvRole;
using jaxext::DepthwiseConfig;
using jaxext::Dtype;
using jaxext::Status;
using jaxext::depthwise::Plan;

struct Case {
  int64_t role, dtype, result;
  ConvProblem problem;
  DepthwiseConfig config;
  int64_t shift;         // bytes from a 16-byte boundary at which arrays start
  int64_t told_aligned;  // whether the plan is told otherwise
  int64_t dry;           // only plan
  int64_t bytes[3];      // of the operands and the result
};

struct Reply {
  int64_t code, message_bytes;
  int64_t vector, window, line, taps, grid[3], shared_bytes;
};

// An array that starts `shift` bytes after a boundary; what lies before it is there to be found unchanged.
class Array {
 public:
  Array(int64_t bytes, int64_t shift) : bytes_(bytes), shift_(shift), memory_(static_cast<char*>(std::malloc(bytes + shift))) {
    std::memset(memory_, 0xFF, bytes + shift);
  }
  ~Array() { std::free(memory_); }
  Array(const Array&) = delete;
  char* data() const { return memory_ + shift_; }
  std::string contents() const { return std::string(data(), bytes_); }
  bool intact() const {
    return std::all_of(memory_, memory_ + shift_, [](char c) { return c == '\xFF'; });
  }

 private:
  int64_t bytes_, shift_;
  char* memory_;
};

void Launch(const Plan& plan, ConvRole role, const Array& first, const Array& second, const Array& third, simt::Order order) {
  using T = ELEMENT;
  namespace depthwise = jaxext::depthwise;
  const dim3 grid{static_cast<unsigned>(plan.grid[0]), static_cast<unsigned>(plan.grid[1]), static_cast<unsigned>(plan.grid[2])};
  const dim3 block{static_cast<unsigned>(plan.lanes), static_cast<unsigned>(depthwise::kThreads / plan.lanes), 1};
  const simt::Shared shared{depthwise::shared_memory, sizeof depthwise::shared_memory, static_cast<size_t>(plan.shared_bytes)};
  const bool dgrad = role == ConvRole::kDgrad;  // its operands are w and y, and its source is y
  const T* source = reinterpret_cast<const T*>((dgrad ? second : first).data());
  const T* other = reinterpret_cast<const T*>((dgrad ? first : second).data());
  simt::Run(grid, block, shared, order, [&] {
    if (role == ConvRole::kWgrad) {
      depthwise::WgradKernel<T>(plan)(plan.params, source, other, third.data());
    } else {
      depthwise::GatherKernel<T>(plan)(plan.params, source, other, reinterpret_cast<T*>(third.data()));
    }
  });
}

std::string Run(const Case& c, const Plan& plan, const std::string& first, const std::string& second) {
  std::string result;
  for (simt::Order order : {simt::Order::kForward, simt::Order::kBackward, simt::Order::kShuffled}) {
    const Array a(c.bytes[0], c.shift), b(c.bytes[1], c.shift), out(c.bytes[2], c.shift);
    std::memcpy(a.data(), first.data(), first.size());
    std::memcpy(b.data(), second.data(), second.size());
    const ConvRole role = static_cast<ConvRole>(c.role);
    if (!jaxext::depthwise::IsEmpty(c.problem, role)) Launch(plan, role, a, b, out, order);
    if (a.contents() != first || b.contents() != second) simt::Fail("an operand was changed");
    if (!a.intact() || !b.intact() || !out.intact()) simt::Fail("written before the start of an array");
    if (order != simt::Order::kForward && out.contents() != result) simt::Fail("another order of threads gives another result");
    result = out.contents();
  }
  return result;
}

template <typename T>
T Read(std::istream& in) {
  T value;
  in.read(reinterpret_cast<char*>(&value), sizeof value);
  if (!in) simt::Fail("the request ends early");
  return value;
}

std::string ReadBytes(std::istream& in, int64_t bytes) {
  std::string contents(bytes, '\0');
  in.read(contents.data(), bytes);
  if (!in) simt::Fail("the request ends early");
  return contents;
}

}  // namespace

int main(int, char** arguments) {
  std::ifstream in(arguments[1], std::ios::binary);
  std::ofstream out(arguments[2], std::ios::binary);
  const int64_t cases = Read<int64_t>(in);
  for (int64_t i = 0; i < cases; ++i) {
    const Case c = Read<Case>(in);
    const std::string first = ReadBytes(in, c.bytes[0]), second = ReadBytes(in, c.bytes[1]);
    Plan plan{};
    const bool aligned = c.shift == 0 || c.told_aligned != 0;
    const Status status = jaxext::depthwise::Make(c.problem, static_cast<ConvRole>(c.role), c.config, static_cast<Dtype>(c.dtype),
                                                  static_cast<Dtype>(c.result), aligned, &plan);
    std::cerr << "case " << i << std::endl;
    const std::string result = status.ok() && !c.dry ? Run(c, plan, first, second) : std::string(c.dry ? 0 : c.bytes[2], '\xFF');
    const int64_t length = static_cast<int64_t>(status.message.size());
    const Reply reply{status.code,      length, plan.vector, plan.window, plan.line, plan.taps, {plan.grid[0], plan.grid[1], plan.grid[2]},
                      plan.shared_bytes};
    out.write(reinterpret_cast<const char*>(&reply), sizeof reply);
    out << status.message << result;
  }
  return 0;
}
