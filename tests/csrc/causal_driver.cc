// Runs causal cases from a file through the launcher of causal.h, on a device that is simt.h, and writes what comes out of them to another.
//
//     driver REQUEST RESPONSE
//
// Numbers are int64.  A request is a number of cases; a case is a Case and the bytes of the operands that exist, and gets a Reply, its
// message, and the bytes of the results.  Every array is an allocation of its own, of exactly its size, for AddressSanitizer; results start
// as NaN; a case runs with three orders of threads, which must give the same bits.
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "causal/causal.h"
#include "causal/causal_plan.h"
#include "driver.h"

namespace jaxext::causal {
float4 shared_memory[kSharedBytes / sizeof(float4)];
}

namespace {

using driver::Array;
using driver::Read;
using driver::ReadBytes;
using jaxext::CausalRole;
using jaxext::Dtype;
using jaxext::Status;

// In the order of CausalOperands and CausalResults.
enum { kX, kWeight, kBias, kState, kIdx, kIdxOfStates, kDy, kOperands, kFirst = kOperands, kSums, kDState, kArrays };

struct Case {
  int64_t role, dtype, of_weight, of_bias, activation;
  jaxext::CausalProblem problem;
  jaxext::CausalConfig config;
  int64_t dry;               // only plan
  int64_t blocks;            // run only so many blocks, the last ones
  int64_t pending;           // the error that CUDA remembers from before
  int64_t refusal;           // the error that CUDA answers a launch with
  int64_t shifts[kArrays];   // bytes from a 16-byte boundary at which the arrays start
  int64_t bytes[kArrays];    // of the arrays, -1 for one that is not there
  int64_t carried[kArrays];  // of these, what the request and the reply have: the last ones, before which there are zeros
};

struct Reply {
  int64_t code, message_bytes;
  int64_t kind, vector, grid, shared_bytes;
  int64_t remembered;  // the error that CUDA remembers afterwards
};

using Arrays = std::vector<std::unique_ptr<Array>>;

jaxext::CausalOperands OperandsOf(const Case& c, const std::vector<const void*>& at) {
  return {static_cast<Dtype>(c.dtype),
          static_cast<Dtype>(c.of_weight),
          static_cast<Dtype>(c.of_bias),
          static_cast<jaxext::Activation>(c.activation),
          at[kX],
          at[kWeight],
          at[kBias],
          at[kState],
          static_cast<const int32_t*>(at[kIdx]),
          static_cast<const int32_t*>(at[kIdxOfStates]),
          at[kDy]};
}

Status Launch(const Case& c, const Arrays& arrays, simt::Order order) {
  auto* stream = reinterpret_cast<cudaStream_t>(&simt::runtime);  // any, but none that is CUDA's
  simt::machine = {jaxext::causal::shared_memory, sizeof jaxext::causal::shared_memory, order, c.blocks};
  simt::runtime = {stream, static_cast<cudaError_t>(c.pending), static_cast<cudaError_t>(c.refusal)};
  std::vector<const void*> at;
  for (const auto& array : arrays) at.push_back(array ? array->data() : nullptr);
  const auto result = [&](int i) { return const_cast<void*>(at[i]); };
  return LaunchCausal(static_cast<CausalRole>(c.role), c.problem, c.config, OperandsOf(c, at),
                      {result(kFirst), static_cast<float*>(result(kSums)), result(kDState)}, stream);
}

Status Run(const Case& c, const std::vector<std::string>& operands, std::string* results) {
  Status status;
  for (simt::Order order : {simt::Order::kForward, simt::Order::kBackward, simt::Order::kShuffled}) {
    Arrays arrays(kArrays);
    for (int i = 0; i < kArrays; ++i) {
      if (c.bytes[i] >= 0) arrays[i] = std::make_unique<Array>(c.bytes[i], c.carried[i], c.shifts[i]);
      if (arrays[i] && i < kOperands) std::copy(operands[i].begin(), operands[i].end(), arrays[i]->end());
    }
    status = Launch(c, arrays, order);
    std::string made;
    for (int i = 0; i < kArrays; ++i) {
      if (!arrays[i]) continue;
      if (!arrays[i]->intact()) simt::Fail("written before the start of an array");
      if (i < kOperands && arrays[i]->contents() != operands[i]) simt::Fail("an operand was changed");
      if (i >= kOperands) made += arrays[i]->contents();
    }
    if (order != simt::Order::kForward && made != *results) simt::Fail("another order of threads gives another result");
    *results = made;
  }
  return status;
}

Status MakePlan(const Case& c, jaxext::causal::Plan* plan) {
  std::vector<const void*> at;
  bool aligned = true;
  for (int i = 0; i < kArrays; ++i) {
    at.push_back(c.bytes[i] >= 0 ? &c : nullptr);
    if (i != kWeight && i != kBias && i != kIdx && i != kIdxOfStates && i != kSums) aligned = aligned && c.shifts[i] == 0;
  }
  return jaxext::causal::Make(c.problem, static_cast<CausalRole>(c.role), c.config, OperandsOf(c, at), aligned, plan);
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
      if (c.bytes[n] >= 0 && !c.dry) operands[n] = ReadBytes(in, c.carried[n]);
    }
    std::cerr << "case " << i << std::endl;
    jaxext::causal::Plan plan{};
    Status status = MakePlan(c, &plan);
    std::string results;
    if (!c.dry) status = Run(c, operands, &results);
    const int64_t length = static_cast<int64_t>(status.message.size());
    const Reply reply{status.code, length, static_cast<int64_t>(plan.kind), plan.vector, plan.grid, plan.shared_bytes, cudaGetLastError()};
    out.write(reinterpret_cast<const char*>(&reply), sizeof reply);
    out << status.message << results;
  }
  return 0;
}
