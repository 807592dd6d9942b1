// Dense convolutions in the terms of Hopper's TMA: views of the arrays, without groups or batch label, read through a bounding box of
// pixels ("im2col").  A convolution with groups, a batch label or a split sum becomes several such *parts*.
//
// So does dgrad with strides.  Output p and tap r meet x's pixel i where  p·stride + r·dilation = i + low.  Pixels of one residue modulo
// the stride, which are a *phase*, meet every (stride / gcd)-th tap alone, and neighbours among them meet neighbouring outputs:
//
//     i = begin + stride·j    r = first + (stride / gcd)·t    p = j + low' - (dilation / gcd)·t
//     low' = (begin + low - first·dilation) / stride
//
// which is a dgrad without strides, of those taps.  A phase that no tap meets gets zeros.
//
// TMA numbers the box's pixels from `lower`, a stride apart, and adds to each the offset of a tap:
//
//     role    box in  pixel of tap r
//     fprop   x       p·stride + r·dilation - low         for y's p
//     dgrad   y       j + low - t·dilation                for a phase's j
//     wgrad   x       as fprop
//
// Pixels outside the array are read as zeros, so padding costs nothing.  A crop (negative padding) makes a smaller view.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/problem.h"
#include "common/refusals.h"
#include "common/status.h"

namespace jaxext {

// The config.  Exported programs hold it, so a released tile may be removed only with a new version of the targets.
struct ConvConfig {
  JAXEXT_INTEGERS(tile_m, tile_n,  // of the product that a block computes: pixels by channels, and in wgrad K by C
                  cluster,         // blocks that share loads: one above the other, in wgrad side by side
                  splits)          // wgrad: partial sums, along a leading axis of the result; otherwise 1
};

struct ConvPart {
  int64_t N;                                     // images
  std::array<int64_t, 3> input, filter, output;  // sizes of its views of x, w and y; no taps: its part of x is zeros
  std::array<int64_t, 3> low, high;              // zeros around x; `high` makes the size of the output exact (dgrad: 0, it is not needed)
  std::array<int64_t, 3> dilation;
  std::array<int64_t, 3> pixel, tap;  // from one pixel of its view of x, and one tap of its view of w, to the next
  int64_t x, w, y;                    // offsets of its views, in elements
};

// The box of one axis.
struct ConvBox {
  int64_t lower, upper;              // corners, from the array's first and last pixel
  int64_t first_offset, tap_stride;  // of the taps
};

// The most parts of a call.  Each launch has some of them, and launches follow each other.
constexpr int64_t kMostParts = 64;    // B·G·splits
constexpr int64_t kMostPhases = 512;  // B·G·phases of dgrad

// Problems with a size of 0 are accepted, whatever the other sizes.
Reason ConvRefuses(ConvRole role, int rank, const ConvProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// The parts, none if the result is empty, or the reason for refusing.  `rank` spatial axes, the last ones, may have sizes other than 1.
Status PlanConv(ConvRole role, int rank, const ConvProblem& problem, const ConvConfig& config, std::vector<ConvPart>* parts);

ConvBox BoxOf(ConvRole role, const ConvPart& part, int axis);

}  // namespace jaxext
