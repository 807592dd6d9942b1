"""Quantised matrices: numbers of 8 or 4 bits with scales, for `jaxext.quantized_matmul`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxext.ops.quantized import quantization as _quantize
from jaxext.ops.quantized.quantization import Quantized

__all__ = ["Quantized", "pack_int4", "quantize", "unpack_int4"]


def quantize(
    w: ArrayLike,
    *,
    bits: int = 8,
    group: int | None = None,
    axis: int | None = -2,
    symmetric: bool = True,
    dtype: DTypeLike | None = None,
) -> Quantized:
    """Quantise w: small numbers with a scale for each block, rounded to nearest, ties to even, and saturated.

    Args:
      w: shape (..., K, N) or any other, floating-point and finite.
      bits: 8 for int8, 4 for int4.
      group: how many neighbours along `axis` share a scale; it divides the size.  None: all.
      axis: the axis along which numbers share a scale.  The default is that of the sum in `quantized_matmul`: -2, so that matrices which
        are stacked along axes before it, such as layers or experts, have scales of their own.  A vector has no such axis: its own is 0.
        None: one scale for all of w.
      symmetric: whether the largest |w| of a block becomes the largest number, such as 127 or 7, without a `zero_point`.  If not, the range
        of a block, with zero in it, becomes all of the dtype's, which is an integer one.
      dtype: the dtype of `qvalue` instead of `bits`: an integer one, or float8_e4m3fn and others.  Unsigned ones want symmetric=False.

    Returns:
      a `Quantized`: `qvalue` of the shape of w, and scales in float32, or float64 for such a w.  Blocks of zeros have the scale one.

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
    """Pack int4 or uint4 numbers, two in a byte.  The first of two is in the low half.

    Args:
      q: shape (..., N), int4 or uint4.

    Returns:
      shape (..., N / 2), uint8.

    Examples:
      >>> pack_int4(jnp.array([1, -1, 3, 2], jnp.int4)).tolist()
      [241, 35]

    Raises:
      TypeError: q is not an array of int4 or uint4.
      ValueError: the size of its last axis is odd.
    """
    return _quantize.packed("pack_int4", q)


def unpack_int4(packed: ArrayLike, dtype: DTypeLike = jnp.int4) -> jax.Array:
    """Unpack the numbers of bytes that `pack_int4` packed.

    XLA makes no copy for it where it keeps int4 packed, as it does on GPUs: weights may be kept as bytes, and unpacked in the program.

    Args:
      packed: shape (..., N / 2), uint8 or int8.
      dtype: int4 or uint4.

    Returns:
      shape (..., N), of this dtype.

    Examples:
      >>> unpack_int4(jnp.array([241, 35], jnp.uint8)).tolist()
      [1, -1, 3, 2]

    Raises:
      TypeError: `packed` is not an array of bytes, or `dtype` is neither int4 nor uint4.
    """
    return _quantize.unpacked("unpack_int4", packed, dtype)


def __dir__() -> list[str]:
    return __all__
