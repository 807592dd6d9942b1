"""Ragged products by loops over blocks of rows, each times the filter of its group.

A loop slices a block of rows and the filter of its group out of the arrays, so nothing is expanded to all groups.  On a CPU it runs over
the groups that have rows, then over the blocks of each: large ones that the group fills, then small ones, whose last also meets rows of
other groups.  Elsewhere the host must know how often a loop runs, or waits for the device each time.  There the blocks of all groups are
listed, and it runs as often as there can be blocks: M / T + G times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxext import _compat
from jaxext.core.call import Call
from jaxext.ops.matmul.xla import product
from jaxext.ops.ragged.xla_at_once import factors, selected, wide_dtype


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The blocks of all groups, ordered by B, P and G as in `sizes`: the group, the first row and the one after the last of each."""

    sizes: Mapping[str, int]
    group: jax.Array
    first: jax.Array
    last: jax.Array

    @classmethod
    def of(cls, call: Call, flat: Mapping[str, jax.Array], rows: int, axes: str) -> _Blocks:
        begin, end = (jnp.transpose(flat[name], ["BPG".index(axis) for axis in axes]).reshape(-1) for name in ("begin", "end"))
        each = (end - begin + (rows - 1)) // rows
        upto = jnp.cumsum(each, dtype=jnp.int32)
        sizes = {axis: call.sizes[axis] for axis in axes}
        visit = jnp.arange(sizes["B"] * sizes["P"] * (call.sizes["M"] // rows + sizes["G"]), dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(upto, visit, side="right").astype(jnp.int32), upto.size - 1)
        first = begin[group] + (visit - (upto - each)[group]) * rows
        last = jnp.where(visit < upto[-1], jnp.minimum(first + rows, end[group]), first)
        return cls(sizes, group, first, last)

    @property
    def number(self) -> jax.Array:
        """The number of blocks: as many as there can be.  Those that are not needed change nothing."""
        return jnp.int32(self.group.size)

    def at(self, v) -> dict[str, jax.Array]:
        """The index along each axis."""
        found, i = {}, self.group[v]
        for axis, size in reversed(list(self.sizes.items())):
            found[axis], i = i % size, i // size
        return found


def _block(x: jax.Array, at: Mapping[str, jax.Array], start, rows: int) -> jax.Array:
    """Rows of x (B, P, R, M, K) from `start` on: (R, rows, K)."""
    zero = jnp.int32(0)
    return _sliced(lax.dynamic_slice(x, (at["B"], at["P"], zero, start, zero), (1, 1, x.shape[2], rows, x.shape[4]))[0, 0])


def _sliced(x: jax.Array) -> jax.Array:
    """A slice that stays one: on CPUs XLA multiplies 16-bit numbers as float32, and would convert the whole array before the loop."""
    return lax.optimization_barrier(x) if x.dtype.itemsize == 2 else x


def _loop(number, body, initial, like: jax.Array):
    """`fori_loop` whose results vary over as many mesh axes as `like`."""
    initial = jax.tree.map(lambda x: _compat.align_varying(x, like)[0], initial)
    return lax.fori_loop(jnp.int32(0), number, body, initial)


def _filter(w: jax.Array, at: Mapping[str, jax.Array]) -> jax.Array:
    zero = jnp.int32(0)
    return _sliced(lax.dynamic_slice(w, (at["B"], at["G"], zero, zero), (1, 1, *w.shape[2:]))[0, 0])


def _put(y: jax.Array, new: jax.Array, at: Mapping[str, jax.Array], start) -> jax.Array:
    return lax.dynamic_update_slice(y, new[None, None], (at["B"], at["P"], jnp.int32(0), start, jnp.int32(0)))


def listed_rows(call: Call, flat, rows: int) -> jax.Array:
    """Rows times filters, by one loop over the blocks of all groups."""
    a, w, summed = factors(call, flat)
    blocks = _Blocks.of(call, flat, rows, "BPG")

    def one(v, y):
        at, (start, kept) = blocks.at(v), _clamped(blocks.first[v], blocks.last[v], rows, a.shape[3])
        new = _times(call, _block(a, at, start, rows), _filter(w, at), summed)
        return _put(y, jnp.where(jnp.broadcast_to(kept, new.shape), new, _block(y, at, start, rows)), at, start)

    return _loop(blocks.number, one, jnp.zeros((*a.shape[:4], w.shape[5 - summed]), call.dtype), a)


def _times(call: Call, rows: jax.Array, of_group: jax.Array, summed: int) -> jax.Array:
    return product(rows, of_group, (((2,), (summed - 2,)), ((), ())), call.precision, call.dtype)


def listed_sum(call: Call, flat, rows: int) -> jax.Array:
    """The gradients of filters, by one loop over the blocks of all groups."""
    x, y = flat["x"], flat["y"]
    blocks = _Blocks.of(call, flat, rows, "BGP")
    wide = wide_dtype(call.dtype)

    def one(v, both):
        w, total = both
        at, (start, kept) = blocks.at(v), _clamped(blocks.first[v], blocks.last[v], rows, x.shape[3])
        new = _total(call, [selected(kept, _block(of, at, start, rows)) for of in (x, y)], wide)
        into = at["B"] * call.sizes["G"] + at["G"]
        same = (v > 0) & (into == blocks.group[jnp.maximum(v - 1, 0)] // call.sizes["P"])
        total = jnp.where(same, total, 0) + new
        return lax.dynamic_update_index_in_dim(w, total.astype(call.dtype), into, 0), total

    shape = x.shape[4], y.shape[4]
    w = jnp.zeros((call.sizes["B"] * call.sizes["G"], *shape), call.dtype)
    return _loop(blocks.number, one, (w, jnp.zeros(shape, wide)), x)[0]


def _total(call: Call, both: Iterable[jax.Array], dtype) -> jax.Array:
    x, y = both
    return product(x, y, (((0, 1), (0, 1)), ((), ())), call.precision, dtype)


def _groups(call: Call, flat, axes: str):
    """The groups that have rows, in the order of `axes`: how many there are, and `group(i)`: its indices, first row and end."""
    begin, end = (jnp.transpose(flat[name], ["BPG".index(axis) for axis in axes]).reshape(-1) for name in ("begin", "end"))
    most = min(begin.size, call.sizes["B"] * call.sizes["P"] * call.sizes["M"])
    (having,) = jnp.nonzero(end > begin, size=most, fill_value=0)
    having = having.astype(jnp.int32)

    def group(i):
        at, q = {}, having[i]
        for axis in reversed(axes):
            at[axis], q = q % call.sizes[axis], q // call.sizes[axis]
        return at, begin[having[i]], end[having[i]]

    return jnp.sum(end > begin, dtype=jnp.int32), group


def rows_by_group(call: Call, flat, rows: int, more: int) -> jax.Array:
    """Rows times filters, by a loop over the groups and one over the blocks of each."""
    a, filters, summed = factors(call, flat)
    number, group = _groups(call, flat, "BPG")

    def one(i, y):
        at, begin, end = group(i)
        w = _filter(filters, at)

        def filled(v, y):
            start = begin + v * more
            return _put(y, _times(call, _block(a, at, start, more), w, summed), at, start)

        def rest(v, y):
            start, kept = _clamped(begin + v * rows, end, rows, a.shape[3])
            new = _times(call, _block(a, at, start, rows), w, summed)
            return _put(y, jnp.where(jnp.broadcast_to(kept, new.shape), new, _block(y, at, start, rows)), at, start)

        if more:
            y, begin = _loop((end - begin) // more, filled, y, a), begin + (end - begin) // more * more
        return _loop((end - begin + (rows - 1)) // rows, rest, y, a)

    return _loop(number, one, jnp.zeros((*a.shape[:4], filters.shape[5 - summed]), call.dtype), a)


def _clamped(start, end, rows: int, of: int) -> tuple[jax.Array, jax.Array]:
    """The first of `rows` of all rows that hold those from `start` on, and which of them are these, and before `end` (rows, 1)."""
    first = jnp.minimum(start, of - rows)
    row = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return first, (row >= start) & (row < end)


def sum_by_group(call: Call, flat, rows: int, more: int) -> jax.Array:
    """The gradients of filters, by a loop over the groups and one over the blocks of each."""
    x, y = flat["x"], flat["y"]
    number, group = _groups(call, flat, "BGP")
    wide = wide_dtype(call.dtype)

    def one(i, both):
        w, total = both
        at, begin, end = group(i)
        into = at["B"] * call.sizes["G"] + at["G"]
        middle = begin + (end - begin) % more if more else end  # from here on it is filled

        def filled(v, total):
            return total + _total(call, [_block(of, at, middle + v * more, more) for of in (x, y)], wide)

        def rest(v, total=None):
            start, kept = _clamped(begin + v * rows, middle, rows, x.shape[3])
            new = _total(call, [selected(kept, _block(of, at, start, rows)) for of in (x, y)], wide)
            return new if total is None else total + new

        if call.sizes["P"] > 1:
            before = group(jnp.maximum(i - 1, 0))[0]
            same = (i > 0) & (into == before["B"] * call.sizes["G"] + before["G"])
            total = rest(0, jnp.where(same, total, 0))
        else:
            total = rest(0)
        begin = jnp.minimum(begin + rows, middle)
        total = _loop((middle - begin + (rows - 1)) // rows, rest, total, x)
        if more:
            total = _loop((end - middle) // more, filled, total, x)
        return lax.dynamic_update_index_in_dim(w, total.astype(call.dtype), into, 0), total

    shape = x.shape[4], y.shape[4]
    w = jnp.zeros((call.sizes["B"] * call.sizes["G"], *shape), call.dtype)
    return _loop(number, one, (w, jnp.zeros(shape, wide)), x)[0]
