"""The Triton kernels of convolutions, dense and depthwise."""

from __future__ import annotations

from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.kernels import conv, depthwise
from jaxext.ops.conv.problem import ConvKernels


class TritonConv(ConvKernels, TritonKernels):
    def kernels(self, problem):
        # A single input channel per group has no matmul to use.  `conv` is the fallback for problems that `depthwise` refuses.
        alone = problem.C == 1 and problem.G > 1 and depthwise.refuses(problem) is None
        return depthwise if alone else conv

    def multiplied(self, problem):
        return "ieee" if self.kernels(problem).__name__.endswith("depthwise") else super().multiplied(problem)
