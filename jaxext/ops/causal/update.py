"""Causal depthwise convolutions along time, step by step: the last inputs lie in a state, which each call updates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext.core import activation as _activation
from jaxext.core import partition
from jaxext.core.checks import checked, refuse_shape
from jaxext.core.epilogue import accumulated, applied
from jaxext.core.family import Family
from jaxext.core.reference import Reference
from jaxext.lax.dispatch import compiled
from jaxext.ops.causal.form import along, refuse_shapes

FAMILY = Family(
    "causal_conv1d_update", lax_primitive=None, names="causal_conv1d_update", implementations=[Reference()]
)  # no kernel: not declared


def update(name: str, arrays: Mapping[str, Any], activation, *, implementation: str | None) -> Any:
    """`arrays`: x, conv_state and w, and bias, cache_seqlens and conv_state_indices if they are given."""
    arrays = checked(name, arrays)
    x, state, w = arrays["x"], arrays["conv_state"], arrays["w"]
    indices = "conv_state_indices" in arrays
    lead, of_state = ("N", "(rows, steps, C)") if indices else ("...", "(..., steps, C)")
    beside = " with conv_state_indices" if indices else ""
    if x.ndim == 0 or state.ndim < 2 or state.shape[-1] != x.shape[-1] or indices and state.ndim != 3:
        raise TypeError(f"{name}: conv_state has the shape {state.shape}, want {of_state}{beside}, since x has the shape {x.shape}")
    fits = x.ndim in (state.ndim - 1, state.ndim)
    refuse_shapes(name, arrays, fits, f"({lead}, C) or ({lead}, T, C), with conv_state {of_state}")
    lead = x.shape[: state.ndim - 2]
    if state.shape[-2] < w.shape[0] - 1:
        raise ValueError(f"{name}: conv_state has {state.shape[-2]} steps, want at least {w.shape[0] - 1}, one less than the taps of w")
    if not indices and state.shape[:-2] != lead:
        raise TypeError(f"{name}: conv_state has the shape {state.shape}, want {(*lead, state.shape[-2], x.shape[-1])}")
    kind, wanted = (jnp.floating, "floating-point") if jnp.issubdtype(x.dtype, jnp.floating) else (jnp.complexfloating, "complex")
    if not jnp.issubdtype(state.dtype, kind):
        raise TypeError(f"{name}: conv_state is {state.dtype}, want {wanted} numbers, since x is {x.dtype}")
    for argument in ("cache_seqlens", "conv_state_indices"):
        if argument in arrays:
            refuse_shape(name, argument, arrays[argument], lead, "an element for each sequence")
            if not jnp.issubdtype(arrays[argument].dtype, jnp.integer):
                raise TypeError(f"{name}: {argument} is {arrays[argument].dtype}, want integers")
    activation, function = _activation.named(name, activation)
    z, state = compiled(_update, (tuple(arrays), activation), FAMILY, implementation, tuple(arrays.values()), {}, name=name)
    given = {"indices": arrays["conv_state_indices"]} if indices else {}
    return applied(name, function, z, given, _masked_sequences), state


def _update(names, activation, *arrays, implementation):
    del implementation  # there is one
    given = dict(zip(names, partition.place_on_one_mesh(arrays), strict=True))
    x, buffer, w, bias = given["x"], given["conv_state"], given["w"], given.get("bias")
    single = x.ndim < buffer.ndim
    x = x[..., None, :] if single else x
    indices, lengths = given.get("conv_state_indices"), given.get("cache_seqlens")
    indices = None if indices is None else indices.astype(jnp.int32)  # the rows may be more than fewer bits count
    own = partition.explicit(jax.typeof(buffer))
    rows = jax.typeof(x).sharding.spec[0]  # a mesh axis that splits them splits nothing else of the states
    of_rows = None if own is None else NamedSharding(own.mesh, P(rows, *(None if at == rows else at for at in own.spec[1:])))
    state = buffer if indices is None else buffer.at[jnp.clip(indices, 0, buffer.shape[0] - 1)].get(out_sharding=of_rows)
    for axis in (*range(x.ndim - 2), x.ndim - 1):  # sequences and channels
        of_lengths = axis if lengths is not None and axis < lengths.ndim else None
        x, state, lengths = partition.alike((x, state, lengths), (axis, axis, of_lengths))
    taps, size, steps = w.shape[0], state.shape[-2], x.shape[-2]
    if lengths is None:
        before = state[..., size - (taps - 1) :, :]
        new = jnp.concatenate([state, x.astype(state.dtype)], -2)[..., steps:, :]
    else:
        before, new = _circular(state, x, lengths, taps)
    wide = accumulated(jnp.promote_types(x.dtype, w.dtype))
    read = jnp.concatenate([before.astype(wide), x.astype(wide)], -2)
    z = functools.reduce(jnp.add, [read[..., i : i + steps, :] * along(w[i].astype(wide), x) for i in range(taps)])
    z = z if bias is None else z + along(bias.astype(wide), x)
    y = _activation.apply(activation, z).astype(given["x"].dtype)
    y = _masked_sequences(y, indices)
    if indices is not None:
        at = jnp.where(indices >= 0, indices, buffer.shape[0])
        new = buffer.at[at].set(new, mode="drop", out_sharding=own)
    return (y[..., 0, :] if single else y), new


def _masked_sequences(y: jax.Array, indices: jax.Array | None = None) -> jax.Array:
    """y, and zeros of a negative index, which has no state."""
    if indices is None:
        return y
    return jnp.where(lax.expand_dims(indices >= 0, range(indices.ndim, y.ndim)), y, jnp.zeros((), y.dtype))


def _circular(state, x, lengths, taps):
    """The inputs before these, and the state with these; step t of a sequence lies at t modulo the size."""
    size, steps = state.shape[-2], x.shape[-2]
    kept = min(steps, size)  # the others would be overwritten
    lengths = (lengths % max(size, 1) if size <= jnp.iinfo(lengths.dtype).max else lengths).astype(jnp.int32)  # offsets may be negative

    def place(first, last):
        offsets = lax.broadcasted_iota(lengths.dtype, (*lengths.shape, last - first), lengths.ndim) + first
        return (lengths[..., None] + offsets) % size

    own = partition.explicit(jax.typeof(state))  # said where jax cannot tell it: a caller's vmap may map the places, and not the state
    of_all, of_some = (own and NamedSharding(own.mesh, P(at, own.spec[-1])) for at in (own and own.spec[-2], None))

    def read(state, at):
        return state.at[at].get(out_sharding=of_some)

    def put(state, at, x):
        return state.at[at].set(x, unique_indices=True, out_sharding=of_all)

    for _ in lengths.shape:
        read, put = jax.vmap(read), jax.vmap(put)
    before = read(state, place(1 - taps, 0))
    return before, put(state, place(steps - kept, steps), x[..., steps - kept :, :].astype(state.dtype))
