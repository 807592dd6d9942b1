"""The Triton kernels of matrix products."""

from __future__ import annotations

from jaxext.backends.fields import matmul_problem
from jaxext.backends.triton.triton_binding import INTERPRETED_CAPABILITY, TritonKernels
from jaxext.kernels import matmul


class TritonMatmul(TritonKernels):
    def problem(self, call):
        return matmul_problem(call, self.kernels(None).Problem, call.arch or INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        return matmul

    def slower(self, call):
        return "XLA's matrix products (cuBLAS) are expected to be as fast"
