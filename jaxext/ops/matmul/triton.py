"""The Triton kernels of matrix products."""

from __future__ import annotations

from jaxext.backends.fields import matmul_problem
from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.kernels import matmul


class TritonMatmul(TritonKernels):
    module = matmul

    def problem(self, call):
        return matmul_problem(call, matmul.Problem, self.arch(call))

    def slower(self, call):
        return "XLA's matmuls (cuBLAS) are expected to be as fast"
