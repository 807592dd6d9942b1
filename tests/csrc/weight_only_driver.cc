// Runs weight-only products from a file through the launcher of weight_only.h, on a device that is simt.h, and writes what comes out of
// them to another.
//
//     driver REQUEST RESPONSE
//
// Numbers are int64.  A request is a number of cases; a case is a Case and the bytes of the operands, and gets a Reply, its message, and
// the bytes of the result.  Every array is an allocation of its own, of exactly its size, for AddressSanitizer; the result starts as NaN; a
// case runs with three orders of threads, which must give the same bits.
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"
#include "simt_mma.h"
#include "weight_only/weight_only.h"
#include "weight_only/weight_only_plan.h"
#include "weight_only/wide_weight_only.h"

namespace jaxext {
namespace weight_only {
float4 shared_sums[(48 << 10) / sizeof(float4)];
}
// No CPU has Hopper's instructions.
std::vector<WideWeightOnlyKernel> WideWeightOnlyBF16() { return {}; }
std::vector<WideWeightOnlyKernel> WideWeightOnlyF16() { return {}; }
}  // namespace jaxext

namespace {

using driver::Array;
using driver::Read;
using driver::ReadBytes;
using jaxext::Dtype;
using jaxext::Status;

enum { kX, kQ, kScale, kOperands, kY = kOperands, kArrays };

struct Case {
  int64_t dtype, of_result;
  jaxext::WeightOnlyProblem problem;
  jaxext::WeightOnlyConfig config;
  int64_t dry;               // only plan
  int64_t blocks;            // run only so many blocks, the last ones
  int64_t pending;           // the error that CUDA remembers from before
  int64_t refusal;           // the error that CUDA answers a launch with
  int64_t shifts[kArrays];   // bytes from a 16-byte boundary at which the arrays start
  int64_t bytes[kArrays];    // of the arrays
  int64_t carried[kArrays];  // of these, what the request and the reply have: the last ones, before which there are zeros
};

struct Reply {
  int64_t code, message_bytes;
  int64_t tiles, columns, grid, shared_bytes;
  int64_t remembered;  // the error that CUDA remembers afterwards
};

Status Run(const Case& c, const std::vector<std::string>& operands, std::string* result) {
  auto* stream = reinterpret_cast<cudaStream_t>(&simt::runtime);  // any, but none that is CUDA's
  Status status;
  for (simt::Order order : {simt::Order::kForward, simt::Order::kBackward, simt::Order::kShuffled}) {
    std::vector<std::unique_ptr<Array>> arrays;
    for (int i = 0; i < kArrays; ++i) {
      arrays.push_back(std::make_unique<Array>(c.bytes[i], c.carried[i], c.shifts[i]));
      if (i < kOperands) std::copy(operands[i].begin(), operands[i].end(), arrays[i]->end());
    }
    simt::machine = {jaxext::weight_only::shared_sums, sizeof jaxext::weight_only::shared_sums, order, c.blocks};
    simt::runtime = {stream, static_cast<cudaError_t>(c.pending), static_cast<cudaError_t>(c.refusal)};
    const auto* scale = reinterpret_cast<const float*>(arrays[kScale]->data());
    status = LaunchWeightOnly(c.problem, c.config,
                              {static_cast<Dtype>(c.dtype), static_cast<Dtype>(c.of_result), arrays[kX]->data(), arrays[kQ]->data(), scale},
                              arrays[kY]->data(), stream);
    for (int i = 0; i < kArrays; ++i) {
      if (!arrays[i]->intact()) simt::Fail("written before the start of an array");
      if (i < kOperands && arrays[i]->contents() != operands[i]) simt::Fail("an operand was changed");
    }
    if (order != simt::Order::kForward && arrays[kY]->contents() != *result) simt::Fail("another order of threads gives another result");
    *result = arrays[kY]->contents();
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
    std::vector<std::string> operands(kOperands);
    for (int n = 0; n < kOperands; ++n) {
      if (!c.dry) operands[n] = ReadBytes(in, c.carried[n]);
    }
    std::cerr << "case " << i << std::endl;
    jaxext::weight_only::Plan plan{};
    Status status = jaxext::weight_only::Make(
        c.problem, c.config, {static_cast<Dtype>(c.dtype), static_cast<Dtype>(c.of_result), nullptr, nullptr, nullptr}, &plan);
    std::string result;
    if (!c.dry) status = Run(c, operands, &result);
    const int64_t length = static_cast<int64_t>(status.message.size());
    const Reply reply{status.code, length, plan.tiles, plan.columns, plan.grid, plan.shared_bytes, cudaGetLastError()};
    out.write(reinterpret_cast<const char*>(&reply), sizeof reply);
    out << status.message << result;
  }
  return 0;
}
