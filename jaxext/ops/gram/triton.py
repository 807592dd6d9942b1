"""The Triton kernel of half of a product with its own transpose."""

from __future__ import annotations

from jaxext.backends.triton.triton_binding import INTERPRETED_CAPABILITY, TritonKernels
from jaxext.kernels import gram
from jaxext.ops.gram.problem import gram_problem, slower


class TritonGram(TritonKernels):
    def problem(self, call):
        return gram_problem(call, self.kernels(None).Problem, call.arch or INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        return gram

    def slower(self, call):
        return slower(self.kernels(None).share(self.problem(call)))
