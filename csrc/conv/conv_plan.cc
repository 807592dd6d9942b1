#include "conv/conv_plan.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "common/refusals.h"

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

int64_t PhasesOf(const ConvProblem& p, int i) { return std::min(p.stride[i], p.input[i]); }

int64_t PhasesOf(const ConvProblem& p) { return PhasesOf(p, 0) * PhasesOf(p, 1) * PhasesOf(p, 2); }

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
  const int64_t stride = most(p.stride);
  if (most(p.input_dilation) > 1) return "an input dilation of " + Text(most(p.input_dilation)) + ", TMA's boxes have no holes";
  if (stride > kMostStride) return "a stride of " + Text(stride) + ", a TMA box takes " + Text(kMostStride) + " at most";
  if (const int64_t parts = Product({p.B, p.G}); parts > kMostParts) {
    return Text(parts) + " groups, with those of the batch label, it takes " + Text(kMostParts) + " at most";
  } else if (role == ConvRole::kDgrad && parts * PhasesOf(p) > kMostPhases) {
    return Text(PhasesOf(p)) + " phases of the strides in each of " + Text(parts) + " groups, it takes " + Text(kMostPhases) +
           " together at most";
  }
  const int64_t taps = Volume(p.filter), groups = p.B * p.G;
  const int64_t x = Product({groups, p.N, Volume(p.input), p.C}), w = Product({groups, p.K, taps, p.C});
  const int64_t y = Product({groups, p.N, Volume(p.output), p.K});
  if (std::max({x, w, y}) >= kMostElements) return "an array of 2^39 elements or more, it takes fewer";
  if (const int64_t pixels = p.N * std::max(Volume(p.input), Volume(p.output)); pixels >= kMostPixels) {
    return Text(pixels) + " pixels, it takes fewer than 2^31 - 2^16";
  }
  const int64_t channels = role == ConvRole::kFprop ? p.K : p.C;
  const bool pairs = role == ConvRole::kWgrad;  // of blocks side by side, in each of which one may be without columns
  const int64_t narrow = (channels + kNarrowestTile - 1) / kNarrowestTile * (pairs ? taps : 1), columns = narrow + (pairs && narrow % 2);
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
  part->filter[i] = p.filter[i];
  part->output[i] = rows;
  part->low[i] = *begin - first;
  part->high[i] = last + 1 - end;
  part->dilation[i] = p.filter_dilation[i];
  part->pixel[i] = part->tap[i] = 1;
  return {};
}

// Phase `begin` of an axis in dgrad (conv_plan.h).
void Phase(const ConvProblem& p, int i, int64_t begin, ConvPart* part, int64_t* first) {
  const int64_t stride = p.stride[i], common = std::gcd(stride, p.filter_dilation[i]), step = stride / common;
  const auto meets = [&](int64_t tap) { return (begin + p.low[i] - tap * p.filter_dilation[i]) % stride == 0; };
  for (*first = 0; *first < step && !meets(*first);) ++*first;
  const bool any = *first < std::min(step, p.filter[i]);
  part->input[i] = (p.input[i] - begin + stride - 1) / stride;
  part->output[i] = p.output[i];
  part->filter[i] = any ? (p.filter[i] - *first + step - 1) / step : 0;
  part->low[i] = any ? (begin + p.low[i] - *first * p.filter_dilation[i]) / stride : 0;
  part->high[i] = 0;
  part->dilation[i] = p.filter_dilation[i] / common;
  part->pixel[i] = stride;
  part->tap[i] = step;
}

// TMA stores the corners of all axes in 16 bits together, and the offsets of taps likewise; CUTLASS also wants padding within these bounds.
Reason CheckBox(ConvRole role, int rank, const ConvPart& part, int i) {
  const int64_t corner = int64_t{1} << (16 / rank - 1);
  const int64_t most_reach = (int64_t{1} << (16 / rank)) - 2;
  const int64_t most_padding = rank == 1 ? 65536 : rank == 2 ? 256 : 16;
  const std::string axis = std::string(" on axis ") + AxisName(i), with = " with " + Text(rank) + " axes";
  // A block of wgrad without a tap of its own, beside the last, reads one more of the first axis.
  const int64_t taps = part.filter[i] + (role == ConvRole::kWgrad && i == 3 - rank);
  const int64_t reach = (taps - 1) * part.dilation[i];
  if (reach > most_reach) {
    return "a dilated filter of " + Text(reach + 1) + axis + ", TMA takes " + Text(most_reach + 1) + " at most" + with;
  }
  const ConvBox box = BoxOf(role, part, i);
  if (std::min(box.lower, box.upper) < -corner || std::max(box.lower, box.upper) >= corner) {
    return "corners " + Text(box.lower) + " and " + Text(box.upper) + " of the box" + axis + ", TMA takes " + Text(-corner) + " to " +
           Text(corner - 1) + with;
  }
  const int64_t padding = std::max(part.low[i], part.high[i]);
  if (padding > most_padding) return "padding of " + Text(padding) + axis + ", it takes " + Text(most_padding) + " at most" + with;
  return {};
}

// Which part: the phase by the first pixel of each axis.
struct Place {
  int64_t splits, split, b, g;
  Three phase;
};

Reason Views(ConvRole role, int rank, const ConvProblem& p, const Place& at, ConvPart* part) {
  const int cut = 3 - rank;  // the axis whose rows are shared out
  const int64_t slices = at.splits > p.N ? at.splits / p.N : 1;
  const int64_t image = at.splits > p.N ? at.split / slices : p.N * at.split / at.splits;
  const int64_t image_end = at.splits > p.N ? image + 1 : p.N * (at.split + 1) / at.splits;
  Three first_row = {}, begin = at.phase, first_tap = {};
  part->N = image_end - image;
  for (int i = 0; i < 3; ++i) {
    if (role == ConvRole::kDgrad) {
      Phase(p, i, begin[i], part, &first_tap[i]);
      continue;
    }
    int64_t rows = p.output[i];
    if (i == cut && slices > 1) {
      const int64_t slice = at.split % slices;
      first_row[i] = p.output[i] * slice / slices;
      rows = p.output[i] * (slice + 1) / slices - first_row[i];
    }
    if (Reason reason = Crop(p, i, first_row[i], rows, part, &begin[i])) return reason;
  }
  const bool zeros = Volume(part->filter) == 0;  // nothing is read
  for (int i = cut; i < 3 && !zeros; ++i) {
    if (Reason reason = CheckBox(role, rank, *part, i)) return reason;
  }
  const auto pixel = [&](const Three& sizes, const Three& first) {
    return (((at.b * p.N + image) * sizes[0] + first[0]) * sizes[1] + first[1]) * sizes[2] + first[2];
  };
  const int64_t tap = zeros ? 0 : (first_tap[0] * p.filter[1] + first_tap[1]) * p.filter[2] + first_tap[2];
  part->x = (pixel(p.input, begin) * p.G + at.g) * p.C;
  part->y = (pixel(p.output, first_row) * p.G + at.g) * p.K;
  part->w = (((at.split * p.B + at.b) * p.G + at.g) * p.K * Volume(p.filter) + tap) * p.C;
  return {};
}

// The first pixels of all phases in dgrad, those of most taps first: blocks begin in order, and the short ones fill up the end.
std::vector<Three> Phases(ConvRole role, const ConvProblem& p) {
  if (role != ConvRole::kDgrad) return {Three{}};
  std::vector<std::pair<int64_t, Three>> found;
  for (int64_t d = 0; d < PhasesOf(p, 0); ++d) {
    for (int64_t h = 0; h < PhasesOf(p, 1); ++h) {
      for (int64_t w = 0; w < PhasesOf(p, 2); ++w) {
        ConvPart part;
        int64_t first;
        const Three phase = {d, h, w};
        for (int i = 0; i < 3; ++i) Phase(p, i, phase[i], &part, &first);
        found.push_back({Volume(part.filter), phase});
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Three> phases;
  for (const auto& [taps, phase] : found) phases.push_back(phase);
  return phases;
}

}  // namespace

ConvBox BoxOf(ConvRole role, const ConvPart& part, int i) {
  const int64_t reach = (part.filter[i] - 1) * part.dilation[i];
  if (role == ConvRole::kDgrad) {
    const int64_t lower = part.low[i] - reach;
    return {lower, lower + part.input[i] - part.output[i], reach, -part.dilation[i]};
  }
  return {-part.low[i], part.high[i] - reach, 0, part.dilation[i]};
}

Reason ConvRefuses(ConvRole role, int rank, const ConvProblem& p, const Dtypes& dtypes, std::optional<int> arch) {
  if (Reason reason = CheckArch("conv", arch)) return reason;
  if (Reason reason = CheckDtypes(dtypes)) return reason;
  const std::vector<int64_t> sizes = Sizes(p);
  const int64_t least = *std::min_element(sizes.begin(), sizes.end());
  if (least < 0) return "a size is " + Text(least) + ", it takes 0 or more";
  if (least == 0) return {};
  if (Reason reason = CheckSizes(role, rank, p)) return reason;
  for (const Three& phase : Phases(role, p)) {
    ConvPart whole;
    if (Reason reason = Views(role, rank, p, {1, 0, 0, 0, phase}, &whole)) return reason;
  }
  return {};
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
  for (const Three& phase : Phases(role, p)) {
    for (int64_t i = 0; i < config.splits * p.B * p.G; ++i) {
      const Place place = {config.splits, i / (p.B * p.G), i / p.G % p.B, i % p.G, phase};
      if (Reason reason = Views(role, rank, p, place, &parts->emplace_back())) return Invalid("conv: " + *reason);
    }
  }
  return {};
}

}  // namespace jaxext
