"""The Triton kernels of ragged products of gathered rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxext.backends.kernel import KernelCall
from jaxext.ops.ragged.triton import TritonRagged
from jaxext.ops.ragged_gather.dispatched import mapped, sum_over_places


class TritonRaggedGather(TritonRagged):
    """The kernel with x open is that of ragged products, whose rows are added up afterwards."""

    def problem(self, call):
        problem = super().problem(call)
        if isinstance(problem, str) or problem.role != "nt":
            return problem
        return dataclasses.replace(problem, name="ragged_nt", S=None)

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)
        if problem.role != "nt":
            return plain
        return dataclasses.replace(plain, slots=(*plain.slots, "place"), call=functools.partial(_added_up, plain, problem.M))


def _added_up(plain: KernelCall, places: int, result: Any, *operands: jax.Array) -> jax.Array:
    *given, place = operands
    B, P, R, _, K = result.shape
    return mapped(sum_over_places, plain.call(jax.ShapeDtypeStruct((B, P, R, places, K), result.dtype), *given), place)
