"""Rows that go to places and come back: two linear maps, each the transpose of the other.  Both are gathers.

    dispatch   y[m] = x[row[m]]              0 if there is no such row
    combine    x[t] = Σ_j y[place[t, j]]     without the j whose place does not exist

`place` lists the places of each row, and `row` the row of each place: row[m] = t if place[t, j] = m, and is no row if no entry is m.
lax's own transpose of a gather is a scatter, which adds in 16 bits if the rows have 16, and on GPUs in no fixed order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxext._compat import align_varying, product_primitive
from jaxext.ops.ragged_gather.dispatched import rows_at_places, sum_over_places


def dispatch(x: jax.Array, row: jax.Array, place: jax.Array) -> jax.Array:
    """Rows (T, ...) at their places (M, ...); `row` has the shape (M,), and `place` (T, k)."""
    return dispatch_p.bind(*align_varying(x, row, place), batch=0, axis=0)


def combine(y: jax.Array, row: jax.Array, place: jax.Array) -> jax.Array:
    """The sum over the places (M, ...) of each row (T, ...), in float32 for 16 bits."""
    return combine_p.bind(*align_varying(y, row, place), batch=0, axis=0)


# `batch`: how many leading axes all operands have; `axis`: which one of the first operand has the rows or the places.


def _dispatch(x, row, place, *, batch, axis):
    if batch:
        return jax.vmap(functools.partial(_dispatch, batch=batch - 1, axis=axis - 1))(x, row, place)
    return rows_at_places(x, row, axis)


def _combine(y, row, place, *, batch, axis):
    if batch:
        return jax.vmap(functools.partial(_combine, batch=batch - 1, axis=axis - 1))(y, row, place)
    return sum_over_places(y, place, axis)


def _shape(size_at: int, x, *at, batch, axis):
    """The shape of the first operand with as many rows as there are places, or the other way round."""
    return (*x.shape[:axis], at[size_at].shape[batch], *x.shape[axis + 1 :])


def _define(name: str, fun, size_at: int) -> Primitive:
    primitive = product_primitive(name, functools.partial(_shape, size_at), lambda x, *_, **__: x.dtype, None)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    ad.defjvp(primitive, functools.partial(_tangent, primitive), None, None)
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    return primitive


def _tangent(primitive, dot, x, row, place, **params):
    return primitive.bind(dot, row, place, **params)


def _transpose(other: Primitive, ct, x, row, place, **params):
    return ad.Zero(x.aval) if isinstance(ct, ad.Zero) else other.bind(ct, row, place, **params), None, None


def _batched(primitive, args, dims, *, batch, axis):
    x, *at = args
    if dims[1] is dims[2] is None:  # the places are those of all
        return primitive.bind(jnp.moveaxis(x, dims[0], batch), *at, batch=batch, axis=axis + 1), batch
    (size,) = {of.shape[dim] for of, dim in zip(args, dims, strict=True) if dim is not None}
    args = [batching.bdim_at_front(of, dim, size) for of, dim in zip(args, dims, strict=True)]
    return primitive.bind(*args, batch=batch + 1, axis=axis + 1), 0


dispatch_p, combine_p = _define("dispatch_rows", _dispatch, 0), _define("combine_rows", _combine, 1)
ad.primitive_transposes[dispatch_p] = functools.partial(_transpose, combine_p)
ad.primitive_transposes[combine_p] = functools.partial(_transpose, dispatch_p)
