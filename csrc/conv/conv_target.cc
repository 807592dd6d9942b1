// The targets of dense convolutions, and the table of kernels.
#include "common/conv_arrays.h"
#include "conv/conv.h"

namespace jaxext {
namespace {

Status Launch(ConvRole role, int rank, const ConvProblem& p, const ConvConfig& config, const ConvArrays& arrays, const Epilogue* epilogue,
              LaunchStream stream) {
  return LaunchConv(role, rank, p, config, arrays.operands, arrays.result, arrays.first, arrays.second, arrays.out, epilogue, stream);
}

std::vector<Row> Kernels() {
  std::vector<Row> rows;
  for (const ConvKernel& k : ConvKernels()) {
    rows.push_back(RowOf({{"rank", int64_t{k.rank}},
                          {"role", kConvRoles[static_cast<int>(k.role)]},
                          {"operands", Name(k.operands)},
                          {"tile_k", int64_t{k.tile_k}},
                          {"parts", int64_t{k.parts}},
                          {"most_parts", kMostParts}},
                         k.config, k.stages, k.shared_bytes));
  }
  return rows;
}

const Registered registered({"conv",
                             Joined({ConvTargets<ConvConfig>("conv", 1, ConvRefuses, Launch),
                                     ConvTargets<ConvConfig>("conv", 2, ConvRefuses, Launch),
                                     ConvTargets<ConvConfig>("conv", 3, ConvRefuses, Launch)}),
                             Kernels});

}  // namespace
}  // namespace jaxext
