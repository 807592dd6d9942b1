#include "conv_plan.h"

#include <algorithm>
#include <string>

namespace jaxext {
namespace {

using Three = std::array<int64_t, 3>;

constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;                     // of an axis
constexpr int64_t kMostElements = int64_t{1} << 39;                       // of an array: TMA wants strides below 2^40 bytes
constexpr int64_t kMostPixels = (int64_t{1} << 31) - (int64_t{1} << 16);  // numbered with 32 bits, and blocks overhang
constexpr int64_t kMostGridY = 65535;
constexpr int64_t kMostStride = 8;  // of a TMA box
constexpr int64_t kChannels = 8;    // 16 bytes, which TMA reads at once

int64_t Product(std::initializer_list<int64_t> sizes) {  // of sizes above 0, or kMostElements if it is more
  int64_t product = 1;
  for (int64_t size : sizes) product = size > kMostElements / product ? kMostElements : product * size;
  return product;
}

int64_t Volume(const Three& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

const char* AxisName(int axis) { return axis == 0 ? "D" : axis == 1 ? "H" : "W"; }

Status Unwanted(const std::string& what, int64_t got, const std::string& want) {
  return Invalid("conv: " + what + " is " + std::to_string(got) + ", want " + want);
}

Status CheckSizes(ConvRole role, int rank, const ConvProblem& p) {
  const struct {
    const char* name;
    int64_t size;
  } labels[] = {{"B", p.B}, {"N", p.N}, {"G", p.G}, {"C", p.C}, {"K", p.K}};
  for (const auto& label : labels) {
    if (label.size < 1 || label.size > kMostSize) return Unwanted(label.name, label.size, "1 to 2^31 - 1");
  }
  for (int i = 0; i < 3; ++i) {
    const std::string axis = std::string(" of axis ") + AxisName(i);
    const struct {
      const char* name;
      int64_t size;
    } sizes[] = {{"input", p.input[i]},
                 {"filter", p.filter[i]},
                 {"output", p.output[i]},
                 {"stride", p.stride[i]},
                 {"filter_dilation", p.filter_dilation[i]}};
    for (const auto& size : sizes) {
      if (size.size < 1 || size.size > kMostSize) return Unwanted(size.name + axis, size.size, "1 to 2^31 - 1");
    }
    if (p.low[i] < -kMostSize || p.low[i] > kMostSize) return Unwanted("low" + axis, p.low[i], "less than 2^31");
    if (p.input_dilation[i] != 1) return Unwanted("input_dilation" + axis, p.input_dilation[i], "1: TMA's box has no holes");
    const int64_t most = role == ConvRole::kDgrad ? 1 : kMostStride;
    if (p.stride[i] > most) {
      return Unwanted("stride" + axis, p.stride[i], role == ConvRole::kDgrad ? "1 in dgrad: CUTLASS computes one phase only" : "8 at most");
    }
    if (i < 3 - rank && (p.input[i] != 1 || p.filter[i] != 1 || p.output[i] != 1 || p.low[i] != 0)) {
      return Invalid("conv: axis " + std::string(AxisName(i)) + " is in use, want " + std::to_string(rank) + " spatial axes");
    }
    if (role == ConvRole::kDgrad && p.low[i] < 0) {
      return Unwanted("low" + axis, p.low[i], "0 or more in dgrad: a crop's gradient has zeros that no box writes");
    }
  }
  if (p.C % kChannels != 0) return Unwanted("C", p.C, "a multiple of 8: TMA reads 16 bytes at once");
  if (p.K % kChannels != 0) return Unwanted("K", p.K, "a multiple of 8: TMA reads 16 bytes at once");
  const int64_t x = Product({p.B, p.N, p.input[0], p.input[1], p.input[2], p.G, p.C});
  const int64_t w = Product({p.B, p.G, p.K, p.filter[0], p.filter[1], p.filter[2], p.C});
  const int64_t y = Product({p.B, p.N, p.output[0], p.output[1], p.output[2], p.G, p.K});
  if (std::max({x, w, y}) >= kMostElements) return Invalid("conv: an array has 2^39 elements or more, want fewer");
  const int64_t pixels = p.N * std::max(Volume(p.input), Volume(p.output));
  if (pixels >= kMostPixels) return Unwanted("the number of pixels", pixels, "fewer than 2^31 - 2^16");
  return {};
}

// The pieces of the sum that a split wgrad adds up apart: images, or if there are more pieces than images, rows of one image.
Status CheckSplits(ConvRole role, int rank, const ConvProblem& p, const ConvConfig& config) {
  if (config.splits < 1 || Product({p.B, p.G, config.splits}) > kMostParts) {
    return Invalid("conv: B=" + std::to_string(p.B) + " G=" + std::to_string(p.G) + " splits=" + std::to_string(config.splits) +
                   " make too many parts or none, want 1 to " + std::to_string(kMostParts));
  }
  if (config.splits == 1) return {};
  if (role != ConvRole::kWgrad) return Unwanted("splits", config.splits, "1 unless in wgrad");
  const int64_t rows = config.splits / p.N;
  if (config.splits > p.N && (config.splits % p.N != 0 || rows > p.output[3 - rank])) {
    return Unwanted("splits", config.splits, "at most N=" + std::to_string(p.N) + ", or a multiple of it that leaves each part a row");
  }
  return {};
}

// Cuts the box of an axis to what is read of x, whose pixels from `begin` on remain.
Status Crop(const ConvProblem& p, int i, int64_t first_row, int64_t rows, ConvPart* part, int64_t* begin) {
  const int64_t first = first_row * p.stride[i] - p.low[i];
  const int64_t last = first + (rows - 1) * p.stride[i] + (p.filter[i] - 1) * p.filter_dilation[i];
  if (last < 0 || first >= p.input[i]) {
    return Invalid(std::string("conv: axis ") + AxisName(i) + " of a part lies in the padding altogether, want some of the input in it");
  }
  *begin = std::max<int64_t>(0, first);
  const int64_t end = std::min(p.input[i], last + 1);
  part->input[i] = end - *begin;
  part->output[i] = rows;
  part->low[i] = *begin - first;
  part->high[i] = last + 1 - end;
  return {};
}

// The views of part (split, b, g).
Status Views(ConvRole role, int rank, const ConvProblem& p, int64_t splits, int64_t split, int64_t b, int64_t g, ConvPart* part) {
  const int cut = 3 - rank;  // the axis whose rows are shared out
  const int64_t slices = splits > p.N ? splits / p.N : 1;
  const int64_t image = splits > p.N ? split / slices : p.N * split / splits;
  const int64_t image_end = splits > p.N ? image + 1 : p.N * (split + 1) / splits;
  Three first_row = {}, begin = {};
  part->N = image_end - image;
  for (int i = 0; i < 3; ++i) {
    int64_t rows = p.output[i];
    if (i == cut && slices > 1) {
      const int64_t slice = split % slices;
      first_row[i] = p.output[i] * slice / slices;
      rows = p.output[i] * (slice + 1) / slices - first_row[i];
    }
    if (role == ConvRole::kDgrad) {
      part->input[i] = p.input[i], part->output[i] = rows, part->low[i] = p.low[i], part->high[i] = 0;
    } else if (Status status = Crop(p, i, first_row[i], rows, part, &begin[i]); !status.ok()) {
      return status;
    }
  }
  const auto pixel = [&](const Three& sizes, const Three& at) {
    return (((b * p.N + image) * sizes[0] + at[0]) * sizes[1] + at[1]) * sizes[2] + at[2];
  };
  part->x = (pixel(p.input, begin) * p.G + g) * p.C;
  part->y = (pixel(p.output, first_row) * p.G + g) * p.K;
  part->w = ((split * p.B + b) * p.G + g) * p.K * Volume(p.filter) * p.C;
  return {};
}

// TMA keeps corners in 16 bits that the axes share, and so the offsets of taps; CUTLASS wants padding to be in bounds too.
Status CheckBox(ConvRole role, int rank, const ConvProblem& p, const ConvPart& part, int i) {
  const int64_t corner = int64_t{1} << (16 / rank - 1);
  const int64_t most_reach = (int64_t{1} << (16 / rank)) - 2;
  const int64_t most_padding = rank == 1 ? 65536 : rank == 2 ? 256 : 16;
  const std::string axis = std::string(" on axis ") + AxisName(i);
  const ConvBox box = BoxOf(role, p, part, i);
  for (int64_t at : {box.lower, box.upper}) {
    if (at < -corner || at >= corner) {
      return Unwanted("a corner of TMA's box" + axis, at, std::to_string(-corner) + " to " + std::to_string(corner - 1));
    }
  }
  const int64_t reach = (p.filter[i] - 1) * p.filter_dilation[i];
  if (reach > most_reach) return Unwanted("the last tap's offset" + axis, reach, "at most " + std::to_string(most_reach));
  const int64_t padding = std::max(part.low[i], part.high[i]);
  if (padding > most_padding) return Unwanted("the padding" + axis, padding, "at most " + std::to_string(most_padding));
  return {};
}

}  // namespace

ConvBox BoxOf(ConvRole role, const ConvProblem& p, const ConvPart& part, int i) {
  const int64_t reach = (p.filter[i] - 1) * p.filter_dilation[i];
  if (role == ConvRole::kDgrad) {
    const int64_t lower = part.low[i] - reach;
    return {lower, lower + part.input[i] - part.output[i], reach, -p.filter_dilation[i]};
  }
  return {-part.low[i], part.high[i] - reach, 0, p.filter_dilation[i]};
}

Status PlanConv(ConvRole role, int rank, const ConvProblem& p, const ConvConfig& config, std::vector<ConvPart>* parts) {
  parts->clear();
  const bool no_x = std::min({p.N, p.input[0], p.input[1], p.input[2], p.C}) == 0;
  const bool no_w = std::min({p.K, p.filter[0], p.filter[1], p.filter[2], p.C}) == 0;
  const bool no_y = std::min({p.N, p.output[0], p.output[1], p.output[2], p.K}) == 0;
  if (p.B == 0 || p.G == 0 || (role == ConvRole::kFprop ? no_y : role == ConvRole::kDgrad ? no_x : no_w)) return {};

  if (Status status = CheckSizes(role, rank, p); !status.ok()) return status;
  if (Status status = CheckSplits(role, rank, p, config); !status.ok()) return status;
  const int64_t taps = role == ConvRole::kWgrad ? Product({p.filter[0], p.filter[1], p.filter[2]}) : 1;
  const int64_t channels = role == ConvRole::kFprop ? p.K : p.C;
  const int64_t columns = Product({(channels + config.tile_n - 1) / config.tile_n, taps});
  if (columns > kMostGridY) return Unwanted("the number of blocks side by side", columns, "at most 65535");
  for (int64_t split = 0; split < config.splits; ++split) {
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t g = 0; g < p.G; ++g) {
        ConvPart& part = parts->emplace_back();
        if (Status status = Views(role, rank, p, config.splits, split, b, g, &part); !status.ok()) return status;
        for (int i = 3 - rank; i < 3; ++i) {
          if (Status status = CheckBox(role, rank, p, part, i); !status.ok()) return status;
        }
      }
    }
  }
  return {};
}

}  // namespace jaxext
