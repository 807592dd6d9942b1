"""Products of scaled numbers.

They support all of JAX: every transformation, derivatives of any order and every sharding.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxext.core.checks import given
from jaxext.ops.scaled import form

__all__ = ["scaled_dot"]


def scaled_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    lhs_scale: ArrayLike | None = None,
    rhs_scale: ArrayLike | None = None,
    dimension_numbers: Any = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | P | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Product of two scaled arrays: `dot_general(lhs * lhs_scale, rhs * rhs_scale)`.

    It takes the arguments of `lax.scaled_dot`, and adds derivatives of any order, shardings, and scales of blocks of any size.  lax rounds
    the scaled numbers to bfloat16 before it multiplies them.  jaxext does so only on GPUs, if a scale varies along the sum and the result
    has 16 bits.

    Args:
      lhs, rhs: floating-point numbers, or integers of at most 8 bits, such as float8_e4m3fn, int8 or int4.
      lhs_scale, rhs_scale: floating-point, with as many axes as the operand.  Each size divides that of the operand, whose axis is cut
        into that many equal blocks.  (1, 1) is one scale for a matrix, (M, 1) one per row, (M, K // 32) one per 32 neighbours in a row, (K
        // 128, N // 128) one per square of 128.  None means one.
      dimension_numbers: as in `lax.dot_general`.  None contracts the last axis of lhs with the second to last of rhs; the axes before
        these are batch axes.
      precision: as in `jax.lax.dot_general`, for factors of 32 bits or more.
      preferred_element_type: dtype of the result, floating-point.  Defaults to bfloat16.  Accumulation is in float32 or wider.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape: batch axes, free axes of lhs, free axes of rhs.

    The gradient of an operand is with respect to the number before scaling, and has the operand's dtype, as JAX requires.  8 bits hold
    gradients poorly: `fp8_matmul` takes and returns wide arrays.  Scales have gradients too, except those of float8_e8m0fnu.

    Examples:
      >>> x, w = jnp.ones((2, 64), jnp.float8_e4m3fn), jnp.ones((64, 3), jnp.float8_e4m3fn)
      >>> y = scaled_dot(x, w, lhs_scale=jnp.array([[1.0, 2.0], [0.0, 0.5]]), preferred_element_type=jnp.float32)
      >>> y[:, 0].tolist()
      [96.0, 16.0]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype; a scale of float8_e8m0fnu is differentiated.
      ValueError: `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = {"lhs": lhs, "rhs": rhs} | given(lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    static = dict(precision=precision, out_sharding=out_sharding)
    return form.product("scaled_dot", arrays, dimension_numbers, preferred_element_type, implementation=implementation, **static)
