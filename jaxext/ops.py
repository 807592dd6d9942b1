"""The public operations: each has the signature and the results of its namesake in lax or jnp, and one keyword more.

An operation is its namesake with every product of lax in it replaced by one of ours (`_dispatch.like`), so shapes, dtypes, weak types and
errors are the namesake's.  It must not know how products are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext._dispatch import like


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Matrix product, as `jax.numpy.matmul`: c[..., m, n] = Σ_k a[..., m, k] b[..., k, n].

    Args:
      a: shape (..., M, K) or (K,).
      b: shape (..., K, N) or (K,); leading axes broadcast against those of `a`.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of accumulation and result; by default the promoted dtype of the operands.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: None for the preferred one, or its name, which then also governs every derivative.

    Returns:
      shape (..., M, N), without the axes that a vector operand lacks.

    Raises:
      what `jax.numpy.matmul` raises; ValueError for an unknown `implementation`, and NotImplementedError when the named one does not
      support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return like(jnp.matmul, implementation, a, b, **static)


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """General product of tensors, as `jax.lax.dot_general`, in any layout without a transposed copy (but of one of two transposes).

    Args:
      lhs, rhs: arrays of any rank.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)) axes.
      precision: None, a `jax.lax.Precision`, a string, a pair of either, or a `jax.lax.DotAlgorithmPreset`.
      preferred_element_type: dtype of accumulation and result; by default that of the operands.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: None for the preferred one, or its name, which then also governs every derivative.

    Returns:
      shape: batch axes, free axes of `lhs`, free axes of `rhs`.

    Raises:
      what `jax.lax.dot_general` raises; ValueError for an unknown `implementation`, and NotImplementedError when the named one does not
      support the call.
    """
    return like(
        lax.dot_general,
        implementation,
        lhs,
        rhs,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution in any number of spatial axes, as `jax.lax.conv_general_dilated`.

    Args:
      lhs: the input, of rank n + 2: batch, channels and n spatial axes in the order that `dimension_numbers` gives.
      rhs: the filter, of rank n + 2: output channels, input channels per group and n spatial axes.
      window_strides: n strides.
      padding: 'SAME', 'SAME_LOWER', 'VALID' or n (low, high) pairs; negative padding crops.
      lhs_dilation: n dilations of the input (transposed convolution).
      rhs_dilation: n dilations of the filter (atrous convolution).
      dimension_numbers: as in lax, such as ('NHWC', 'HWIO', 'NHWC'); None is ('NCHW', 'OIHW', 'NCHW').  Channels last is the layout
        that needs no transposed copy.
      feature_group_count, batch_group_count: as in lax.
      precision: None, a `jax.lax.Precision`, a string, or a pair of either.
      preferred_element_type: dtype of accumulation and result.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: None for the preferred one, or its name, which then also governs every derivative.

    Returns:
      the convolution, in the layout of `dimension_numbers`.

    Raises:
      what `jax.lax.conv_general_dilated` raises; `ShardingTypeError` when a spatial axis is sharded on an explicit mesh; ValueError for
      an unknown `implementation`, and NotImplementedError when the named one does not support the call.
    """
    return like(
        lax.conv_general_dilated,
        implementation,
        lhs,
        rhs,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def conv(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution of NCHW inputs with OIHW filters, as `jax.lax.conv`; see `conv_general_dilated`."""
    return like(
        lax.conv,
        implementation,
        lhs,
        rhs,
        window_strides=window_strides,
        padding=padding,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def conv_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    transpose_kernel: bool = False,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Fractionally strided convolution, as `jax.lax.conv_transpose`.

    Args:
      lhs: the input, of rank n + 2.
      rhs: the filter, of rank n + 2.
      strides: n fractional strides: each spatial axis of the result is about that many times longer.
      padding: 'SAME', 'VALID' or n (low, high) pairs.
      rhs_dilation, dimension_numbers, precision, preferred_element_type: as in `conv_general_dilated`; the default layout is channels
        last, such as ('NHWC', 'HWIO', 'NHWC').
      transpose_kernel: flip the filter's spatial axes and swap its channel axes, so that this is the gradient of a convolution.
      use_consistent_padding: read `padding` as that of the convolution whose gradient this is.
      implementation: None for the preferred one, or its name, which then also governs every derivative.

    Raises:
      what `jax.lax.conv_transpose` raises; ValueError for an unknown `implementation`, and NotImplementedError when the named one does
      not support the call.
    """
    return like(
        lax.conv_transpose,
        implementation,
        lhs,
        rhs,
        strides=strides,
        padding=padding,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        transpose_kernel=transpose_kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
        use_consistent_padding=use_consistent_padding,
    )


def convolve(
    a: ArrayLike,
    v: ArrayLike,
    mode: str = "full",
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Discrete convolution of two vectors, as `jax.numpy.convolve`: c[k] = Σ_j a[k-j] v[j].

    Args:
      a, v: shapes (M,) and (N,).
      mode: 'full', 'same' or 'valid': a result of M + N - 1, max(M, N) or max(M, N) - min(M, N) + 1 elements.
      precision, preferred_element_type: as in `conv_general_dilated`.
      implementation: None for the preferred one, or its name, which then also governs every derivative.

    Raises:
      what `jax.numpy.convolve` raises; ValueError for an unknown `implementation`, and NotImplementedError when the named one does not
      support the call.
    """
    static = dict(mode=mode, precision=precision, preferred_element_type=preferred_element_type)
    return like(jnp.convolve, implementation, a, v, **static)
