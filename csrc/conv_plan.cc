#include "conv_plan.h"

#include <algorithm>
#include <string>

#include "refusals.h"

namespace jaxext {
namespace {

using Three = std::array<int64_t, 3>;

constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;                     // of an axis, of padding and of a dilation
constexpr int64_t kMostElements = int64_t{1} << 39;                       // of an array: TMA wants strides below 2^40 bytes
constexpr int64_t kMostPixels = (int64_t{1} << 31) - (int64_t{1} << 16);  // numbered with 32 bits, and blocks overhang
constexpr int64_t kMostGridY = 65535;
constexpr int64_t kNarrowestTile = 64;  // columns of the narrowest tile of conv_sm90.cuh: it makes the most blocks
constexpr int64_t kMostStride = 8;      // of a TMA box
constexpr int64_t kChannels = 8;        // 16 bytes, which TMA reads at once

std::string Text(int64_t number) { return std::to_string(number); }

int64_t Volume(const Three& sizes) { return Product({sizes[0], sizes[1], sizes[2]}); }

const char* AxisName(int axis) { return axis == 0 ? "D" : axis == 1 ? "H" : "W"; }

Status Unwanted(const std::string& what, int64_t got, const std::string& want) {
  return Invalid("conv: " + what + " is " + Text(got) + ", want " + want);
}

Reason CheckDtypes(const Dtypes& dtypes) {
  if (dtypes.second != dtypes.first || (dtypes.first != "bf16" && dtypes.first != "fp16")) {
    return "the operands are " + dtypes.first + " and " + dtypes.second + ", it takes two of bf16 or fp16";
  }
  if (dtypes.result != dtypes.first && dtypes.result != "fp32") {
    return "the result is " + dtypes.result + ", it gives " + dtypes.first + " or fp32";
  }
  return {};
}

std::vector<int64_t> Sizes(const ConvProblem& p) {
  std::vector<int64_t> sizes = {p.B, p.N, p.G, p.C, p.K};
  for (const Three& axes : {p.input, p.filter, p.output}) sizes.insert(sizes.end(), axes.begin(), axes.end());
  return sizes;
}

// Of sizes above 0.
Reason CheckSizes(ConvRole role, int rank, const ConvProblem& p) {
  std::vector<int64_t> bounded = Sizes(p);
  for (const Three& numbers : {p.low, p.filter_dilation}) bounded.insert(bounded.end(), numbers.begin(), numbers.end());
  for (int64_t number : bounded) {
    if (number < -kMostSize || number > kMostSize) return "a size, padding or dilation is " + Text(number) + ", it takes less than 2^31";
  }
  for (const Three& steps : {p.stride, p.input_dilation, p.filter_dilation}) {
    for (int64_t step : steps) {
      if (step < 1) return "a stride or dilation of " + Text(step) + ", it takes 1 or more";
    }
  }
  for (int i = 0; i < 3 - rank; ++i) {
    if (p.input[i] != 1 || p.filter[i] != 1 || p.output[i] != 1 || p.low[i] != 0) {
      return "axis " + std::string(AxisName(i)) + " is in use, want " + Text(rank) + " spatial axes";
    }
  }
  for (int64_t channels : {p.C, p.K}) {
    if (channels % kChannels != 0) return Text(channels) + " channels per group, TMA wants a multiple of " + Text(kChannels);
  }
  const auto most = [](const Three& numbers) { return *std::max_element(numbers.begin(), numbers.end()); };
  const int64_t stride = most(p.stride), lowest = *std::min_element(p.low.begin(), p.low.end());
  if (most(p.input_dilation) > 1) return "an input dilation of " + Text(most(p.input_dilation)) + ", TMA's boxes have no holes";
  if (role == ConvRole::kDgrad && stride > 1) {
    return "a stride of " + Text(stride) + " in dgrad, it takes 1: CUTLASS's schedule for Hopper leaves out all phases but one";
  }
  if (role == ConvRole::kDgrad && lowest < 0) {
    return "padding " + Text(lowest) + " in dgrad, it takes none below 0: a crop's gradient has zeros that no box writes";
  }
  if (stride > kMostStride) return "a stride of " + Text(stride) + ", a TMA box takes " + Text(kMostStride) + " at most";
  if (const int64_t parts = Product({p.B, p.G}); parts > kMostParts) {
    return Text(parts) + " groups, with those of the batch label, it takes " + Text(kMostParts) + " at most";
  }
  const int64_t taps = Volume(p.filter), groups = p.B * p.G;
  const int64_t x = Product({groups, p.N, Volume(p.input), p.C}), w = Product({groups, p.K, taps, p.C});
  const int64_t y = Product({groups, p.N, Volume(p.output), p.K});
  if (std::max({x, w, y}) >= kMostElements) return "an array of 2^39 elements or more, it takes fewer";
  if (const int64_t pixels = p.N * std::max(Volume(p.input), Volume(p.output)); pixels >= kMostPixels) {
    return Text(pixels) + " pixels, it takes fewer than 2^31 - 2^16";
  }
  const int64_t channels = role == ConvRole::kFprop ? p.K : p.C;
  const int64_t columns = (channels + kNarrowestTile - 1) / kNarrowestTile * (role == ConvRole::kWgrad ? taps : 1);
  if (columns > kMostGridY) return Text(columns) + " blocks side by side, it takes " + Text(kMostGridY) + " at most";
  return {};
}

// The parts of the sum of a split wgrad: images, or rows of an image if there are more parts than images.
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

// Cut the box of an axis to the pixels of x that are read, those from `begin` on.
Reason Crop(const ConvProblem& p, int i, int64_t first_row, int64_t rows, ConvPart* part, int64_t* begin) {
  const int64_t first = first_row * p.stride[i] - p.low[i];
  const int64_t last = first + (rows - 1) * p.stride[i] + (p.filter[i] - 1) * p.filter_dilation[i];
  if (last < 0 || first >= p.input[i]) return "axis " + std::string(AxisName(i)) + " lies in the padding altogether";
  *begin = std::max<int64_t>(0, first);
  const int64_t end = std::min(p.input[i], last + 1);
  part->input[i] = end - *begin;
  part->output[i] = rows;
  part->low[i] = *begin - first;
  part->high[i] = last + 1 - end;
  return {};
}

// TMA stores the corners of all axes in 16 bits together, and the offsets of taps likewise; CUTLASS also wants padding within these bounds.
Reason CheckBox(ConvRole role, int rank, const ConvProblem& p, const ConvPart& part, int i) {
  const int64_t corner = int64_t{1} << (16 / rank - 1);
  const int64_t most_reach = (int64_t{1} << (16 / rank)) - 2;
  const int64_t most_padding = rank == 1 ? 65536 : rank == 2 ? 256 : 16;
  const std::string axis = std::string(" on axis ") + AxisName(i), with = " with " + Text(rank) + " axes";
  const int64_t reach = (p.filter[i] - 1) * p.filter_dilation[i];
  if (reach > most_reach) {
    return "a dilated filter of " + Text(reach + 1) + axis + ", TMA takes " + Text(most_reach + 1) + " at most" + with;
  }
  const ConvBox box = BoxOf(role, p, part, i);
  if (std::min(box.lower, box.upper) < -corner || std::max(box.lower, box.upper) >= corner) {
    return "corners " + Text(box.lower) + " and " + Text(box.upper) + " of the box" + axis + ", TMA takes " + Text(-corner) + " to " +
           Text(corner - 1) + with;
  }
  const int64_t padding = std::max(part.low[i], part.high[i]);
  if (padding > most_padding) return "padding of " + Text(padding) + axis + ", it takes " + Text(most_padding) + " at most" + with;
  return {};
}

// The views of part (split, b, g).
Reason Views(ConvRole role, int rank, const ConvProblem& p, int64_t splits, int64_t split, int64_t b, int64_t g, ConvPart* part) {
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
    } else if (Reason reason = Crop(p, i, first_row[i], rows, part, &begin[i])) {
      return reason;
    }
    if (i < cut) continue;
    if (Reason reason = CheckBox(role, rank, p, *part, i)) return reason;
  }
  const auto pixel = [&](const Three& sizes, const Three& at) {
    return (((b * p.N + image) * sizes[0] + at[0]) * sizes[1] + at[1]) * sizes[2] + at[2];
  };
  part->x = (pixel(p.input, begin) * p.G + g) * p.C;
  part->y = (pixel(p.output, first_row) * p.G + g) * p.K;
  part->w = ((split * p.B + b) * p.G + g) * p.K * Volume(p.filter) * p.C;
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

Reason ConvRefuses(ConvRole role, int rank, const ConvProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (arch && *arch != 90) return "compute capability is " + CapabilityText(*arch) + ", the conv kernels want 9.0";
  if (rank < 1 || rank > 3) return Text(rank) + " spatial axes, it takes 1 to 3";
  if (Reason reason = CheckDtypes(dtypes)) return reason;
  const std::vector<int64_t> sizes = Sizes(p);
  const int64_t least = *std::min_element(sizes.begin(), sizes.end());
  if (least < 0) return "a size is " + Text(least) + ", it takes 0 or more";
  if (least == 0) return {};
  if (Reason reason = CheckSizes(role, rank, p)) return reason;
  ConvPart whole;
  return Views(role, rank, p, 1, 0, 0, 0, &whole);
}

// Of a problem that ConvRefuses takes.
Status PlanConv(ConvRole role, int rank, const ConvProblem& p, const ConvConfig& config, std::vector<ConvPart>* parts) {
  parts->clear();
  const bool no_x = std::min({p.N, p.input[0], p.input[1], p.input[2], p.C}) == 0;
  const bool no_w = std::min({p.K, p.filter[0], p.filter[1], p.filter[2], p.C}) == 0;
  const bool no_y = std::min({p.N, p.output[0], p.output[1], p.output[2], p.K}) == 0;
  if (p.B == 0 || p.G == 0 || (role == ConvRole::kFprop ? no_y : role == ConvRole::kDgrad ? no_x : no_w)) return {};
  if (no_x || no_w || no_y) return Invalid("conv: an operand is empty, want none: no kernel writes the zeros of an empty sum");

  if (Status status = CheckSplits(role, rank, p, config); !status.ok()) return status;
  for (int64_t split = 0; split < config.splits; ++split) {
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t g = 0; g < p.G; ++g) {
        if (Reason reason = Views(role, rank, p, config.splits, split, b, g, &parts->emplace_back())) return Invalid("conv: " + *reason);
      }
    }
  }
  return {};
}

}  // namespace jaxext
