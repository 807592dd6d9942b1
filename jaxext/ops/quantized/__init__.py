"""Products with quantised matrices, and products in 8-bit floats.

They support all of JAX: every transformation, derivatives of any order and every sharding.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxext.core.checks import given
from jaxext.ops.quantized import fp8
from jaxext.ops.quantized import quantization as _quantize

__all__ = ["fp8_matmul", "quantized_matmul"]


def quantized_matmul(
    x: ArrayLike,
    w: Any,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | P | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Matmul with a quantised matrix: x @ ((w.qvalue - w.zero_point) * w.scale).

    Args:
      x: shape (..., K), floating-point.
      w: a `Quantized` of shape (K, N), or an object with the attributes `qvalue`, `scale` and perhaps `zero_point`, such as qwix's QArray.
      precision: as in `jax.lax.dot_general`, for factors of 32 bits or more.
      preferred_element_type: dtype of the result.  Defaults to that of x.  Accumulation is in float32 or wider.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape (..., N).

    It is differentiable in x and in the scale, to any order.  The derivative takes `qvalue` and `zero_point` as constants, although
    another scale would have rounded to other integers.

    Examples:
      >>> w = jnp.array([[127.0, -1.0], [1.0, 127.0]])
      >>> quantized_matmul(jnp.ones((3, 2)), quantize(w, bits=8))[0].tolist()
      [128.0, 126.0]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      ValueError: a zero point is outside the range of `qvalue` (checked if its value is known); `implementation` is unknown;
        `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return _quantize.matmul("quantized_matmul", x, w, implementation=implementation, **static)


def fp8_matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    x_scale: ArrayLike | None = None,
    w_scale: ArrayLike | None = None,
    gradient_scale: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | P | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """x @ w in 8-bit floats, for training: float8_e4m3fn forward and float8_e5m2 for cotangents, with one scale per array.

    x, w and the result are wide.  Each factor is divided by its scale, saturated and rounded to 8 bits right before it is multiplied, and
    the 8-bit arrays are what is saved for the backward pass.  The derivative treats rounding as the identity.  The gradients are those of
    the rounded arrays and the rounded cotangent, with the dtypes of x and w.

    Args:
      x: shape (..., K), floating-point.
      w: shape (K, N), floating-point.
      x_scale, w_scale, gradient_scale: shape ().  None means the array's largest absolute value divided by the dtype's largest number
        (current scaling).  For delayed scaling, pass the largest absolute value of some earlier steps, divided by 448 for x and w and by
        57,344 for cotangents.  Zero counts as one.
      preferred_element_type: dtype of the result.  Defaults to that of x.  Accumulation is in float32 or wider.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape (..., N).

    The largest absolute value is that of a device's part inside a `shard_map`, and that of one example under `vmap`.  If `vmap` maps only
    the scale of the other factor, the cotangents of the examples are summed before they are rounded.  Forward mode does not round
    tangents.  Only first derivatives are supported.

    Examples:
      >>> x, w = jnp.array([[7.0, 3.5]]), jnp.array([[7.0], [1.75]])
      >>> float(fp8_matmul(x, w)[0, 0])
      55.125

    Raises:
      TypeError: an argument has the wrong type, shape or dtype; a derivative of a derivative is taken.
      ValueError: `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    scales = given(x_scale=x_scale, w_scale=w_scale, gradient_scale=gradient_scale)
    static = dict(preferred_element_type=preferred_element_type, out_sharding=out_sharding, implementation=implementation)
    return fp8.matmul("fp8_matmul", x, w, scales, **static)
