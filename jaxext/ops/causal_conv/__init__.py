"""The public operation on streams: causal convolutions of sequences and videos, chunk by chunk.

It supports all of JAX, as `jaxext.conv_general_dilated` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

from jaxext.core.checks import given
from jaxext.ops.causal_conv import form

__all__ = ["causal_conv"]


@overload
def causal_conv(
    x: ArrayLike,
    w: ArrayLike,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    transpose: bool = False,
    state: ArrayLike | None = None,
    return_state: Literal[False] = False,
    precision=None,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def causal_conv(
    x: ArrayLike,
    w: ArrayLike,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    transpose: bool = False,
    state: ArrayLike | None = None,
    return_state: Literal[True],
    precision=None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def causal_conv(
    x,
    w,
    *,
    strides: Any = 1,
    padding: Any = "SAME",
    dilation: Any = 1,
    groups: Any = 1,
    transpose: Any = False,
    state: Any = None,
    return_state: Any = False,
    precision: Any = None,
    implementation: Any = None,
) -> Any:
    """Convolution of a sequence or a video, causal along time: frame p reads the steps up to s·p, for a stride s along time.

    Before the first step are zeros, or the steps of `state`.  Chunks, each with the state of the one before, give the frames of the whole.
    On CPUs these are the same to the last bit, on one device: a loop computes block after block, and its body does not depend on the
    number of frames.  A block of a video is a frame; that of a sequence is 16 steps, less with a batch.  Elsewhere the loop runs inside
    `use_invariant` alone.

    Args:
      x: shape (N, T, *space, C), floating-point, with none, one or two axes of space.
      w: shape (k_t, *k, C / groups, K); its last row along time meets the present step.
      strides: an int, or one for each axis, time first.  Unless `transpose`, T is a multiple of the stride along time: each chunk begins
        with a frame.
      padding: of space, as in `jaxext.conv_general_dilated`, or, if `transpose`, as in `jaxext.conv_transpose`.
      dilation: of w, an int, or one for each axis, time first.
      groups: of channels.  C, with one output for each channel, is depthwise.
      transpose: whether this is a transposed convolution, with `strides` frames for each step: frame p reads the steps up to p // s.
      state: shape (N, steps, *space, C), the steps before x: (k_t - 1)·dilation of them, and if `transpose`, ((k_t - 1)·dilation) // s.
        None: zeros.
      return_state: whether to return the state after x too, a bool.
      precision, implementation: as in `jaxext.conv_general_dilated`.

    Returns:
      shape (N, T / s, *space, K), or (N, T·s, *space, K) if `transpose`, with the dtype of x; and, if `return_state`, the last steps of the
      state and x, with the shape of `state`.  16-bit floats are accumulated in float32 and rounded once.

    Examples:
      >>> x, w = jnp.arange(1.0, 5.0).reshape(1, 4, 1), jnp.array([10.0, 1.0]).reshape(2, 1, 1)
      >>> causal_conv(x, w)[0, :, 0].tolist()
      [1.0, 12.0, 23.0, 34.0]
      >>> first, state = causal_conv(x[:, :3], w, return_state=True)
      >>> causal_conv(x[:, 3:], w, state=state)[0, :, 0].tolist()
      [34.0]
      >>> causal_conv(x, w, strides=2, transpose=True)[0, :, 0].tolist()
      [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0]

    Raises:
      TypeError: an argument is not an array, or its shape or dtype does not fit; `strides`, `dilation` or `groups` are not ints;
        `transpose` or `return_state` is not a bool.
      ShardingTypeError: time or space is sharded on an explicit mesh.
      ValueError: T is no multiple of the stride along time; `strides`, `padding`, `dilation` or `groups` has a wrong value;
        `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    arrays = {"x": x, "w": w} | given(state=state)
    geometry: dict[str, Any] = dict(strides=strides, padding=padding, dilation=dilation, groups=groups, transpose=transpose)
    how: dict[str, Any] = dict(return_state=return_state, precision=precision, implementation=implementation)
    return form.convolution("causal_conv", arrays, **geometry, **how)
