"""The `xla` implementation of products of scaled numbers: `lax.dot_general` of wide numbers.

A scale that does not change along the sum multiplies the result, another one its operand.  Both operands become wide first.  Where one is
large that is done part by part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.xla_products import XlaDefinition, convert, product, summed, unfused
from jaxext.core.call import Call, Partitioner, symbolic_size
from jaxext.core.implementation import Algorithm
from jaxext.ops.matmul.form import FAMILY as MATMUL


class XlaScaled(XlaDefinition):
    def candidates(self, call: Call) -> Sequence[Algorithm]:
        """Return the algorithms, by parts first where a factor is large: the cache holds a part in float32, and memory is not written."""
        if symbolic_size(call) or call.partitioner is Partitioner.XLA or _part(call) is None:
            return (Algorithm("whole"),)
        order = ("by parts", "whole") if call.platform == "cpu" else ("whole", "by parts")
        return tuple(map(Algorithm, order))

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        sums, kept = summed(*call.dtypes.values(), call.dtype), {*call.axes[call.open]}
        scales = {slot: f"{slot}_scale" for slot in (*call.factors, call.open) if f"{slot}_scale" in operands}
        after = [name for slot, name in scales.items() if slot == call.open or {*call.axes[name]} <= kept]
        wide = multiplied_dtype(call, before=len(after) < len(scales))
        parts = config.algorithm == "by parts"
        dtype = sums if after or parts else call.dtype

        def scaled(operands):
            factors = {}
            for slot in call.factors:
                x = operands[slot]
                if slot in scales and scales[slot] not in after:
                    x = x.astype(sums) * scale_along(call, scales[slot], operands, slot, sums)
                factors[slot] = x.astype(wide)
            return (_flat if parts else MATMUL.implementations[-1].run)(dataclasses.replace(call, dtype=dtype), config, factors)

        y = _run_parts(call, scaled, operands, dtype) if parts else scaled(operands)
        along = [scale_along(call, name, operands, call.open, sums) for name in after]
        for scale in balanced(*along) if len(along) == 2 else along:
            y = y * scale
        return convert(y, call.dtype)


MOST_AT_ONCE = 1 << 20  # numbers of a factor: 4 MiB in float32


def _part(call: Call) -> tuple[str, int, int] | None:
    """An axis of the larger factor, the elements along it of a part, and its size; None if the factor is no larger than a part.

    It is the outermost axis of which some elements make a part, so that a part lies together in memory.
    """
    largest = max(call.factors, key=lambda slot: _numbers(call, call.axes[slot]))
    axes = call.axes[largest]
    if _numbers(call, axes) <= MOST_AT_ONCE:
        return None
    inside = [_numbers(call, axes[i + 1 :]) for i in range(len(axes))]
    i = next(i for i, numbers in enumerate(inside) if numbers <= MOST_AT_ONCE)
    return axes[i], MOST_AT_ONCE // inside[i], call.extents[axes[i]]


def _numbers(call: Call, axes: Sequence[str]) -> int:
    return math.prod(call.extents[axis] for axis in axes)


def _flat(call: Call, config: Algorithm, factors: Mapping[str, jax.Array]) -> jax.Array:
    """The product with the axes of each two neighbouring labels as one: XLA's CPU backend copies a factor that has more.

    The factors may be parts of those of the call.
    """
    del config
    sizes = {axis: n for slot, x in factors.items() for axis, n in zip(call.axes[slot], x.shape, strict=True)}

    def split(slot):
        batch, *pairs = call.labels[slot]
        kinds = (batch,), pairs[:2], pairs[2:]
        return [[axis for axis in call.axes[slot] if axis.rstrip("0123456789") in kind] for kind in kinds]

    rows, cols = split(call.open)[1:]
    left, right = sorted(factors, key=lambda slot: rows not in split(slot))
    x, w = (factors[slot].reshape([math.prod(sizes[axis] for axis in axes) for axes in split(slot)]) for slot in (left, right))
    contracted = tuple((1 if split(slot)[2] == kept else 2,) for slot, kept in ((left, rows), (right, cols)))
    dims = contracted, ((0,), (0,))
    y = unfused(product(x, w, dims, call.precision, call.dtype), x, w, dims, call.platform)
    return y.reshape([sizes[axis] for axis in call.axes[call.open]])


def _run_parts(call: Call, of, operands: Mapping[str, jax.Array], dtype) -> jax.Array:
    """A product of all operands part by part: the sum of all, or, if the result has the axis, beside each other."""
    found = _part(call)
    assert found is not None
    axis, part, size = found
    at = call.axes[call.open].index(axis) if axis in call.axes[call.open] else None

    def add(y, first, length):
        slices = {
            name: lax.dynamic_slice_in_dim(x, first, length, call.axes[name].index(axis)) if axis in call.axes[name] else x
            for name, x in operands.items()
        }
        of_part = of(slices)
        return y + of_part if at is None else lax.dynamic_update_slice_in_dim(y, of_part, first, at)

    y = lax.fori_loop(0, size // part, lambda i, y: add(y, i * part, part), jnp.zeros(call.shape, dtype))
    return add(y, size - size % part, size % part) if size % part else y


def scale_along(call: Call, name: str, operands: Mapping[str, jax.Array], slot: str, dtype) -> jax.Array:
    """A scale with an axis of size 1 for each axis of a slot that it lacks."""
    missing = [i for i, axis in enumerate(call.axes[slot]) if axis not in call.axes[name]]
    return lax.expand_dims(operands[name].astype(dtype), missing)


def balanced(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two scales for these, of the same product: a number times both leaves the range of the dtype only if the result does.

    Scales on both sides of one are multiplied with each other: their product lies between them.
    """
    opposite = (jnp.abs(one) < 1) != (jnp.abs(other) < 1)
    return jnp.where(opposite, one * other, one), jnp.where(opposite, 1, other)


def multiplied_dtype(call: Call, before: bool) -> jnp.dtype:
    """The dtype in which factors are multiplied.

    On GPUs they have 16 bits if that holds their numbers.  Those that are scaled `before` are rounded to bfloat16 then, if the result has
    16 bits.
    """
    dtypes = [call.dtypes[slot] for slot in call.factors]
    wide = [dtype for dtype in dtypes if dtype.itemsize > 1]
    rounds = before and (call.dtype.itemsize > 2 or jnp.float16 in wide)
    if call.platform == "cpu" or rounds or len({*wide}) > 1 or any(dtype.itemsize > 2 for dtype in wide):
        return summed(*call.dtypes.values(), call.dtype)
    return jnp.dtype(wide[0] if wide else jnp.bfloat16)
