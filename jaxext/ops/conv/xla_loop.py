"""A convolution with groups or batched filters as one dense convolution for each b and g, in a loop."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv import xla_lax as conv_lax
from jaxext.ops.conv.xla_lax import dense_fprop, dense_wgrad
from jaxext.ops.conv.xla_views import outputs_first, outputs_last, pair, repeat, zeros
from jaxext.ops.conv.xla_work import Conv, Work


def loop_fprop(x, w, window: Window, *, precision, preferred):
    """One dense convolution for each b and g, in a loop."""
    B, G, K = w.shape[:3]
    C = x.shape[-1]
    x, w = x.reshape(x.shape[:-2] + (-1,)), outputs_last(w)

    def step(i, y):
        b, g = pair(i, B, G)
        part = dense_fprop(_part(x, b, g, C), _part(w, b, g, K), window, precision, preferred)
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
        part = dense_wgrad(_part(x, b, g, C), _part(y, b, g, K), window, precision, preferred)
        return lax.dynamic_update_slice(w, part[None], _starts(w, b, g, K), allow_negative_indices=False)

    w = repeat(B * G, step, zeros((B,) + window.filter + (C, G * K), preferred or x.dtype, x, y))
    return outputs_first(w, G)


def _starts(x, b, g, channels):
    return [b, *[np.int32(0)] * (x.ndim - 2), g * np.int32(channels)]


def _part(x, b, g, channels):
    """(B, ..., G·channels) -> (..., channels)"""
    return lax.dynamic_slice(x, _starts(x, b, g, channels), (1,) + x.shape[1:-1] + (channels,), allow_negative_indices=False)[0]


def work(conv: Conv) -> Work | None:
    if conv.groups == 1 or not conv.window.rank:
        return None
    one = dataclasses.replace(conv, B=1, G=1, dtype=np.dtype(np.float32), dgrad=False)
    step = conv_lax.work(one) if conv.window.rank < 3 else conv_lax.work_of_xla(one)  # Eigen's has three axes only outside of loops
    elements, size = conv.x + conv.w + conv.y, conv.dtype.itemsize
    converted = 4 * elements if conv.short else 0
    return dataclasses.replace(step.times(conv.groups), programs=1, fusions=4, bytes=step.bytes) + Work(
        steps=conv.groups,
        gathered_in_loop=step.gathered_uneven * conv.groups,
        rows_in_loop=(step.results + step.spread) * conv.groups,
        transposed=size * elements,
        copied=1.5 * converted,
        bytes=size * (elements / conv.groups + conv.w) + converted,
    )
