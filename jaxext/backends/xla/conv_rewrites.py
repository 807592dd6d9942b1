"""Rewrites of convolutions in plain XLA ops, for cases that lax's own convolution computes slowly or wrongly.

Each computes, for arrays with one axis per label,

    y[b,n,p,g,k] = Σ_{r,c} view_r(x)[b,n,p,g,c] · w[b,g,k,r,c]        view_r(x)[p] = x̃[stride·p + filter_dilation·r]

or the same form with w open.  `view` is the input as filter tap r sees it.  It contains all the geometry, so every rewrite supports every
window.  Sums are accumulated in `acc`; the caller rounds them.

A convolution inside a loop is as fast on CPUs as outside only in XLA's own layout, NHWC with the filter HWIO.  In other layouts it is some
fifteen times slower.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.forms.window import Window, dilate

# More taps than this become a loop, since compile time grows with the program.
UNROLLED_TAPS = 64


def view(x, window: Window, tap, lead=2):
    """x as filter tap `tap` sees it.  The spatial axes come after `lead` others, and become those of the output."""
    config = [(0, 0, 0)] * x.ndim
    for axis, (r, i, o, (low, _), s, di, dr) in enumerate(_axes(window, tap), lead):
        before = low - dr * r
        config[axis] = (before, s * (o - 1) + 1 - dilate(i, di) - before, di - 1)
    return _stride(lax.pad(x, _zero(x), config), window, lead)


def padded(x, window: Window, lead=2):
    """x̃: x dilated and padded, once for all taps."""
    config = [(0, 0, 0)] * x.ndim
    config[lead : lead + window.rank] = [(low, high, d - 1) for (low, high), d in zip(window.padding, window.input_dilation, strict=True)]
    return lax.pad(x, _zero(x), config)


def view_of_padded(x, window: Window, tap, lead=2):
    """The `view` of an already `padded` x.  `tap` may be traced."""
    start, size = [0] * x.ndim, list(x.shape)
    for axis, (r, _, o, _, s, _, dr) in enumerate(_axes(window, tap), lead):
        start[axis], size[axis] = dr * r, s * (o - 1) + 1
    if all(isinstance(i, int) for i in start):
        return lax.slice(x, start, [i + n for i, n in zip(start, size, strict=True)], _strides(x, window, lead))
    x = lax.dynamic_slice(x, [lax.convert_element_type(i, np.int32) for i in start], size)
    return _stride(x, window, lead)


def _axes(window, tap):
    return zip(tap, window.input, window.output, window.padding, window.stride, window.input_dilation, window.filter_dilation, strict=True)


def _stride(x, window, lead):
    return x if set(window.stride) <= {1} else lax.slice(x, [0] * x.ndim, x.shape, _strides(x, window, lead))


def _strides(x, window, lead):
    return [1] * lead + list(window.stride) + [1] * (x.ndim - lead - window.rank)


def _zero(x):
    return np.zeros((), x.dtype)


def taps_of(window: Window):
    return itertools.product(*map(range, window.filter))


def zeros(shape, dtype, *operands):
    """Zeros that vary over the same manual axes as the operands, as results and loop carries must."""
    total = np.zeros((), np.int32)
    for x in operands:
        nothing = lax.slice_in_dim(x, 0, 0)
        total = total + lax.reduce_sum(lax.convert_element_type(lax.ne(nothing, nothing), np.int32), tuple(range(x.ndim)))
    return lax.broadcast(lax.convert_element_type(total, dtype), shape)


def add(a, b):
    """The sum.  For booleans it is `or`, as in XLA's own products."""
    return lax.bitwise_or(a, b) if a.dtype == bool else lax.add(a, b)


def dots_fprop(x, w, window: Window, *, acc, precision):
    """The sum over filter taps of a dot, batched over B and G.

    The dot's batch, contracted and free axes are whole labels.  XLA's partitioner therefore splits it correctly, unlike a grouped
    convolution.
    """
    w = w.reshape(w.shape[:3] + (-1, w.shape[-1]))  # (B, G, K, taps, C)
    batch, inner = ((0, x.ndim - 2), (0, 1)), ((x.ndim - 1,), (3,))
    dot = functools.partial(lax.dot_general, dimension_numbers=(inner, batch), precision=precision, preferred_element_type=acc)
    if w.shape[3] <= UNROLLED_TAPS:
        terms = (dot(view(x, window, tap), w[:, :, :, t]) for t, tap in enumerate(taps_of(window)))
        y = functools.reduce(add, terms)
    else:
        x = padded(x, window)

        def step(y, t):
            return add(y, dot(view_of_padded(x, window, _unravel(t, window)), lax.dynamic_index_in_dim(w, t, 3, keepdims=False))), None

        shape = (x.shape[0], x.shape[-2], x.shape[1], *window.output, w.shape[2])
        y, _ = lax.scan(step, zeros(shape, acc, x, w), np.arange(w.shape[3], dtype=np.int32))
    return jnp.moveaxis(y, 1, -2)  # (B, G, N, *output, K)


def dots_wgrad(x, y, window: Window, *, acc, precision):
    """A dot for each filter tap, batched over B and G, stacked."""
    space = tuple(range(1, y.ndim - 2))
    batch = (0, y.ndim - 2)
    dot = functools.partial(
        lax.dot_general, y, dimension_numbers=((space, space), (batch, batch)), precision=precision, preferred_element_type=acc
    )
    count = math.prod(window.filter)
    if count <= UNROLLED_TAPS:
        w = jnp.stack([dot(view(x, window, tap)) for tap in taps_of(window)], 3)  # (B, G, K, taps, C)
    else:
        x = padded(x, window)
        w = lax.map(lambda t: dot(view_of_padded(x, window, _unravel(t, window))), np.arange(count, dtype=np.int32))
        w = jnp.moveaxis(w, 0, 3)
    return w.reshape(w.shape[:3] + window.filter + w.shape[4:])


def _unravel(t, window):
    """The tap with the traced index `t` in the order of `taps_of`."""
    tap = []
    for n in reversed(window.filter):
        tap.append(t % n)
        t = t // n
    return tap[::-1]


def dense(open, a, b, window: Window, *, precision, preferred):
    """A convolution without batch and groups, in XLA's own layout."""
    if open == "w":
        return outputs_first(_wgrad(a[0, ..., 0, :], b[0, ..., 0, :], window, precision, preferred)[None], 1)
    return jnp.expand_dims(_dense(a[0, ..., 0, :], jnp.moveaxis(b[0, 0], 0, -1), window, precision, preferred), (0, -2))


def loop_fprop(x, w, window: Window, *, precision, preferred):
    """One dense convolution for each b and g, in a loop."""
    B, G, K = w.shape[:3]
    C = x.shape[-1]
    x, w = x.reshape(x.shape[:-2] + (-1,)), outputs_last(w)

    def step(i, y):
        b, g = pair(i, B, G)
        part = _dense(_part(x, b, g, C), _part(w, b, g, K), window, precision, preferred)
        return lax.dynamic_update_slice(y, part[None], _starts(y, b, g, K), allow_negative_indices=False)

    y = zeros((B, x.shape[1]) + window.output + (G * K,), preferred or x.dtype, x, w)
    return repeat(B * G, step, y).reshape(y.shape[:-1] + (G, K))


def loop_wgrad(x, y, window: Window, *, precision, preferred):
    """As `loop_fprop`, with x as the image, whose channels are the batch, and y as the filter."""
    B, G, K = y.shape[0], *y.shape[-2:]
    C = x.shape[-1]
    x, y = (a.reshape(a.shape[:-2] + (-1,)) for a in (x, y))

    def step(i, w):
        b, g = pair(i, B, G)
        part = _wgrad(_part(x, b, g, C), _part(y, b, g, K), window, precision, preferred)
        return lax.dynamic_update_slice(w, part[None], _starts(w, b, g, K), allow_negative_indices=False)

    w = repeat(B * G, step, zeros((B,) + window.filter + (C, G * K), preferred or x.dtype, x, y))
    return outputs_first(w, G)


def _wgrad(x, y, window, precision, preferred):
    """(N, *input, C) and (N, *output, K) -> (*filter, C, K)"""
    window = dataclasses.replace(window, stride=window.filter_dilation, filter_dilation=window.stride, padding=window.read)
    images, filters = jnp.moveaxis(x, (0, -1), (-1, 0)), jnp.moveaxis(y, 0, -2)
    return jnp.moveaxis(_dense(images, filters, window, precision, preferred), 0, -2)


def repeat(count, step, total):
    """Runs `total = step(i, total)` for i < count.  i is an int32 even under x64."""
    return lax.fori_loop(0, count, lambda i, total: step(lax.convert_element_type(i, np.int32), total), total)


def pair(i, B, G):
    """b and g of step i."""
    zero = np.int32(0)
    return (i, zero) if G == 1 else (zero, i) if B == 1 else (lax.div(i, np.int32(G)), lax.rem(i, np.int32(G)))


def _starts(x, b, g, channels):
    return [b, *[np.int32(0)] * (x.ndim - 2), g * np.int32(channels)]


def _part(x, b, g, channels):
    """(B, ..., G·channels) -> (..., channels)"""
    return lax.dynamic_slice(x, _starts(x, b, g, channels), (1,) + x.shape[1:-1] + (channels,), allow_negative_indices=False)[0]


def outputs_last(w):
    """(B, G, K, *filter, C) -> (B, *filter, C, G·K)

    G and K are merged before they move, so that XLA sees that an HWIO filter is already in this order, and does not copy it.
    """
    B, inner = w.shape[0], w.shape[3:]
    if B == 1:
        return jnp.moveaxis(w.reshape((-1,) + inner), 0, -1)[None]
    return jnp.moveaxis(w.reshape((B, -1) + inner), 1, -1)


def outputs_first(w, G):
    """The inverse of `outputs_last`."""
    B, inner = w.shape[0], w.shape[1:-1]
    w = jnp.moveaxis(w[0], -1, 0) if B == 1 else jnp.moveaxis(w, -1, 1)
    return w.reshape((B, G, -1) + inner)


def _dense(x, w, window, precision, preferred):
    """lax's convolution of (N, *input, C) and (*filter, C, K)."""
    last, space = window.rank + 1, tuple(range(1, window.rank + 1))
    numbers = lax.ConvDimensionNumbers((0, last, *space), (last, last - 1, *range(window.rank)), (0, last, *space))
    return lax.conv_general_dilated(
        x, w, window.stride, window.padding, window.input_dilation, window.filter_dilation, numbers,
        precision=precision, preferred_element_type=preferred,
    )  # fmt: skip
