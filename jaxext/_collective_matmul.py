"""Matrix products that overlap their communication: all-gather then matmul, and matmul then reduce-scatter, in n steps around a ring.

Of n devices, device i holds block i of the rows.  In step t of `all_gather_matmul` it multiplies the block of device i + t, while that
block travels on to device i - 1, which needs it next:

    block_0 = lhs,    block_t = block_{t-1} of the next device,    rows of device i + t = block_t rhs

In step t of `matmul_reduce_scatter`, from n - 1 down to 0, it adds its part of the rows of device i + t, block_t, to the sum of other
devices' parts, which then travels on to device i + 1, to which these rows are those of step t - 1; at t = 0 they are at home:

    sum_{n-1} = block_{n-1} rhs,    sum_t = sum_{t+1} of the previous device + block_t rhs,    result = sum_0

No product waits for the permute beside it, so XLA can run both at once.  Block t is not the same rows on every device: products are put
into the order of the rows, and blocks taken out of it, by an index that depends on i.  The one is the transpose of the other, and that of a
permute and of a product is one of its own kind, so each function is the transpose of the other, and derivatives overlap as well: no rule is
written here.

It must not know how products are computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext._axes import devices_along
from jaxext._compat import align_varying
from jaxext.ops import matmul


def all_gather_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    axis_name,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The rows of `lhs` of all n devices along `axis_name`, times `rhs`: the product overlaps the gathering.

    `matmul(lax.all_gather(lhs, axis_name, axis=lhs.ndim - 2, tiled=True), rhs)`, as n products and n - 1 permutes to a neighbour, for use
    inside `jax.shard_map` or `jax.pmap`.  Each device sends and receives (n - 1)/n of the gathered rows, as an all-gather does.

    Args:
      lhs: shape (..., M/n, K), this device's rows.
      rhs: shape (..., K, N), this device's matrix, which may differ between devices (its columns of a larger one); leading axes broadcast
        against those of `lhs`.
      axis_name: the name of a mesh or pmap axis, or a tuple of several in the order of their mesh, taken as one.
      precision, preferred_element_type, implementation: as in `jaxext.matmul`.

    Returns:
      shape (..., M, N), the rows in the order of the devices; it varies over `axis_name`.

    Every transformation that `jaxext.matmul` and `lax.ppermute` have holds, forward and reverse derivatives of any order included.  The
    gradient of `lhs` is a `matmul_reduce_scatter`.  That of `rhs` keeps the gathered rows, as it does after an all-gather; under
    `jax.checkpoint` the rows are gathered once more instead, again beside the products.

    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows, columns = jax.P("x", None), jax.P(None, "x")
    >>> f = jax.shard_map(lambda a, b: all_gather_matmul(a, b, "x"), mesh=mesh, in_specs=(rows, columns), out_specs=columns)
    >>> jax.jit(f)(jnp.ones((16, 4)), jnp.ones((4, 8))).shape
    (16, 8)

    Raises:
      NameError: no `shard_map` or `pmap` around the call has the axis.
      TypeError: `lhs` has not as many columns as `rhs` has rows; `axis_name` is a list.
      ValueError: an operand has no rows and columns; several axes are named in another order than their mesh has them.
      And what `jaxext.matmul` raises.
    """
    n, index = devices_along(axis_name, "all_gather_matmul: axis_name"), lax.axis_index(axis_name)
    lhs, rhs = _operands("all_gather_matmul", lhs, rhs, index)
    product = functools.partial(matmul, precision=precision, preferred_element_type=preferred_element_type, implementation=implementation)
    to_previous = [(i, (i - 1) % n) for i in range(n)]
    block, parts = lhs, []
    for _ in range(n - 1):
        arriving = lax.ppermute(block, axis_name, to_previous)
        parts.append(product(block, rhs))
        block = arriving
    parts.append(product(block, rhs))
    # jnp.roll would lay two copies side by side, here and where blocks are taken below
    in_order = (lax.iota(index.dtype, n) - index) % n
    blocks = jnp.take(jnp.stack(parts, axis=-3), in_order, axis=-3, unique_indices=True, mode="clip")
    return blocks.reshape(*blocks.shape[:-3], n * lhs.shape[-2], blocks.shape[-1])


def matmul_reduce_scatter(
    lhs: ArrayLike,
    rhs: ArrayLike,
    axis_name,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """This device's rows of the sum of `lhs @ rhs` over all n devices along `axis_name`: the product overlaps the reduction.

    `lax.psum_scatter(matmul(lhs, rhs), axis_name, scatter_dimension=lhs.ndim - 2, tiled=True)`, as n products and n - 1 permutes to a
    neighbour, for use inside `jax.shard_map` or `jax.pmap`.  Each device sends and receives (n - 1)/n of the product, as a reduce-scatter
    does.

    Args:
      lhs: shape (..., M, K), this device's columns of a larger matrix; n divides M.
      rhs: shape (..., K, N), this device's rows of a larger matrix; leading axes broadcast against those of `lhs`.
      axis_name: the name of a mesh or pmap axis, or a tuple of several in the order of their mesh, taken as one.
      precision, preferred_element_type, implementation: as in `jaxext.matmul`.  The n parts are sent and added up in the dtype of the
        result, as `lax.psum_scatter` does: of bfloat16 operands ask for `preferred_element_type=jnp.float32` to have the whole sum in
        float32, for twice the bytes.

    Returns:
      shape (..., M/n, N); it varies over `axis_name`.

    Every transformation that `jaxext.matmul` and `lax.ppermute` have holds, forward and reverse derivatives of any order included.  The
    gradient of `lhs` is an `all_gather_matmul`; that of `rhs` keeps a copy of `lhs`.

    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows, columns = jax.P("x", None), jax.P(None, "x")
    >>> f = jax.shard_map(lambda a, b: matmul_reduce_scatter(a, b, "x"), mesh=mesh, in_specs=(columns, rows), out_specs=rows)
    >>> jax.jit(f)(jnp.ones((16, 8)), jnp.ones((8, 4))).shape
    (16, 4)

    Raises:
      NameError: no `shard_map` or `pmap` around the call has the axis.
      TypeError: `lhs` has not as many columns as `rhs` has rows; `axis_name` is a list.
      ValueError: an operand has no rows and columns; n does not divide M; several axes are named in another order than their mesh has them.
      And what `jaxext.matmul` raises.
    """
    n, index = devices_along(axis_name, "matmul_reduce_scatter: axis_name"), lax.axis_index(axis_name)
    lhs, rhs = _operands("matmul_reduce_scatter", lhs, rhs, index)
    rows = lhs.shape[-2]
    if rows % n:
        raise ValueError(f"matmul_reduce_scatter: lhs has {rows} rows (shape {lhs.shape}), want a multiple of the {n} devices")
    product = functools.partial(matmul, precision=precision, preferred_element_type=preferred_element_type, implementation=implementation)
    to_next = [(i, (i + 1) % n) for i in range(n)]
    *blocks, last = (lax.dynamic_slice_in_dim(lhs, (index + t) % n * (rows // n), rows // n, lhs.ndim - 2) for t in range(n))
    total = product(last, rhs)
    for block in reversed(blocks):
        arriving = lax.ppermute(total, axis_name, to_next)
        total = product(block, rhs) + arriving
    return total


def _operands(name, lhs, rhs, index) -> tuple[jax.Array, jax.Array]:
    """Both operands, varying as the index does.

    A replicated one is made so here, once: its gradient is then added up over the devices once, and not in each step.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    for argument, x in (("lhs", lhs), ("rhs", rhs)):
        if x.ndim < 2:
            raise ValueError(f"{name}: {argument} has shape {x.shape}, want at least two axes, rows and columns")
    if lhs.shape[-1] != rhs.shape[-2]:
        raise TypeError(f"{name}: rhs has {rhs.shape[-2]} rows (shape {rhs.shape}), want {lhs.shape[-1]}, the columns of lhs")
    lhs, rhs, _ = align_varying(lhs, rhs, index)
    return lhs, rhs
