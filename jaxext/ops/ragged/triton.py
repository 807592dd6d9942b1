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
        return "ragged_chunked" if config.chunk else "ragged_found" if config.finds_visit else "ragged"

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)
        if "visits" not in plain.slots:
            return plain
        with_visits = functools.partial(_call_with_visits, plain, problem.M, config.tile_m)
        return dataclasses.replace(plain, slots=(*plain.slots[:-1], "begin", "end"), call=with_visits)


def _call_with_visits(plain: KernelCall, rows: int, tile: int, result: Any, *operands: jax.Array) -> Any:
    *given, begin, end = operands
    return plain.call(result, *given, visits(jnp, begin, end, rows, tile))
