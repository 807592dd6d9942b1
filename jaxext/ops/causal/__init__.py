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

    It means what the function of this name in the package causal-conv1d does, with the channels last.  Before the first step are zeros,
    or the k - 1 inputs of `initial_states`.  Pieces, each with the final state of the one before, give the results of the whole.

    Args:
      x: shape (..., T, C), floating-point.
      w: shape (k, C); its last row meets the present step.  k is 1 or more.
      bias: shape (C,), or None.
      seq_idx: shape (..., T), integers: the number of each step's sequence, where several lie behind each other.  A step sees what has its
        own number.  A number that comes back after another one would see the steps of before.
      initial_states: shape (..., k - 1, C), or None for zeros.  With `seq_idx` they are of the first sequence of each row: zeros where a
        new one begins.
      return_final_states: whether to return the last k - 1 inputs too, a bool.
      activation: as in `linear`.
      precision: as in `conv_general_dilated`, of what "xla" computes by a convolution.  Kernels multiply all bits.
      implementation: the name of an implementation, also used for all derivatives; None selects one automatically.

    Returns:
      shape (..., T, C), with the dtype of x; and, if `return_final_states`, the final state, of shape (..., k - 1, C).  Where T is less
      than k - 1, it begins with what is left of `initial_states`, or with zeros.  With `seq_idx` it is that of the last sequence of each
      row, with zeros in the place of other sequences.

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
      TypeError: an argument is not an array, or its shape or dtype does not fit; `activation` is neither a str nor a function;
        `return_final_states` is not a bool.
      ValueError: `activation` or `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
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
    """One or several steps of `causal_conv1d`, by the inputs before them, as a model that generates takes them.

    XLA computes it.  It updates the state in place where the caller donates it: `jax.jit(..., donate_argnums=...)`.

    Args:
      x: shape (..., C), a step, or (..., T, C).
      conv_state: shape (..., L, C): the last L inputs, L being k - 1 or more.
      w, bias, activation: as in `causal_conv1d`.
      cache_seqlens: shape (...), integers: how many steps each sequence has had.  The state is a circle then: step t lies at t modulo L.
        None: the state is in order, the latest input last.
      conv_state_indices: shape (N,), integers, if x has the shape (N, C) or (N, T, C): which rows of `conv_state`, of shape (rows, L, C),
        are the states of these sequences, each of another one.  The result of a sequence with a negative index is zero, and no state is
        changed for it.
      implementation: "xla", the only one, or None.

    Returns:
      the results, with the shape and dtype of x, and the new state, with those of `conv_state`.

    Examples:
      >>> w, state = jnp.array([[10.0], [1.0]]), jnp.array([[3.0]])
      >>> y, state = causal_conv1d_update(jnp.array([4.0]), state, w)
      >>> y.tolist(), state.tolist()
      ([34.0], [[4.0]])

    Raises:
      TypeError: an argument is not an array, or its shape or dtype does not fit; `activation` is neither a str nor a function.
      ValueError: the state has fewer than k - 1 steps; `activation` or `implementation` is unknown.
    """
    optional = given(bias=bias, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    arrays = {"x": x, "conv_state": conv_state, "w": w} | optional
    return causal_update.update("causal_conv1d_update", arrays, activation, implementation=implementation)
