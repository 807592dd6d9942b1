"""The `xla` implementation of `gram`: on CPUs half of the product by blocks, elsewhere `lax.dot_general`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext._compat import Partitioner
from jaxext.backends.xla_products import XlaDefinition, product
from jaxext.core.call import Call, symbolic_size
from jaxext.core.composition import composed
from jaxext.core.form import dimension_numbers
from jaxext.core.implementation import Algorithm

DOT = Algorithm("dot_general")
HALVES = Algorithm("halves")
MOST_PARTS = 4  # of the rows: more save few products, and take longer to compile


class XlaGram(XlaDefinition):
    def candidates(self, call: Call) -> Sequence[Algorithm]:
        if call.platform != "cpu" or symbolic_size(call) or not call.partitioner.by_labels or call.sizes["M"] < 2:
            return (DOT,)
        return (HALVES, DOT) if _gains(call) else (DOT, HALVES)

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        if call.static.sum:
            return composed(call, operands, self.name)
        numbers = dimension_numbers(*(call.axes[slot] for slot in "cba"))

        def dot(left: jax.Array, right: jax.Array) -> jax.Array:
            return product(left, right, numbers, call.precision, call.dtype)

        def alone(x: jax.Array) -> jax.Array:
            y = dot(x, x)
            return y if call.partitioner is Partitioner.XLA else symmetric(y)  # it would send the transpose between devices

        x = operands["c"]
        return alone(x) if config == DOT else _halves(dot, alone, x, max(1, -(-x.shape[-2] // MOST_PARTS)))


def _gains(call: Call) -> bool:
    """Return whether the products that are saved take longer than putting the blocks together, and these are large enough for XLA."""
    return call.sizes["M"] >= 768 and call.sizes["N"] >= 512


def _halves(dot: Callable, alone: Callable, x: jax.Array, leaf: int) -> jax.Array:
    """Multiply the rows of each half with themselves, and those of one half with the other; until no more than `leaf` rows are left."""
    rows = x.shape[-2]
    if rows <= leaf:
        return alone(x)
    first, second = jnp.split(x, [rows // 2], -2)
    below = dot(second, first)
    upper = lax.concatenate([_halves(dot, alone, first, leaf), jnp.swapaxes(below, -1, -2)], x.ndim - 1)
    lower = lax.concatenate([below, _halves(dot, alone, second, leaf)], x.ndim - 1)
    return lax.concatenate([upper, lower], x.ndim - 2)


def symmetric(y: jax.Array) -> jax.Array:
    """The mean of a matrix and its transpose, which are equal but for rounding.  Others are left as they are."""
    return y * 0.5 + jnp.swapaxes(y, -1, -2) * 0.5 if jnp.issubdtype(y.dtype, jnp.floating) else y
