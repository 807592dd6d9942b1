"""The Triton kernel of half of a product with its own transpose."""

from __future__ import annotations

from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.kernels import gram
from jaxext.ops.gram.problem import GramKernels, slower


class TritonGram(GramKernels, TritonKernels):
    module = gram

    def slower(self, call):
        return slower(self.module.share(self.problem(call)))
