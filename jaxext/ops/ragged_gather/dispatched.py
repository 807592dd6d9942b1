"""The `xla` implementation of ragged products of gathered rows: rows are copied to their places first, or added up from there afterwards.

The product between is the same without the gather, by the implementation that its family chooses.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.core.call import Call
from jaxext.core.choose import Choice, chosen
from jaxext.core.epilogue import accumulated
from jaxext.core.implementation import Algorithm, Definition
from jaxext.core.labelled import Labelled
from jaxext.ops.ragged import form


def rows_at_places(x: jax.Array, row: jax.Array, axis: int = 0) -> jax.Array:
    """Return x[row] along an axis, and zeros where there is no such row, as for each negative number."""
    if x.shape[axis] == 0:  # jnp gathers nothing from there
        return jnp.zeros((*x.shape[:axis], *row.shape, *x.shape[axis + 1 :]), x.dtype)
    at = (*(slice(None),) * axis, row)
    return x.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sum_over_places(y: jax.Array, place: jax.Array, axis: int = 0) -> jax.Array:
    """The sum over j of y[place[:, j]] along an axis, without the places that do not exist, in float32 for 16 bits."""
    # A sum of gathers is one pass over the result, and a gather of all places one over an array k times as large.
    parts = [rows_at_places(y, at, axis).astype(accumulated(y.dtype)) for at in place.T]
    if not parts:
        return jnp.zeros((*y.shape[:axis], place.shape[0], *y.shape[axis + 1 :]), y.dtype)
    return functools.reduce(operator.add, parts).astype(y.dtype)


class Dispatched(Definition):
    name, version = "xla", "of its call"

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        return (Algorithm("dispatched"),)

    def describe(self, call: Call, config: Algorithm) -> str:
        choice = self._choice(call)
        assert choice.plan is not None
        by = "" if choice.implementation == self.name else f"{choice.implementation} "
        product = f"{by}{choice.plan.describe(choice.config)}"
        return f"{product}, then rows added up" if call.open == "x" else f"rows copied to their places, then {product}"

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> Any:
        flat, inner = call.flatten(operands), plain_call(call)
        if "x" in flat:
            flat["x"] = mapped(rows_at_places, flat["x"], flat["row"])
        results = self._choice(call).compute({name: flat[name] for name in inner.dtypes})
        if call.open == "x":
            return mapped(sum_over_places, results, flat["place"]).reshape(call.shape)
        if call.further:
            return tuple(y.reshape(call.shape_of(name)) for name, y in zip(call.results, results, strict=True))
        return results.reshape(call.shape)

    def _choice(self, call: Call) -> Choice:
        """The implementation of the product without the gather: this one if the user named it."""
        inner = plain_call(call)
        family = form.FAMILY if inner.operation is None else inner.operation.family
        return chosen(inner, family.implementations, self.name if call.parameters.implementation == self.name else None)


def mapped(function: Callable, x: jax.Array, index: jax.Array) -> jax.Array:
    """Apply one of the functions above to rows (B, P, R, rows, columns) and to the indices (B, P, ...) of each b and p."""
    if x.shape[:2] == (1, 1):  # XLA's gathers are faster without indices of b and p
        return function(x[0, 0], index[0, 0], axis=1)[None, None]
    return jax.vmap(jax.vmap(functools.partial(function, axis=1)))(x, index)


def plain_call(call: Call) -> Call:
    """The call whose rows are at their places, with one axis for each label."""
    labelled: Labelled = form.RAGGED
    if call.operation is not None:
        labelled = form.ragged_gated_linear_unit(False) if call.operation.unsharded else form.ragged_linear(False, False)
    shapes = {name: [call.sizes[label] for label in labelled.labels[name]] for name in labelled.operands(call.open)}
    results = (call.open,) if call.operation is None else call.operation.results
    static = call.parameters.replace(
        ranks=labelled.pack({}),
        dtypes=tuple(call.results.get(name, call.dtype) for name in results),  # those of `tune` are wider than the user's
        precision=call.precision,
        out_sharding=None,
    )
    return labelled.call(
        call.open,
        [jax.ShapeDtypeStruct(shape, call.dtypes[name]) for name, shape in shapes.items()],
        static=static,
        wanted=tuple(call.results),
        platform=call.platform,
        arch=call.arch,
        partitioner=call.partitioner,
    )
