"""Quantised matrices, and products with them.

The products support all of JAX: every transformation, derivatives of any order and every sharding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxext.ops.quantized import fp8
from jaxext.ops.quantized import quantization as _quantize
from jaxext.ops.quantized.quantization import Quantized

__all__ = ["Quantized", "fp8_matmul", "pack_int4", "quantize", "quantized_matmul", "unpack_int4"]


def quantized_matmul(
    x: ArrayLike,
    w: Any,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | P | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The product with a quantised matrix: x @ ((w.qvalue - w.zero_point) * w.scale).

    Args:
      x: shape (..., K), floating-point.
      w: a `Quantized` of shape (K, N), or an object with the attributes `qvalue`, `scale` and perhaps `zero_point`, as qwix's QArray.
      precision: as in `jax.lax.dot_general`, for factors of 32 bits or more.
      preferred_element_type: dtype of the result.  None: that of x.  Sums are kept in float32, or more.
      out_sharding: of the result, on explicit meshes.
      implementation: the name of an implementation, also used for all derivatives; None selects one automatically.

    Returns:
      shape (..., N).

    It is differentiable in x and in the scale, to any order.  `qvalue` and `zero_point` are constants there: that another scale would round
    to other integers is no part of the derivative.

    Examples:
      >>> w = jnp.array([[127.0, -1.0], [1.0, 127.0]])
      >>> quantized_matmul(jnp.ones((3, 2)), quantize(w, bits=8))[0].tolist()
      [128.0, 126.0]

    Raises:
      TypeError: an argument has the wrong type, or its shape or dtype does not fit.
      ValueError: a zero point is outside the range of `qvalue`, where its value is known; `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    return _quantize.matmul(
        "quantized_matmul",
        x,
        w,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def quantize(
    w: ArrayLike,
    bits: int = 8,
    group: int | None = None,
    axis: int | None = -2,
    *,
    symmetric: bool = True,
    dtype: DTypeLike | None = None,
) -> Quantized:
    """w in small numbers, with a scale for each block: rounded to nearest, ties to even, and saturated.

    Args:
      w: floating-point and finite.
      bits: 8 for int8, 4 for int4.
      group: how many neighbours along `axis` share a scale; it divides the size.  None: all.
      axis: the axis along which numbers share a scale.  The default is that of the sum in `quantized_matmul`: -2, so that matrices which
        are stacked along axes before it, such as layers or experts, have scales of their own.  A vector has no such axis: its own is 0.
        None: one scale for all of w.
      symmetric: whether the largest |w| of a block becomes the largest number, such as 127 or 7, without a `zero_point`.  If not, the range
        of a block, with zero in it, becomes all of the dtype's, which is an integer one.
      dtype: the dtype of `qvalue` instead of `bits`: an integer one, or float8_e4m3fn and others.  Unsigned ones want symmetric=False.

    Returns:
      a `Quantized`, with scales in float32, or float64 for such a w.  Blocks of zeros have the scale one.

    Examples:
      >>> q = quantize(jnp.array([[3.0, -7.0], [7.0, 2.2]]), bits=4)
      >>> q.qvalue.tolist(), q.scale.tolist()
      ([[3, -7], [7, 2]], [[1.0, 1.0]])
      >>> experts = quantize(jnp.ones((8, 64, 32)), bits=4, group=16)
      >>> experts.qvalue.shape, experts.scale.shape
      ((8, 64, 32), (8, 4, 32))
      >>> jax.vmap(quantized_matmul)(jnp.ones((8, 2, 64)), experts).shape
      (8, 2, 32)

    Its derivative in w is that of the scale: `qvalue` is constant.  To train w, `w + stop_gradient(quantize(w).dequantize() - w)` takes
    rounding for the identity.

    Raises:
      TypeError: w is not an array of floating-point numbers, `group` or `axis` is no whole number, or `dtype` has more than 8 bits, or no
        zero.
      ValueError: `bits`, `group` or `axis` is not one that there is, or `symmetric` does not fit the dtype.
    """
    return _quantize.quantized("quantize", w, _quantize.dtype_of("quantize", bits, dtype), group, axis, symmetric)


def pack_int4(q: ArrayLike) -> jax.Array:
    """int4 or uint4 numbers (..., N) as bytes, uint8 (..., N / 2).  The first of two numbers is in the low half of a byte.

    Examples:
      >>> pack_int4(jnp.array([1, -1, 3, 2], jnp.int4)).tolist()
      [241, 35]

    Raises:
      TypeError: q is not an array of int4 or uint4.
      ValueError: the size of its last axis is odd.
    """
    return _quantize.packed("pack_int4", q)


def unpack_int4(packed: ArrayLike, dtype: DTypeLike = jnp.int4) -> jax.Array:
    """The numbers (..., N), int4 or uint4, in bytes (..., N / 2), which are packed as `pack_int4` does.

    XLA makes no copy for it where it keeps int4 packed, as it does on GPUs: weights may be kept as bytes, and unpacked in the program.

    Examples:
      >>> unpack_int4(jnp.array([241, 35], jnp.uint8)).tolist()
      [1, -1, 3, 2]

    Raises:
      TypeError: `packed` is not an array of bytes, or `dtype` is neither int4 nor uint4.
    """
    return _quantize.unpacked("unpack_int4", packed, dtype)


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
    """x @ w in 8-bit floats, for training: float8_e4m3fn forward, float8_e5m2 for cotangents, with a scale for each array.

    The arrays stay wide.  Each is divided by its scale, rounded and saturated where it enters a product, and the derivative takes rounding
    for the identity.  What is saved for the gradients has 8 bits.  The gradients are those of the rounded arrays and of the rounded
    cotangent, and have the dtypes of x and w.

    Args:
      x: shape (..., K), floating-point.
      w: shape (K, N), floating-point.
      x_scale, w_scale, gradient_scale: shape ().  An array over its scale is rounded to 8 bits.  None: its largest absolute number over the
        largest number of the dtype (current scaling).  For delayed scaling give what earlier steps have shown: the largest absolute number
        of some steps, over 448 for x and w, and over 57,344 for cotangents.  Zero counts as one.
      preferred_element_type: dtype of the result.  None: that of x.  Sums are kept in float32, or more.
      out_sharding: of the result, on explicit meshes.
      implementation: the name of an implementation, also used for all derivatives; None selects one automatically.

    Returns:
      shape (..., N).

    In a `shard_map` the largest number is that of a device's part, under vmap that of an example.  Where vmap maps the scale of the other
    factor alone, the cotangents of the examples are added before they are rounded.  Forward mode does not round tangents.  Derivatives are
    of first order.

    Examples:
      >>> x, w = jnp.array([[7.0, 3.5]]), jnp.array([[7.0], [1.75]])
      >>> float(fp8_matmul(x, w)[0, 0])
      55.125

    Raises:
      TypeError: an argument is not an array of floating-point numbers, or its shape does not fit; a derivative of a derivative is taken.
      ValueError: `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    scales = {"x_scale": x_scale, "w_scale": w_scale, "gradient_scale": gradient_scale}
    return fp8.matmul(
        "fp8_matmul",
        x,
        w,
        {name: scale for name, scale in scales.items() if scale is not None},
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )
