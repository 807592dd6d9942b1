"""Convolutions with filters as long as the sequence, by the FFT or by the direct sum, whichever is expected to be faster.

They support all of JAX, as `jaxext.matmul` does.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxext._messages import format_value
from jaxext.core import partition
from jaxext.core.checks import checked, given, refuse_kinds, refuse_shape
from jaxext.lax.dispatch import compiled
from jaxext.ops.long_conv import form

__all__ = ["long_conv"]


def long_conv(
    x: ArrayLike,
    w: ArrayLike,
    *,
    skip: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    causal: bool = True,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """Long convolution: y[..., t, c] = gate[..., t, c] (Σ_s w[s, c] x[..., t - s, c] + skip[c] x[..., t, c]), with zeros outside x.

    The sum is computed by FFT or directly.  In the direct sum, the error of each element is proportional to that element's own terms.  In
    the FFT, it is about 1e-7 ‖x[..., c]‖ ‖w[:, c]‖ in float32 for every element of a channel, and an infinity or NaN spreads over its
    channel.  For the direct sum, pass `implementation="xla"`.

    Args:
      x: shape (..., T, C), floating-point or complex.
      w: shape (K, C), one filter per channel, or (K, C, D), dense: y[..., t, d] = Σ_s,c w[s, c, d] x[..., t - s, c].  Its first row
        multiplies the present step, unlike that of `causal_conv1d`.  K is at least 1, and may exceed T.  Its dtype may be wider than that
        of x.
      skip: shape (C,), or None for zeros.  With a dense filter, C must equal D.
      gate: exactly the shape of the result, or None for ones.
      causal: a bool, whether the sum reads only the present step and those before.  If False it is centred and reads x[..., t + (K - 1) //
        2 - s, c], as `jax.numpy.convolve` does in the mode "same".
      precision: as in `conv_general_dilated`, for the direct sum.  The FFT always multiplies at full precision.
      implementation: "fft", "xla" (the direct sum), or one that you registered, also used for derivatives.  None selects one.

    Returns:
      shape (..., T, C), or (..., T, D), with the dtype of x, rounded once.

    Examples:
      >>> x, w = jnp.arange(1.0, 5.0)[:, None], jnp.array([[1.0], [10.0], [100.0]])
      >>> long_conv(x, w)[:, 0].round().tolist()
      [1.0, 12.0, 123.0, 234.0]
      >>> long_conv(x, w, skip=jnp.array([1000.0]))[:, 0].round().tolist()
      [1001.0, 2012.0, 3123.0, 4234.0]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    name = "long_conv"
    arrays = checked(name, {"x": x, "w": w} | given(skip=skip, gate=gate))
    _refuse(name, arrays)
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"{name}: causal is {format_value(causal)}, want a bool")
    key = tuple(arrays), bool(causal)
    return compiled(_long_conv, key, form.FAMILY, implementation, tuple(arrays.values()), {"precision": precision}, name=name)


def _refuse(name: str, arrays: Mapping[str, jax.Array]) -> None:
    """Raise if the arrays do not fit each other."""
    x, w = arrays["x"], arrays["w"]
    if x.ndim < 2:
        raise TypeError(f"{name}: x has the shape {x.shape}, want (..., T, C)")
    if w.ndim not in (2, 3) or w.shape[0] < 1 or w.shape[1] != x.shape[-1]:
        wanted = f"(K, {x.shape[-1]}) or (K, {x.shape[-1]}, D) with at least one tap, since x has the shape {x.shape}, channels last"
        raise TypeError(f"{name}: w has the shape {w.shape}, want {wanted}")
    for argument, of in arrays.items():
        if not jnp.issubdtype(of.dtype, jnp.inexact):
            raise TypeError(f"{name}: {argument} is {of.dtype}, want floating-point or complex numbers")
    refuse_kinds(name, arrays, x.dtype)
    if "skip" in arrays:
        refuse_shape(name, "skip", arrays["skip"], x.shape[-1:], "an element for each channel")
        if w.shape[-1] != x.shape[-1]:
            raise TypeError(f"{name}: w has the shape {w.shape}, want as many output channels as input channels, since skip is given")
    if "gate" in arrays:
        refuse_shape(name, "gate", arrays["gate"], (*x.shape[:-1], w.shape[-1]), "the shape of the result")


def _long_conv(names, causal, *arrays, precision, implementation) -> jax.Array:
    operands = dict(zip(names, partition.place_on_one_mesh(arrays), strict=True))
    x, w = operands["x"], operands["w"]
    taps, padding = form.reach(x.shape[-2], w.shape[0], causal)
    y = form.summed(padding, form.summed_dtype(names, x.dtype), x, w[taps], precision=precision, implementation=implementation)
    return form.combined(y, operands)
