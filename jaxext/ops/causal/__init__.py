"""The public operations on sequences: the short causal convolutions of state space models, and their steps.

They support all of JAX, as `jaxext.matmul` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

from jaxext.core.checks import given
from jaxext.ops.causal import form as causal
from jaxext.ops.causal import update as causal_update

__all__ = ["causal_conv1d", "causal_conv1d_update"]


@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    seq_idx: ArrayLike | None = None,
    initial_states: ArrayLike | None = None,
    return_final_states: Literal[False] = False,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    seq_idx: ArrayLike | None = None,
    initial_states: ArrayLike | None = None,
    return_final_states: Literal[True],
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    precision=None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def causal_conv1d(
    x, w, bias=None, *, seq_idx=None, initial_states=None, return_final_states=False, activation=None, precision=None, implementation=None
) -> Any:
    """Causal depthwise convolution: y[..., t, c] = activation(Σ_i w[i, c] x[..., t - (k - 1) + i, c] + bias[c]).

    It computes what `causal_conv1d_fn` of the package causal-conv1d does, with channels last.  The steps before the first are zeros, or
    the k - 1 inputs in `initial_states`.  A long sequence can be convolved in chunks: give each the final states of the one before.

    Args:
      x: shape (..., T, C), floating-point.
      w: shape (k, C), k ≥ 1.  Its last row multiplies the present step.
      bias: shape (C,), or None.
      seq_idx: shape (..., T), integers, or None: the sequence to which each step belongs, if several are packed along T.  A step reads
        only steps with its own number.  Use a number for one contiguous range only.
      initial_states: shape (..., k - 1, C), or None for zeros.  With `seq_idx` they precede the first sequence of each row; the others
        start from zeros.
      return_final_states: a bool, whether to return the last k - 1 inputs too.
      activation: as in `linear`.
      precision: as in `conv_general_dilated`, for the convolution of "xla".  Kernels always multiply at full precision.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape (..., T, C), with the dtype of x.  With `return_final_states`, a pair of this and the final states, of shape (..., k - 1, C).
      If T < k - 1, they begin with the end of `initial_states`, or with zeros.  With `seq_idx` they are those of the last sequence of each
      row, with zeros in place of steps of other sequences.

    Examples:
      >>> x, w = jnp.arange(1.0, 6.0)[:, None], jnp.array([[10.0], [1.0]])
      >>> causal_conv1d(x, w)[:, 0].tolist()
      [1.0, 12.0, 23.0, 34.0, 45.0]
      >>> causal_conv1d(x, w, seq_idx=jnp.array([0, 0, 0, 1, 1]))[:, 0].tolist()
      [1.0, 12.0, 23.0, 4.0, 45.0]
      >>> first, state = causal_conv1d(x[:3], w, return_final_states=True)
      >>> causal_conv1d(x[3:], w, initial_states=state)[:, 0].tolist()
      [34.0, 45.0]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      ValueError: `activation` or `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = {"x": x, "w": w} | given(bias=bias, seq_idx=seq_idx, initial_states=initial_states)
    static: dict[str, Any] = dict(return_final_states=return_final_states, precision=precision, implementation=implementation)
    return causal.convolution("causal_conv1d", arrays, activation, **static)


def causal_conv1d_update(
    x: ArrayLike,
    conv_state: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    cache_seqlens: ArrayLike | None = None,
    conv_state_indices: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One or several steps of `causal_conv1d`, from a state that holds the inputs before them, for generation.

    XLA computes it, and updates the state in place if the caller donates it: `jax.jit(..., donate_argnums=...)`.

    Args:
      x: shape (..., C) for one step, or (..., T, C).
      conv_state: shape (..., L, C), L ≥ k - 1: the last L inputs.
      w, bias, activation: as in `causal_conv1d`.
      cache_seqlens: shape (...), integers: how many steps each sequence has had.  The state is then a circular buffer, with step t at t
        modulo L.  None: the state is in order, with the latest input last.
      conv_state_indices: shape (N,), integers, if x has the shape (N, C) or (N, T, C).  Sequence i uses row `conv_state_indices[i]` of
        `conv_state`, which has the shape (rows, L, C).  No row may be used twice.  A sequence with a negative index has the result zero
        and changes no state.
      implementation: "xla", the only one, or None.

    Returns:
      the results, with the shape and dtype of x, and the new state, with those of `conv_state`.

    Examples:
      >>> w, state = jnp.array([[10.0], [1.0]]), jnp.array([[3.0]])
      >>> y, state = causal_conv1d_update(jnp.array([4.0]), state, w)
      >>> y.tolist(), state.tolist()
      ([34.0], [[4.0]])

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      ValueError: the state has fewer than k - 1 steps; `activation` or `implementation` is unknown.
    """
    optional = given(bias=bias, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    arrays = {"x": x, "conv_state": conv_state, "w": w} | optional
    return causal_update.update("causal_conv1d_update", arrays, activation, implementation=implementation)
