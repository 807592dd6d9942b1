"""Causal convolutions along time, and along space: a whole, a chunk of one, or a frame.

    y[n,p,q,k] = Σ_{r,u,c} x̃[n, stride·p - (taps - 1 - r)·dilation, ..u.., c] w[r,u,c,k]

Time is the first axis of a convolution (`ops/conv`), without padding: the steps that its first frame reads lie before it, in the *state*.
So the form has the labels of a convolution and all of its rules.  The state is put before the form, by jnp.

A transposed convolution has s frames for each step.  These are s results of one convolution without strides, each of its own taps, so they
are channels of a form, too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._messages import format_value
from jaxext.core.checks import checked, refuse_kinds, refuse_shape
from jaxext.core.family import Family, declare
from jaxext.core.form import Form
from jaxext.core.window import Window, dilate
from jaxext.lax.dispatch import compiled, lax_params
from jaxext.ops.causal_conv.xla import XlaCausalConv
from jaxext.ops.conv import form as conv

FAMILY = declare(
    Family(
        "causal_conv",
        lax_primitive=lax.conv_general_dilated_p,
        names=r"causal_conv_\d+d",
        weights="w",
        axis_names=conv.FAMILY.axis_names,
        groups=conv.FAMILY.groups,
    ),
    XlaCausalConv(),
)


@functools.cache
def causal_form(rank: int) -> Form:
    """The form of a convolution with `rank` axes, the first of which is time."""
    return conv.defined(f"causal_conv_{rank}d", rank, FAMILY)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The geometry of a causal convolution, of all its axes, time first.

    Attributes:
      window: of the steps after a state, whose first axis has no padding.
      groups: of channels.
      steps: how many the state holds.
      upsampling: how many frames a step has.  If more than one, the taps of time are those of `phases`.
      dilation: of the taps that `phases` reads.
    """

    window: Window
    groups: int
    steps: int
    upsampling: int = 1
    dilation: int = 1

    def convolved(self, x: jax.Array, w: jax.Array, *, precision, implementation) -> jax.Array:
        """The result of (N, steps and T, *space, C) and a filter."""
        w = phases(w, self)
        window, rank = self.window, self.window.rank
        last, space = rank + 1, tuple(range(1, rank + 1))
        images = (0, last, *space)
        dtype = jnp.result_type(x, w)  # raises where the user wants no promotion
        product = functools.partial(
            lax.conv_general_dilated,
            window_strides=window.stride,
            padding=window.padding,
            lhs_dilation=window.input_dilation,
            rhs_dilation=window.filter_dilation,
            dimension_numbers=lax.ConvDimensionNumbers(images, (last, last - 1, *range(rank)), images),
            feature_group_count=self.groups,
            precision=precision,
        )
        params, _ = lax_params(product, *(jax.ShapeDtypeStruct(z.shape, dtype) for z in (x, w)))
        params |= dict(dtype=x.dtype, implementation=implementation, out_sharding=None)
        form, operands, static, arrangement = conv.arranged(x, w, **params, forms=causal_form)
        return interleaved(arrangement.to_lax(form.bind("y", operands, static)), self)


def phases(w: jax.Array, geometry: Geometry) -> jax.Array:
    """The filter of a transposed convolution as one of all frames of a step: (taps, *filter, C, K) -> (steps + 1, *filter, C, frames·K).

    Frame j of a step reads the tap that is j + i·frames before the last one from the step that is i before.
    """
    frames, groups, steps = geometry.upsampling, geometry.groups, geometry.steps + 1
    if frames == 1:
        return w
    front = frames * steps - dilate(w.shape[0], geometry.dilation)
    zero, others = np.zeros((), w.dtype), [(0, 0, 0)] * (w.ndim - 1)
    w = lax.pad(w, zero, [(front, 0, geometry.dilation - 1), *others])
    w = lax.rev(w.reshape((steps, frames, *w.shape[1:-1], groups, w.shape[-1] // groups)), (1,))
    return lax.collapse(jnp.moveaxis(w, 1, -2), w.ndim - 3)


def interleaved(y: jax.Array, geometry: Geometry) -> jax.Array:
    """The frames of all steps, from channels: (N, T, *space, frames·K) -> (N, T·frames, *space, K)."""
    frames = geometry.upsampling
    if frames == 1:
        return y
    groups = geometry.groups
    y = jnp.moveaxis(y.reshape((*y.shape[:-1], groups, frames, y.shape[-1] // groups // frames)), -2, 2)
    return lax.collapse(lax.collapse(y, y.ndim - 2), 1, 3)


def geometry_of(name: str, x: tuple[int, ...], w: tuple[int, ...], *, strides, padding, dilation, groups, transpose) -> Geometry:
    """The geometry of a call, from the shapes of x and of the filter.

    Raises:
      TypeError: shapes do not fit, or an argument is of another type.
      ValueError: an argument has another value, or the steps of x are no multiple of the stride.
    """
    if not 3 <= len(x) <= 5:
        raise TypeError(f"{name}: x has the shape {x}, want (N, T, *space, C) with at most two spatial axes")
    axes = len(x) - 2
    strides, dilation = _per_axis(name, "strides", strides, axes), _per_axis(name, "dilation", dilation, axes)
    if not isinstance(groups, int | np.integer) or isinstance(groups, bool):
        raise TypeError(f"{name}: groups is {format_value(groups)}, want an int")
    if groups < 1 or x[-1] % groups:
        raise ValueError(f"{name}: groups is {groups}, want a divisor of {x[-1]}, the channels of x")
    wanted = (*("k" for _ in range(axes)), x[-1] // groups, "K")
    if len(w) != len(x) or w[-2] != x[-1] // groups or 0 in w[:axes]:
        wanted = f"({', '.join(map(str, wanted))}) with at least one tap along each axis"
        raise TypeError(f"{name}: w has the shape {w}, want {wanted}, since x has the shape {x} and groups is {groups}")
    if w[-1] % groups:
        raise ValueError(f"{name}: w has {w[-1]} output channels, want a multiple of {groups}, the groups")
    if not transpose and x[1] % strides[0]:
        raise ValueError(f"{name}: x has {x[1]} steps, want a multiple of {strides[0]}, the stride along time")
    reach, up = (w[0] - 1) * dilation[0], strides[0] if transpose else 1
    steps = reach // up
    ones = (1,) * (axes - 1)
    window = Window(
        input=(steps + x[1], *x[2:-1]),
        filter=(w[0] if up == 1 else steps + 1, *w[1:axes]),
        stride=(1, *ones) if transpose else strides,
        padding=((0, 0), *_pads(name, x[2:-1], w[1:axes], strides[1:], padding, dilation[1:], transpose)),
        input_dilation=(1, *strides[1:]) if transpose else (1, *ones),
        filter_dilation=(dilation[0] if up == 1 else 1, *dilation[1:]),
    )
    return Geometry(window, int(groups), steps, up, dilation[0])


def _per_axis(name: str, argument: str, value: Any, axes: int) -> tuple[int, ...]:
    """Positive numbers, one for each axis."""
    each: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * axes
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in each):
        raise TypeError(f"{name}: {argument} is {format_value(value)}, want an int, or one for each of {axes} axes, time first")
    if len(each) != axes or min(each) < 1:
        raise ValueError(f"{name}: {argument} is {format_value(value)}, want a positive int, or one for each of {axes} axes, time first")
    return tuple(map(operator.index, each))


def _pads(name, space, filter, strides, padding, dilation, transpose) -> Sequence[tuple[int, int]]:
    """The padding of the axes of space, as lax reads it."""
    rank = len(space)
    if not (isinstance(padding, str) or isinstance(padding, Sequence) and len(padding) == rank):
        raise ValueError(f"{name}: padding is {format_value(padding)}, want a str, or a pair for each of {rank} spatial axes")
    names = ("SAME", "VALID") if transpose else ("SAME", "SAME_LOWER", "VALID")
    if isinstance(padding, str) and padding.upper() not in names:
        raise ValueError(f"{name}: padding is {format_value(padding)}, want one of {names}, or a pair for each of {rank} spatial axes")
    if not rank:
        return ()
    images, filters = (0, rank + 1, *range(1, rank + 1)), (rank + 1, rank, *range(rank))
    numbers = dict(dimension_numbers=lax.ConvDimensionNumbers(images, filters, images), rhs_dilation=dilation)
    padded = functools.partial(lax.conv_transpose if transpose else lax.conv_general_dilated, padding=padding, **numbers)
    product = functools.partial(padded, strides=strides) if transpose else functools.partial(padded, window_strides=strides)
    params, _ = lax_params(product, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, *space, 1), (*filter, 1, 1))))
    return params["padding"]


def convolution(name: str, arrays: Mapping[str, Any], *, return_state, precision, implementation, **geometry) -> Any:
    """`arrays`: x and w, and the state, if it is given.  `geometry`: the other arguments of `geometry_of`."""
    arrays = checked(name, arrays)
    for argument, value in (("return_state", return_state), ("transpose", geometry["transpose"])):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name}: {argument} is {format_value(value)}, want a bool")
    x, w = arrays["x"], arrays["w"]
    found = geometry_of(name, x.shape, w.shape, **geometry)
    for argument in ("x", "w"):
        if not jnp.issubdtype(arrays[argument].dtype, jnp.inexact):
            raise TypeError(f"{name}: {argument} is {arrays[argument].dtype}, want floating-point numbers")
    refuse_kinds(name, arrays, x.dtype)
    if "state" in arrays:
        refuse_shape(name, "state", arrays["state"], (x.shape[0], found.steps, *x.shape[2:]), "the steps before the first of x")
    key = (found, bool(return_state))
    return compiled(_convolution, key, FAMILY, implementation, tuple(arrays.values()), {"precision": precision}, name=name)


def convolved(name: str, geometry: Geometry, x: jax.Array, w: jax.Array, *, precision, implementation) -> jax.Array:
    """`Geometry.convolved`, as a call of an operation."""
    return compiled(Geometry.convolved, (geometry,), FAMILY, implementation, (x, w), {"precision": precision}, name=name)


def _convolution(geometry: Geometry, return_state: bool, x, w, state=None, *, precision, implementation):
    seen = after(state, x, geometry.steps)
    # The new state is a part of an array that is made in any case.  Made of the old one, it would be a copy of it inside `lax.scan`.
    seen = lax.optimization_barrier(seen) if return_state else seen
    y = geometry.convolved(seen, w, precision=precision, implementation=implementation)
    return (y, lax.slice_in_dim(seen, seen.shape[1] - geometry.steps, seen.shape[1], axis=1)) if return_state else y


def after(state: jax.Array | None, x: jax.Array, steps: int) -> jax.Array:
    """Return x with the state before it, of so many steps, or zeros."""
    if state is None:
        return lax.pad(x, np.zeros((), x.dtype), [(steps if axis == 1 else 0, 0, 0) for axis in range(x.ndim)])
    return jnp.concatenate([state.astype(x.dtype), x], 1)


for _rank in (1, 2, 3):
    causal_form(_rank)
