"""Convolutions with halo exchange: each device exchanges the edges of its part of an image or of a sequence with its neighbours.

Along one axis, part i of n convolves its own rows and a halo,

    y_i = conv([last rows of x_{i-1}, x_i, first rows of x_{i+1}], w).

`parallel/shards` computes the size of the halo.  The first and the last part have one neighbour; `ppermute` gives them zeros on the other
side, which pad the image.  All steps are linear and have JAX's rules, so each derivative is a convolution with halo exchange too.  Of a
causal convolution the last inputs of each part are the state of the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext._compat import align_varying
from jaxext._messages import format_value
from jaxext.core import checks
from jaxext.core.form import owner
from jaxext.ops.causal import form as causal
from jaxext.ops.conv import conv_general_dilated as one_device
from jaxext.ops.long_conv import form as long
from jaxext.ops.long_conv import long_conv
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

    The result equals `jaxext.conv_general_dilated` of the whole image.  Call it inside `jax.shard_map` or `jax.pmap`, but not over an axis
    named by `jax.vmap`, whose `ppermute` supports full rings only.  Along each split axis with input H and output P, device i of D holds
    rows [i·H/D, (i+1)·H/D) of the image and returns rows [i·P/D, (i+1)·P/D) of the result.  Its halo comes from its two neighbours, by one
    `jax.lax.ppermute` each way, with as many rows on all devices as any needs; what they do not hold comes from further devices, by one
    for each distance.  The convolution starts when all rows have arrived.

    Args:
      x: shape (N, C, H/D, ...), this device's part of the input, of n spatial axes, floating-point or integer; `dimension_numbers` may put
        the axes in another order.
      w: shape (O, I, R, ...), the whole filter.
      padding: 'SAME', 'SAME_LOWER', 'VALID' or n (low, high) pairs, of the whole image.  Negative padding crops.
      axis_names: one entry per spatial axis, in the order of `window_strides`: the mesh axis that splits it, a tuple of axes in mesh
        order, or None if it is not split.
      window_strides, lhs_dilation, rhs_dilation, dimension_numbers: as in `jaxext.conv_general_dilated`.
      feature_group_count, batch_group_count: as in `jaxext.conv_general_dilated`.
      precision, preferred_element_type, implementation: as in `jaxext.conv_general_dilated`.

    Returns:
      shape (N, O, P/D, ...), this device's part of the convolution, with the dtype of `jaxext.conv_general_dilated`.  All derivatives are
      supported, in both modes.  With `check_vma=True` the gradient of a replicated filter is summed over the devices.  With
      `check_vma=False`, and in `pmap`, the caller must do that `psum`.  If an automatic axis splits the filter's output channels, XLA sums
      the image's gradient with its halo; a `shard_map` over both axes sends less.

    Raises:
      Exception: any error that `jaxext.conv_general_dilated` raises for the whole image.
      ValueError: a mesh axis does not divide an output evenly, or `axis_names` is invalid.
      TypeError: `axis_names` holds a list of axes.
      NameError: an axis is not bound.

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
    sizes = _sizes(axis_names, len(spatial))
    image = list(x.shape)
    for axis, n in zip(spatial, sizes, strict=True):
        image[axis] *= n
    window = _window(functools.partial(conv, padding=padding, lhs_dilation=lhs_dilation), jax.ShapeDtypeStruct(image, x.dtype), w)
    parts = {i: _part(window, i, axis_names[i], n) for i, n in enumerate(sizes) if n > 1}
    # Align before the exchange: otherwise the gradient's psum over devices that split the filter's channels would include the halo.
    x, w = align_varying(x, w)
    for i, part in parts.items():  # later axes also send the halos of earlier ones, so corners are included
        low, high = (edge(x, spatial[i], axis_names[i], part.halo[side], before=side == 0) for side in (0, 1))
        x = lax.concatenate([low, x, high], spatial[i])
    paddings, dilations = list(window.padding), list(window.input_dilation)
    for i, part in parts.items():
        x = _take(x, spatial[i], axis_names[i], part)
        paddings[i], dilations[i] = part.padding, part.input_dilation
    return conv(x, w, padding=paddings, lhs_dilation=dilations)


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

    Equals `jaxext.causal_conv1d` of the whole.  Call it inside `jax.shard_map` or `jax.pmap`.  Each device sends its last k - 1 inputs to
    the next one, by one `jax.lax.ppermute` (with `seq_idx`, two).  If it has fewer, it sends them to as many devices as read them.

    Args:
      x: shape (..., T/n, C), this device's steps, floating-point.
      w: shape (k, C), the whole filter.
      bias, activation, precision, implementation: as in `jaxext.causal_conv1d`, whole.
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

    def convolve(**states):
        return causal.convolution(
            name, arrays | states, activation, return_final_states=False, precision=precision, implementation=implementation
        )

    # Traced for what it refuses, before shapes are relied on.
    jax.eval_shape(lambda: convolve(**checks.given(initial_states=initial_states)))
    steps, part = jnp.shape(w)[0] - 1, jnp.asarray(x)
    state = edge(part, part.ndim - 2, axis_name, steps, before=True)  # zeros for the first
    states = {"initial_states": state}
    if seq_idx is not None:
        numbers = jnp.asarray(seq_idx)
        states["idx_of_states"] = state_numbers = edge(numbers, numbers.ndim - 1, axis_name, steps, before=True)
    if initial_states is None:
        return convolve(**states)
    first = lax.axis_index(axis_name) * part.shape[-2]  # of this device's steps
    begin = steps - first  # where in its state the first step of all lies
    given = jnp.asarray(initial_states).astype(part.dtype)
    own = lax.dynamic_slice_in_dim(jnp.concatenate([given, jnp.zeros_like(given)], -2), first, steps, given.ndim - 2)
    states["initial_states"] = jnp.where(_positions(state, -2) < begin, own, state)
    if seq_idx is not None:  # the number of the given state is that of the first step
        seen = jnp.concatenate([state_numbers, numbers], -1)
        number = jnp.where(_positions(seen, -1) == begin, seen, 0).sum(-1, keepdims=True, dtype=seen.dtype)
        states["idx_of_states"] = jnp.where(_positions(state_numbers, -1) < begin, number, state_numbers)
    return convolve(**states)


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
    taps, (before, behind) = long.reach(n * steps, w.shape[0], causal)
    dtype = long.summed_dtype(optional, x.dtype)
    x, w = align_varying(x, w[taps])

    def summed(padding, x, w):
        return long.program(name, padding, dtype, x, w, **how)

    sent = sum(map(sum, (senders(rows, steps, n) for rows in (before, behind))))
    if w.ndim == 2 and channels % n == 0 and sent * n > 2 * (n - 1) * steps:
        own = channels // n
        turned = lax.all_to_all(x, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)
        w = lax.dynamic_slice_in_dim(w, lax.axis_index(axis_name) * own, own, 1)
        y = lax.all_to_all(summed((before, behind), turned, w), axis_name, x.ndim - 2, x.ndim - 1, tiled=True)
    else:
        low, high = (edge(x, x.ndim - 2, axis_name, rows, before=rows_before) for rows, rows_before in ((before, True), (behind, False)))
        y = summed((0, 0), lax.concatenate([low, x, high], x.ndim - 2), w)
    return long.combined(y, {"x": x, **optional})


def _sizes(axis_names, rank) -> list[int]:
    """The number of devices along each spatial axis."""
    if isinstance(axis_names, str) or not isinstance(axis_names, Sequence) or len(axis_names) != rank:
        raise ValueError(f"halo_conv: axis_names is {format_value(axis_names)}, want one entry for each of {rank} spatial axes")
    sizes = [1 if entry is None else devices_along(entry, f"halo_conv: axis_names[{i}]") for i, entry in enumerate(axis_names)]
    names = [name for entry in axis_names if entry is not None for name in (entry if isinstance(entry, tuple) else (entry,))]
    if len(set(names)) < len(names):
        raise ValueError(f"halo_conv: axis_names is {format_value(axis_names)}, want no mesh axis twice")
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


def _part(window, i, name, n) -> Part:
    """Return how spatial axis i is convolved in n parts, which must have equally many outputs."""
    if window.output[i] % n:
        more = window.stride[i] * (-window.output[i] % n)
        raise ValueError(
            f"halo_conv: the output has {window.output[i]} rows along spatial axis {i}, want a multiple of {n}, the devices of"
            f" {name!r}: {more} rows of padding more would do, it is {window.padding[i]}"
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
    """The position of each element along an axis."""
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis)
