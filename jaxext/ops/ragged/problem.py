"""A ragged product on one device as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

from jaxext.backends.fields import matmul_problem
from jaxext.backends.kernel import KernelImplementation
from jaxext.kernels.ragged.problem import Problem


class RaggedKernels(KernelImplementation):
    def problem(self, call):
        return matmul_problem(call, Problem, self.arch(call))

    def slower(self, call):  # XLA multiplies the rows by every group's matrix, or block by block in a loop
        return "one group makes a plain matrix product, in which XLA (cuBLAS) is expected to be as fast" if call.sizes["G"] == 1 else None
