"""Causal convolution of sequences that are split over devices along time: the last inputs of each part are the state of the next."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxext.core import checks
from jaxext.ops.causal import form as causal
from jaxext.parallel.axes import devices_along
from jaxext.parallel.halo import edge


def halo_causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
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
    the next one, by one `jax.lax.ppermute` (with `seq_idx`, two).  If it has fewer, it sends them to as many devices as read them.

    Args:
      x: shape (..., T/n, C), this device's steps, floating-point.
      w: shape (k, C), the whole filter.
      bias, activation, implementation: as in `jaxext.causal_conv1d`, whole.
      axis_name: a mesh or pmap axis of n devices, or a tuple of axes in mesh order, treated as one.
      seq_idx: shape (..., T/n), integers, this device's part.
      initial_states: shape (..., k - 1, C), those of the whole sequences; with `seq_idx`, of the first one of each row.

    Returns:
      shape (..., T/n, C), this device's steps of the result, with the dtype of x.  All derivatives are supported, in both modes.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "time"), jax.P("time")
      >>> f = lambda x, w: halo_causal_conv1d(x, w, axis_name="time")
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
      >>> f(jnp.ones((32, 1)), jnp.ones((3, 1)))[:5, 0].tolist()
      [1.0, 2.0, 3.0, 3.0, 3.0]

    Raises:
      Exception: any error that `jaxext.causal_conv1d` raises.
      ValueError: `axis_name` is invalid.
      NameError: no `shard_map` or `pmap` around the call binds the axis.
    """
    name = "halo_causal_conv1d"
    devices_along(axis_name, f"{name}: axis_name")
    arrays = {"x": x, "w": w} | checks.given(bias=bias, seq_idx=seq_idx)

    def of_part(**states):
        return causal.convolution(name, arrays | states, activation, return_final_states=False, implementation=implementation)

    # Traced for what it refuses, before shapes are relied on.
    jax.eval_shape(lambda: of_part(**checks.given(initial_states=initial_states)))
    steps, part = jnp.shape(w)[0] - 1, jnp.asarray(x)
    state = edge(part, part.ndim - 2, axis_name, steps, before=True)  # zeros for the first
    states = {"initial_states": state}
    if seq_idx is not None:
        numbers = jnp.asarray(seq_idx)
        states["idx_of_states"] = of_state = edge(numbers, numbers.ndim - 1, axis_name, steps, before=True)
    if initial_states is None:
        return of_part(**states)
    first = lax.axis_index(axis_name) * part.shape[-2]  # of this device's steps
    begin = steps - first  # where in its state the first step of all lies
    given = jnp.asarray(initial_states).astype(part.dtype)
    own = lax.dynamic_slice_in_dim(jnp.concatenate([given, jnp.zeros_like(given)], -2), first, steps, given.ndim - 2)
    states["initial_states"] = jnp.where(_places(state, -2) < begin, own, state)
    if seq_idx is not None:  # the number of the given state is that of the first step
        seen = jnp.concatenate([of_state, numbers], -1)
        number = jnp.where(_places(seen, -1) == begin, seen, 0).sum(-1, keepdims=True, dtype=seen.dtype)
        states["idx_of_states"] = jnp.where(_places(of_state, -1) < begin, number, of_state)
    return of_part(**states)


def _places(x: jax.Array, axis: int) -> jax.Array:
    """The place of each element along an axis."""
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis)
