"""Long convolutions of sequences that are split over devices along time: with a halo, or by channels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxext._compat import align_varying
from jaxext.core import checks
from jaxext.ops.long_conv import form, long_conv
from jaxext.parallel.axes import devices_along
from jaxext.parallel.halo import edge
from jaxext.parallel.shards import senders


def split_long_conv(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name,
    skip: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    causal: bool = True,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """Long convolution of this device's part of sequences that are split along time.

    Equals `jaxext.long_conv` of the whole sequences.  Call it inside `jax.shard_map` or `jax.pmap`.  For n devices and T steps in all, it
    uses the method that sends less:

    - halo: a device sends the steps that others read, K - 1 or all of its own, with C numbers each, by one `jax.lax.ppermute` for each
      direction and distance.
    - channels: a `jax.lax.all_to_all` gives each device all steps of C/n channels, and another returns the result.  A device sends 2 (n -
      1)/n · T/n · C numbers.  This needs a depthwise filter and a C that n divides.

    For long filters the second method sends n / 2 times less, and each device transforms each sequence once.

    Args:
      x: shape (..., T/n, C), this device's steps.
      w: as in `jaxext.long_conv`, whole.
      axis_name: a mesh or pmap axis of n devices, or a tuple of axes in mesh order, treated as one.
      skip: as in `jaxext.long_conv`, whole.
      gate: the shape of the result, this device's part.
      causal, precision, implementation: as in `jaxext.long_conv`.

    Returns:
      this device's steps of the result.  All derivatives are supported.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "time"), jax.P("time")
      >>> f = jax.shard_map(functools.partial(split_long_conv, axis_name="time"), mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
      >>> f(jnp.ones((32, 1)), jnp.ones((3, 1)))[:5, 0].round().tolist()
      [1.0, 2.0, 3.0, 3.0, 3.0]

    Raises:
      Exception: any error that `jaxext.long_conv` raises.
      TypeError: `axis_name` is a list.
      ValueError: several axes are not in mesh order.
      NameError: no `shard_map` or `pmap` around the call binds the axis.
    """
    name, optional = "split_long_conv", checks.given(skip=skip, gate=gate)
    n = devices_along(axis_name, f"{name}: axis_name")
    how: dict[str, Any] = dict(precision=precision, implementation=implementation)
    jax.eval_shape(functools.partial(long_conv, causal=causal, **how), x, w, **optional)  # traced for what it refuses
    part, filters = jnp.asarray(x), jnp.asarray(w)
    steps, channels = part.shape[-2:]
    time, last = part.ndim - 2, part.ndim - 1
    taps, (before, behind) = form.reach(n * steps, filters.shape[0], causal)
    dtype = form.summed_dtype(optional, part.dtype)
    part, filters = align_varying(part, filters[taps])

    def summed(padding, part, filters):
        return form.program(name, padding, dtype, part, filters, **how)

    sent = sum(map(sum, (senders(rows, steps, n) for rows in (before, behind))))
    if filters.ndim == 2 and channels % n == 0 and sent * n > 2 * (n - 1) * steps:
        own = channels // n
        filters = lax.dynamic_slice_in_dim(filters, lax.axis_index(axis_name) * own, own, 1)
        y = summed((before, behind), lax.all_to_all(part, axis_name, last, time, tiled=True), filters)
        y = lax.all_to_all(y, axis_name, time, last, tiled=True)
    else:
        low, high = edge(part, time, axis_name, before, before=True), edge(part, time, axis_name, behind, before=False)
        y = summed((0, 0), lax.concatenate([low, part, high], time), filters)
    return form.combined(y, {"x": part} | {argument: jnp.asarray(of) for argument, of in optional.items()})
