"""Convolutions: drop-in replacements for functions of lax and jnp, with one extra keyword, `implementation`.

Each operation traces its namesake and replaces every lax product in it with jaxext's (`dispatch.call_namesake`).  Shapes, dtypes, weak
types and errors are therefore those of the namesake.

Every operation supports all of JAX: jit, vmap over any operand and axis, forward and reverse derivatives of any order, remat, scan,
shard_map, pmap, automatic and explicit sharding, and export.  float16 and bfloat16 are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext.lax.dispatch import call_namesake
from jaxext.ops.conv.form import FAMILY

__all__ = ["conv", "conv_general_dilated", "conv_transpose", "convolve"]


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

    For one spatial axis and channels last, y[n, p, k] = Σ_{r,c} x[n, stride·p + dilation·r - low, c] w[r, c, k], with zeros outside x.

    Args:
      lhs: the input, of rank n + 2: batch, channels and n spatial axes, in the order given by `dimension_numbers`.
      rhs: the filter, of rank n + 2: output channels, input channels per group and n spatial axes.
      window_strides: n strides.
      padding: 'SAME', 'SAME_LOWER', 'VALID' or n (low, high) pairs.  Negative padding crops.
      lhs_dilation: n dilations of the input (transposed convolution).
      rhs_dilation: n dilations of the filter (atrous convolution).
      dimension_numbers: as in lax, such as ('NHWC', 'HWIO', 'NHWC').  None means ('NCHW', 'OIHW', 'NCHW').  Other layouts than channels
        last are transposed, which copies.
      feature_group_count, batch_group_count: as in lax.
      precision: None, a `jax.lax.Precision`, a string, or a pair of either.
      preferred_element_type: dtype of accumulation and result.  Defaults to the dtype of lhs and rhs, which must be the same.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      the result, in the layout given by `dimension_numbers`.

    Examples:
      >>> x, w = jnp.ones((2, 32, 32, 8)), jnp.ones((3, 3, 8, 16))
      >>> conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).shape
      (2, 16, 16, 16)

    Raises:
      Exception: any error that `jax.lax.conv_general_dilated` raises.
      ShardingTypeError: a spatial axis is sharded on an explicit mesh.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    window = dict(window_strides=window_strides, padding=padding, lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation)
    groups = dict(feature_group_count=feature_group_count, batch_group_count=batch_group_count)
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    static |= dict(window, dimension_numbers=dimension_numbers, **groups)
    return call_namesake(lax.conv_general_dilated, FAMILY, implementation, (lhs, rhs), static)


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
    """Convolution of NCHW inputs with OIHW filters, as `jax.lax.conv`.

    Args:
      lhs: shape (N, C, *input).
      rhs: shape (K, C, *filter).
      window_strides, padding, precision, preferred_element_type, implementation: as in `conv_general_dilated`.

    Returns:
      shape (N, K, *output).

    Raises:
      Exception: any error that `jax.lax.conv` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.

    Examples:
      >>> conv(jnp.ones((2, 8, 32, 32)), jnp.ones((16, 8, 3, 3)), (1, 1), "VALID").shape
      (2, 16, 30, 30)
    """
    static = dict(window_strides=window_strides, padding=padding, precision=precision, preferred_element_type=preferred_element_type)
    return call_namesake(lax.conv, FAMILY, implementation, (lhs, rhs), static)


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
      strides: n fractional strides.  Each spatial axis of the result is longer by about this factor.
      padding: 'SAME', 'VALID' or n (low, high) pairs.
      rhs_dilation, dimension_numbers: as in `conv_general_dilated`, but the default layout is channels last, such as ('NHWC', 'HWIO',
        'NHWC').
      transpose_kernel: whether to flip the filter's spatial axes and swap its channel axes, which gives the gradient of a convolution.
      precision, preferred_element_type: as in `conv_general_dilated`.
      use_consistent_padding: whether `padding` is the padding of the convolution whose gradient this is.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      the shape of `lhs`, with the output channels of `rhs` and longer spatial axes.

    Examples:
      >>> conv_transpose(jnp.ones((2, 16, 16, 8)), jnp.ones((4, 4, 8, 3)), (2, 2), "SAME").shape
      (2, 32, 32, 3)

    Raises:
      Exception: any error that `jax.lax.conv_transpose` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    window = dict(strides=strides, padding=padding, rhs_dilation=rhs_dilation, dimension_numbers=dimension_numbers)
    gradient = dict(transpose_kernel=transpose_kernel, use_consistent_padding=use_consistent_padding)
    static = dict(window, **gradient, precision=precision, preferred_element_type=preferred_element_type)
    return call_namesake(lax.conv_transpose, FAMILY, implementation, (lhs, rhs), static)


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
      mode: 'full', 'same' or 'valid'.
      precision, preferred_element_type, implementation: as in `conv_general_dilated`.

    Returns:
      shape (M + N - 1,), (max(M, N),) or (max(M, N) - min(M, N) + 1,) for the three modes, with the promoted dtype of a and v.

    Examples:
      >>> convolve(jnp.arange(5.0), jnp.array([2.0, 3.0, 4.0]), "valid").tolist()
      [7.0, 16.0, 25.0]

    Raises:
      Exception: any error that `jax.numpy.convolve` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(mode=mode, precision=precision, preferred_element_type=preferred_element_type)
    return call_namesake(jnp.convolve, FAMILY, implementation, (a, v), static)
