"""The public ragged products: rows that are cut into groups, each with a matrix of its own, as in a mixture of experts.

Every operation supports all of JAX, as `jaxext.matmul` does: also `vmap` over any of its operands, the sizes included, and derivatives of
any order.  The sizes are not known when a program is compiled.  The work does not grow with the number of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxext._messages import format_value
from jaxext.core import activation as _activation
from jaxext.core import epilogue
from jaxext.core.checks import checked, given, refuse_shape
from jaxext.core.operation import Operation
from jaxext.lax.dispatch import compiled
from jaxext.ops.fused.form import parameters
from jaxext.ops.ragged import form

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
    """Matmul of groups of rows, as `jax.lax.ragged_dot`: out[m, n] = Σ_k lhs[m, k] rhs[group of m, k, n].

    The first `group_sizes[0]` rows are the first group, and so on.  Sizes may be zero.  Rows after the last group are zero in the result
    and are not read: not even a NaN in them or in their cotangents reaches a result or a gradient.

    lax leaves invalid sizes undefined.  Here a negative size counts as zero, and a group that would exceed the last row ends there.

    Args:
      lhs: shape (M, K).
      rhs: shape (G, K, N).
      group_sizes: shape (G,), of any integer dtype.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of accumulation and result.  Defaults to the dtype of the operands.
      group_offset: shape (1,), an integer: the first group that rhs holds.  `group_sizes` may then be longer than rhs, and the rows of
        groups that rhs lacks are zero in the result.  None means 0.
      out_sharding: sharding of the result on an explicit mesh.  None derives it from the operands.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape (M, N).

    Examples:
      >>> ragged_dot(jnp.ones((5, 2)), jnp.arange(12.0).reshape(3, 2, 2), jnp.array([2, 0, 2])).tolist()
      [[2.0, 4.0], [2.0, 4.0], [18.0, 20.0], [18.0, 20.0], [0.0, 0.0]]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      Exception: any other error that `jax.lax.ragged_dot` raises.
      ValueError: `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = dict(lhs=lhs, rhs=rhs, group_sizes=group_sizes) | given(group_offset=group_offset)
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return form.product("ragged_dot", arrays, None, implementation=implementation, **static)


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
    """General tensor product with one ragged axis of lhs, as `jax.lax.ragged_dot_general`.

    The kind of the ragged axis determines the result:

    - a free axis m of lhs: out[b, m, n] = Σ_k lhs[b, m, k] rhs[group of m, b, k, n]
    - a contracted axis k: out[g, b, m, n] = Σ_{k in group g} lhs[b, m, k] rhs[b, k, n]
    - a batch axis b: out[b, m, n] = Σ_k lhs[b, m, k] rhs[b, k, n], with zeros for each b after the last group

    Each of b, m, k and n stands for any number of axes, in any order.  Elements that belong to no group are not read, and invalid sizes
    count as in `ragged_dot`.  lhs is not copied if its axes are in this order: batch axes, the axes of the ragged axis's kind with the
    ragged axis last, all others.  rhs is not copied if it has the batch axes first, then the groups, then k and n or n and k.  A ragged
    batch axis copies both.

    Args:
      lhs, rhs: arrays.
      group_sizes: shape (G,), or (*outer, G) with sizes for each element of the batch axes (unless one of them is ragged) and of the axes
        of lhs that are of the ragged axis's kind and before it.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`: the contracted and batch axes, the ragged axis of lhs, and the
        axis of rhs for the groups, which it has if a free axis is ragged.
      precision, preferred_element_type: as in `ragged_dot`.
      group_offset: as in `ragged_dot`.  If rhs has no groups, the groups of the result start at this one, and those that `group_sizes`
        lacks are empty.
      out_sharding, implementation: as in `ragged_dot`.

    Returns:
      shape: batch axes, free axes of `lhs`, free axes of `rhs`.  If a contracted axis is ragged, the groups come first.

    Examples:
      >>> numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> ragged_dot_general(jnp.ones((5, 2)), jnp.ones((5, 3)), jnp.array([2, 0, 2]), numbers)[:, 0, 0].tolist()
      [2.0, 0.0, 2.0]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      Exception: any other error that `jax.lax.ragged_dot_general` raises.
      ValueError: `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = dict(lhs=lhs, rhs=rhs, group_sizes=group_sizes) | given(group_offset=group_offset)
    if not isinstance(ragged_dot_dimension_numbers, jax.lax.RaggedDotDimensionNumbers):
        got = format_value(ragged_dot_dimension_numbers)
        raise TypeError(f"ragged_dot_general: ragged_dot_dimension_numbers is {got}, want a jax.lax.RaggedDotDimensionNumbers")
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return form.product("ragged_dot_general", arrays, ragged_dot_dimension_numbers, implementation=implementation, **static)


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
    """Ragged matmul with a fused epilogue: y[m, n] = row_scale[m] activation(Σ_k x[m, k] w[g, k, n] + bias[g, n]), g the group of row m.

    In a mixture of experts `row_scale` is the router's weight of each row.  Rows after the last group are zero, as in `ragged_dot`, and
    neither they nor their scales are read.

    Args:
      x: shape (M, K), rows sorted by group.
      w: shape (G, K, N).
      group_sizes: shape (G,), integers, as in `ragged_dot`.
      bias: shape (G, N), or None.
      activation: as in `linear`.
      row_scale: shape (M,), or None.
      precision: as in `ragged_dot`.
      preferred_element_type: dtype of the result.  Defaults to the promoted dtype of x and w, whatever the dtypes of bias and row_scale.
      out_sharding: as in `ragged_dot`.
      implementation: as in `linear`.

    Returns:
      shape (M, N).

    Examples:
      >>> x, w, bias = jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([[-3.0], [1.0]])
      >>> ragged_linear(x, w, jnp.array([1, 2]), bias, activation="relu", row_scale=jnp.array([1.0, 1.0, 0.5, 1.0])).tolist()
      [[0.0], [3.0], [1.5], [0.0]]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype; `activation` is given for a result of integers.
      ValueError: `activation` or `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    arrays = {"x": x, "w": w, "group_sizes": group_sizes} | given(bias=bias, row_scale=row_scale)
    return _fused("ragged_linear", arrays, activation, static, gated=False, implementation=implementation)


def ragged_gated_linear_unit(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: ArrayLike,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    row_scale: ArrayLike | None = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Gated linear unit of each group: y[m, n] = row_scale[m] activation(Σ_k x[m, k] w[g, k, 0, n]) Σ_k x[m, k] w[g, k, 1, n].

    Args:
      x: shape (M, K), rows sorted by group.
      w: shape (G, K, 2, N): gate and linear part of each group.
      group_sizes, ..., implementation: as in `ragged_linear`.

    Returns:
      shape (M, N).

    Examples:
      >>> ragged_gated_linear_unit(jnp.ones((5, 3)), jnp.ones((2, 3, 2, 4)), jnp.array([2, 3]), activation="silu").shape
      (5, 4)

    Raises:
      TypeError, ValueError, NotImplementedError: as `ragged_linear`.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    arrays = {"x": x, "w": w, "group_sizes": group_sizes} | given(row_scale=row_scale)
    return _fused("ragged_gated_linear_unit", arrays, activation, static, gated=True, implementation=implementation)


def _fused(name: str, arrays: Mapping[str, Any], activation, static: dict[str, Any], *, gated: bool, implementation) -> jax.Array:
    """`arrays`: x, w and group_sizes, and bias and row_scale if they are given."""
    arrays = checked(name, arrays)
    x, w, sizes = arrays["x"], arrays["w"], arrays["group_sizes"]
    if x.ndim != 2:
        raise TypeError(f"{name}: x has the shape {x.shape}, want (M, K)")
    if w.ndim != (4 if gated else 3) or w.shape[1] != x.shape[1] or gated and w.shape[2] != 2:
        wanted = f"(G, {x.shape[1]}, 2, N): gate and up" if gated else f"(G, {x.shape[1]}, N)"
        raise TypeError(f"{name}: w has the shape {w.shape}, want {wanted}, since x has the shape {x.shape}")
    if sizes.shape != w.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: group_sizes is {sizes.dtype}{list(sizes.shape)}, want an integer for each of the {w.shape[0]} groups")
    if "bias" in arrays:
        refuse_shape(name, "bias", arrays["bias"], (w.shape[0], w.shape[-1]), "an element for each group and column of w")
    if "row_scale" in arrays:
        refuse_shape(name, "row_scale", arrays["row_scale"], x.shape[:1], "an element for each row of x")
    activation, function = _activation.named(name, activation)
    added = epilogue.taken_out(function, arrays, "row_scale")
    with_scale, fused = "row_scale" in arrays, gated and function is None
    operation = form.ragged_gated_linear_unit(with_scale) if fused else form.ragged_linear("bias" in arrays, with_scale)
    key = (operation, name, activation)
    z = compiled(_ragged, key, operation.family, implementation, tuple(arrays.values()), static, name=name)
    return epilogue.applied(name, function, z, added, functools.partial(form.masked_rows, sizes), gated)


def _ragged(operation: Operation, name, activation, x, w, sizes, *added, **keywords) -> jax.Array:
    begin, end = form.ranges(sizes, x.shape[0], w.shape[0])
    operands = dict(zip(operation.inputs, (x, w, *added, begin, end), strict=True))
    public = {slot: argument for slot, argument in (("bias", "bias"), ("scale", "row_scale")) if slot in operands}
    ranks = dict(B=0, P=0, R=0, M=1, K=1, G=1, N=1 if operation.unsharded else w.ndim - 2, T=1)
    dims = ((1,), (1,)), ((), ())
    operands, static = parameters(operation, name, activation, operands, "xw", dims, ranks, public, **keywords)
    return epilogue.bind(operation, operands, activation, static)
