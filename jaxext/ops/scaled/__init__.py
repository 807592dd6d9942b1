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
    """The product of two arrays of scaled numbers: `dot_general(lhs * lhs_scale, rhs * rhs_scale)`.

    Its namesake is `lax.scaled_dot`, whose arguments it takes.  It adds derivatives of any order, shardings, and scales of any blocks.  lax
    multiplies the scaled numbers after rounding them to bfloat16; this does so on GPUs only, and only where a scale changes along the sum
    and the result has 16 bits.

    Args:
      lhs, rhs: floating-point numbers, or integers of at most 8 bits, such as float8_e4m3fn, int8 or int4.
      lhs_scale, rhs_scale: floating-point, with as many axes as the operand, or none.  Each size divides that of the operand, whose axis is
        cut into as many blocks of equal size: (1, 1) is a scale for all of a matrix, (M, 1) one for each row, (M, K // 32) one for 32
        neighbours of a row, (K // 128, N // 128) one for a square.  None: one.
      dimension_numbers: as in `lax.dot_general`.  None: the last axis of lhs with the one before the last of rhs; axes before these are
        batches.
      precision: as in `jax.lax.dot_general`, for factors of 32 bits or more.
      preferred_element_type: dtype of the result, floating-point.  None: bfloat16.  Sums are kept in float32, or more.
      out_sharding: of the result, on explicit meshes.
      implementation: the name of an implementation, also used for all derivatives; None selects one automatically.

    Returns:
      the product, with batch axes, those of lhs, and those of rhs.

    The gradient of an operand has its dtype, as JAX wants it, and is that with respect to the number before it is scaled.  Numbers of 8
    bits hold gradients badly: `fp8_matmul` takes and gives wide ones.  Scales have gradients too, but for float8_e8m0fnu.

    Examples:
      >>> x, w = jnp.ones((2, 64), jnp.float8_e4m3fn), jnp.ones((64, 3), jnp.float8_e4m3fn)
      >>> y = scaled_dot(x, w, lhs_scale=jnp.array([[1.0, 2.0], [0.0, 0.5]]), preferred_element_type=jnp.float32)
      >>> y[:, 0].tolist()
      [96.0, 16.0]

    Raises:
      TypeError: an argument is not an array; its dtype or its shape does not fit; a scale of float8_e8m0fnu is differentiated.
      ValueError: `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    arrays = {"lhs": lhs, "rhs": rhs} | given(lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    static = dict(precision=precision, out_sharding=out_sharding)
    return form.product("scaled_dot", arrays, dimension_numbers, preferred_element_type, implementation=implementation, **static)
