"""Causal convolution of sequences that are split over devices along time: the last inputs of each part are the state of the next."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxext._compat import align_varying
from jaxext.families import causal
from jaxext.parallel.axes import devices_along


def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    axis_name,
    seq_idx: ArrayLike | None = None,
    initial_states: ArrayLike | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal convolution of this device's part of sequences that are split along time.

    Equals `jaxext.causal_conv1d` of the whole.  Call it inside `jax.shard_map` or `jax.pmap`.  Each device sends its last k - 1 inputs to
    the next one, by one `jax.lax.ppermute` (with `seq_idx`, two).

    Args:
      x: shape (..., T/n, C), this device's steps.
      weight, bias, activation, implementation: as in `jaxext.causal_conv1d`, whole.
      axis_name: a mesh or pmap axis of n devices, or a tuple of axes in mesh order, treated as one.
      seq_idx: shape (..., T/n), this device's part.
      initial_states: shape (..., k - 1, C), those of the whole sequences.

    Returns:
      shape (..., T/n, C), this device's steps of the result.  All derivatives are supported, in both modes.

    Examples:
      >>> mesh, split = jax.make_mesh((jax.device_count(),), ("time",)), jax.P("time")
      >>> f = jax.shard_map(lambda x, w: causal_conv1d(x, w, axis_name="time"), mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
      >>> f(jnp.ones((32, 1)), jnp.ones((3, 1)))[:5, 0].tolist()
      [1.0, 2.0, 3.0, 3.0, 3.0]

    Raises:
      Exception: any error that `jaxext.causal_conv1d` raises.
      ValueError: this device has fewer than k - 1 steps; `seq_idx` beside `initial_states`; `axis_name` is invalid.
      NameError: no `shard_map` or `pmap` around the call binds the axis.
    """
    name = "causal_conv1d"
    n = devices_along(axis_name, f"{name}: axis_name")
    arrays = {"x": x, "weight": weight} | {key: of for key, of in (("bias", bias), ("seq_idx", seq_idx)) if of is not None}
    if seq_idx is not None and initial_states is not None:
        raise ValueError(f"{name}: initial_states is given beside seq_idx, want one of them: a state is of a single sequence")

    def of_part(**states):
        return causal.convolution(name, arrays | states, activation, return_final_states=False, implementation=implementation)

    # Traced for what it refuses, before shapes are relied on.
    jax.eval_shape(lambda: of_part(**({} if initial_states is None else {"initial_states": initial_states})))
    steps, part = jnp.shape(weight)[0] - 1, jnp.asarray(x)
    if part.shape[-2] < steps:
        raise ValueError(
            f"{name}: x has {part.shape[-2]} steps on each of {n} devices, want {steps} at least, one less than weight has taps"
        )

    def of_the_one_before(of, axis):
        last = lax.slice_in_dim(of, of.shape[axis] - steps, of.shape[axis], axis=axis)
        return lax.ppermute(last, axis_name, [(i, i + 1) for i in range(n - 1)])

    state = of_the_one_before(part, part.ndim - 2)  # zeros for the first
    if seq_idx is not None:
        numbers = jnp.asarray(seq_idx)
        return of_part(initial_states=state, idx_of_states=of_the_one_before(numbers, numbers.ndim - 1))
    if initial_states is not None:
        first, state = align_varying(jnp.asarray(initial_states).astype(part.dtype), state)
        state = jnp.where(lax.axis_index(axis_name) == 0, first, state)
    return of_part(initial_states=state)
