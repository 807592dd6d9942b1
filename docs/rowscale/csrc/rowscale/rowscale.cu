#include "rowscale/rowscale.h"

#include <cuda_bf16.h>

#include "common/launch.cuh"

namespace jaxext::rowscale {
namespace {

constexpr int kThreads = 256;

template <typename T, int kLanes>
struct alignas(sizeof(T) * kLanes) Lanes {
  T each[kLanes];
};

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    Rowscale(const Lanes<T, kLanes>* x, const float* scale, Lanes<T, kLanes>* y,
             unsigned count, unsigned count_of_row, unsigned M) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const float factor = scale[i / count_of_row % M];
  Lanes<T, kLanes> lanes = x[i];
#pragma unroll
  for (T& each : lanes.each) each = static_cast<T>(static_cast<float>(each) * factor);
  y[i] = lanes;
}

struct Kernel {
  Dtype operands;
  RowscaleConfig config;
  cudaError_t (*launch)(const RowscaleProblem&, const void* x, const void* scale, void* y,
                        LaunchStream);
};

template <typename T, int kLanes>
cudaError_t LaunchOf(const RowscaleProblem& p, const void* x, const void* scale, void* y,
                     LaunchStream stream) {
  using Vector = Lanes<T, kLanes>;
  const unsigned count = p.B * p.M * p.N / kLanes, count_of_row = p.N / kLanes, M = p.M;
  return jaxext::Launch({(count + kThreads - 1) / kThreads}, {kThreads}, 0, stream,
                        Rowscale<T, kLanes>, static_cast<const Vector*>(x),
                        static_cast<const float*>(scale), static_cast<Vector*>(y), count,
                        count_of_row, M);
}

const std::vector<Kernel>& Kernels() {
  static const auto* const kernels =
      new std::vector<Kernel>{{Dtype::kF32, {1}, LaunchOf<float, 1>},
                              {Dtype::kF32, {4}, LaunchOf<float, 4>},
                              {Dtype::kBF16, {1}, LaunchOf<__nv_bfloat16, 1>},
                              {Dtype::kBF16, {8}, LaunchOf<__nv_bfloat16, 8>}};
  return *kernels;
}

// Of x, scale and y.
Reason Refuses(const RowscaleProblem& p, const Dtypes& dtypes, std::optional<int>) {
  if (dtypes.first != "fp32" && dtypes.first != "bf16")
    return "x is " + dtypes.first + ", want fp32 or bf16";
  if (dtypes.second != "fp32") return "scale is " + dtypes.second + ", want fp32";
  if (dtypes.result != dtypes.first)
    return "the result is " + dtypes.result + ", want " + dtypes.first + ", as x";
  if (Reason reason = CheckSizes({p.B, p.M, p.N})) return reason;
  if (Product({p.B, p.M, p.N}) == 0) return "x has no elements";
  if (Product({p.B, p.M, p.N}) > kMostOfAxis)
    return "x has " + Text(p) + ", want " + std::to_string(kMostOfAxis) +
           " elements at most";
  return {};
}

Status Launch(Arrays& arrays, const RowscaleProblem& p, const RowscaleConfig& config,
              LaunchStream stream) {
  const Array x = arrays.Operand("x", {p.B, p.M, p.N});
  const Array scale = arrays.Operand("scale", {p.M});
  const Array y = arrays.Result("y", {p.B, p.M, p.N});
  if (Status status = arrays.Done(); !status.ok()) return status;
  if (Reason reason =
          Refuses(p, {ShortName(x.dtype), ShortName(scale.dtype), ShortName(y.dtype)}, {}))
    return Invalid("rowscale: " + *reason);
  const Kernel* kernel = Find(Kernels(), config, [&](const Kernel& k) {
    return k.operands == x.dtype && p.N % k.config.lanes == 0;
  });
  if (kernel == nullptr)
    return Invalid("rowscale: no kernel for " + Text(p) + " has " + Text(config));
  if (!Aligned(x.data) || !Aligned(y.data))
    return Invalid("rowscale: x or y does not begin at a multiple of 16 bytes");
  const cudaError_t error = kernel->launch(p, x.data, scale.data, y.data, stream);
  return error == cudaSuccess ? Status{}
                              : Internal(std::string("rowscale: the launch failed: ") +
                                         cudaGetErrorString(error));
}

std::vector<Row> Rows() {
  std::vector<Row> rows;
  for (const Kernel& k : Kernels())
    rows.push_back(RowOf({{"operands", Name(k.operands)}}, k.config, 1, 0));
  return rows;
}

const Registered registered({"rowscale",
                             {TargetOf<RowscaleProblem, RowscaleConfig>("rowscale", Refuses,
                                                                        Launch)},
                             Rows});

}  // namespace
}  // namespace jaxext::rowscale
