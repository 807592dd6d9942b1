// What a weight-only launch computes on the host: whether a problem can be done, which kernel does it, on which grid, with which numbers.
#pragma once

#include <cstdint>

#include "common/problem.h"
#include "common/status.h"
#include "weight_only/weight_only.h"

namespace jaxext::weight_only {

constexpr int kWarp = 32;
constexpr int kWarps = 8;  // of a block
constexpr int kThreads = kWarps * kWarp;
constexpr int kStep = 32;       // rows of the weight that a warp multiplies at a time, all of one scale
constexpr int kRowsOfTile = 8;  // of x, which a product of the tensor cores takes

// Limits, which the messages name in figures.
constexpr int64_t kMostRows = 64;  // of x, but for Hopper's kernels: with more, loading the weight is not what takes the time
constexpr int64_t kMultiple = 32;  // what K, N and a block of a scale are multiples of
constexpr int64_t kMostIndex = 1 << 30;
constexpr int64_t kMostDepth = 1 << 21;  // of the sum: its steps times those of a scale are fewer than 2^32, so that `of_scale` is exact
constexpr int64_t kMostSplits = 64;
constexpr int64_t kMostGridX = (int64_t{1} << 31) - 1;

// The arguments of a kernel; the arrays come beside them.
struct Params {
  int B, M, N, K, S;
  int row_blocks, column_blocks, splits;
  int steps, share;   // steps of the sum, and how many of them a part has at most: an even number for a wide kernel
  unsigned of_scale;  // 2^32 over the steps that share a scale, rounded up; 0 if each has its own
  int wide;           // 1 if the result is float32
};

// Which kernel: `columns` of a thread, and `tiles` of kRowsOfTile rows.  A wide one (wide_weight_only.h) has memory of its own.
struct Plan {
  Params params;
  int bits, tiles, columns;
  bool wide;
  int64_t grid;
  int shared_bytes;
};

// A plan for results that are not empty, or the reason for refusing.
Status Make(const WeightOnlyProblem& problem, const WeightOnlyConfig& config, const WeightOnlyOperands& operands, Plan* plan);

bool IsEmpty(const WeightOnlyProblem& problem);

// The sums of half of a block's warps, 64 at most for each thread.
constexpr int SharedBytes(int tiles, int columns) { return kThreads / 2 * 2 * columns * tiles * static_cast<int>(sizeof(float)); }

}  // namespace jaxext::weight_only
