// The targets of dense convolutions, and the table of kernels.
#include "conv/conv.h"

namespace jaxext {
namespace {

Row Facts(const ConvKernel& k) {
  return {{"rank", int64_t{k.rank}},     {"role", Name(k.role)},      {"operands", Name(k.operands)},
          {"tile_k", int64_t{k.tile_k}}, {"parts", int64_t{k.parts}}, {"most_parts", kMostParts}};
}

const Registered registered({"conv", ConvTargets<ConvConfig>("conv", ConvRefuses, LaunchConv),
                             [] { return RowsOf(ConvKernels(), Facts); }});

}  // namespace
}  // namespace jaxext
