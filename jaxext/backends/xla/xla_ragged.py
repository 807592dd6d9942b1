"""The `xla` implementation of ragged products: a loop over blocks of rows, each times the filter of its group.

A group of s rows is ⌈s / T⌉ *visits* of T rows each.  The last one also meets rows of other groups, whose results are not kept.  A visit
slices its rows and its filter out of the arrays, so nothing is expanded to all groups, and at most M / T + G visits are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext import _compat
from jaxext.backends.xla.xla_matmul import product
from jaxext.forms.call import Call, symbolic_size
from jaxext.forms.implementation import Implementation, folder_of, hash_of


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a ragged product is computed: by "blocks" of so many rows, "dense", which is all rows times each filter, or as one "group"."""

    algorithm: str
    rows: int = 0


class XlaRagged(Implementation):
    """The definition of ragged products.  It supports every call."""

    name = "xla"
    version = "of its files"

    def code(self, platform: str) -> str:
        return hash_of(folder_of(type(self)))

    def supports(self, call: Call) -> str | None:
        return None

    def gains(self, call: Call) -> str | None:
        return None

    def candidates(self, call: Call) -> Sequence[Ways]:
        if symbolic_size(call) or call.splitter is _compat.Splitter.XLA:
            return (Ways("dense"),)
        return (Ways("blocks", min(call.sizes["M"], 128)),)

    def run(self, call: Call, config: Ways, operands: Mapping[str, jax.Array]) -> jax.Array:
        if call.empty:
            return jnp.zeros(call.shape, call.dtype)
        compute = {"blocks": _sum if call.open == "w" else _rows, "dense": _dense}[config.algorithm]
        return compute(call, call.flatten(operands), config.rows).reshape(call.shape)


# --- blocks


@dataclasses.dataclass(frozen=True)
class _Visits:
    """All visits, ordered by B, P and G as in `sizes`: arrays with an element for each.  `upto`: the number up to the end of each group."""

    sizes: Mapping[str, int]
    group: jax.Array
    first: jax.Array
    last: jax.Array
    upto: jax.Array

    @classmethod
    def of(cls, call: Call, flat: Mapping[str, jax.Array], rows: int, axes: str) -> _Visits:
        begin, end = (jnp.transpose(flat[name], ["BPG".index(axis) for axis in axes]).reshape(-1) for name in ("begin", "end"))
        each = (end - begin + (rows - 1)) // rows
        upto = jnp.cumsum(each, dtype=jnp.int32)
        sizes = {axis: call.sizes[axis] for axis in axes}
        visit = jnp.arange(sizes["B"] * sizes["P"] * (call.sizes["M"] // rows + sizes["G"]), dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(upto, visit, side="right").astype(jnp.int32), upto.size - 1)
        first = begin[group] + (visit - (upto - each)[group]) * rows
        last = jnp.where(visit < upto[-1], jnp.minimum(first + rows, end[group]), first)
        return cls(sizes, group, first, last, upto)

    def number(self, call: Call):
        """How many are made: on a CPU as many as there are, elsewhere as many as there can be, since the host knows that."""
        return self.upto[-1] if call.platform == "cpu" else jnp.int32(self.group.size)

    def at(self, v) -> dict[str, jax.Array]:
        """The index along each axis."""
        found, i = {}, self.group[v]
        for axis, size in reversed(self.sizes.items()):
            found[axis], i = i % size, i // size
        return found

    def block(self, v, rows: int, of: int) -> tuple[jax.Array, jax.Array]:
        """The first of `rows` of all rows that holds those of a visit, and which of them count (rows, 1)."""
        start = jnp.minimum(self.first[v], of - rows)
        row = start + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        return start, (row >= self.first[v]) & (row < self.last[v])


def _block(x: jax.Array, at: Mapping[str, jax.Array], start, rows: int) -> jax.Array:
    """Rows of x (B, P, R, M, K) from `start` on: (R, rows, K)."""
    zero = jnp.int32(0)
    return lax.dynamic_slice(x, (at["B"], at["P"], zero, start, zero), (1, 1, x.shape[2], rows, x.shape[4]))[0, 0]


def _loop(visits, body, initial: jax.Array, like: jax.Array, begin=0):
    """`fori_loop` whose result varies over as many mesh axes as `like`."""
    initial, _ = _compat.align_varying(initial, like)
    return lax.fori_loop(jnp.int32(begin), visits, body, initial)


def _rows(call: Call, flat, rows: int) -> jax.Array:
    a, summed = (flat["x"], 2) if call.open == "y" else (flat["y"], 3)
    w = flat["w"]
    visits, zero = _Visits.of(call, flat, rows, "BPG"), jnp.int32(0)

    def visit(v, y):
        at, (start, kept) = visits.at(v), visits.block(v, rows, a.shape[3])
        of_group = lax.dynamic_slice(w, (at["B"], at["G"], zero, zero), (1, 1, *w.shape[2:]))[0, 0]
        new = product(_block(a, at, start, rows), of_group, (((2,), (summed - 2,)), ((), ())), call.precision, call.dtype)
        new = jnp.where(jnp.broadcast_to(kept, new.shape), new, _block(y, at, start, rows))
        return lax.dynamic_update_slice(y, new[None, None], (at["B"], at["P"], zero, start, zero))

    return _loop(visits.number(call), visit, jnp.zeros((*a.shape[:4], w.shape[5 - summed]), call.dtype), a)


def _sum(call: Call, flat, rows: int) -> jax.Array:
    x, y = flat["x"], flat["y"]
    visits = _Visits.of(call, flat, rows, "BGP")
    wide = jnp.dtype(jnp.float32) if jnp.issubdtype(call.dtype, jnp.floating) and call.dtype.itemsize < 4 else call.dtype
    upto = visits.upto.reshape(-1, call.sizes["P"])[:, -1]

    def of_group(i, w):
        def visit(v, total):
            at, (start, kept) = visits.at(v), visits.block(v, rows, x.shape[3])
            left, right = (_selected(kept, _block(of, at, start, rows)) for of in (x, y))
            return total + product(left, right, (((0, 1), (0, 1)), ((), ())), call.precision, wide)

        total = _loop(upto[i], visit, jnp.zeros(w.shape[1:], wide), x, jnp.where(i == 0, 0, upto[i - 1]))
        return lax.dynamic_update_index_in_dim(w, total.astype(w.dtype), i, 0)

    groups = call.sizes["B"] * call.sizes["G"]
    return _loop(jnp.int32(groups), of_group, jnp.zeros((groups, x.shape[4], y.shape[4]), call.dtype), x)


def _selected(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x where the mask, which is broadcast, is set, and zero elsewhere, also in place of NaN."""
    mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
    return jnp.where(jnp.broadcast_to(mask, x.shape), x, jnp.zeros((), x.dtype))


# --- dense


def _dense(call: Call, flat, rows: int) -> jax.Array:
    """All rows times each filter.  XLA's partitioner splits this well, and would gather what a loop slices; and sizes may be symbolic."""
    del rows
    begin, end = (flat[name][:, :, None, None, :] for name in ("begin", "end"))
    row = lax.broadcasted_iota(jnp.int32, (1, 1, 1, call.sizes["M"], 1), 3)
    inside = (begin <= row) & (row < end)  # (B, P, 1, M, G)
    any_group = inside.any(-1, keepdims=True)
    if call.open == "w":
        x = _selected(
            inside[..., None], jnp.broadcast_to(flat["x"][..., None, :], (*flat["x"].shape[:4], call.sizes["G"], flat["x"].shape[4]))
        )
        return product(x, _selected(any_group, flat["y"]), (((1, 2, 3), (1, 2, 3)), ((0,), (0,))), call.precision, call.dtype)
    a, summed = (flat["x"], 2) if call.open == "y" else (flat["y"], 3)
    a = _selected(inside[..., None], jnp.broadcast_to(a[..., None, :], (*a.shape[:4], call.sizes["G"], a.shape[4])))
    y = product(a, flat["w"], (((4, 5), (1, summed)), ((0,), (0,))), call.precision, call.dtype)
    return _selected(any_group, y)
