// The epilogue of a kernel, which it applies to a finished sum before storing it:
//
//     z = sum + bias                     in float32
//     y = activation(z) + residual       rounded once, to the result's dtype
//
// The same as in Python: `jaxext.kernels.epilogue.Epilogue`.
#pragma once

#include <vector>

#include "common/family.h"

namespace jaxext {

// None, then the order of `jaxext.kernels.epilogue.ACTIVATIONS`.
enum class Activation { kNone, kRelu, kRelu6, kGelu, kGeluTanh, kSilu, kSigmoid, kTanh, kLeakyRelu, kSquaredRelu };
constexpr int kActivations = 10;

struct Epilogue {
  Activation activation = Activation::kNone;
  const float* bias = nullptr;     // an element for each column of the result (for each batch element and group), or none
  const void* residual = nullptr;  // of the result's shape and dtype, or none
  void* saved = nullptr;           // where z goes, rounded to the result's dtype, or none; it has the result's shape
};

// Its attributes.  Its arrays, if they exist, are the bias and the residual after the factors, and the saved sum after the result.
struct EpilogueOptions {
  JAXEXT_INTEGERS(activation,             // `Activation`
                  bias, residual, saves)  // 1 or 0: whether it exists
};

// The epilogue of a result of this shape and dtype, with a bias of this shape.
Epilogue TakeEpilogue(Arrays& arrays, const EpilogueOptions& options, const std::vector<int64_t>& bias, const std::vector<int64_t>& shape,
                      Dtype dtype);

// An activation by its number; refuses other numbers, and flags that are neither 0 nor 1.
Activation TakeActivation(Arrays& arrays, int64_t activation, const std::vector<std::pair<std::string, int64_t>>& flags);

}  // namespace jaxext
