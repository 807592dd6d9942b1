"""The Triton kernel of half of a product with its own transpose."""

from __future__ import annotations

from jaxext.backends import preference
from jaxext.backends.problems import gram_problem
from jaxext.backends.triton.triton_binding import INTERPRETED_CAPABILITY, TritonKernels
from jaxext.kernels import gram


class TritonGram(TritonKernels):
    def problem(self, call):
        return gram_problem(call, self.kernels(None).Problem, call.arch or INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        return gram

    def slower(self, call):
        return preference.of_half(self.kernels(None).share(self.problem(call)))
