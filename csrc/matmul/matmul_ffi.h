// Shared by the handlers of matrix products.
#pragma once

#include <vector>

#include "common/ffi.h"
#include "matmul/matmul.h"

namespace jaxext {

// An error unless the buffers are the operands and the result of `role`, in the order of slots (a, b, c without the open one).
inline Status CheckMatmul(MatmulRole role, const MatmulProblem& p, int64_t splits, const ffi::AnyBuffer& first,
                          const ffi::AnyBuffer& second, const ffi::AnyBuffer& out, Dtype* operands, Dtype* result) {
  const struct Slot {
    const char* name;
    std::vector<int64_t> shape;
  } a = {"a", {p.B, p.M, p.K}}, b = {"b", {p.B, p.K, p.N}}, c = {"c", {p.B, p.M, p.N}};
  const Slot& one = role == MatmulRole::kNT ? b : a;
  const Slot& other = role == MatmulRole::kNN ? b : c;
  const Slot& open = role == MatmulRole::kNN ? c : role == MatmulRole::kNT ? a : b;
  Dtype second_operand;
  if (Status s = Check(one.name, first, one.shape, operands); !s.ok()) return s;
  if (Status s = Check(other.name, second, other.shape, &second_operand); !s.ok()) return s;
  if (Status s = Check(open.name, out, InParts(open.shape, splits), result); !s.ok()) return s;
  return CheckSame(*operands, second_operand);
}

}  // namespace jaxext
