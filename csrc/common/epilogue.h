// The epilogue of a kernel, which it applies to a finished sum before storing it:
//
//     z = sum + bias                     in float32
//     y = activation(z) + residual       rounded once, to the result's dtype
//
// The same as in Python: `jaxext.kernels._epilogue.Epilogue`.  Plain C++: it must not know CUDA, XLA or Python.
#pragma once

namespace jaxext {

// None, then the order of `jaxext.kernels._epilogue.ACTIVATIONS`.
enum class Activation { kNone, kRelu, kRelu6, kGelu, kGeluTanh, kSilu, kSigmoid, kTanh, kLeakyRelu, kSquaredRelu };
constexpr int kActivations = 10;

struct Epilogue {
  Activation activation = Activation::kNone;
  const float* bias = nullptr;     // an element for each column of the result (for each batch element and group), or none
  const void* residual = nullptr;  // of the result's shape and dtype, or none
  void* saved = nullptr;           // where z goes, rounded to the result's dtype, or none; it has the result's shape
};

}  // namespace jaxext
