"""The public ragged products: rows that are cut into groups, each with a matrix of its own, as in a mixture of experts.

Every operation supports all of JAX, as those of `ops` do: also `vmap` over any of its operands, the sizes included, and derivatives of any
order.  The sizes are not known when a program is compiled.  The work does not grow with the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxext._told import told
from jaxext.families import fuse, ragged

__all__ = ["ragged_dot", "ragged_dot_general", "ragged_gated_linear_unit", "ragged_linear"]


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    out_sharding=None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Matrix product of groups of rows, as `jax.lax.ragged_dot`: out[m, n] = Σ_k lhs[m, k] rhs[group of m, k, n].

    The first `group_sizes[0]` rows are the first group, and so on.  Sizes may be zero.  Rows after the last group are zero in the result
    and are not read: neither they nor their cotangents reach a result or a gradient, not even as NaN.

    lax leaves other sizes undefined.  Here a negative size counts as zero, and the part of a group beyond the last row is not there.

    Args:
      lhs: shape (M, K).
      rhs: shape (G, K, N).
      group_sizes: shape (G,), of any integer dtype.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of accumulation and result.  Defaults to the dtype of the operands.
      group_offset: shape (1,), an integer: rhs holds the groups from this one on.  `group_sizes` may then have more entries than rhs has
        groups, and the rows of groups that rhs does not have are zero.  None means 0.
      out_sharding: sharding of the result on an explicit mesh.  None derives it from the operands.
      implementation: the name of an implementation, also used for all derivatives.  None selects one automatically.

    Returns:
      shape (M, N).

    Examples:
      >>> ragged_dot(jnp.ones((5, 2)), jnp.arange(12.0).reshape(3, 2, 2), jnp.array([2, 0, 2])).tolist()
      [[2.0, 4.0], [2.0, 4.0], [18.0, 20.0], [18.0, 20.0], [0.0, 0.0]]

    Raises:
      TypeError: an argument is not an array, or its rank, shape or dtype does not fit.
      Exception: any other error that `jax.lax.ragged_dot` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    arrays = dict(lhs=lhs, rhs=rhs, group_sizes=group_sizes) | fuse.given(group_offset=group_offset)
    return ragged.product(
        "ragged_dot",
        arrays,
        None,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    out_sharding=None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """General tensor product with one ragged axis of lhs, as `jax.lax.ragged_dot_general`.  The kind of that axis tells what is computed:

    - one of the rows m of lhs: out[b, m, n] = Σ_k lhs[b, m, k] rhs[group of m, b, k, n]
    - one of the contracted axes k: out[g, b, m, n] = Σ_{k in group g} lhs[b, m, k] rhs[b, k, n]
    - one of the batch axes b: out[b, m, n] = Σ_k lhs[b, m, k] rhs[b, k, n], with zeros for the b after the last group

    b, m, k and n stand for any number of axes, in any order.  What is in no group is not read, and other sizes are as in `ragged_dot`.  An
    operand is copied unless its axes are in this order: batch axes, the axes before the ragged one, the other axes of its kind, the ragged
    one, and the rest; of rhs, batch axes, groups, then k and n or n and k.  A ragged batch copies both operands.

    Args:
      lhs, rhs: arrays.
      group_sizes: shape (G,), or (*outer, G) with sizes for each element of the batch axes (unless one is ragged) and of the axes of lhs
        that are of the same kind as the ragged one and before it.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`: contracted and batch axes, the ragged axis of lhs, and the axis
        of the groups of rhs, which it has if the rows are ragged.
      precision, preferred_element_type, group_offset, out_sharding, implementation: as in `ragged_dot`.  If rhs has no groups,
        `group_offset` shifts the groups of the result by as many, and those that `group_sizes` does not have are empty.

    Returns:
      shape: batch axes, free axes of `lhs`, free axes of `rhs`, and before them the groups if the contraction is ragged.

    Examples:
      >>> numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> ragged_dot_general(jnp.ones((5, 2)), jnp.ones((5, 3)), jnp.array([2, 0, 2]), numbers)[:, 0, 0].tolist()
      [2.0, 0.0, 2.0]

    Raises:
      TypeError: an argument is not an array, or its rank, shape or dtype does not fit.
      Exception: any other error that `jax.lax.ragged_dot_general` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    arrays = dict(lhs=lhs, rhs=rhs, group_sizes=group_sizes) | fuse.given(group_offset=group_offset)
    if not isinstance(ragged_dot_dimension_numbers, jax.lax.RaggedDotDimensionNumbers):
        got = told(ragged_dot_dimension_numbers)
        raise TypeError(f"ragged_dot_general: ragged_dot_dimension_numbers is {got}, want a jax.lax.RaggedDotDimensionNumbers")
    return ragged.product(
        "ragged_dot_general",
        arrays,
        ragged_dot_dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def ragged_linear(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    row_scale: ArrayLike | None = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Ragged product with a fused epilogue: y[m, n] = row_scale[m] activation(Σ_k x[m, k] w[g, k, n] + bias[g, n]), g the group of row m.

    In a mixture of experts `row_scale` is the router's weight of each row.  Rows after the last group are zero, as in `ragged_dot`, and
    neither they nor their scales are read.

    Args:
      x: shape (M, K), rows sorted by group.
      w: shape (G, K, N).
      group_sizes: shape (G,), integers, as in `ragged_dot`.
      bias: shape (G, N), or None.
      activation: as in `linear`.
      row_scale: shape (M,), or None.
      precision, out_sharding: as in `ragged_dot`.
      preferred_element_type: dtype of the result.  Defaults to the promoted dtype of x and w; that of bias and row_scale does not count.
      implementation: as in `linear`.

    Returns:
      shape (M, N).

    Examples:
      >>> x, w, bias = jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([[-3.0], [1.0]])
      >>> ragged_linear(x, w, jnp.array([1, 2]), bias, activation="relu", row_scale=jnp.array([1.0, 1.0, 0.5, 1.0])).tolist()
      [[0.0], [3.0], [1.5], [0.0]]

    Raises:
      TypeError: an argument is not an array, or its shape or dtype does not fit; `activation` is neither a str nor a function, or is given
        for a result of integers.
      ValueError: `activation` or `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    return _fused(
        "ragged_linear",
        {"x": x, "w": w, "group_sizes": group_sizes},
        {"bias": bias, "row_scale": row_scale},
        activation,
        gated=False,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def ragged_gated_linear_unit(
    x: ArrayLike,
    weights: ArrayLike,
    group_sizes: ArrayLike,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    row_scale: ArrayLike | None = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Gated linear unit of each group: y[m, n] = row_scale[m] activation(Σ_k x[m, k] weights[g, k, 0, n]) Σ_k x[m, k] weights[g, k, 1, n].

    Args:
      weights: shape (G, K, 2, N): gate and linear part of each group.
      x, group_sizes, ...: as in `ragged_linear`.

    Returns:
      shape (M, N).

    Examples:
      >>> ragged_gated_linear_unit(jnp.ones((5, 3)), jnp.ones((2, 3, 2, 4)), jnp.array([2, 3]), activation="silu").shape
      (5, 4)

    Raises:
      TypeError, ValueError, NotImplementedError: as `ragged_linear`.
    """
    return _fused(
        "ragged_gated_linear_unit",
        {"x": x, "weights": weights, "group_sizes": group_sizes},
        {"row_scale": row_scale},
        activation,
        gated=True,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def _fused(name, arrays, added, activation, **static):
    return fuse.ragged(name, arrays | fuse.given(**added), activation, **static)
