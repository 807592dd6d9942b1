"""Ragged products of all rows at once: each times all filters, or times a filter of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.core.call import Call
from jaxext.ops.matmul.xla import product


def factors(call: Call, flat):
    """The factor of rows, the filters, and the axis of the filters along which the sum runs."""
    return (flat["x"], flat["w"], 2) if call.open == "y" else (flat["y"], flat["w"], 3)


def wide_dtype(dtype):
    """The dtype of sums of sums."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def selected(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x where the mask, which is broadcast, is set, and zero elsewhere, also in place of NaN."""
    mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
    return jnp.where(jnp.broadcast_to(mask, x.shape), x, jnp.zeros((), x.dtype))


def _inside(call: Call, flat) -> jax.Array:
    """Return which rows each group has: (B, P, 1, M, G)."""
    begin, end = (flat[name][:, :, None, None, :] for name in ("begin", "end"))
    row = lax.broadcasted_iota(jnp.int32, (1, 1, 1, call.sizes["M"], 1), 3)
    return (begin <= row) & (row < end)


def gathered(call: Call, flat) -> jax.Array:
    """The filter of each row, a row itself, times the number of the row."""
    inside = _inside(call, flat)[:, :, 0]  # (B, P, M, G)
    a, w, summed = factors(call, flat)
    of_row = jax.vmap(lambda filters, group: filters[group])(lax.squeeze(w, [summed]), inside.argmax(-1))  # (B, P, M, N)
    wide = wide_dtype(call.dtype)
    y = (a.astype(wide) * of_row[:, :, None].astype(wide)).astype(call.dtype)
    return selected(inside.any(-1)[:, :, None, :, None], y)


def dense(call: Call, flat) -> jax.Array:
    """All rows times each filter, of which those of the group are selected; or the rows of each group, and zero for the others."""
    inside = _inside(call, flat)  # (B, P, 1, M, G)
    if call.open == "w":
        of_group = jnp.moveaxis(inside, 4, 1)[..., None]  # (B, G, P, 1, M, 1)
        x, y = (selected(of_group, jnp.broadcast_to(x[:, None], (*of_group.shape[:2], *x.shape[1:]))) for x in (flat["x"], flat["y"]))
        return product(x, y, (((2, 3, 4), (2, 3, 4)), ((0, 1), (0, 1))), call.precision, call.dtype)
    a, w, summed = factors(call, flat)
    y = product(a, w, (((4,), (summed,)), ((0,), (0,))), call.precision, call.dtype)  # (B, P, R, M, G, N)
    return selected(inside[..., None], y).sum(4, dtype=y.dtype)


def expanded(call: Call, flat) -> jax.Array:
    """The rows of each group with zeros for the others times all filters, in one sum.  Sizes may be symbolic."""
    if call.open == "w":
        return dense(call, flat)
    inside = _inside(call, flat)
    a, w, summed = factors(call, flat)
    of_groups = selected(inside[..., None], jnp.broadcast_to(a[..., None, :], (*a.shape[:4], call.sizes["G"], a.shape[4])))
    y = product(of_groups, w, (((4, 5), (1, summed)), ((0,), (0,))), call.precision, call.dtype)
    return selected(inside.any(-1, keepdims=True), y)
