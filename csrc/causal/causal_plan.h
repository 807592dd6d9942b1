// What a causal launch computes on the host: whether a problem can be done, which kernel does it, on which grid, with which numbers.
#pragma once

#include <cstdint>

#include "causal/causal.h"
#include "common/problem.h"
#include "common/status.h"

namespace jaxext::causal {

constexpr int kThreads = 128;           // of a block
constexpr int kVectorBytes = 16;        // the widest access
constexpr int kTaps = 4;                // of the kernels that keep all taps and a window of inputs in registers
constexpr int kMoreTaps = 8;            // backward: of the kernel that takes more
constexpr int kManyVector = 4;          // backward: channels of a thread of kernels other than kExact, so that all fits the registers
constexpr int kSharedBytes = 48 << 10;  // what every device grants a block without being asked

// Limits, which the messages name in figures.
constexpr int kMostTaps = 31;                                       // forward; backward it is kMoreTaps
constexpr int64_t kMostIndex = 1 << 30;                             // of steps and channels, so that sums of two fit into 32 bits
constexpr int64_t kMostPositions = (int64_t{1} << 31) - (1 << 16);  // numbered with 32 bits, and blocks overhang
constexpr int64_t kMostSplits = 65535;
constexpr int64_t kMostGridX = (int64_t{1} << 31) - 1;

// The arguments of a kernel; the arrays come beside them.
struct Params {
  int B, T, C, J;
  int strip, strips;  // steps of a strip, and strips of a sequence
  int channel_blocks;
  unsigned there;    // bit v: whether the filter has the tap v of the kernel's first 32
  int groups;        // forward: groups of kTaps taps
  int tiles, share;  // backward: tiles, as many strips as a block has rows of threads for, and how many of them a block sums
  Activation activation;
};

// Which kernel.  Those for up to so many taps leave some out; only kExact has exactly kTaps, and no numbers of sequences.
enum class Kind { kExact, kUpTo, kMany };

struct Plan {
  Params params;
  Kind kind;
  int vector;  // channels of a thread
  int lanes;
  int64_t grid;
  int shared_bytes;
};

// A plan for results that are not empty, or the reason for refusing.  `packed`: with numbers of sequences.
Status Make(const CausalProblem& problem, CausalRole role, const CausalConfig& config, const CausalOperands& operands, bool aligned,
            Plan* plan);

// Whether there is nothing to do.
bool IsEmpty(const CausalProblem& problem, CausalRole role);

}  // namespace jaxext::causal
