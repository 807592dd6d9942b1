"""The public operations that fuse what follows a product: bias, activation, residual and gate.

Each is one primitive whose meaning is a composition of jaxext's product with jnp.  XLA cannot fuse anything into a kernel, so a kernel
computes all of it, and nothing but the result is written to memory.

Every operation supports all of JAX, as `jaxext.matmul` does.  The sum is kept in float32 for results of 16 bits, and the result is rounded
once; on GPUs the implementation `xla` rounds where plain jnp does.  Where a derivative needs the activation's input, the same kernel writes
it too, with the dtype of the result; `jax.checkpoint`'s policies know it by the name "preactivation".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext.core import activation as _activation
from jaxext.core import epilogue
from jaxext.core.checks import checked, given, refuse_dtypes, refuse_shape
from jaxext.core.operation import Operation
from jaxext.lax.dispatch import compiled, lax_params, sharding_in_types
from jaxext.ops.conv.form import Arrangement, arranged
from jaxext.ops.fused import form

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
    """Matmul with a fused epilogue: y[..., n] = activation(Σ_k x[..., k] w[k, n] + bias[n]) + residual[..., n].

    Args:
      x: shape (..., K), of any dtype that `matmul` accepts.
      w: shape (K, N).
      bias: shape (N,), of a dtype that converts to the result's, or None.
      activation: "relu", "relu6", "gelu" (exact), "gelu_tanh" (approximate, the default of `jax.nn.gelu`), "silu" or "swish", "sigmoid",
        "tanh", "leaky_relu" (slope 0.01), "squared_relu" (relu(z)²), or an elementwise function.  A function of jax.nn that is one of
        these, such as `jax.nn.silu`, counts as its name.  Any other function is applied after the kernel, and may close over traced
        values.
      residual: shape (..., N), of a dtype that converts to the result's, or None.  It is added after the activation.
      precision: as in `matmul`.
      preferred_element_type: dtype of the result.  Defaults to the promoted dtype of x and w, whatever the dtypes of bias and residual.
      out_sharding: as in `matmul`.
      implementation: an implementation's name, also for derivatives.  "xla" is the composition of jnp operations.  None selects one.

    Returns:
      shape (..., N).

    Examples:
      >>> linear(jnp.ones((5, 2, 3)), jnp.ones((3, 4)), jnp.ones(4), activation="gelu").shape
      (5, 2, 4)

    Raises:
      TypeError: an argument has the wrong type, shape or dtype; `activation` is given for a result of integers.
      ValueError: `activation` or `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    arrays = {"x": x, "w": w} | given(bias=bias, residual=residual)
    return _fused("linear", arrays, activation, static, gated=False, implementation=implementation)


def gated_linear_unit(
    x: ArrayLike,
    w: ArrayLike,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Gated linear unit: y[..., n] = activation(Σ_k x[..., k] w[k, 0, n]) Σ_k x[..., k] w[k, 1, n].

    With the activation "silu" it is SwiGLU, with "gelu" GEGLU, with "sigmoid" GLU, and with None the bilinear unit.

    Args:
      x: shape (..., K).
      w: shape (K, 2, N): gate and linear part.
      activation, precision, preferred_element_type, out_sharding, implementation: as in `linear`.

    Returns:
      shape (..., N).

    Examples:
      >>> gated_linear_unit(jnp.ones((5, 3)), jnp.ones((3, 2, 4)), activation="silu").shape
      (5, 4)

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear`.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return _fused("gated_linear_unit", {"x": x, "w": w}, activation, static, gated=True, implementation=implementation)


def conv_bias_act(
    x: ArrayLike,
    w: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    *,
    bias: ArrayLike | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    residual: ArrayLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution with a fused epilogue: activation(conv_general_dilated(x, w, ...) + bias) + residual.

    Args:
      x, w: the input and the filter, `lhs` and `rhs` of `conv_general_dilated`.
      window_strides, ..., precision: as in `conv_general_dilated`.  A transposed convolution has an `lhs_dilation`.
      preferred_element_type: dtype of the result.  Defaults to the promoted dtype of x and w, whatever the dtypes of bias and residual.
      bias: shape (output channels,), or None.
      activation: as in `linear`.
      residual: the shape of the result, or None.  It is added after the activation.
      out_sharding: as in `conv_general_dilated`.
      implementation: as in `linear`.

    Returns:
      the result, in the layout given by `dimension_numbers`.

    Examples:
      >>> x, w, layout = jnp.ones((2, 32, 32, 8)), jnp.ones((3, 3, 8, 16)), ("NHWC", "HWIO", "NHWC")
      >>> conv_bias_act(x, w, (1, 1), "SAME", dimension_numbers=layout, bias=jnp.ones(16), activation="relu").shape
      (2, 32, 32, 16)

    Raises:
      Exception: any error that `jax.lax.conv_general_dilated` raises.
      TypeError, ValueError, NotImplementedError: as `linear`.
    """
    window = dict(window_strides=window_strides, padding=padding, lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation)
    groups = dict(feature_group_count=feature_group_count, batch_group_count=batch_group_count)
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    static |= dict(window, dimension_numbers=dimension_numbers, **groups)
    name, arrays = "conv_bias_act", checked("conv_bias_act", {"x": x, "w": w} | given(bias=bias, residual=residual))
    activation, function = _activation.named(name, activation)
    added = epilogue.taken_out(function, arrays, "residual")
    z = compiled(_conv, (tuple(arrays), activation), form.CONV_BIAS_ACT, implementation, tuple(arrays.values()), static, name=name)
    if added:
        refuse_shape(name, "residual", added["residual"], z.shape, "that of the result")
    return epilogue.applied(name, function, z, added, epilogue.plus)


def _fused(name: str, arrays: Mapping[str, Any], activation, static: dict[str, Any], *, gated: bool, implementation) -> jax.Array:
    """`arrays`: x, w, and bias and residual if they are given."""
    arrays = checked(name, arrays)
    x, w = arrays["x"], arrays["w"]
    if x.ndim == 0:
        raise TypeError(f"{name}: x has the shape (), want (..., K)")
    if w.ndim != (3 if gated else 2) or w.shape[0] != x.shape[-1] or gated and w.shape[1] != 2:
        wanted = f"({x.shape[-1]}, 2, N): gate and up" if gated else f"({x.shape[-1]}, N)"
        raise TypeError(f"{name}: w has the shape {w.shape}, want {wanted}, since x has the shape {x.shape}")
    columns = w.shape[-1]
    if "bias" in arrays:
        refuse_shape(name, "bias", arrays["bias"], (columns,), "an element for each column of w")
    if "residual" in arrays:
        refuse_shape(name, "residual", arrays["residual"], (*x.shape[:-1], columns), "that of the result")
    activation, function = _activation.named(name, activation)
    added = epilogue.taken_out(function, arrays, "residual")
    fused = gated and function is None
    operation = form.gated_linear_unit() if fused else form.linear("bias" in arrays, "residual" in arrays)
    key = (operation, name, activation)
    z = compiled(_product, key, operation.family, implementation, tuple(arrays.values()), static, name=name)
    return epilogue.applied(name, function, z, added, epilogue.plus, gated)


def _product(operation: Operation, name, activation, *arrays, **keywords) -> jax.Array:
    operands = dict(zip(operation.inputs, arrays, strict=True))
    added = {argument: argument for argument in list(operands)[2:]}
    ndim = operands["a"].ndim
    ranks = dict(B=0, M=ndim - 1, K=1, N=1 if operation.unsharded else operands["b"].ndim - 1, T=1)
    dims = ((ndim - 1,), (0,)), ((), ())
    operands, static = form.parameters(operation, name, activation, operands, "ab", dims, ranks, added, **keywords)
    return epilogue.bind(operation, operands, activation, static)


def _conv(names: tuple[str, ...], activation, *arrays, implementation, out_sharding, **keywords) -> jax.Array:
    name = "conv_bias_act"
    added = dict(zip(names, arrays, strict=True))
    x, w = added.pop("x"), added.pop("w")
    convolution = functools.partial(lax.conv_general_dilated, **keywords)
    params, result = lax_params(convolution, x, w)
    features = w.shape[params["dimension_numbers"].rhs_spec[0]]
    if "bias" in added:
        refuse_shape(name, "bias", added["bias"], (features,), "an element for each output channel")
    if "residual" in added:
        refuse_shape(name, "residual", added["residual"], result.shape, "that of the result")
    refuse_dtypes(name, activation, result.dtype, added)
    params["out_sharding"] = sharding_in_types(name, out_sharding, x.ndim)
    product, operands, static, arrangement = arranged(x, w, dtype=result.dtype, implementation=implementation, **params)
    operation = form.conv_bias_act(len(product.window) // 3, "bias" in added, "residual" in added)
    arrange = {"bias": Arrangement.bias_from_lax, "residual": Arrangement.from_lax}
    operands |= {argument: arrange[argument](arrangement, array) for argument, array in added.items()}
    y = arrangement.to_lax(epilogue.bind(operation, operands, activation, static))
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
