// Products of more rows than the kernel of weight_only.cuh is for, on Hopper.  Equation, operands and config are those of weight_only.h,
// whose launcher takes a kernel from this table.
#pragma once

#include <vector>

#include "weight_only/weight_only_plan.h"

namespace jaxext {

struct WideWeightOnlyKernel {
  Dtype operands;  // of x
  int64_t bits;
  WeightOnlyConfig config;  // of one part
  int stages;
  int shared_bytes;
  Status (*launch)(const weight_only::Plan&, const WeightOnlyOperands&, void* result, LaunchStream);
};

// Every kernel that was compiled, in no particular order.
const std::vector<WideWeightOnlyKernel>& WideWeightOnlyKernels();

// The compile units' parts of the table.
std::vector<WideWeightOnlyKernel> WideWeightOnlyBF16();
std::vector<WideWeightOnlyKernel> WideWeightOnlyF16();

}  // namespace jaxext
