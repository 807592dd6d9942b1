// The host's part of a depthwise launch: whether a problem is supported, the kernel, its grid and its arguments.
//
// Every role gathers: on each axis the target t takes, at the tap r, the source s for which  a·t + b·r + offset = d·s  (none where d does
// not divide or s lies outside).  With d > 1 the targets of one phase, t mod `period`, meet the taps first, first + step, ...; within a
// phase s is linear in t and r.  kernels/geometry.py has a, b, offset and d by role.
#pragma once

#include <cstdint>
#include <string>

#include "depthwise/depthwise.h"
#include "common/problem.h"
#include "common/status.h"

namespace jaxext::depthwise {

constexpr int kThreads = 128;     // of a block
constexpr int kVectorBytes = 16;  // the widest access
constexpr int kWgradTaps = 7;     // the most taps of a filter row whose sums a thread of wgrad holds
constexpr int kFewWgradTaps = 4;  // the same for a thread without a window of sources, or of several filters per channel
constexpr int kWarp = 32;
constexpr int kSharedBytes = 48 << 10;  // the shared memory of a block without opting in for more, on every device

// Of the kernels on tensor cores (depthwise_mma.cuh, depthwise_mma_wgrad.cuh).
constexpr int kMmaThreads = 256, kMmaResident = 2;      // of a block, and blocks on a multiprocessor
constexpr int kMmaLines = 16;                           // that a block walks down in step
constexpr int kMmaSources = 16;                         // of a product
constexpr int kMmaMostLines = 32;                       // of targets that it walks along: a thread has a bit for each
constexpr int kMmaTargets = 8;                          // neighbours in a line
constexpr int kMmaVector = 8;                           // channels of an access
constexpr int kMmaChannels = 16;                        // of a block
constexpr int64_t kMostMmaElements = int64_t{1} << 34;  // wgrad numbers vectors of 4 channels with 32 bits
constexpr int kMmaRows = 7, kMmaColumns = 9;  // the most taps along the axes: the sums of all rows are held, a band has 16 sources
constexpr int kMmaSharedBytes = 33280;        // two lines' sources and sums
constexpr int kMmaWgradSteps = 48;            // of wgrad, at most, in lines of sources
static_assert(kMmaMostLines + 2 * kMmaRows - 1 <= kMmaWgradSteps);
constexpr int kMmaWgradSharedBytes = 27392;  // two lines' sources and targets, and what there is at each step

// Limits, which the messages name in figures.
constexpr int kMostTaps = 31;            // of an axis
constexpr int64_t kMostOutputs = 65535;  // of a group: with all taps of two axes they are numbered with 32 bits
constexpr int64_t kMostStep = 65535;     // stride or input dilation: products of two fit into 32 bits
constexpr int64_t kMostIndex = 1 << 30;  // of places on an axis, so that sums of two fit into 32 bits
constexpr int64_t kMostApart = 1 << 25;  // distance of neighbours in a strip or a row of taps: kernels read up to 31 places beyond the last
constexpr int64_t kMostPositions = (int64_t{1} << 31) - (1 << 16);  // numbered with 32 bits, and blocks overhang
constexpr int64_t kMostGridX = (int64_t{1} << 31) - 1;
constexpr int64_t kMostGridYZ = 65535;

// The least r >= 0 with  wanted·r + given·f + offset = 0 (mod d), as a function of f:  inverse · (e / gcd) mod (d / gcd)  where
// e = -(given·f + offset) mod d  is a multiple of gcd = gcd(wanted, d); otherwise there is none.
struct Congruence {
  unsigned d, minus_given, minus_offset, gcd, inverse;
};

struct Axis {
  int T, R, S;  // targets, taps and sources
  int a, b, offset, d;
  int period, phases, targets;         // of targets; `phases` have a target, and a phase has at most `targets`
  int step, taps;                      // taps of a phase at most
  int target_stride, tap_stride;       // from one target or tap of a phase to the next, in sources
  Congruence first_tap, first_target;  // of a phase, and of a tap: its phase
};

// The arguments of a kernel besides the operands and the result.
struct Params {
  int N;
  int filters;                           // G·K: there is one for each channel of y
  int source_channels, target_channels;  // of an image: `filters`, or for x G
  int source_share, target_share;        // neighbouring filters that meet the same channel of it: 1, or for x K
  int folds;                             // dgrad: neighbouring vectors of filters that are summed by one thread
  Axis d, h, w;
  // The targets of a strip are `spacing` apart in their phase, so that dilated taps meet the same sources again: the target u and the
  // tap v of a strip meet its source number  hop·u + v.
  int spacing, hop;
  int strip;   // targets of a strip
  int strips;  // of a line of targets of one phase
  int channel_blocks;
  int staged_rows;    // fprop, dgrad: filter rows, of all folds, that lie in shared memory at once
  int classes;        // wgrad: residues of taps modulo w.step
  int row_pieces;     // wgrad: pieces of a class of taps of a filter row
  int pieces;         // wgrad: pieces that share a block
  int tiles, share;   // wgrad: tiles, as many strips as a block has threads for, and how many of them a block sums
  bool float_result;  // wgrad
};

// An axis of the kernel on tensor cores: the target j meets the source j + origin + u at its tap first_tap + tap_step·u.
struct MmaAxis {
  int T, S, taps;
  int origin, first_tap, tap_step;
};

// The arguments of the kernel of fprop and dgrad.  Lines are numbered: those of one part of an image after those of another.
struct MmaParams {
  int images, channels;
  int lines, parts;  // lines of targets of a part, and parts of an image
  int steps;         // lines of sources that a part meets, in wgrad rounded up to a multiple of the rows of its kernel
  int channel_blocks, column_blocks;
  int64_t source_pitch, target_pitch;  // elements of a line
  MmaAxis h, w;
};

// The arguments of the kernel of wgrad.  A walk is of 16 lines and 8 columns.
struct MmaWgradParams {
  MmaParams geometry;
  int walks, share;                     // all walks, and how many of them a block sums
  unsigned source_pitch, target_pitch;  // vectors of 8 and 4 channels of a line
  int float_result;                     // 1 or 0
};

struct Plan {
  Params params;
  MmaParams mma;
  MmaWgradParams mma_wgrad;
  bool vector;  // 16 bytes of channels of y per access, or one channel
  bool many;    // vectors, and several filters per channel of x
  bool window;  // neighbouring targets share sources (hop 1)
  bool line;    // a filter of one row, which stays in registers along the whole strip
  int taps;     // of a filter row or a piece of it, if a kernel is specialised for this number; otherwise 0
  int rows;     // of the filter, which a kernel on tensor cores is specialised for; otherwise 0
  int lanes;
  int64_t grid[3];
  int shared_bytes;
};

// A plan for a result that is not empty, or the reason for refusing.
Status Make(const ConvProblem& problem, ConvRole role, const DepthwiseConfig& config, Dtype dtype, Dtype result, bool aligned, Plan* plan);

// Whether the result has no elements: then there is nothing to do.
bool IsEmpty(const ConvProblem& problem, ConvRole role);

}  // namespace jaxext::depthwise
