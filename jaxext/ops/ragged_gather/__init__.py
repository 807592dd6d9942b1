"""Ragged products of rows that lie elsewhere: the first products of a mixture of experts, without a copy of its rows by expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxext.core import epilogue
from jaxext.lax.dispatch import compiled
from jaxext.ops.fused.form import parameters
from jaxext.ops.ragged.form import masked_rows, ranges
from jaxext.ops.ragged_gather import form

__all__: list[str] = []  # nothing public: `jaxext.moe` is made of it


def ragged_gather_linear(
    x: ArrayLike,
    w: Any,
    group_sizes: ArrayLike,
    row: ArrayLike,
    place: ArrayLike,
    *,
    name: str = "ragged_gather_linear",
    activation: str | None | Callable[[jax.Array], jax.Array] = None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """Return `ragged_linear(dispatched, w, group_sizes, activation=activation)`, dispatched[m] = x[row[m]], or 0 if there is no such row.

    Args:
      x: shape (S, K).
      w: shape (G, K, N), or (G, K, 2, N) for gate and linear part, as in `ragged_gated_linear_unit`.
      group_sizes: shape (G,), integers.
      row: shape (M,), int32.
      place: shape (S, J), int32: the places m of each row of x.  Numbers below 0, or M and more, are of none.
      name: of the public function, for errors and profiles.
      activation: as in `linear`.

    Returns:
      shape (M, N).
    """
    arrays = dict(x=x, w=w, group_sizes=group_sizes, row=row, place=place)
    gated, function = w.ndim == 4, activation if callable(activation) else None
    fused = gated and function is None
    operation = form.gated_linear_unit() if fused else form.linear()
    key = operation, name, None if function else activation
    z = compiled(_product, key, operation.family, implementation, tuple(arrays.values()), dict(precision=precision), name=name)
    return epilogue.applied(name, function, z, {}, functools.partial(masked_rows, jnp.asarray(group_sizes)), gated)


def _product(operation, name, activation, x, w, sizes, row, place, **keywords) -> jax.Array:
    begin, end = ranges(sizes, row.shape[0], w.shape[0])
    operands = dict(x=x, w=w, begin=begin, end=end, row=row, place=place)
    ranks = dict(B=0, P=0, R=0, M=1, K=1, G=1, N=1 if operation.unsharded else w.ndim - 2, T=1, S=1, J=1)
    dims = ((1,), (1,)), ((), ())
    operands, static = parameters(
        operation, name, activation, operands, "xw", dims, ranks, {}, preferred_element_type=None, out_sharding=None, **keywords
    )
    return epilogue.bind(operation, operands, activation, static)
