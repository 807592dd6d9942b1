"""Collective matmuls: all-gather then matmul, and matmul then reduce-scatter, overlapped in n steps around a ring of n devices.

Device i holds block i of the rows.  In step t of `all_gather_matmul`, device i multiplies the block of device i + t and sends it on to
device i - 1, which needs it in the next step:

    block_0 = x,    block_t = block_{t-1} of the next device,    rows of device i + t = block_t w

`matmul_reduce_scatter` runs t from n - 1 down to 0.  In step t, device i computes its part of the rows of device i + t, from block_t, and
adds it to the sum that arrived from device i - 1.  It sends the sum on to device i + 1.  At t = 0 the sum has reached its owner:

    sum_{n-1} = block_{n-1} w,    sum_t = sum_{t+1} of the previous device + block_t w,    result = sum_0

No product waits for the permute in its step, so XLA can run both at once.  Block t holds different rows on each device, so products are
reordered, and blocks selected, by an index that depends on i.  Each ring is the transpose of the other, so derivatives overlap as well.

CPU devices do not send while they multiply, so one product and a plain collective are faster there.  The platform is known only at
lowering: `parallel/by_platform` keeps both versions and their derivatives until then.  The only derivative rule in this file is that of the
gathering: it keeps the gathered rows for the gradient of `w`, in both versions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from jaxext._compat import align_varying
from jaxext.ops.matmul import matmul
from jaxext.parallel.axes import devices_along
from jaxext.parallel.by_platform import Bound, choose


def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """All-gather the rows of `x` along `axis_name` and multiply them by `w`, overlapping communication and computation.

    Equals `matmul(lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True), w)`, computed as n matmuls and n - 1 permutes to a neighbour.
    Call it inside `jax.shard_map` or `jax.pmap`.  Each device sends and receives (n - 1)/n of the gathered rows, like an all-gather.

    Args:
      x: shape (..., M/n, K), this device's rows, of any dtype that `jaxext.matmul` accepts.
      w: shape (..., K, N), this device's matrix.  It may differ between devices, such as columns of a larger matrix.  Leading axes
        broadcast against those of `x`.
      axis_name: a mesh or pmap axis, or a tuple of axes in mesh order, treated as one.
      precision, preferred_element_type, implementation: as in `jaxext.matmul`.

    Returns:
      shape (..., M, N), of the dtype of `jaxext.matmul`, the rows in the order of the devices.  It varies over `axis_name`.

    All transformations and derivatives of any order are supported.  The gradient of `x` is a `matmul_reduce_scatter`.  The gradient of `w`
    keeps the gathered rows, as after an all-gather.  Under `jax.checkpoint` it gathers them again instead, also overlapped.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("i",))
      >>> rows, columns = jax.P("i", None), jax.P(None, "i")
      >>> f = functools.partial(all_gather_matmul, axis_name="i")
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
      >>> jax.jit(f)(jnp.ones((16, 4)), jnp.ones((4, 8))).shape
      (16, 8)

    Raises:
      NameError: no `shard_map` or `pmap` around the call binds the axis.
      TypeError: the columns of `x` do not match the rows of `w`; `axis_name` is a list.
      ValueError: an operand has fewer than two axes; several axes are not in mesh order.
      Exception: any error that `jaxext.matmul` raises.
    """
    along, x, w = _checked("all_gather_matmul", x, w, axis_name, precision, preferred_element_type, implementation)
    if _ring_only(along, x, w):
        return _gathering_ring(along, False, x, w)[0]
    return _gathered(along, False, x, w)[0]


def matmul_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Sum `x @ w` over the devices along `axis_name` and keep this device's rows, overlapping computation and communication.

    Equals `lax.psum_scatter(matmul(x, w), axis_name, scatter_dimension=x.ndim - 2, tiled=True)`, computed as n matmuls and n - 1 permutes
    to a neighbour.  Call it inside `jax.shard_map` or `jax.pmap`.  Each device sends and receives (n - 1)/n of the result of the matmul,
    like a reduce-scatter.

    Args:
      x: shape (..., M, K), this device's columns of a larger matrix, of any dtype that `jaxext.matmul` accepts.  n must divide M.
      w: shape (..., K, N), this device's rows of a larger matrix.  Leading axes broadcast against those of `x`.
      axis_name: a mesh or pmap axis, or a tuple of axes in mesh order, treated as one.
      precision, preferred_element_type, implementation: as in `jaxext.matmul`.  The n parts are sent and added in the dtype of the result,
        as in `lax.psum_scatter`.  To sum bfloat16 operands in float32 throughout, set `preferred_element_type=jnp.float32`, which sends
        twice the bytes.

    Returns:
      shape (..., M/n, N), of the dtype of `jaxext.matmul`.  It varies over `axis_name`.

    All transformations and derivatives of any order are supported.  The gradient of `x` is an `all_gather_matmul`.  The gradient of `w`
    keeps a copy of `x`.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("i",))
      >>> rows, columns = jax.P("i", None), jax.P(None, "i")
      >>> f = functools.partial(matmul_reduce_scatter, axis_name="i")
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(columns, rows), out_specs=rows)
      >>> jax.jit(f)(jnp.ones((16, 8)), jnp.ones((8, 4))).shape
      (16, 4)

    Raises:
      NameError: no `shard_map` or `pmap` around the call binds the axis.
      TypeError: the columns of `x` do not match the rows of `w`; `axis_name` is a list.
      ValueError: an operand has fewer than two axes; n does not divide M; several axes are not in mesh order.
      Exception: any error that `jaxext.matmul` raises.
    """
    along, x, w = _checked("matmul_reduce_scatter", x, w, axis_name, precision, preferred_element_type, implementation)
    if x.shape[-2] % along.n:
        raise ValueError(f"matmul_reduce_scatter: x has {x.shape[-2]} rows (shape {x.shape}), want a multiple of the {along.n} devices")
    if _ring_only(along, x, w):
        return _scattering_ring(along, x, w)[0]
    return _chosen(_plain_scattering, _scattering_ring, (along,), x, w)[0]


@dataclasses.dataclass(frozen=True)
class _Along:
    """An axis of n devices, and how their products are computed."""

    axis_name: Hashable
    n: int
    precision: Any
    dtype: Any
    implementation: str | None

    # jitted, so that it is differentiated once and not for each block.
    @functools.partial(jax.jit, static_argnums=0)
    def product(self, x, w):
        return matmul(x, w, precision=self.precision, preferred_element_type=self.dtype, implementation=self.implementation)

    def permute(self, block, shift):
        return lax.ppermute(block, self.axis_name, [(i, (i + shift) % self.n) for i in range(self.n)])


# jitted, so that all products of the same shapes share one transformed and lowered program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _chosen(plain, ring, static, x, w):
    return choose(Bound(plain, static), Bound(ring, static), x, w)


def _ring_only(along, x, w) -> bool:
    """Return whether plain collectives are impossible: there are no rows, or XLA's CPU compiler would abort.

    It aborts on a bfloat16 sum over devices in a partial-manual shard_map.
    """
    partial = any(kind is not AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types)
    dtypes = {x.dtype, w.dtype, x.dtype if along.dtype is None else np.dtype(along.dtype)}
    return x.shape[-2] == 0 or partial and np.dtype(jnp.bfloat16) in dtypes


# The gathering: returns the product and, with `with_rows`, the gathered rows.


def _plain_gathering(along, with_rows, x, w):
    rows = lax.all_gather(x, along.axis_name, axis=x.ndim - 2, tiled=True)
    return (along.product(rows, w), rows)[: 1 + with_rows]


def _gathering_ring(along, with_rows, x, w):
    block, parts, blocks = x, [], [x]
    for _ in range(along.n - 1):
        arriving = along.permute(block, -1)
        parts.append(along.product(block, w))
        blocks.append(block := arriving)
    parts.append(along.product(block, w))
    index = lax.axis_index(along.axis_name)
    return tuple(_ordered(index, each) for each in (parts, blocks)[: 1 + with_rows])


@jax.jit
def _ordered(index, blocks):
    # jnp.roll would concatenate two copies, here and in `_part`
    order = (lax.iota(index.dtype, len(blocks)) - index) % len(blocks)
    rows = jnp.take(jnp.stack(blocks, axis=-3), order, axis=-3, unique_indices=True, mode="clip")
    return rows.reshape(*rows.shape[:-3], len(blocks) * rows.shape[-2], rows.shape[-1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gathered(along, with_rows, x, w):
    return _chosen(_plain_gathering, _gathering_ring, (along, with_rows), x, w)


@functools.partial(_gathered.defjvp, symbolic_zeros=True)
def _(along, with_rows, primals, tangents):
    (x, w), (d_x, d_w) = primals, tangents  # at least one tangent is not zero
    results = _, rows = _gathered(along, True, x, w)
    if isinstance(d_x, SymbolicZero):
        return results[: 1 + with_rows], (along.product(rows, d_w), _zero_tangent(rows))[: 1 + with_rows]
    d_y, *d_rows = _gathered(along, with_rows, d_x, w)
    if not isinstance(d_w, SymbolicZero):
        d_y = d_y + along.product(rows, d_w)
    return results[: 1 + with_rows], (d_y, *d_rows)


def _zero_tangent(x):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.zeros(x.shape, jax.dtypes.float0)
    return align_varying(jnp.zeros_like(x), x)[0]


# The scattering.


def _plain_scattering(along, x, w):
    y = along.product(x, w)
    return (lax.psum_scatter(y, along.axis_name, scatter_dimension=y.ndim - 2, tiled=True),)


def _scattering_ring(along, x, w):
    index = lax.axis_index(along.axis_name)
    total = _part(along, x, w, index, along.n - 1, None)
    for t in reversed(range(along.n - 1)):
        total = _part(along, x, w, index, t, along.permute(total, 1))
    return (total,)


@functools.partial(jax.jit, static_argnums=0)
def _part(along, x, w, index, t, arriving):
    """The product of this device's block t, plus the sum that arrives from the other devices."""
    rows = x.shape[-2] // along.n
    y = along.product(lax.dynamic_slice_in_dim(x, (index + t) % along.n * rows, rows, x.ndim - 2), w)
    return y if arriving is None else y + arriving


def _checked(name, x, w, axis_name, *how) -> tuple[_Along, jax.Array, jax.Array]:
    """The axis and both operands, varying over it.

    A replicated operand is made varying once, here, so that its gradient is summed over the devices once and not in each step.
    """
    along = _Along(axis_name, devices_along(axis_name, f"{name}: axis_name"), *how)
    x, w = jnp.asarray(x), jnp.asarray(w)
    for argument, operand in (("x", x), ("w", w)):
        if operand.ndim < 2:
            raise ValueError(f"{name}: {argument} has shape {operand.shape}, want at least two axes, rows and columns")
    if x.shape[-1] != w.shape[-2]:
        raise TypeError(f"{name}: w has {w.shape[-2]} rows (shape {w.shape}), want {x.shape[-1]}, the columns of x")
    x, w, _ = align_varying(x, w, lax.axis_index(axis_name))
    return along, x, w
