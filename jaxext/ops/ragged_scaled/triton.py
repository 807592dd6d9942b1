"""The Triton kernels of ragged products of scaled numbers."""

from __future__ import annotations

from jaxext.kernels import ragged_scaled
from jaxext.ops.ragged_scaled.problem import RaggedScaledKernels
from jaxext.ops.scaled.triton import TritonScaled


class TritonRaggedScaled(RaggedScaledKernels, TritonScaled):
    module = ragged_scaled
