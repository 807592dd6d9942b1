// What conv_sm90.cuh hands to CUTLASS, on the host alone: with the descriptors and coordinates that CUTLASS makes of it, TMA reads every
// element of both operands where the definition has it, and a zero where it has none, tiles' overhang included.  Boxes are those of
// conv_plan.h, stores those of the result.  Needs nvcc and CUTLASS; no GPU and no driver.  Compiled once per RANK, with
// csrc/conv/conv_plan.cc.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

#include "common/tensor_map.h"

// What a descriptor was made of, which stands in its place.
struct Description {
  int64_t address, strides[4];  // strides in bytes, of all axes but the first
  int32_t sizes[5];
  int32_t lower[3], upper[3];  // corners, if it gathers
  int32_t step[5];
  int32_t rank, gathers;
};
static_assert(sizeof(Description) <= sizeof(CUtensorMap));

int described = 0;  // descriptors so far

void Describe(CUtensorMap* map, Description* d, const void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
              const cuuint32_t* step) {
  d->address = reinterpret_cast<int64_t>(address);
  for (int i = 0; i < d->rank; ++i) d->sizes[i] = sizes[i], d->step[i] = step[i];
  for (int i = 0; i + 1 < d->rank; ++i) d->strides[i] = strides[i];
  std::memcpy(map, d, sizeof(*d));
  ++described;
}

CUresult DescribeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t*, const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Description d = {};
  d.rank = rank;
  Describe(map, &d, address, sizes, strides, step);
  return CUDA_SUCCESS;
}

CUresult DescribeIm2col(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                        const cuuint64_t* strides, const int* lower, const int* upper, cuuint32_t, cuuint32_t, const cuuint32_t* step,
                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Description d = {};
  d.rank = rank, d.gathers = true;
  for (cuuint32_t i = 0; i + 2 < rank; ++i) d.lower[i] = lower[i], d.upper[i] = upper[i];
  Describe(map, &d, address, sizes, strides, step);
  return CUDA_SUCCESS;
}

namespace jaxext::sm90 {  // in place of the driver's functions

template <>
decltype(DescribeTiled)* DriverFunction<decltype(DescribeTiled)>(const char*) {
  return DescribeTiled;
}

template <>
decltype(DescribeIm2col)* DriverFunction<decltype(DescribeIm2col)>(const char*) {
  return DescribeIm2col;
}

}  // namespace jaxext::sm90

#include "conv/conv_sm90.cuh"
#include "common/refusals.h"

namespace jaxext {
namespace {

constexpr int64_t kFirst = int64_t{1} << 40, kSecond = int64_t{1} << 41, kOut = int64_t{1} << 42;  // addresses

int failures = 0;

void Expect(bool ok, const char* what) {
  if (!ok && failures++ < 10) std::printf("  wrong: %s\n", what);
}

int64_t Up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Volume(const std::array<int64_t, 3>& a) { return a[0] * a[1] * a[2]; }
void* Address(int64_t at) { return reinterpret_cast<void*>(at); }
int64_t Number(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

const Description& DescriptionOf(const CUtensorMap* map) { return *reinterpret_cast<const Description*>(map); }

// Where TMA reads the element at these coordinates, which the offsets of a tap follow if it gathers; kZero if that lies outside.
constexpr int64_t kZero = -1;

template <class Tuple>
int64_t Place(const Description& d, const Tuple& coordinates) {
  int64_t at[8] = {};
  int count = 0;
  cute::for_each(cute::flatten(coordinates), [&](auto c) { at[count++] = c; });
  Expect(count == d.rank + (d.gathers ? d.rank - 2 : 0), "the number of coordinates");
  int64_t place = d.address;
  for (int i = 0; i < d.rank; ++i) {
    const bool spatial = d.gathers && i > 0 && i < d.rank - 1;
    const int64_t offset = spatial ? at[d.rank + i - 1] : 0;
    Expect(!spatial || (offset >= 0 && (at[i] - d.lower[i - 1]) % d.step[i] == 0), "a pixel of the box, and a tap after the first");
    if (at[i] + offset < 0 || at[i] + offset >= d.sizes[i]) return kZero;
    place += (at[i] + offset) * (i == 0 ? 2 : d.strides[i - 1]);
  }
  return place;
}

// The coordinates of taps [t, r, s], behind those of a channel.
auto Depth(int channel, const std::array<int64_t, 3>& tap) {
  const int s = tap[2], r = tap[1], t = tap[0];
  if constexpr (RANK == 1)
    return cute::make_coord(channel, s);
  else if constexpr (RANK == 2)
    return cute::make_coord(channel, s, r);
  else
    return cute::make_coord(channel, s, r, t);
}

// Elements of a part's tiles, where they are read and where the definition has them.
template <class C, ConvRole kRole, class Params>
void CheckReads(const ConvProblem& p, const ConvPart& part, const Params& params, std::mt19937& rng) {
  constexpr bool dgrad = kRole == ConvRole::kDgrad;
  const auto& targets = dgrad ? part.input : part.output;  // of the pixels that are gone through
  const auto& sources = dgrad ? part.output : part.input;  // of the view that is gathered from
  const auto& whole = dgrad ? p.output : p.input;
  const int64_t channels = dgrad ? p.K : p.C, pixels = part.N * Volume(targets), columns = kRole == ConvRole::kFprop ? p.K : p.C;
  const int64_t x = (kRole == ConvRole::kFprop || C::kWgrad ? kFirst : kSecond) + 2 * (dgrad ? part.y : part.x);
  const int64_t w = (kRole == ConvRole::kFprop ? kSecond : kFirst) + 2 * part.w, y = kSecond + 2 * part.y;
  const auto [M, N, K, L] = params.shape;
  const auto& a = params.mainloop.tma_load_a;
  const auto& b = params.mainloop.tma_load_b;
  const auto of_a = a.get_tma_tensor(cute::make_shape(M, K));
  const auto of_b = b.get_tma_tensor(cute::make_shape(N, K));
  const Description& of_box = DescriptionOf(C::kWgrad ? b.get_tma_descriptor() : a.get_tma_descriptor());
  const Description& of_other = DescriptionOf(C::kWgrad ? a.get_tma_descriptor() : b.get_tma_descriptor());

  for (int i = 0; i < RANK; ++i) {
    const ConvBox box = BoxOf(kRole, part, 2 - i);
    const int64_t length = of_box.sizes[i + 1] + of_box.upper[i] - of_box.lower[i];
    Expect(of_box.lower[i] == box.lower && of_box.upper[i] == box.upper, "corners of the box");
    Expect((length - 1) / of_box.step[i + 1] + 1 == targets[2 - i], "as many pixels in the box as there are");
  }

  const auto draw = [&](int64_t n) { return static_cast<int>(rng() % n); };
  for (int trial = 0; trial < 100; ++trial) {
    const int channel = draw(Up(channels, 64) * 64), pixel = draw(Up(pixels, 256) * 256), column = draw(Up(columns, 128) * 128);
    const std::array<int64_t, 3> tap = {draw(part.filter[0]), draw(part.filter[1]), draw(part.filter[2])};
    const int64_t linear_tap = (tap[0] * part.tap[0] * p.filter[1] + tap[1] * part.tap[1]) * p.filter[2] + tap[2] * part.tap[2];
    const int64_t image = pixel / Volume(targets);
    const int64_t at[3] = {pixel / (targets[1] * targets[2]) % targets[0], pixel / targets[2] % targets[1], pixel % targets[2]};
    bool inside = image < part.N && channel < channels;
    int64_t place = image;
    for (int i = 0; i < 3; ++i) {
      const int64_t source =
          dgrad ? at[i] + part.low[i] - tap[i] * part.dilation[i] : at[i] * p.stride[i] + tap[i] * part.dilation[i] - part.low[i];
      inside = inside && source >= 0 && source < sources[i];
      place = place * whole[i] + source;
    }
    const int64_t want = inside ? x + 2 * (place * p.G * channels + channel) : kZero;
    if constexpr (C::kWgrad) {
      Expect(Place(of_box, of_b(Depth(channel, tap), pixel)) == want, "where x is gathered");
      const int k = draw(Up(p.K, 128) * 128);
      Expect(Place(of_other, of_a(k, pixel)) == (k < p.K && pixel < pixels ? y + 2 * (pixel * p.G * p.K + k) : kZero), "where y is read");
    } else {
      Expect(Place(of_box, of_a(pixel, Depth(channel, tap))) == want, "where pixels are gathered");
      const int64_t k = dgrad ? channel : column, c = dgrad ? column : channel;
      const int64_t of_w = k < p.K && c < p.C ? w + 2 * ((k * Volume(p.filter) + linear_tap) * p.C + c) : kZero;
      Expect(Place(of_other, of_b(column, Depth(channel, tap))) == of_w, "where w is read");
    }
  }
}

template <class C, ConvRole kRole, class Params>
void CheckStores(const ConvProblem& p, const ConvPart& part, Dtype result, const Params& params, std::mt19937& rng) {
  constexpr bool dgrad = kRole == ConvRole::kDgrad;
  const auto& targets = dgrad ? part.input : part.output;
  const int64_t taps = Volume(p.filter), rows = C::kWgrad ? p.K : part.N * Volume(targets);
  const int64_t columns = kRole == ConvRole::kFprop ? p.K : p.C;
  const int64_t leading = kRole == ConvRole::kFprop ? p.G * p.K : taps * p.C;
  const int64_t d = kOut + Bytes(result) * (kRole == ConvRole::kFprop ? part.y : dgrad ? part.x : part.w);
  Expect(Number(params.store.out) == d, "where the result begins");
  Expect(params.store.rows == rows && params.store.columns == columns && params.store.taps == (C::kWgrad ? taps : 1), "store");
  Expect(params.store.zeros == (Volume(part.filter) == 0), "whether nothing is read");
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t row = rng() % rows;
    int64_t place = row / Volume(targets), rest = row % Volume(targets);
    for (int i = 0; i < 3 && dgrad; ++i) {
      rest %= targets[i] * (i == 0 ? targets[1] * targets[2] : i == 1 ? targets[2] : 1);
      place = place * p.input[i] + part.pixel[i] * (rest / (i == 0 ? targets[1] * targets[2] : i == 1 ? targets[2] : 1));
    }
    Expect(params.store.layout.Begin(row) == (dgrad ? place * p.G * p.C : row * leading), "where a row begins");
  }
}

template <ConvRole kRole>
void CheckRole(const char* name) {
  using C = sm90::Convolution<kRole, RANK, cutlass::bfloat16_t, 128, 128, 2, 6, 1>;
  std::mt19937 rng(0);
  const auto draw = [&](std::initializer_list<int64_t> of) { return of.begin()[rng() % of.size()]; };
  int checked = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const bool large = trial % 8 == 0;  // far more than 2^31 elements
    ConvProblem p = {draw({1, 2}), draw({1, 2, 5}), draw({1, 2}), draw({8, 64, 136}), draw({8, 64, 136}), {}, {}, {}, {}, {}, {}, {}};
    for (int i = 0; i < 3; ++i) {
      const bool used = i >= 3 - RANK;
      p.input[i] = !used ? 1 : large ? int64_t{1} << 27 / RANK : draw({1, 5, 9, 14});
      p.filter[i] = used ? draw({1, 2, 3, 4}) : 1;
      p.stride[i] = used ? draw({1, 2, 3, 8}) : 1;
      p.low[i] = used ? draw({0, 1, 3, -1}) : 0;
      p.filter_dilation[i] = used ? draw({1, 2}) : 1;
      p.input_dilation[i] = 1;
      const int64_t reach = (p.filter[i] - 1) * p.filter_dilation[i], high = used ? draw({0, 1, 3, -1}) : 0;
      p.output[i] = std::max<int64_t>(0, p.input[i] + p.low[i] + high - reach - 1 + p.stride[i]) / p.stride[i];
    }
    const ConvConfig config = {128, 128, 2, C::kWgrad ? draw({1, p.N, 2 * p.N}) : 1};
    std::vector<ConvPart> parts;
    if (ConvRefuses(kRole, RANK, p, {"bf16", "bf16", "bf16"}) || !PlanConv(kRole, RANK, p, config, &parts).ok()) continue;
    const Dtype result = config.splits > 1 ? Dtype::kF32 : Dtype::kBF16;
    for (size_t begin = 0; begin < parts.size(); begin += C::kParts) {
      const int count = std::min<int>(C::kParts, parts.size() - begin), before = described;
      sm90::ConvParts<typename C::Kernel, C::kParts> params;
      if (!C::Fill(p, &parts[begin], count, result, Address(kFirst), Address(kSecond), Address(kOut), /*epilogue=*/nullptr, &params)) {
        Expect(false, "CUTLASS refuses");
        continue;
      }
      int reading = 0;
      for (int i = 0; i < count; ++i) {
        CheckStores<C, kRole>(p, parts[begin + i], result, params.part[i], rng);
        if (params.part[i].store.zeros) continue;
        CheckReads<C, kRole>(p, parts[begin + i], params.part[i], rng);
        ++reading;
      }
      Expect(described - before == 2 * reading, "a descriptor for each operand of each part, and no more: the host waits for them");
    }
    checked += parts.size();
  }
  std::printf("conv%dd_%s: %d parts\n", RANK, name, checked);
  Expect(checked > 50, "too few parts were checked");
}

}  // namespace
}  // namespace jaxext

int main() {
  jaxext::CheckRole<jaxext::ConvRole::kFprop>("fprop");
  jaxext::CheckRole<jaxext::ConvRole::kDgrad>("dgrad");
  jaxext::CheckRole<jaxext::ConvRole::kWgrad>("wgrad");
  return jaxext::failures != 0;
}
