// Matrix products as the Hopper kernels are told of them (`GemmOf`), carried out with plain loops: every role, batched and in parts, equals
// the definition.  The majors of A and B are those of LayoutA and LayoutB in matmul_sm90.cuh.  Needs no GPU.
#include <cstdio>
#include <vector>

#include "matmul/matmul.h"

namespace jaxext {

// No kernel is called.
#define NONE(unit) \
  std::vector<MatmulKernel> unit() { return {}; }
NONE(MatmulNN)
NONE(MatmulNT)
NONE(MatmulTN)
NONE(MatmulNTE4M3)
NONE(MatmulNNFused)

namespace {

// Whether the parts of `role` add up to its definition.
bool Right(MatmulRole role, const MatmulProblem& p, int64_t splits) {
  std::vector<int> a(p.B * p.M * p.K), b(p.B * p.K * p.N), c(p.B * p.M * p.N);
  int number = 1;
  for (auto* array : {&a, &b, &c}) {
    for (int& x : *array) x = (number = number * 75 % 65537) % 7 - 3;
  }
  const bool nn = role == MatmulRole::kNN, nt = role == MatmulRole::kNT;
  std::vector<int> want(nn ? c.size() : nt ? a.size() : b.size()), parts(want.size() * splits, -99);
  for (int64_t l = 0; l < p.B; ++l) {
    for (int64_t m = 0; m < p.M; ++m) {
      for (int64_t n = 0; n < p.N; ++n) {
        for (int64_t k = 0; k < p.K; ++k) {
          const int64_t ia = (l * p.M + m) * p.K + k, ib = (l * p.K + k) * p.N + n, ic = (l * p.M + m) * p.N + n;
          nn ? want[ic] += a[ia] * b[ib] : nt ? want[ia] += c[ic] * b[ib] : want[ib] += a[ia] * c[ic];
        }
      }
    }
  }
  const Gemm g = GemmOf(role, p, splits, nt ? b.data() : a.data(), nn ? b.data() : c.data(), parts.data());
  const bool rows_first = role == MatmulRole::kTN, depth_first = role != MatmulRole::kNT;
  for (int64_t l = 0; l < g.l; ++l) {
    for (int64_t row = 0; row < g.m; ++row) {
      for (int64_t column = 0; column < g.n; ++column) {
        int sum = 0;
        for (int64_t k = 0; k < g.k; ++k) {
          const int64_t at_a = l * g.a_batch + (rows_first ? row + k * g.a_leading : row * g.a_leading + k);
          const int64_t at_b = l * g.b_batch + (depth_first ? k * g.b_leading + column : column * g.b_leading + k);
          sum += static_cast<const int*>(g.a)[at_a] * static_cast<const int*>(g.b)[at_b];
        }
        static_cast<int*>(g.d)[(l * g.m + row) * g.n + column] = sum;
      }
    }
  }
  std::vector<int> got(want.size());
  for (size_t i = 0; i < parts.size(); ++i) got[i % want.size()] += parts[i];
  return got == want;
}

}  // namespace
}  // namespace jaxext

int main() {
  using namespace jaxext;
  int wrong = 0;
  for (MatmulRole role : {MatmulRole::kNN, MatmulRole::kNT, MatmulRole::kTN}) {
    wrong += !Right(role, {1, 8, 12, 20}, 1) + !Right(role, {3, 4, 6, 10}, 1) + !Right(role, {1, 8, 12, 20}, 2) +
             !Right(role, {1, 8, 12, 20}, 4);
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
