"""Convolutions with halo exchange: each device exchanges the edges of its part of an image or of a sequence with its neighbours.

Along one axis, part i of n convolves its own rows and a halo,

    y_i = conv([last rows of x_{i-1}, x_i, first rows of x_{i+1}], w).

`parallel/shards` computes the size of the halo.  The first and the last part have one neighbour; `ppermute` gives them zeros on the other
side, which pad the image.  All steps are linear and have JAX's rules, so each derivative is a convolution with halo exchange too.  Of a
causal convolution the last inputs of each part are the state of the next.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext._compat import align_varying
from jaxext._messages import format_value
from jaxext.core import checks
from jaxext.core.form import owner
from jaxext.core.window import Window
from jaxext.ops.causal import form as causal
from jaxext.ops.causal_conv import form as causal_conv
from jaxext.ops.conv import conv_general_dilated as one_device
from jaxext.parallel.axes import devices_along
from jaxext.parallel.shards import Part, senders


def halo_conv(
    x: jax.Array,
    w: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    *,
    axis_names: Sequence[Hashable | None],
    implementation: str | None = None,
) -> jax.Array:
    """Convolution of an image whose spatial axes are split over devices, with halo exchange.

    Equals `jaxext.conv_general_dilated` of the whole image.  Call it inside `jax.shard_map` or `jax.pmap`, but not over an axis named by
    `jax.vmap`, whose `ppermute` supports full rings only.  Along each split axis with input size H and output size P, device i of D holds
    rows [i·H/D, (i+1)·H/D) of the image and returns rows [i·P/D, (i+1)·P/D) of the result.  Its halo comes from its two neighbours, by one
    `jax.lax.ppermute` each way, of as many rows as the device that needs most.  Rows beyond the neighbours' take one more `ppermute` for
    each distance.  The convolution starts when all rows have arrived.

    Args:
      x: shape (N, C, H/D, ...), this device's part of the input, floating-point or integer, with n spatial axes.  `dimension_numbers` may
        name another order of the axes.
      w: shape (O, I, R, ...), the whole filter.
      window_strides: as in `jaxext.conv_general_dilated`.
      padding: 'SAME', 'SAME_LOWER', 'VALID' or n (low, high) pairs, for the whole image.  Negative padding crops.
      lhs_dilation, ..., preferred_element_type: as in `jaxext.conv_general_dilated`.
      axis_names: one entry per spatial axis, in the order of `window_strides`: the mesh axis that splits it, a tuple of axes in mesh
        order, or None if it is not split.
      implementation: as in `jaxext.conv_general_dilated`.

    Returns:
      shape (N, O, P/D, ...), this device's part of the convolution, with the dtype of `jaxext.conv_general_dilated`.

    All derivatives are supported.  With `check_vma=True` the gradient of a replicated filter is summed over the devices.  With
    `check_vma=False`, and in `pmap`, the caller must do that `psum`.  If an automatic axis splits the filter's output channels, XLA sums
    the image's gradient including its halo; a `shard_map` over both axes sends less.

    Raises:
      Exception: any error that `jaxext.conv_general_dilated` raises for the whole image.
      ValueError: a mesh axis does not divide an output evenly, or `axis_names` is invalid.
      TypeError: `axis_names` contains a list of axes.
      NameError: no `shard_map` or `pmap` around the call binds an axis.

    Examples:
      >>> mesh, split = jax.make_mesh((jax.device_count(),), ("rows",)), jax.P(None, "rows")
      >>> conv = functools.partial(halo_conv, window_strides=(2, 2), padding="SAME", axis_names=("rows", None))
      >>> conv = functools.partial(conv, dimension_numbers=("NHWC", "HWIO", "NHWC"))
      >>> conv = jax.jit(jax.shard_map(conv, mesh=mesh, in_specs=(split, jax.P()), out_specs=split))
      >>> conv(jax.device_put(jnp.ones((2, 64, 32, 3)), jax.NamedSharding(mesh, split)), jnp.ones((5, 5, 3, 16))).shape
      (2, 32, 16, 16)
    """
    conv = functools.partial(
        one_device,
        window_strides=window_strides,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    x, w = jnp.asarray(x), jnp.asarray(w)
    spatial = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers).lhs_spec[2:]
    sizes = _sizes("halo_conv", axis_names, len(spatial))
    image = list(x.shape)
    for axis, n in zip(spatial, sizes, strict=True):
        image[axis] *= n
    window = _window(functools.partial(conv, padding=padding, lhs_dilation=lhs_dilation), jax.ShapeDtypeStruct(image, x.dtype), w)
    x, w = align_varying(x, w)  # before the exchange: else the gradient's psum over devices that split channels includes the halo
    x, window = _with_halos("halo_conv", x, window, spatial, dict(enumerate(axis_names)))
    return conv(x, w, padding=window.padding, lhs_dilation=window.input_dilation)


def halo_causal_conv(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_names: Sequence[Hashable | None],
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    transpose: bool = False,
    state: ArrayLike | None = None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal convolution of this device's part of a sequence or a video that is split along time, along space, or both.

    Equals `jaxext.causal_conv` of the whole.  Call it inside `jax.shard_map` or `jax.pmap`.  Along time each device sends its last steps
    to the next device by one `jax.lax.ppermute`, or to several devices if one needs more steps than its neighbour has.  Along space it
    exchanges halos as `halo_conv` does.

    Args:
      x: shape (N, T/D, *space/D, C), this device's part.
      w: shape (k_t, *k, C / groups, K), the whole filter.
      axis_names: one entry per axis, time first: the mesh axis that splits it, a tuple of axes in mesh order, or None if it is not split.
      strides: as in `jaxext.causal_conv`.
      padding: as in `jaxext.causal_conv`, for the whole space.
      dilation, groups, transpose: as in `jaxext.causal_conv`.
      state: the steps before those of the first device, split along space as x is.
      precision, implementation: as in `jaxext.causal_conv`.

    Returns:
      this device's part of the result, with the dtype of x.  All derivatives are supported.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "time"), jax.P(None, "time")
      >>> f = lambda x, w: halo_causal_conv(x, w, axis_names=("time",))
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
      >>> f(jnp.ones((1, 32, 1)), jnp.ones((3, 1, 1)))[0, :5, 0].tolist()
      [1.0, 2.0, 3.0, 3.0, 3.0]

    Raises:
      Exception: any error that `jaxext.causal_conv` raises.
      ValueError: the stride along time does not divide the steps of a device; a mesh axis does not divide an output evenly; `axis_names`
        is invalid.
      TypeError: `axis_names` contains a list of axes.
      NameError: no `shard_map` or `pmap` around the call binds an axis.
    """
    name, arrays = "halo_causal_conv", {"x": x, "w": w} | checks.given(state=state)
    arguments: dict[str, Any] = dict(strides=strides, padding=padding, dilation=dilation, groups=groups, transpose=transpose)
    how: dict[str, Any] = dict(precision=precision, implementation=implementation)
    # Traced for what it refuses, before shapes are relied on.
    jax.eval_shape(lambda: causal_conv.convolution(name, arrays, return_state=False, **arguments, **how))
    part, filters, *given = align_varying(*map(jnp.asarray, arrays.values()))
    sizes = _sizes(name, axis_names, part.ndim - 2, "axes, time first")
    whole = [n * parts for n, parts in zip(part.shape, (1, *sizes, 1), strict=True)]
    geometry = causal_conv.geometry_of(name, tuple(whole), filters.shape, **arguments)
    before = given[0] if given else None
    before = before if axis_names[0] is None else _before(part, 1, axis_names[0], geometry.steps, before)
    part = causal_conv.after(before, part, geometry.steps)
    names = {i: axis for i, axis in enumerate(axis_names) if i}
    part, window = _with_halos(name, part, geometry.window, range(1, part.ndim - 1), names)
    return causal_conv.convolved(name, dataclasses.replace(geometry, window=window), part, filters, **how)


def halo_causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    axis_name,
    seq_idx: ArrayLike | None = None,
    initial_states: ArrayLike | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal convolution of this device's part of sequences that are split along time.

    Equals `jaxext.causal_conv1d` of the whole sequences.  Call it inside `jax.shard_map` or `jax.pmap`.  Each device sends its last k - 1
    inputs to the next device by one `jax.lax.ppermute` (two with `seq_idx`), or to several devices if it has fewer than k - 1 steps.

    Args:
      x: shape (..., T/n, C), this device's steps, floating-point.
      w: shape (k, C), the whole filter.
      bias: as in `jaxext.causal_conv1d`, whole.
      axis_name: a mesh or pmap axis of n devices, or a tuple of axes in mesh order, treated as one.
      seq_idx: shape (..., T/n), integers, this device's part.
      initial_states: shape (..., k - 1, C), those of the whole sequences.  With `seq_idx` they precede the first sequence of each row.
      activation, precision, implementation: as in `jaxext.causal_conv1d`.

    Returns:
      shape (..., T/n, C), this device's steps of the result, with the dtype of x.  All derivatives are supported.

    Examples:
      >>> mesh, split = jax.sharding.Mesh(jax.devices(), "time"), jax.P("time")
      >>> f = lambda x, w: halo_causal_conv1d(x, w, axis_name="time")
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
      >>> f(jnp.ones((32, 1)), jnp.ones((3, 1)))[:5, 0].tolist()
      [1.0, 2.0, 3.0, 3.0, 3.0]

    Raises:
      Exception: any error that `jaxext.causal_conv1d` raises.
      TypeError: `axis_name` is a list.
      ValueError: several axes are not in mesh order.
      NameError: no `shard_map` or `pmap` around the call binds the axis.
    """
    name = "halo_causal_conv1d"
    devices_along(axis_name, f"{name}: axis_name")
    arrays = {"x": x, "w": w} | checks.given(bias=bias, seq_idx=seq_idx)

    def convolve(**states):
        return causal.convolution(
            name, arrays | states, activation, return_final_states=False, precision=precision, implementation=implementation
        )

    # Traced for what it refuses, before shapes are relied on.
    jax.eval_shape(lambda: convolve(**checks.given(initial_states=initial_states)))
    steps, part = jnp.shape(w)[0] - 1, jnp.asarray(x)
    given = None if initial_states is None else jnp.asarray(initial_states)
    state = _before(part, part.ndim - 2, axis_name, steps, given)
    states = {"initial_states": state}
    if seq_idx is None:
        return convolve(**states)
    numbers = jnp.asarray(seq_idx)
    states["idx_of_states"] = state_numbers = edge(numbers, numbers.ndim - 1, axis_name, steps, before=True)
    if given is not None:  # the number of the given state is that of the first step
        begin = steps - lax.axis_index(axis_name) * part.shape[-2]  # where in the state of this device the first step of all lies
        seen = jnp.concatenate([state_numbers, numbers], -1)
        number = jnp.where(_positions(seen, -1) == begin, seen, 0).sum(-1, keepdims=True, dtype=seen.dtype)
        states["idx_of_states"] = jnp.where(_positions(state_numbers, -1) < begin, number, state_numbers)
    return convolve(**states)


def _before(x: jax.Array, axis: int, name: Hashable, steps: int, given: jax.Array | None) -> jax.Array:
    """The steps before those of this device: of the devices before it, and of a `given` state, or zeros, before the first of all."""
    state = edge(x, axis, name, steps, before=True)
    if given is None:
        return state
    first = lax.axis_index(name) * x.shape[axis]  # of this device's steps
    given = given.astype(x.dtype)
    own = lax.dynamic_slice_in_dim(lax.concatenate([given, jnp.zeros_like(given)], axis), first, steps, axis)
    return jnp.where(_positions(state, axis - x.ndim) < steps - first, own, state)


def _with_halos(name: str, x: jax.Array, window: Window, axes: Sequence[int], names: Mapping[int, Hashable]) -> tuple[jax.Array, Window]:
    """This device's part with its halo, and the window by which it is convolved.

    `window` is that of the whole, whose axes are the `axes` of x; `names` those that split some of them.
    """
    sizes = {i: devices_along(axis, name) for i, axis in names.items() if axis is not None}
    parts = {i: _part(name, window, i, names[i], n) for i, n in sizes.items() if n > 1}
    for i, part in parts.items():  # later axes also send the halos of earlier ones, so corners are included
        low, high = (edge(x, axes[i], names[i], part.halo[side], before=side == 0) for side in (0, 1))
        x = lax.concatenate([low, x, high], axes[i])
    paddings, dilations = list(window.padding), list(window.input_dilation)
    for i, part in parts.items():
        x = _take(x, axes[i], names[i], part)
        paddings[i], dilations[i] = part.padding, part.input_dilation
    held = tuple(x.shape[axis] for axis in axes)
    return x, dataclasses.replace(window, input=held, padding=tuple(paddings), input_dilation=tuple(dilations))


def _sizes(op, axis_names, rank, axes="spatial axes") -> list[int]:
    """The number of devices along each of these axes."""
    if isinstance(axis_names, str) or not isinstance(axis_names, Sequence) or len(axis_names) != rank:
        raise ValueError(f"{op}: axis_names is {format_value(axis_names)}, want one entry for each of {rank} {axes}")
    sizes = [1 if entry is None else devices_along(entry, f"{op}: axis_names[{i}]") for i, entry in enumerate(axis_names)]
    names = [name for entry in axis_names if entry is not None for name in (entry if isinstance(entry, tuple) else (entry,))]
    if len(set(names)) < len(names):
        raise ValueError(f"{op}: axis_names is {format_value(axis_names)}, want no mesh axis twice")
    return sizes


def _window(conv, image, filter):
    """The geometry of the convolution of the whole image.  Tracing it raises the usual errors for invalid arguments."""

    def products(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive in owner:
                yield eqn
            elif "jaxpr" in eqn.params:  # jax 0.11 and newer keep the operation in a jit
                yield from products(eqn.params["jaxpr"].jaxpr)

    jaxpr = jax.make_jaxpr(conv)(image, jax.ShapeDtypeStruct(filter.shape, filter.dtype)).jaxpr
    return next(products(jaxpr)).params["static"].window


def _part(op, window, i, name, n) -> Part:
    """Return how spatial axis i is convolved in n parts, which must have equally many outputs."""
    if window.output[i] % n:
        more = window.stride[i] * (-window.output[i] % n)
        raise ValueError(
            f"{op}: the output has {window.output[i]} rows along spatial axis {i}, want a multiple of {n}, the devices of"
            f" {name!r}: add {more} rows to the padding, which is {window.padding[i]}"
        )
    return Part.of(window, i, n)


def edge(x: jax.Array, axis: int, name: Hashable, rows: int, *, before: bool) -> jax.Array:
    """The last `rows` rows of all devices before this one, or the first of those behind it; zeros beyond the ends.

    A device that holds fewer sends them further, by one `ppermute` for each distance.
    """
    n, held, received = lax.axis_size(name), x.shape[axis], []
    for hops, take in enumerate(senders(rows, held, n), 1):
        begin = held - take if before else 0
        pairs = [(i, i + hops) if before else (i + hops, i) for i in range(n - hops)]
        received.append(lax.ppermute(lax.slice_in_dim(x, begin, begin + take, axis=axis), name, pairs))
    received = received or [lax.slice_in_dim(x, 0, 0, axis=axis)]  # beside others, jax 0.11 ends the process where nothing is jitted
    found = lax.concatenate(received[::-1] if before else received, axis)
    missing = rows - found.shape[axis]
    ends = (missing, 0, 0) if before else (0, missing, 0)
    return lax.pad(found, jnp.zeros((), x.dtype), [ends if i == axis else (0, 0, 0) for i in range(x.ndim)])


def _take(x, axis, name, part):
    """The rows that this part convolves, as `Part` describes.  The margin is outside the image, or is not read by any output."""
    edges = [(*part.margin, part.dilation - 1) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    if part.step == 0:
        return lax.slice_in_dim(x, part.first, part.first + part.rows, axis=axis)
    return lax.dynamic_slice_in_dim(x, part.first + part.step * lax.axis_index(name), part.rows, axis)


def _positions(x: jax.Array, axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis)
