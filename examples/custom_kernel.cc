// Kernels for CPUs, as handlers of XLA's FFI.  custom_kernel.py compiles this file.
//
// A channelwise product:  out[b,i,j,c] = sum over s of first[b,i,s,c] second[b,s,j,c].
//
// Both operands are dense in b and c.  Their strides along i, s and j are attributes, counted in elements: so one kernel serves
// the operation and both of its gradients.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Channelwise(ffi::Buffer<ffi::F32> first, ffi::Buffer<ffi::F32> second, int64_t S, int64_t first_i, int64_t first_s,
                              int64_t second_s, int64_t second_j, ffi::ResultBuffer<ffi::F32> out) {
  auto shape = out->dimensions();
  if (shape.size() != 4) return ffi::Error::InvalidArgument("channelwise: out must have the axes b, i, j and c");
  const int64_t B = shape[0], I = shape[1], J = shape[2], C = shape[3];
  if (static_cast<int64_t>(first.element_count()) != B * I * S * C || static_cast<int64_t>(second.element_count()) != B * S * J * C) {
    return ffi::Error::InvalidArgument("channelwise: operands and out do not fit each other");
  }
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < I; ++i) {
      for (int64_t j = 0; j < J; ++j) {
        float* __restrict sum = out->typed_data() + ((b * I + i) * J + j) * C;
        std::fill_n(sum, C, 0.0f);
        for (int64_t s = 0; s < S; ++s) {
          const float* x = first.typed_data() + b * I * S * C + i * first_i + s * first_s;
          const float* w = second.typed_data() + b * S * J * C + s * second_s + j * second_j;
          for (int64_t c = 0; c < C; ++c) sum[c] += x[c] * w[c];  // the channels are neighbours: the compiler makes vectors of them
        }
      }
    }
  }
  return ffi::Error::Success();
}

extern "C" XLA_FFI_DEFINE_HANDLER_SYMBOL(ChannelwiseHandler, Channelwise,
                                         ffi::Ffi::Bind()
                                             .Arg<ffi::Buffer<ffi::F32>>()
                                             .Arg<ffi::Buffer<ffi::F32>>()
                                             .Attr<int64_t>("S")
                                             .Attr<int64_t>("first_i")
                                             .Attr<int64_t>("first_s")
                                             .Attr<int64_t>("second_s")
                                             .Attr<int64_t>("second_j")
                                             .Ret<ffi::Buffer<ffi::F32>>());

static bool Within(ffi::Buffer<ffi::S32> labels, int64_t V) {
  return std::all_of(labels.typed_data(), labels.typed_data() + labels.element_count(), [V](int v) { return v >= 0 && v < V; });
}

static const char kLabel[] = "cross entropy: a label is not the number of a logit";

// A softmax cross entropy of each row:  loss[n] = lse[n] - logits[n,labels[n]],  where lse[n] = log(sum over v of exp(logits[n,v])).

static ffi::Error CrossEntropy(ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> labels, ffi::ResultBuffer<ffi::F32> loss,
                               ffi::ResultBuffer<ffi::F32> lse) {
  const int64_t N = logits.dimensions()[0], V = logits.dimensions()[1];
  if (!Within(labels, V)) return ffi::Error::InvalidArgument(kLabel);
  for (int64_t n = 0; n < N; ++n) {
    const float* x = logits.typed_data() + n * V;
    const float largest = *std::max_element(x, x + V);
    float sum = 0;
    for (int64_t v = 0; v < V; ++v) sum += std::exp(x[v] - largest);
    lse->typed_data()[n] = largest + std::log(sum);
    loss->typed_data()[n] = lse->typed_data()[n] - x[labels.typed_data()[n]];
  }
  return ffi::Error::Success();
}

// Its gradient:  d_logits[n,v] = (exp(logits[n,v] - lse[n]) - [v = labels[n]]) d_loss[n].

static ffi::Error CrossEntropyBackward(ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> labels, ffi::Buffer<ffi::F32> lse,
                                       ffi::Buffer<ffi::F32> d_loss, ffi::ResultBuffer<ffi::F32> d_logits) {
  const int64_t N = logits.dimensions()[0], V = logits.dimensions()[1];
  if (!Within(labels, V)) return ffi::Error::InvalidArgument(kLabel);
  for (int64_t n = 0; n < N; ++n) {
    const float* x = logits.typed_data() + n * V;
    float* d = d_logits->typed_data() + n * V;
    const float of_row = d_loss.typed_data()[n], logarithm = lse.typed_data()[n];
    for (int64_t v = 0; v < V; ++v) d[v] = std::exp(x[v] - logarithm) * of_row;
    d[labels.typed_data()[n]] -= of_row;
  }
  return ffi::Error::Success();
}

extern "C" XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CrossEntropyHandler, CrossEntropy,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

extern "C" XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossEntropyBackwardHandler, CrossEntropyBackward,
                                         ffi::Ffi::Bind()
                                             .Arg<ffi::Buffer<ffi::F32>>()
                                             .Arg<ffi::Buffer<ffi::S32>>()
                                             .Arg<ffi::Buffer<ffi::F32>>()
                                             .Arg<ffi::Buffer<ffi::F32>>()
                                             .Ret<ffi::Buffer<ffi::F32>>());
