"""The Newton-Schulz iteration of Muon, made of `gram` and of products with a residual.

    A = x xᵀ        B = b A + c A Aᵀ        x ← a x + B x

It moves the singular values of x towards 1 and keeps its singular vectors.  A and B are symmetric, so two of the three products are `gram`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext._messages import format_value
from jaxext.core import epilogue, partition
from jaxext.core.epilogue import accumulated
from jaxext.core.static import Static
from jaxext.lax.dispatch import compiled
from jaxext.ops.fused import form as fused
from jaxext.ops.gram import form as gram

MUON = (3.4445, -4.7750, 2.0315)

Triple = tuple[float, ...]  # three


def newton_schulz(name: str, x: Any, steps: Any, coefficients: Any, *, eps: Any, implementation: str | None, **static) -> jax.Array:
    """Return the result of the public operation."""
    x = gram.matrices(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: x is {x.dtype}, want floating-point numbers")
    if not isinstance(steps, int | np.integer) or isinstance(steps, bool):
        raise TypeError(f"{name}: steps is {format_value(steps)}, want an int")
    if steps < 0:
        raise ValueError(f"{name}: steps is {steps}, want 0 or more")
    if not _is_number(eps):
        raise TypeError(f"{name}: eps is {format_value(eps)}, want a number")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name}: eps is {eps}, want a finite number of at least 0")
    key = (name, _triples(name, int(steps), coefficients), float(eps))
    return compiled(_iterated, key, gram.FAMILY, implementation, (x,), static, name=name)


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _triples(name: str, steps: int, coefficients: Any) -> tuple[Triple, ...]:
    """The coefficients of each step."""

    def triple(given: Any) -> bool:
        return isinstance(given, Sequence) and len(given) == 3 and all(map(_is_number, given))

    if triple(coefficients):
        return (tuple(map(float, coefficients)),) * steps
    wanted = f"want three numbers, or three for each of the {steps} steps"
    if not isinstance(coefficients, Sequence) or not all(map(triple, coefficients)):
        raise TypeError(f"{name}: coefficients is {format_value(coefficients)}, {wanted}")
    if len(coefficients) != steps:
        raise ValueError(f"{name}: coefficients has {len(coefficients)} triples, {wanted}")
    return tuple(tuple(map(float, each)) for each in coefficients)


def _iterated(name: str, coefficients: Sequence[Triple], eps: float, x: jax.Array, *, precision, implementation) -> jax.Array:
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    x = _normalised(x, eps)
    said = gram.gram_params(x, precision, None)
    for of_step in coefficients:
        x = _step(x, *of_step, implementation=implementation, **said)
    return jnp.swapaxes(x, -1, -2) if tall else x


def _normalised(x: jax.Array, eps: float) -> jax.Array:
    """Return x with the Frobenius norm 1, or 0."""
    wide = x.astype(accumulated(x.dtype))
    squares = jnp.square(wide).sum((-2, -1), keepdims=True)
    some = squares > 0
    norm = jnp.where(some, jnp.sqrt(jnp.where(some, squares, 1)), 0)  # whose derivative is finite at 0
    return (wide / (norm + eps)).astype(x.dtype)


def _step(x: jax.Array, a: float, b: float, c: float, **params: Any) -> jax.Array:
    """a x + b (x xᵀ) x + c (x xᵀ)² x.  `params`: fields of `Static`."""
    sharding = partition.explicit(jax.typeof(x))
    of_square = None
    if sharding is not None:
        *batch, rows, _ = tuple(sharding.spec)
        of_square = NamedSharding(sharding.mesh, P(*batch, rows, None))
    square = gram.bound(x, None, gram.Options(), out_sharding=of_square, **params)
    polynomial = gram.bound(square, square, gram.Options(sum=True, scale=c, of_addend=b), out_sharding=of_square, **params)
    linear = fused.linear(bias=False, residual=True)
    static = Static(ranks=linear.pack({"B": x.ndim - 2}), out_sharding=sharding, **params)
    return epilogue.bind(linear, {"a": polynomial, "b": x, "residual": a * x}, None, static)
