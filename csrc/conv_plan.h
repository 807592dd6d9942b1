// Dense convolution as Hopper's TMA sees it: without groups or batch label, in views of the arrays, through a bounding box of pixels
// ("im2col").  One that has groups, a batch label, or a sum that is split becomes several such *parts*.
//
// TMA numbers the box's pixels from `lower`, a stride apart, and adds to each the offset of a tap:
//
//     role    box in  pixel of tap r
//     fprop   x       p·stride + r·dilation - low         for y's p
//     dgrad   y       i + low - r·dilation                for x's i (stride 1)
//     wgrad   x       as fprop
//
// What lies outside the array is read as zeros, so padding costs nothing; a crop, negative padding, makes a smaller view.
// Plain C++: it must not know CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "problem.h"
#include "status.h"

namespace jaxext {

// How; exported programs carry it, so a tile that was released goes only with a new version of the targets.  The fields of
// `jaxext.backends.cuda.cuda_conv.ConvConfig`.
struct ConvConfig {
  int64_t tile_m, tile_n;  // of the product that a block computes: pixels by channels, and in wgrad K by C
  int64_t cluster_m;       // blocks, one above the other, that load together what they share
  int64_t splits;          // wgrad: partial sums, which go along a leading axis of the result; otherwise 1
};

struct ConvPart {
  int64_t N;                             // images
  std::array<int64_t, 3> input, output;  // sizes of its views of x and y
  std::array<int64_t, 3> low, high;      // zeros around x; `high` makes the size of the output exact (dgrad: 0, it is not needed)
  int64_t x, w, y;                       // where its views begin, in elements
};

// The box of one axis.
struct ConvBox {
  int64_t lower, upper;              // corners, from the array's first and last pixel
  int64_t first_offset, tap_stride;  // of the taps
};

constexpr int64_t kMostParts = 64;  // they are launched some at a time, one after the other

// The parts, none if the result is empty, or the reason for refusing.  `rank` spatial axes, the last ones, may have sizes other than 1.
Status PlanConv(ConvRole role, int rank, const ConvProblem& problem, const ConvConfig& config, std::vector<ConvPart>* parts);

ConvBox BoxOf(ConvRole role, const ConvProblem& problem, const ConvPart& part, int axis);

}  // namespace jaxext
