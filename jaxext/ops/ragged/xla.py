"""The `xla` implementation of ragged products: plain XLA ops, in the way that is expected to be fastest.

All rows at once: each times all filters, or times a filter of its own.  Or loops over blocks of rows, each times the filter of its group.
A loop slices a block of rows and the filter of its group out of the arrays, so nothing is expanded to all groups.  On a CPU it runs over
the groups that have rows, then over the blocks of each: large ones that the group fills, then small ones, whose last also meets rows of
other groups.  Elsewhere the host must know how often a loop runs, or waits for the device each time.  There the blocks of all groups are
listed, and it runs as often as there can be blocks: M / T + G times.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext import _compat
from jaxext.backends.xla_products import XlaDefinition, product
from jaxext.core.call import Call, symbolic_size
from jaxext.core.epilogue import accumulated


@dataclasses.dataclass(frozen=True)
class Ways:
    """The way in which a ragged product is computed.

    Attributes:
      algorithm: "groups", a loop over the groups and one over the blocks of each; "listed", a loop over the blocks of all groups;
        "gathered", which takes a filter for each row, where a sum has one term; "dense", which multiplies all rows by each filter and
        selects; or "expanded", in which the sum runs over the groups too, as in lax.
      rows: of a block.
      more: of a block that a group fills, for "groups"; 0 if there are none.
    """

    algorithm: str
    rows: int = 0
    more: int = 0


class XlaRagged(XlaDefinition):
    def candidates(self, call: Call) -> Sequence[Ways]:
        # XLA's partitioner would gather what a loop slices, and splits a sum well.
        if symbolic_size(call) or call.partitioner is _compat.Partitioner.XLA:
            return (Ways("expanded"),)
        if call.empty:
            return (Ways("dense"),)
        if call.open != "w" and call.sizes["K" if call.open == "y" else "N"] == 1:
            return (Ways("gathered"),)
        if call.platform == "cpu":
            # Smaller blocks multiply more slowly, and larger ones have more rows that do not count: for y open those cost most.
            of_group = _power_of_two(call.sizes["M"] / call.sizes["G"])
            rows = min(max(of_group // 2 if call.open == "y" else of_group, 4), 32, call.sizes["M"])
            if of_group <= 4 and (call.open == "w" or call.dtypes["w"] in (jnp.float32, jnp.float64)):
                rows = 1  # XLA multiplies a row by a matrix as it lies in memory, and two rows by one that it packs first
            # A sum is read and written for each block.  XLA would multiply a block of all rows before the loop, also if no group fills it.
            more = 256 if call.open == "w" and call.sizes["M"] > 256 else 128
            blocks = Ways("groups", rows, more if call.sizes["M"] > more else 0)
        else:
            rows = min(max(_power_of_two(call.sizes["M"] / call.sizes["G"]), 64), 512, call.sizes["M"])
            blocks = Ways("listed", rows)
        return (Ways("dense"), blocks) if _small(call) else (blocks,)

    def describe(self, call: Call, config: Ways) -> str:
        return config.algorithm + "".join(f" {rows}" for rows in (config.more, config.rows) if rows)

    def run(self, call: Call, config: Ways, operands: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.zeros(call.shape, call.dtype) if call.empty else computed(call, config, call.flatten(operands)).reshape(call.shape)


@dataclasses.dataclass(frozen=True)
class ScaledFilters:
    """Filters (B, G, K, N) of small numbers, which become wide one by one.

    Attributes:
      values: shape (B, G, S, K / S, J, N / J).
      scale: shape (B, G, S, 1, J, 1).
      dtype: of the wide ones.
    """

    values: jax.Array
    scale: jax.Array
    dtype: Any

    def widened(self, part: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The wide numbers of a part, whose axes before the last four are those of `part(values)`."""
        values = part(self.values)
        wide = (values.astype(self.scale.dtype) * part(self.scale)).astype(self.dtype)
        *lead, blocks, depth, across, columns = values.shape
        return wide.reshape(*lead, blocks * depth, across * columns)


def computed(call: Call, config: Ways, flat: Mapping[str, Any]) -> jax.Array:
    """The result with an axis for each label, from such operands.  w may be `ScaledFilters`."""
    ways = {
        "groups": functools.partial(sum_by_group if call.open == "w" else rows_by_group, rows=config.rows, more=config.more),
        "listed": functools.partial(listed_sum if call.open == "w" else listed_rows, rows=config.rows),
        "gathered": gathered,
        "dense": dense,
        "expanded": expanded,
    }
    if isinstance(w := flat.get("w"), ScaledFilters) and config.algorithm not in ("groups", "listed"):
        flat = {**flat, "w": w.widened(lambda x: x)}
    return ways[config.algorithm](call, flat)


def _power_of_two(size: float) -> int:
    """The largest that is not more, at least 1."""
    return 1 << int(math.log2(max(size, 1)))


def _small(call: Call) -> bool:
    """Return whether the dense way is as fast: one group, a block of all rows, or a loop that takes longer than what it computes."""
    groups, rows, columns, summed = (call.sizes[label] for label in "GMNK")
    if call.open == "w":
        return groups == 1 or rows * groups <= 256 and min(columns, summed) > 1  # the dense way writes no filter twice
    products = math.prod(call.sizes[label] for label in "BPRMGNK")
    return groups == 1 or products <= 1 << 17


def factors(call: Call, flat: Mapping[str, Any]) -> tuple[jax.Array, Any, int]:
    """The factor of rows, the filters, and the axis of the filters along which the sum runs."""
    return (flat["x"], flat["w"], 2) if call.open == "y" else (flat["y"], flat["w"], 3)


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
    wide = accumulated(call.dtype)
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


def _ranges(call: Call, flat: Mapping[str, jax.Array], axes: str) -> tuple[jax.Array, jax.Array, Callable]:
    """The first rows and the ends of all groups, ordered by these axes, B, P and G; and `at(q)`, the index of group q along each."""
    begin, end = (jnp.transpose(flat[name], ["BPG".index(axis) for axis in axes]).reshape(-1) for name in ("begin", "end"))

    def at(q) -> dict[str, jax.Array]:
        found = {}
        for axis in reversed(axes):
            found[axis], q = q % call.sizes[axis], q // call.sizes[axis]
        return found

    return begin, end, at


def _blocks(call: Call, flat: Mapping[str, jax.Array], rows: int, axes: str):
    """The blocks of all groups, as many as there can be: the group, the first row and the one after the last of each; and `at` as above.
    Those that are not needed change nothing."""
    begin, end, at = _ranges(call, flat, axes)
    each = (end - begin + (rows - 1)) // rows
    upto = jnp.cumsum(each, dtype=jnp.int32)
    visit = jnp.arange(call.sizes["B"] * call.sizes["P"] * (call.sizes["M"] // rows + call.sizes["G"]), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(upto, visit, side="right").astype(jnp.int32), upto.size - 1)
    first = begin[group] + (visit - (upto - each)[group]) * rows
    last = jnp.where(visit < upto[-1], jnp.minimum(first + rows, end[group]), first)
    return group, first, last, at


def _block(x: jax.Array, at: Mapping[str, jax.Array], start, rows: int) -> jax.Array:
    """Rows of x (B, P, R, M, K) from `start` on: (R, rows, K)."""
    zero = jnp.int32(0)
    return _sliced(lax.dynamic_slice(x, (at["B"], at["P"], zero, start, zero), (1, 1, x.shape[2], rows, x.shape[4]))[0, 0])


def _sliced(x: jax.Array) -> jax.Array:
    """A slice that stays one: on CPUs XLA multiplies small numbers as float32, and would convert the whole array before the loop."""
    return lax.optimization_barrier(x) if x.dtype.itemsize <= 2 else x


def _loop(number, body, initial, like: jax.Array):
    """`fori_loop` whose results vary over as many mesh axes as `like`."""
    initial = jax.tree.map(lambda x: _compat.align_varying(x, like)[0], initial)
    return lax.fori_loop(jnp.int32(0), number, body, initial)


def _zeros(call: Call) -> jax.Array:
    """The result, with an axis for each label."""
    return jnp.zeros([call.sizes[label] for label in call.labels[call.open]], call.dtype)


def _filter(w: jax.Array | ScaledFilters, at: Mapping[str, jax.Array]) -> jax.Array:
    def of_group(x: jax.Array) -> jax.Array:
        start = (at["B"], at["G"], *(jnp.int32(0) for _ in x.shape[2:]))
        return _sliced(lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0])

    return w.widened(of_group) if isinstance(w, ScaledFilters) else of_group(w)


def _put(y: jax.Array, new: jax.Array, at: Mapping[str, jax.Array], start) -> jax.Array:
    return lax.dynamic_update_slice(y, new[None, None], (at["B"], at["P"], jnp.int32(0), start, jnp.int32(0)))


def listed_rows(call: Call, flat, rows: int) -> jax.Array:
    """Rows times filters, by one loop over the blocks of all groups."""
    a, w, summed = factors(call, flat)
    group, first, last, index = _blocks(call, flat, rows, "BPG")

    def one(v, y):
        at, (start, kept) = index(group[v]), _clamped(first[v], last[v], rows, a.shape[3])
        new = _times(call, _block(a, at, start, rows), _filter(w, at), summed)
        return _put(y, jnp.where(jnp.broadcast_to(kept, new.shape), new, _block(y, at, start, rows)), at, start)

    return _loop(jnp.int32(group.size), one, _zeros(call), a)


def _times(call: Call, rows: jax.Array, of_group: jax.Array, summed: int) -> jax.Array:
    return product(rows, of_group, (((2,), (summed - 2,)), ((), ())), call.precision, call.dtype)


def listed_sum(call: Call, flat, rows: int) -> jax.Array:
    """The gradients of filters, by one loop over the blocks of all groups."""
    x, y = flat["x"], flat["y"]
    group, first, last, index = _blocks(call, flat, rows, "BGP")
    wide = accumulated(call.dtype)

    def one(v, both):
        w, total = both
        at, (start, kept) = index(group[v]), _clamped(first[v], last[v], rows, x.shape[3])
        new = _total(call, [selected(kept, _block(of, at, start, rows)) for of in (x, y)], wide)
        into = at["B"] * call.sizes["G"] + at["G"]
        same = (v > 0) & (into == group[jnp.maximum(v - 1, 0)] // call.sizes["P"])
        total = jnp.where(same, total, 0) + new
        return lax.dynamic_update_index_in_dim(w, total.astype(call.dtype), into, 0), total

    shape = x.shape[4], y.shape[4]
    w = jnp.zeros((call.sizes["B"] * call.sizes["G"], *shape), call.dtype)
    return _loop(jnp.int32(group.size), one, (w, jnp.zeros(shape, wide)), x)[0]


def _total(call: Call, both: Iterable[jax.Array], dtype) -> jax.Array:
    x, y = both
    return product(x, y, (((0, 1), (0, 1)), ((), ())), call.precision, dtype)


def _groups(call: Call, flat, axes: str):
    """The groups that have rows, in the order of `axes`: how many there are, and `group(i)`: its indices, first row and end."""
    begin, end, at = _ranges(call, flat, axes)
    most = min(begin.size, call.sizes["B"] * call.sizes["P"] * call.sizes["M"])
    (having,) = jnp.nonzero(end > begin, size=most, fill_value=0)
    having = having.astype(jnp.int32)

    def group(i):
        return at(having[i]), begin[having[i]], end[having[i]]

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

    return _loop(number, one, _zeros(call), a)


def _clamped(start, end, rows: int, of: int) -> tuple[jax.Array, jax.Array]:
    """The first of `rows` of all rows that hold those from `start` on, and which of them are these, and before `end` (rows, 1)."""
    first = jnp.minimum(start, of - rows)
    row = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return first, (row >= start) & (row < end)


def sum_by_group(call: Call, flat, rows: int, more: int) -> jax.Array:
    """The gradients of filters, by a loop over the groups and one over the blocks of each."""
    x, y = flat["x"], flat["y"]
    number, group = _groups(call, flat, "BGP")
    wide = accumulated(call.dtype)

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
