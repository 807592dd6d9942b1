"""The Triton kernels of ragged products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends.kernel import KernelCall
from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.kernels import ragged
from jaxext.kernels.ragged.problem import visits
from jaxext.ops.ragged.problem import RaggedKernels


class TritonRagged(RaggedKernels, TritonKernels):
    module = ragged

    def family(self, problem, config):
        return "ragged_chunked" if config.chunk else super().family(problem, config)

    def launch(self, call, problem, config):
        return with_visits(super().launch(call, problem, config), problem.M, config.tile_m)


def with_visits(plain: KernelCall, rows: int, tile: int) -> KernelCall:
    """A call with the ranges of groups in place of the visits of tiles of rows, if the kernel takes these, as its last operands."""
    if "visits" not in plain.slots:
        return plain
    return dataclasses.replace(
        plain, slots=(*plain.slots[:-1], "begin", "end"), call=functools.partial(_call_with_visits, plain, rows, tile)
    )


def _call_with_visits(plain: KernelCall, rows: int, tile: int, result: Any, *operands: jax.Array) -> Any:
    *given, begin, end = operands
    return plain.call(result, *given, visits(jnp, begin, end, rows, tile))
