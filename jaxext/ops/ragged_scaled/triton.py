"""The Triton kernels of ragged products of scaled numbers."""

from __future__ import annotations

from jaxext.kernels import ragged_scaled
from jaxext.ops.ragged.triton import with_visits
from jaxext.ops.ragged_scaled.problem import RaggedScaledKernels
from jaxext.ops.scaled.triton import TritonScaled


class TritonRaggedScaled(RaggedScaledKernels, TritonScaled):
    module = ragged_scaled

    def launch(self, call, problem, config):
        return with_visits(super().launch(call, problem, config), problem.M, config.tile_m)
