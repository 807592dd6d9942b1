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
    """Convolution of a sequence or a video, causal along time: output frame p reads the steps up to s·p, where s is the stride along time.

    The steps before the first are zeros, or those in `state`.  A long input can be convolved chunk by chunk: give each chunk the state of
    the one before, and the frames equal those of the whole input.  On a single CPU device they are also bitwise identical, because a loop
    computes blocks of fixed size: one frame of a video, or 16 steps of a sequence (fewer with a batch).  On other platforms this loop runs
    only inside `use_invariant`.

    Args:
      x: shape (N, T, *space, C), floating-point, with zero, one or two spatial axes.
      w: shape (k_t, *k, C / groups, K).  Its last row along time multiplies the present step.
      strides: an int, or one per axis, time first.  The stride along time must divide T, unless `transpose` is set.
      padding: along space, as in `jaxext.conv_general_dilated`, or as in `jaxext.conv_transpose` if `transpose` is set.
      dilation: dilation of w, an int, or one per axis, time first.
      groups: the number of groups of channels.  C groups with one output channel each are a depthwise convolution.
      transpose: whether this is a transposed convolution, with s frames per step: frame p reads the steps up to p // s.
      state: shape (N, steps, *space, C), the (k_t - 1)·dilation steps before x, or ((k_t - 1)·dilation) // s if `transpose` is set.  None
        means zeros.
      return_state: a bool, whether to return the state after x too.
      precision, implementation: as in `jaxext.conv_general_dilated`.

    Returns:
      shape (N, T / s, *space, K), or (N, T·s, *space, K) if `transpose` is set, with the dtype of x.  16-bit floats are accumulated in
      float32 and rounded once.  With `return_state`, a pair of this and the new state, which has the shape of `state`.

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
      TypeError: an argument has the wrong type, shape or dtype.
      ShardingTypeError: time or space is sharded on an explicit mesh.
      ValueError: the stride along time does not divide T; the value of `strides`, `padding`, `dilation` or `groups` is invalid;
        `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = {"x": x, "w": w} | given(state=state)
    geometry: dict[str, Any] = dict(strides=strides, padding=padding, dilation=dilation, groups=groups, transpose=transpose)
    how: dict[str, Any] = dict(return_state=return_state, precision=precision, implementation=implementation)
    return form.convolution("causal_conv", arrays, **geometry, **how)
