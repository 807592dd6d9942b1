"""Long convolutions of sequences that are split over devices along time: with a halo, or by channels."""

from __future__ import annotations

import functools

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

    Equals `jaxext.long_conv` of the whole.  Call it inside `jax.shard_map` or `jax.pmap`, with n devices and T steps in all.  It is done in
    the way that sends less:

    - with a halo: a device sends the steps that others read, K - 1 or all of its own, C numbers each, by one `jax.lax.ppermute` each way
      and for each distance;
    - by channels: a `jax.lax.all_to_all` gives each device all steps of C/n channels, and another takes the result back.  A device sends
      2 (n - 1)/n · T/n · C numbers.  A dense filter, or one whose channels the devices do not divide, cannot be split so.

    For long filters that is n / 2 times less, and each device transforms each sequence once.

    Args:
      x: shape (..., T/n, C), this device's steps.
      w, skip: as in `jaxext.long_conv`, whole.
      gate: the shape of the result, this device's part.
      axis_name: a mesh or pmap axis of n devices, or a tuple of axes in mesh order, treated as one.
      causal, precision, implementation: as in `jaxext.long_conv`.

    Returns:
      this device's steps of the result.  All derivatives are supported, in both modes.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "time"), jax.P("time")
      >>> f = jax.shard_map(functools.partial(split_long_conv, axis_name="time"), mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
      >>> f(jnp.ones((32, 1)), jnp.ones((3, 1)))[:5, 0].round().tolist()
      [1.0, 2.0, 3.0, 3.0, 3.0]

    Raises:
      Exception: any error that `jaxext.long_conv` raises.
      ValueError: `axis_name` is invalid.
      NameError: no `shard_map` or `pmap` around the call binds the axis.
    """
    name, optional = "split_long_conv", checks.given(skip=skip, gate=gate)
    n = devices_along(axis_name, f"{name}: axis_name")
    how = dict(precision=precision, implementation=implementation)
    jax.eval_shape(functools.partial(long_conv, causal=causal, **how), x, w, **optional)  # traced for what it refuses
    x, w, optional = jax.tree.map(jnp.asarray, (x, w, optional))
    steps, channels = x.shape[-2:]
    taps, (before, behind) = form.reach(n * steps, w.shape[0], causal)
    dtype = form.summed_dtype(optional, x.dtype)
    x, w = align_varying(x, w[taps])

    def summed(padding, x, w):
        return form.program(name, padding, dtype, x, w, **how)

    sent = sum(map(sum, (senders(rows, steps, n) for rows in (before, behind))))
    if w.ndim == 2 and channels % n == 0 and sent * n > 2 * (n - 1) * steps:
        own = channels // n
        turned = lax.all_to_all(x, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)
        w = lax.dynamic_slice_in_dim(w, lax.axis_index(axis_name) * own, own, 1)
        y = lax.all_to_all(summed((before, behind), turned, w), axis_name, x.ndim - 2, x.ndim - 1, tiled=True)
    else:
        low, high = (edge(x, x.ndim - 2, axis_name, rows, before=rows_before) for rows, rows_before in ((before, True), (behind, False)))
        y = summed((0, 0), lax.concatenate([low, x, high], x.ndim - 2), w)
    return form.combined(y, {"x": x, **optional})
