// Runs depthwise cases from a file through the launchers of depthwise.h, on a device that is simt.h, and writes what comes out of them to
// another.
//
//     driver REQUEST RESPONSE
//
// Numbers are int64.  A request is a number of cases; a case is a Case, the bytes of both operands (x, w, y without the open slot), and
// gets a Reply, its message, and the bytes of the result.  Every array is an allocation of its own, of exactly its size, for
// AddressSanitizer; results start as NaN; a case runs with three orders of threads, which must give the same bits.
#include <fstream>
#include <iostream>
#include <string>

#include "depthwise/depthwise.h"
#include "depthwise/depthwise_plan.h"
#include "driver.h"
#include "simt_mma.h"

namespace jaxext::depthwise {
float4 shared_memory[kSharedBytes / sizeof(float4)];
}

namespace {

using driver::Array;
using driver::Read;
using driver::ReadBytes;
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
  int64_t shifts[3];   // of the operands and the result: bytes from a 16-byte boundary at which they start
  int64_t dry;         // only plan
  int64_t blocks;      // run only so many blocks, the last ones
  int64_t pending;     // the error that CUDA remembers from before
  int64_t refusal;     // the error that CUDA answers a launch with
  int64_t bytes[3];    // of the operands and the result
  int64_t carried[3];  // of these, what the request and the reply have: the last ones, before which there are zeros
};

struct Reply {
  int64_t code, message_bytes;
  int64_t vector, many, window, line, taps, rows, grid[3], shared_bytes;
  int64_t remembered;  // the error that CUDA remembers afterwards
};

Status Launch(const Case& c, const Array& first, const Array& second, const Array& third, simt::Order order) {
  auto* stream = reinterpret_cast<cudaStream_t>(&simt::runtime);  // any, but none that is CUDA's
  simt::machine = {jaxext::depthwise::shared_memory, sizeof jaxext::depthwise::shared_memory, order, c.blocks};
  simt::runtime = {stream, static_cast<cudaError_t>(c.pending), static_cast<cudaError_t>(c.refusal)};
  return LaunchDepthwise(static_cast<jaxext::ConvRole>(c.role), /*rank=*/3, c.problem, c.config,
                         {static_cast<Dtype>(c.dtype), static_cast<Dtype>(c.result), first.data(), second.data(), third.data()},
                         /*epilogue=*/nullptr, stream);
}

Status Run(const Case& c, const std::string& first, const std::string& second, std::string* result) {
  Status status;
  for (simt::Order order : {simt::Order::kForward, simt::Order::kBackward, simt::Order::kShuffled}) {
    const Array a(c.bytes[0], c.carried[0], c.shifts[0]), b(c.bytes[1], c.carried[1], c.shifts[1]),
        out(c.bytes[2], c.carried[2], c.shifts[2]);
    std::copy(first.begin(), first.end(), a.end());
    std::copy(second.begin(), second.end(), b.end());
    status = Launch(c, a, b, out, order);
    if (a.contents() != first || b.contents() != second) simt::Fail("an operand was changed");
    if (!a.intact() || !b.intact() || !out.intact()) simt::Fail("written before the start of an array");
    if (order != simt::Order::kForward && out.contents() != *result) simt::Fail("another order of threads gives another result");
    *result = out.contents();
  }
  return status;
}

}  // namespace

int main(int, char** arguments) {
  std::ifstream in(arguments[1], std::ios::binary);
  std::ofstream out(arguments[2], std::ios::binary);
  const int64_t cases = Read<int64_t>(in);
  for (int64_t i = 0; i < cases; ++i) {
    const Case c = Read<Case>(in);
    const std::string first = ReadBytes(in, c.carried[0]), second = ReadBytes(in, c.carried[1]);
    std::cerr << "case " << i << std::endl;
    Plan plan{};
    const bool aligned = c.shifts[0] == 0 && c.shifts[1] == 0 && c.shifts[2] == 0;
    Status status = jaxext::depthwise::Make(c.problem, static_cast<ConvRole>(c.role), c.config, static_cast<Dtype>(c.dtype),
                                            static_cast<Dtype>(c.result), aligned, &plan);
    std::string result;
    if (!c.dry) status = Run(c, first, second, &result);
    const int64_t length = static_cast<int64_t>(status.message.size());
    const Reply reply{status.code,
                      length,
                      plan.vector,
                      plan.many,
                      plan.window,
                      plan.line,
                      plan.taps,
                      plan.rows,
                      {plan.grid[0], plan.grid[1], plan.grid[2]},
                      plan.shared_bytes,
                      cudaGetLastError()};
    out.write(reinterpret_cast<const char*>(&reply), sizeof reply);
    out << status.message << result;
  }
  return 0;
}
