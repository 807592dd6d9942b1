// A kernel for CPUs, as a handler of XLA's FFI.  custom_kernel.py compiles this file.
//
// A channelwise product:  out[b,i,j,c] = sum over s of first[b,i,s,c] second[b,s,j,c].
//
// Both operands are dense in b and c.  Their strides along i, s and j are attributes, counted in elements: so one kernel serves
// the operation and both of its gradients.

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using F32 = ffi::BufferR4<ffi::F32>;

static ffi::Error Channelwise(F32 first, F32 second, int64_t S, int64_t first_i, int64_t first_s, int64_t second_s, int64_t second_j,
                              ffi::Result<F32> out) {
  auto shape = out->dimensions();
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
                                             .Arg<F32>()
                                             .Arg<F32>()
                                             .Attr<int64_t>("S")
                                             .Attr<int64_t>("first_i")
                                             .Attr<int64_t>("first_s")
                                             .Attr<int64_t>("second_s")
                                             .Attr<int64_t>("second_j")
                                             .Ret<F32>());
