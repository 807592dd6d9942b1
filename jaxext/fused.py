"""The public operations that fuse what follows a product: bias, activation, residual and gate.

Each is one primitive whose meaning is a composition of jaxext's product with jnp.  XLA cannot fuse anything into a kernel, so a kernel
computes all of it, and nothing but the result is written to memory.

Every operation supports all of JAX, as those of `ops` do.  The sum is kept in float32 for results of 16 bits, and the result is rounded
once; on GPUs the implementation `xla` rounds where plain jnp does.  Where a derivative needs the activation's input, the same kernel writes
it too, with the dtype of the result; `jax.checkpoint`'s policies know it by the name "preactivation".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxext.families import fuse

__all__ = ["conv_bias_act", "gated_linear_unit", "linear"]


def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    residual: ArrayLike | None = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Matrix product with a fused epilogue: y[..., n] = activation(Σ_k x[..., k] w[k, n] + bias[n]) + residual[..., n].

    Args:
      x: shape (..., K).
      w: shape (K, N).
      bias: shape (N,), or None.
      activation: "relu", "relu6", "gelu" (exact), "gelu_tanh" (its approximation, the default of `jax.nn.gelu`), "silu" or "swish",
        "sigmoid", "tanh", "leaky_relu" (with the slope 0.01), "squared_relu" (relu(z)²), or any elementwise function.  A function of jax.nn
        that is one of these, such as `jax.nn.silu`, counts as its name.  Another function may close over traced values.  It follows the
        product, of which it gets the result.
      residual: shape (..., N), or None.  It is added after the activation.
      precision, out_sharding: as in `matmul`.
      preferred_element_type: dtype of the result.  Defaults to the promoted dtype of x and w; that of bias and residual does not count.
      implementation: the name of an implementation, also used for all derivatives; "xla" is the composition.  None selects one
        automatically.

    Returns:
      shape (..., N).

    Examples:
      >>> linear(jnp.ones((5, 2, 3)), jnp.ones((3, 4)), jnp.ones(4), activation="gelu").shape
      (5, 2, 4)

    Raises:
      TypeError: an argument is not an array, or its shape or dtype does not fit; `activation` is neither a str nor a function, or is given
        for a result of integers.
      ValueError: `activation` or `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    return fuse.linear(
        "linear",
        {"x": x, "w": w} | fuse.given(bias=bias, residual=residual),
        activation,
        gated=False,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def gated_linear_unit(
    x: ArrayLike,
    weights: ArrayLike,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Gated linear unit: y[..., n] = activation(Σ_k x[..., k] weights[k, 0, n]) Σ_k x[..., k] weights[k, 1, n].

    With the activation "silu" it is SwiGLU, with "gelu" GEGLU, with "sigmoid" GLU, and with None the bilinear unit.

    Args:
      x: shape (..., K).
      weights: shape (K, 2, N): gate and linear part.
      activation, precision, preferred_element_type, out_sharding, implementation: as in `linear`.

    Returns:
      shape (..., N).

    Examples:
      >>> gated_linear_unit(jnp.ones((5, 3)), jnp.ones((3, 2, 4)), activation="silu").shape
      (5, 4)

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear`.
    """
    return fuse.linear(
        "gated_linear_unit",
        {"x": x, "weights": weights},
        activation,
        gated=True,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


def conv_bias_act(
    lhs: jax.Array,
    rhs: jax.Array,
    bias: ArrayLike | None,
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
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    residual: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution with a fused epilogue: activation(conv_general_dilated(lhs, rhs, ...) + bias) + residual.

    Args:
      lhs, rhs, window_strides, ..., out_sharding: as in `conv_general_dilated`; a transposed convolution has an `lhs_dilation`.
      bias: shape (output channels,), or None.
      activation: as in `linear`.
      residual: the shape of the result, or None.  It is added after the activation.
      implementation: as in `linear`.

    Returns:
      the result, in the layout given by `dimension_numbers`.

    Examples:
      >>> x, w, b = jnp.ones((2, 32, 32, 8)), jnp.ones((3, 3, 8, 16)), jnp.ones(16)
      >>> conv_bias_act(x, w, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), activation="relu").shape
      (2, 32, 32, 16)

    Raises:
      Exception: any error that `jax.lax.conv_general_dilated` raises.
      TypeError, ValueError, NotImplementedError: as `linear`.
    """
    return fuse.conv_bias_act(
        {"lhs": lhs, "rhs": rhs} | fuse.given(bias=bias, residual=residual),
        activation,
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
        implementation=implementation,
    )
