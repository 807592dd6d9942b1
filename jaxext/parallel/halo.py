"""Convolution of an image whose spatial axes are split over devices: each exchanges the edges of its part with its neighbours.

Along one axis, part i of n convolves its own rows and a halo,

    y_i = conv([last rows of x_{i-1}, x_i, first rows of x_{i+1}], w),

and `parallel/shards` says how many rows those are.  What surrounds the image is zero, as is what `ppermute` hands to the first and the last
part, who have one neighbour.  All that is linear and has JAX's rules, so every derivative is a convolution with an exchange too.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxext import ops
from jaxext._compat import align_varying
from jaxext.forms.form import owner
from jaxext.parallel.axes import devices_along
from jaxext.parallel.shards import Part


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
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
    """Convolution of an image whose spatial axes are split over devices, as `jaxext.conv_general_dilated` of the whole image.

    Call it inside `jax.shard_map` or `jax.pmap`; an axis that `jax.vmap` names will not do, for its `ppermute` takes rings alone.  Along
    each split axis with input H and output P, device i of D holds rows [i·H/D, (i+1)·H/D) of the image and returns rows
    [i·P/D, (i+1)·P/D) of the result.  Rows that it reads beyond its own come from its two neighbours, by one `jax.lax.ppermute` each way,
    as many as any device needs.  The convolution begins when all have arrived.

    Args:
      lhs: this device's part of the input, of rank n + 2.
      rhs: the whole filter, of rank n + 2.
      padding: 'SAME', 'SAME_LOWER', 'VALID' or n (low, high) pairs, of the whole image; negative padding crops.
      axis_names: one entry per spatial axis, in the order of `window_strides`: the mesh axis that splits it, a tuple of several in the
        order of their mesh, or None where it is whole.
      window_strides, lhs_dilation, rhs_dilation, dimension_numbers: as in `jaxext.conv_general_dilated`.
      feature_group_count, batch_group_count: as there.
      precision, preferred_element_type, implementation: as there.

    Returns:
      this device's part of the convolution.  It has every derivative in both modes.  With `check_vma=True` the gradient of a filter that
      is the same on all devices is summed over them; with `check_vma=False`, and in `pmap`, that `psum` is the caller's.  Where an axis
      that is automatic splits the filter's output channels, XLA sums the gradient of the image with its halo; a `shard_map` over both axes
      sends less.

    Raises:
      Exception: whatever `jaxext.conv_general_dilated` raises for the whole image.
      ValueError: the devices of a mesh axis do not divide an output, a device would need rows from beyond its neighbours, or
        `axis_names` is wrong.
      TypeError: `axis_names` holds a list of axes.
      NameError: an axis is not bound.

    Examples:
      >>> mesh, split = jax.make_mesh((jax.device_count(),), ("rows",)), jax.P(None, "rows")
      >>> conv = functools.partial(conv_general_dilated, window_strides=(2, 2), padding="SAME", axis_names=("rows", None))
      >>> conv = functools.partial(conv, dimension_numbers=("NHWC", "HWIO", "NHWC"))
      >>> conv = jax.jit(jax.shard_map(conv, mesh=mesh, in_specs=(split, jax.P()), out_specs=split))
      >>> conv(jax.device_put(jnp.ones((2, 64, 32, 3)), jax.NamedSharding(mesh, split)), jnp.ones((5, 5, 3, 16))).shape
      (2, 32, 16, 16)
    """
    conv = functools.partial(
        ops.conv_general_dilated,
        window_strides=window_strides,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    spatial = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers).lhs_spec[2:]
    sizes = _sizes(axis_names, len(spatial))
    image = list(lhs.shape)
    for axis, n in zip(spatial, sizes, strict=True):
        image[axis] *= n
    window = _window(functools.partial(conv, padding=padding, lhs_dilation=lhs_dilation), jax.ShapeDtypeStruct(image, lhs.dtype), rhs)
    parts = {i: _part(window, i, axis_names[i], n) for i, n in enumerate(sizes) if n > 1}
    # Before the exchange, or the gradient of the image would be summed, over devices that split the filter's channels, with its halo.
    lhs, rhs = align_varying(lhs, rhs)
    for i, part in parts.items():  # the later ones send the halos of the earlier, so corners come along
        lhs = _exchange(lhs, spatial[i], axis_names[i], part)
    paddings, dilations = list(window.padding), list(window.input_dilation)
    for i, part in parts.items():
        lhs = _take(lhs, spatial[i], axis_names[i], part)
        paddings[i], dilations[i] = part.padding, part.input_dilation
    return conv(lhs, rhs, padding=paddings, lhs_dilation=dilations)


def _sizes(axis_names, rank) -> list[int]:
    """The number of devices along each spatial axis."""
    if isinstance(axis_names, str) or not isinstance(axis_names, Sequence) or len(axis_names) != rank:
        raise ValueError(f"conv_general_dilated: axis_names is {axis_names!r}, want one entry for each of {rank} spatial axes")
    sizes = [1 if entry is None else devices_along(entry, f"conv_general_dilated: axis_names[{i}]") for i, entry in enumerate(axis_names)]
    names = [name for entry in axis_names if entry is not None for name in (entry if isinstance(entry, tuple) else (entry,))]
    if len(set(names)) < len(names):
        raise ValueError(f"conv_general_dilated: axis_names is {axis_names!r}, want no mesh axis twice")
    return sizes


def _window(conv, image, filter):
    """The geometry of the convolution of the whole image, whose trace refuses what is to be refused."""

    def products(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive in owner:
                yield eqn
            elif "jaxpr" in eqn.params:  # on jax 0.11 and newer an operation stands in a jit
                yield from products(eqn.params["jaxpr"].jaxpr)

    jaxpr = jax.make_jaxpr(conv)(image, jax.ShapeDtypeStruct(filter.shape, filter.dtype)).jaxpr
    return next(products(jaxpr)).params["window"]


def _part(window, i, name, n) -> Part:
    """How spatial axis i is convolved in n parts, if that can be: each part has as many outputs, and the neighbours hold its halo."""
    if window.output[i] % n:
        more = window.stride[i] * (-window.output[i] % n)
        raise ValueError(
            f"conv_general_dilated: the output has {window.output[i]} rows along spatial axis {i}, want a multiple of {n}, the devices of"
            f" {name!r}: {more} rows of padding more would do, it is {window.padding[i]}"
        )
    part, held = Part.of(window, i, n), window.input[i] // n
    if max(part.halo) > held:
        raise ValueError(
            f"conv_general_dilated: along spatial axis {i}, whose {window.input[i]} rows {name!r} splits over {n} devices, a device reads"
            f" {part.halo[0]} rows before and {part.halo[1]} behind its own, want at most the {held} of a neighbour: take fewer devices or"
            " a larger image"
        )
    return part


def _exchange(x, axis, name, part):
    """These rows, the last of those before them and the first of those behind them: zeros where there are none."""
    n, held, (low, high) = lax.axis_size(name), x.shape[axis], part.halo
    rows = [x]
    if low:
        rows.insert(0, lax.ppermute(lax.slice_in_dim(x, held - low, held, axis=axis), name, [(i, i + 1) for i in range(n - 1)]))
    if high:
        rows.append(lax.ppermute(lax.slice_in_dim(x, 0, high, axis=axis), name, [(i + 1, i) for i in range(n - 1)]))
    return lax.concatenate(rows, axis)


def _take(x, axis, name, part):
    """The rows that this part convolves, as `Part` says.  The margin lies outside of the image, or where no output reads."""
    edges = [(*part.margin, part.dilation - 1) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    if part.step == 0:
        return lax.slice_in_dim(x, part.first, part.first + part.rows, axis=axis)
    return lax.dynamic_slice_in_dim(x, part.first + part.step * lax.axis_index(name), part.rows, axis)
