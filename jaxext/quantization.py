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
    """Quantise w to small numbers with a scale for each block, rounded to nearest, ties to even, and saturated.

    Args:
      w: an array of any shape, such as (..., K, N), floating-point and finite.
      bits: 8 for int8, 4 for int4.
      group: the number of neighbours along `axis` that share a scale.  It must divide the size of the axis.  None means all of them.
      axis: the axis along which numbers share a scale.  The default, -2, is the axis that `quantized_matmul` contracts, so matrices that
        are stacked along earlier axes, such as layers or experts, have their own scales.  For a vector the default is 0.  None means one
        scale for all of w.
      symmetric: whether the largest |w| of a block maps to the largest number, such as 127 or 7, without a `zero_point`.  If False, the
        range of a block, extended to include zero, maps to the full range of the dtype, which must be an integer one.
      dtype: the dtype of `qvalue`, instead of `bits`: an integer dtype, float8_e4m3fn and others.  Unsigned ones need symmetric=False.

    Returns:
      a `Quantized`: `qvalue` with the shape of w, and scales in float32, or in float64 if w is float64.  Blocks of zeros have the scale 1.

    Examples:
      >>> q = quantize(jnp.array([[3.0, -7.0], [7.0, 2.2]]), bits=4)
      >>> q.qvalue.tolist(), q.scale.tolist()
      ([[3, -7], [7, 2]], [[1.0, 1.0]])
      >>> experts = quantize(jnp.ones((8, 64, 32)), bits=4, group=16)
      >>> experts.qvalue.shape, experts.scale.shape
      ((8, 64, 32), (8, 4, 32))
      >>> jax.vmap(quantized_matmul)(jnp.ones((8, 2, 64)), experts).shape
      (8, 2, 32)

    The derivative in w is that of the scale, and `qvalue` is constant.  To train w, use `w + stop_gradient(quantize(w).dequantize() - w)`,
    which treats rounding as the identity.

    Raises:
      TypeError: w is not a floating-point array; `group` or `axis` is not an int; `dtype` has more than 8 bits, or no zero.
      ValueError: `bits`, `group` or `axis` is out of range; `symmetric` does not fit the dtype.
    """
    return _quantize.quantized("quantize", w, _quantize.dtype_of("quantize", bits, dtype), group, axis, symmetric)


def pack_int4(q: ArrayLike) -> jax.Array:
    """Pack int4 or uint4 numbers, two per byte.  The first of each pair is in the low half.

    Args:
      q: shape (..., N), int4 or uint4.

    Returns:
      shape (..., N / 2), uint8.

    Examples:
      >>> pack_int4(jnp.array([1, -1, 3, 2], jnp.int4)).tolist()
      [241, 35]

    Raises:
      TypeError: q is not an array of int4 or uint4.
      ValueError: the size of the last axis is odd.
    """
    return _quantize.packed("pack_int4", q)


def unpack_int4(packed: ArrayLike, dtype: DTypeLike = jnp.int4) -> jax.Array:
    """Unpack bytes that `pack_int4` packed.

    XLA makes no copy on platforms where it keeps int4 packed, such as GPUs.  So weights can be kept as bytes and unpacked in the program.

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
