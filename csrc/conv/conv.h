// Dense convolutions on Hopper: which kernels there are, and the one way to call them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "conv/conv_plan.h"
#include "common/product_arrays.h"

namespace jaxext {

struct ConvKernel {
  ConvRole role;
  int rank;  // spatial axes
  Dtype operands;
  ConvConfig config;  // with splits = 1
  int tile_k;
  int stages;
  int parts;  // most of a launch
  int shared_bytes;
  Status (*launch)(const ConvProblem&, const std::vector<ConvPart>&, Dtype result, const void* first, const void* second, void* out,
                   const Epilogue* epilogue, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<ConvKernel>& ConvKernels();

// The result of `role`, of operands in the order of slots (x, w, y without the open one).  It is of their dtype or float32; with splits > 1
// there are so many partial results, float32, along a leading axis, for the caller to add up.  Fprop may have an epilogue; its bias is
// [B,G,K].
Status LaunchConv(ConvRole role, int rank, const ConvProblem& problem, const ConvConfig& config, const ProductArrays& arrays,
                  const Epilogue* epilogue, LaunchStream stream);

// The compile units' parts of the table.
std::vector<ConvKernel> Conv1dFprop();
std::vector<ConvKernel> Conv1dDgrad();
std::vector<ConvKernel> Conv1dWgrad();
std::vector<ConvKernel> Conv2dFprop();
std::vector<ConvKernel> Conv2dDgrad();
std::vector<ConvKernel> Conv2dWgrad();
std::vector<ConvKernel> Conv3dFprop();
std::vector<ConvKernel> Conv3dDgrad();
std::vector<ConvKernel> Conv3dWgrad();

}  // namespace jaxext
