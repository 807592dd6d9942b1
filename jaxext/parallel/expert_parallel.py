"""Experts split over devices: rows go to the devices of their experts, are computed there, and come back.

With n devices and a capacity of c rows, every device has room for n blocks of c rows, one from each device.  Then

    send        rows of the experts of device j  ->  block i of device j, i being this device
    arrange     the blocks' rows by expert, since block i has rows of every expert
    experts     of one device, as without any other
    arrange     back into blocks
    send        block i  ->  the rows of device i that it was made of

Blocks have the same places whatever the platform: an all-to-all sends them whole, a ragged all-to-all their rows alone.  CPUs have no
ragged one.  The platform is known only at lowering: `parallel/by_platform` keeps both until then.  Every step is linear in the rows, and
its transpose is JAX's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxext._compat import align_varying
from jaxext._messages import array_named, format_value
from jaxext.ops.ragged.form import ranges
from jaxext.parallel.axes import devices_along
from jaxext.parallel.by_platform import Bound, choose


def expert_parallel(
    experts: Callable[[jax.Array, Any, jax.Array], jax.Array],
    x: ArrayLike,
    w: Any,
    group_sizes: ArrayLike,
    *,
    axis_name,
    capacity: int | None = None,
) -> jax.Array:
    """Apply a mixture's experts, which are split over `axis_name`, to the rows of this device.

    Equals `experts(x, w, group_sizes)` with the weights of all devices.  Call it inside `jax.shard_map` or `jax.pmap`.  Each row is sent
    to the device of its expert, and its result is sent back.  `experts` itself, such as two matmuls and an activation, needs no further
    communication.

    Args:
      experts: a function `experts(x, w, group_sizes)` that returns one row for each row of x, of any shape after the first axis.  Rows are
        sorted by expert, and `group_sizes` counts those of each, as in `jaxext.ragged_dot`.  Its rows after the last group are ignored.
        It is called with the experts of one device.
      x: shape (M, ...), this device's rows, of any dtype, sorted by expert, for all E experts.
      w: a pytree of arrays of shape (E/n, ...), the weights of this device's experts.  Device i has experts i E/n up to (i + 1) E/n.
      group_sizes: shape (E,), integers: the number of rows of x for each of all experts.
      axis_name: a mesh or pmap axis of n devices, or a tuple of axes in mesh order, treated as one.
      capacity: the largest number of rows that a device sends to another.  Rows beyond it are dropped, the last experts' first: their
        results and gradients are zero.  None means M, which drops none.  A device has memory for n times as many rows.

    Returns:
      shape (M, ...), of the dtype that `experts` returns: the results in the order of x.  Rows after the last group are zero and not read.
      It varies over `axis_name`.

    On CPUs an all-to-all sends blocks of `capacity` rows.  On other platforms a ragged all-to-all sends only the rows themselves.  All
    transformations of `experts` and derivatives of any order are supported.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("i",))
      >>> by_expert = jax.P("i")
      >>> double = lambda x, w, sizes: ragged_dot(x, w, sizes)
      >>> f = lambda x, w, sizes: expert_parallel(double, x, w, sizes, axis_name="i")
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(by_expert, by_expert, jax.P()), out_specs=by_expert)
      >>> x, w = jnp.ones((16, 2)), jnp.stack([2 * jnp.eye(2)] * 8)
      >>> jax.jit(f)(x, w, jnp.array([1, 0, 1, 0, 0, 0, 0, 0]))[:4, 0].tolist()
      [2.0, 2.0, 2.0, 2.0]

    Raises:
      NameError: no `shard_map` or `pmap` around the call binds the axis.
      TypeError: `group_sizes` is not one axis of integers; `x`, or a leaf of w, has no axes; `axis_name` is a list; `capacity` is not an
        int; `experts` is not a function, or does not return an array.
      ValueError: n does not divide E; the first axis of a leaf of w is not E/n; the capacity is negative; `experts` returns another number
        of rows; several axes are not in mesh order.
    """
    name = "expert_parallel"
    n = devices_along(axis_name, f"{name}: axis_name")
    if not callable(experts):
        raise TypeError(f"{name}: experts is {format_value(experts)}, want a function")
    rows, sizes = array_named(name, "x", x), array_named(name, "group_sizes", group_sizes)
    if rows.ndim == 0:
        raise TypeError(f"{name}: x has the shape (), want (M, ...)")
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: group_sizes is {sizes.dtype}{list(sizes.shape)}, want one axis of integers")
    if len(sizes) % n or not len(sizes):
        raise ValueError(f"{name}: group_sizes has {len(sizes)} experts, want a multiple of the {n} devices")
    for path, leaf in jax.tree.leaves_with_path(w):
        if jnp.ndim(leaf) == 0:
            raise TypeError(f"{name}: w{jax.tree_util.keystr(path)} has shape (), want an axis of experts")
        if leaf.shape[0] != len(sizes) // n:
            of = f"{len(sizes)} experts on {n} devices"
            raise ValueError(f"{name}: w{jax.tree_util.keystr(path)} has {leaf.shape[0]} experts, want {len(sizes) // n} of {of}")
    if not isinstance(capacity, int | np.integer | None) or isinstance(capacity, bool):
        raise TypeError(f"{name}: capacity is {format_value(capacity)}, want an int or None")
    if capacity is not None and capacity < 0:
        raise ValueError(f"{name}: capacity is {format_value(capacity)}, want 0 or more")

    rows, sizes, _ = align_varying(rows, sizes, lax.axis_index(axis_name))
    exchange = _Exchange(axis_name, n, len(rows), len(rows) if capacity is None else min(capacity, len(rows)))
    begin, end = (of.reshape(n, -1) for of in ranges(sizes, len(rows), len(sizes)))
    own = begin[:, 0]  # the first row for each device
    end = jnp.minimum(end, (own + exchange.capacity)[:, None])  # rows beyond the capacity are of no group
    sent = jnp.maximum(end - begin, 0)  # [device, expert of it]
    arrived = lax.all_to_all(sent, axis_name, 0, 0, tiled=True)  # [device, own expert]
    order = _Order(arrived, exchange.capacity)

    between = own, sent.sum(1, dtype=jnp.int32), arrived.sum(1, dtype=jnp.int32)
    there = exchange.go(rows, *between)
    y = experts(order.by_expert(there), w, arrived.sum(0, dtype=jnp.int32))
    if not isinstance(y, jax.Array | np.ndarray):
        raise TypeError(f"{name}: experts returned {format_value(y)}, want an array of {len(there)} rows, as many as it was given")
    if y.ndim == 0 or len(y) != len(there):
        raise ValueError(f"{name}: experts returned the shape {y.shape}, want {len(there)} rows, as many as it was given")
    return exchange.come_back(order.by_device(y), *between)


def _taken(x, at, exists):
    """Rows of x, or zeros."""
    if len(x) == 0:
        return jnp.zeros((*at.shape, *x.shape[1:]), x.dtype)
    return jnp.take(x, jnp.where(exists, at, len(x)), axis=0, mode="fill", fill_value=0)


def _starts(sizes):
    """Return where parts begin that lie one behind the other."""
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes


def _parts(starts, rows):
    """Return for each row the last of the parts that begin at or before it, and how far behind that beginning it is.  The first starts
    at 0."""
    # As jnp.searchsorted, which cannot stand in `by_platform` from jax 0.12 on.
    part = jnp.cumsum(jnp.zeros(rows, jnp.int32).at[starts].add(1, mode="drop"), dtype=jnp.int32) - 1
    return part, jnp.arange(rows, dtype=jnp.int32) - starts[part]


class _Order:
    """Rows in blocks, a block for each device, and the same rows by expert.  `sizes`: of each device's rows for each expert."""

    def __init__(self, sizes, capacity):
        devices, experts = sizes.shape
        in_blocks = capacity * jnp.arange(devices, dtype=jnp.int32)[:, None] + jax.vmap(_starts)(sizes)
        self.sizes, self.in_blocks = sizes, in_blocks
        self.in_order = _starts(sizes.T.ravel()).reshape(experts, devices).T
        self.rows = devices * capacity

    def by_expert(self, x):
        return self._moved(x, self.in_blocks.T.ravel(), self.in_order.T.ravel(), self.sizes.T.ravel())

    def by_device(self, x):
        return self._moved(x, self.in_order.ravel(), self.in_blocks.ravel(), self.sizes.ravel())

    def _moved(self, x, here, there, sizes):
        """Parts of these sizes, which begin `here` and shall begin `there`, where they are in order."""
        part, within = _parts(there, self.rows)
        return _taken(x, here[part] + within, within < sizes[part])


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """`rows` of each of n devices, and n blocks of `capacity` rows on each.

    `own`: the first row of each device's; `sent` and `arrived`: how many rows go to each device, and how many came from it.
    """

    axis_name: Hashable
    n: int
    rows: int
    capacity: int

    def go(self, x, *counts):
        """Rows (rows, ...) into blocks (n * capacity, ...)."""
        return choose(Bound(_Exchange.blocks_go, (self,)), Bound(_Exchange.rows_go, (self,)), x, *counts)[0]

    def come_back(self, blocks, *counts):
        """Blocks into rows."""
        return choose(Bound(_Exchange.blocks_come_back, (self,)), Bound(_Exchange.rows_come_back, (self,)), blocks, *counts)[0]

    def blocks_go(self, x, own, sent, arrived):
        row = jnp.arange(self.capacity, dtype=jnp.int32)[None]
        blocks = _taken(x, own[:, None] + row, row < sent[:, None])
        return (lax.all_to_all(blocks, self.axis_name, 0, 0, tiled=True).reshape(self.n * self.capacity, *x.shape[1:]),)

    def blocks_come_back(self, blocks, own, sent, arrived):
        each = blocks.reshape(self.n, self.capacity, *blocks.shape[1:])
        blocks = lax.all_to_all(each, self.axis_name, 0, 0, tiled=True).reshape(blocks.shape)
        device, within = _parts(own, self.rows)
        return (_taken(blocks, self.capacity * device + within, within < sent[device]),)

    def rows_go(self, x, own, sent, arrived):
        room = jnp.zeros((self.n * self.capacity, *x.shape[1:]), x.dtype)
        place = jnp.full(self.n, self.capacity, jnp.int32) * lax.axis_index(self.axis_name).astype(jnp.int32)
        return self._ragged(x, room, own, sent, place, arrived)

    def rows_come_back(self, blocks, own, sent, arrived):
        room = jnp.zeros((self.rows, *blocks.shape[1:]), blocks.dtype)
        place = lax.all_to_all(own, self.axis_name, 0, 0, tiled=True)  # of this device's block on each
        return self._ragged(blocks, room, self.capacity * jnp.arange(self.n, dtype=jnp.int32), arrived, place, sent)

    def _ragged(self, x, room, *places):
        return (lax.ragged_all_to_all(*align_varying(x, room, *places), axis_name=self.axis_name),)
