"""The public ragged product of scaled numbers: experts in 8-bit floats or in integers of 8 or 4 bits, with scales of any blocks.

It supports all of JAX: every transformation, derivatives of any order and every sharding.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxext.core.checks import given
from jaxext.ops.ragged_scaled import form

__all__ = ["ragged_scaled_dot"]


def ragged_scaled_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    *,
    lhs_scale: ArrayLike | None = None,
    rhs_scale: ArrayLike | None = None,
    transpose_rhs: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | P | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Ragged matmul of scaled arrays: out[m, n] = Σ_k (lhs lhs_scale)[m, k] (rhs rhs_scale)[group of m, k, n].

    It is `ragged_dot(lhs * lhs_scale, rhs * rhs_scale, group_sizes)` with a scale for each block of an operand.  So the experts of a
    mixture can stay in int8, int4 or 8-bit floats, and the rows may have 8 bits too.  Rows after the last group are zero in the result,
    and neither they nor their scales are read.

    Args:
      lhs: shape (M, K), rows sorted by group: floating-point numbers, or integers of at most 8 bits, such as float8_e4m3fn, int8 or int4.
      rhs: shape (G, K, N), or (G, N, K) if `transpose_rhs` is set, of such a dtype, which may differ from that of lhs.
      group_sizes: shape (G,), integers, as in `ragged_dot`.
      lhs_scale, rhs_scale: floating-point, with as many axes as the operand.  Each size divides that of the operand, whose axis is cut
        into that many equal blocks.  (G, 1, N) is one scale per column of each group, (G, K // 128, N) is that of `quantize(rhs,
        group=128)`, and (M, K // 128) with (G, K // 128, N // 128) are those of DeepSeek-V3.  None means one.
      transpose_rhs: whether to contract the last axis of rhs.  The axes of `rhs_scale` are in the order of those of rhs.
      precision: as in `jax.lax.dot_general`, for factors of 32 bits or more.
      preferred_element_type: dtype of the result, floating-point.  Defaults to the dtype of lhs, or bfloat16 if that has 8 bits or fewer.
        Accumulation is in float32 or wider.
      out_sharding, implementation: as in `ragged_dot`.

    Returns:
      shape (M, N).

    It has derivatives of any order in floating-point operands and in scales, except scales of float8_e8m0fnu.  As in `scaled_dot`, the
    gradient of an operand is with respect to the number before scaling, and has the operand's dtype.

    Examples:
      >>> w = jnp.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], jnp.int8)
      >>> scale = jnp.array([[[1.0, 0.5]], [[2.0, 1.0]]])
      >>> ragged_scaled_dot(jnp.ones((3, 2)), w, jnp.array([2, 1]), rhs_scale=scale).tolist()
      [[4.0, 3.0], [4.0, 3.0], [24.0, 14.0]]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype; a scale of float8_e8m0fnu is differentiated.
      ValueError: `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes} | given(lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    static = dict(precision=precision, out_sharding=out_sharding, implementation=implementation)
    return form.product("ragged_scaled_dot", arrays, preferred_element_type, transpose_rhs=transpose_rhs, **static)
