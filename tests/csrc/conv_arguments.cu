// What conv_sm90.cuh hands to CUTLASS, on the host alone: the TMA coordinates that CUTLASS derives from it are those of conv_plan.h's
// boxes, and strides, pointers and grid those of the arrays.  Needs nvcc and CUTLASS; no GPU, and no driver, without which CUTLASS prints
// that it makes no descriptors.  Compiled once per RANK, with csrc/conv_plan.cc.
#include <cstdint>
#include <cstdio>
#include <random>

#include "conv_sm90.cuh"

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

// (channel, w, h, d, n, tap offsets s, r, t) of the pixel `linear` at a tap.
template <class C, class Params>
auto Coordinates(const Params& params, int channel, const std::array<int64_t, 3>& tap, int linear) {
  using namespace cute;
  auto [M, N, K, L] = params.problem_shape;
  const auto k = [&] {
    const int s = tap[2], r = tap[1], t = tap[0];
    if constexpr (RANK == 1)
      return make_coord(channel, s);
    else if constexpr (RANK == 2)
      return make_coord(channel, s, r);
    else
      return make_coord(channel, s, r, t);
  }();
  if constexpr (C::kWgrad)
    return flatten(params.mainloop.tma_load_b.get_tma_tensor(make_shape(N, K))(k, linear));
  else
    return flatten(params.mainloop.tma_load_a.get_tma_tensor(make_shape(M, K))(linear, k));
}

template <class C, ConvRole kRole>
void CheckPart(const ConvProblem& p, const ConvPart& part, const ConvConfig& config, std::mt19937& rng) {
  const Dtype result = config.splits > 1 ? Dtype::kF32 : Dtype::kBF16;
  const auto arguments = C::ArgumentsOf(p, part, result, Address(kFirst), Address(kSecond), Address(kOut));
  Expect(C::CanImplement(arguments), "CUTLASS refuses");
  const auto params = C::Kernel::to_underlying_arguments(arguments, nullptr);

  const bool dgrad = kRole == ConvRole::kDgrad;
  const auto& targets = dgrad ? part.input : part.output;
  const auto draw = [&](int64_t n) { return int64_t(rng() % n); };
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t image = draw(part.N), channel = 64 * draw((dgrad ? p.K : p.C) / 64 + 1);
    std::array<int64_t, 3> at, tap;
    for (int i = 0; i < 3; ++i) at[i] = draw(targets[i]), tap[i] = draw(p.filter[i]);
    const auto got = Coordinates<C>(params, channel, tap, ((image * targets[0] + at[0]) * targets[1] + at[1]) * targets[2] + at[2]);
    bool ok = cute::get<0>(got) == channel && cute::get<RANK + 1>(got) == image;
    cute::for_each(cute::make_seq<RANK>{}, [&](auto i) {
      const int axis = 2 - i;
      const ConvBox box = BoxOf(kRole, p, part, axis);
      const int64_t offset = cute::get<decltype(i)::value + RANK + 2>(got);
      const int64_t stride = dgrad ? 1 : p.stride[axis];
      const int64_t want = box.lower + box.first_offset + at[axis] * stride + tap[axis] * box.tap_stride;
      ok = ok && offset >= 0 && cute::get<decltype(i)::value + 1>(got) + offset == want;
    });
    Expect(ok, "TMA coordinates");
  }

  const auto& shape = arguments.problem_shape;
  const auto& x = kRole == ConvRole::kFprop ? shape.stride_A : kRole == ConvRole::kDgrad ? shape.stride_C : shape.stride_B;
  const auto& w = kRole == ConvRole::kWgrad ? shape.stride_C : shape.stride_B;
  const auto& y = kRole == ConvRole::kFprop ? shape.stride_C : shape.stride_A;
  int64_t of_x = p.G * p.C, of_w = p.C, of_y = p.G * p.K;
  for (int i = RANK; i >= 0; --i) {
    Expect(x[i] == of_x && w[i] == of_w && y[i] == of_y, "strides");
    if (i > 0) of_x *= p.input[i + 2 - RANK], of_w *= p.filter[i + 2 - RANK], of_y *= p.output[i + 2 - RANK];
  }

  const int64_t a = kRole == ConvRole::kFprop ? kFirst + 2 * part.x : kSecond + 2 * part.y;
  const int64_t b = kRole == ConvRole::kFprop ? kSecond + 2 * part.w : kFirst + 2 * (dgrad ? part.w : part.x);
  const int64_t d = kOut + Bytes(result) * (kRole == ConvRole::kFprop ? part.y : dgrad ? part.x : part.w);
  Expect(Number(arguments.mainloop.ptr_A) == a && Number(arguments.mainloop.ptr_B) == b && Number(params.epilogue.out) == d, "pointers");

  const int64_t taps = Volume(p.filter), rows = C::kWgrad ? p.K : part.N * Volume(targets);
  const int64_t columns = kRole == ConvRole::kFprop ? p.K : p.C;
  const int64_t leading = kRole == ConvRole::kFprop ? p.G * p.K : dgrad ? p.G * p.C : taps * p.C;
  Expect(params.epilogue.rows == rows && params.epilogue.columns == columns && params.epilogue.leading == leading, "store");
  const dim3 grid = C::Kernel::get_grid_shape(params);
  Expect(grid.x == Up(Up(rows, config.tile_m), config.cluster_m) * config.cluster_m, "grid.x");
  Expect(grid.y == Up(columns, config.tile_n) * (C::kWgrad ? taps : 1) && grid.z == 1, "grid.y, grid.z");
}

template <ConvRole kRole>
void CheckRole(const char* name) {
  constexpr int kPair = kRole == ConvRole::kWgrad ? 1 : 2;
  using C = sm90::Convolution<kRole, RANK, cutlass::bfloat16_t, 128, 128, kPair, 6, 1>;
  std::mt19937 rng(0);
  const auto draw = [&](std::initializer_list<int64_t> of) { return of.begin()[rng() % of.size()]; };
  int checked = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const bool dgrad = kRole == ConvRole::kDgrad;
    ConvProblem p = {draw({1, 2}), draw({1, 2, 5}), draw({1, 2}), draw({8, 64, 136}), draw({8, 64, 136}), {}, {}, {}, {}, {}, {}, {}};
    for (int i = 0; i < 3; ++i) {
      const bool used = i >= 3 - RANK;
      p.input[i] = used ? draw({1, 5, 9, 14}) : 1;
      p.filter[i] = used ? draw({1, 2, 3, 4}) : 1;
      p.stride[i] = used && !dgrad ? draw({1, 2, 3}) : 1;
      p.low[i] = used ? draw({0, 1, 3, dgrad ? 0 : -1}) : 0;
      p.filter_dilation[i] = used ? draw({1, 2}) : 1;
      p.input_dilation[i] = 1;
      const int64_t reach = (p.filter[i] - 1) * p.filter_dilation[i], high = used ? draw({0, 1, 3, -1}) : 0;
      p.output[i] = std::max<int64_t>(0, p.input[i] + p.low[i] + high - reach - 1 + p.stride[i]) / p.stride[i];
    }
    const ConvConfig config = {128, 128, kPair, C::kWgrad ? draw({1, p.N, 2 * p.N}) : 1};
    std::vector<ConvPart> parts;
    if (!PlanConv(kRole, RANK, p, config, &parts).ok()) continue;
    for (const ConvPart& part : parts) CheckPart<C, kRole>(p, part, config, rng);
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
