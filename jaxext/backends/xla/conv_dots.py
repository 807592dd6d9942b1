"""A convolution as products of matrices, one for each tap of the filter, batched over B and G."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.backends.xla.conv_views import add, padded, padded_size, repeat, taps_of, view, view_of_padded, zeros
from jaxext.backends.xla.conv_work import Conv, Work, matrix_product
from jaxext.forms.window import Window


def dots_fprop(x, w, window: Window, *, acc, precision, most: int):
    """The sum over filter taps of a dot, batched over B and G, in a loop if there are more than `most` taps.

    The dot's batch, contracted and free axes are whole labels.  XLA's partitioner therefore splits it correctly, unlike a grouped
    convolution.
    """
    w = w.reshape(w.shape[:3] + (-1, w.shape[-1]))  # (B, G, K, taps, C)
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=acc)
    if w.shape[3] <= most:
        numbers = (((x.ndim - 1,), (3,)), ((0, x.ndim - 2), (0, 1)))
        y = functools.reduce(add, (dot(view(x, window, tap), w[:, :, :, t], numbers) for t, tap in enumerate(taps_of(window))))
    else:
        (B, G, K), N = w.shape[:3], x.shape[1]
        x, w = lax.optimization_barrier((_padded(x, window), jnp.moveaxis(w, (3, 4), (0, 3))))

        def step(t, y):
            weights = lax.dynamic_index_in_dim(w, t, 0, keepdims=False, allow_negative_indices=False)
            return add(y, dot(_view(x, window, t), weights, (((3,), (2,)), ((0, 1), (0, 1)))))

        y = repeat(w.shape[0], step, zeros((B, G, N * math.prod(window.output), K), acc, x, w)).reshape((B, G, N, *window.output, K))
    return jnp.moveaxis(y, 1, -2)  # (B, G, N, *output, K)


def dots_wgrad(x, y, window: Window, *, acc, precision, most: int):
    """A dot for each filter tap, batched over B and G, stacked, in a loop if there are more than `most` taps."""
    space, taps = tuple(range(1, y.ndim - 2)), math.prod(window.filter)
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=acc)
    if taps <= most:
        numbers = ((space, space), ((0, y.ndim - 2), (0, y.ndim - 2)))
        w = jnp.stack([dot(y, view(x, window, tap), numbers) for tap in taps_of(window)], 3)  # (B, G, K, taps, C)
    else:
        B, G, K = y.shape[0], *y.shape[-2:]
        x, y = lax.optimization_barrier((_padded(x, window), jnp.moveaxis(y, (-2, -1), (1, 2)).reshape((B, G, K, -1))))

        def step(t, w):
            new = dot(y, _view(x, window, t), (((3,), (2,)), ((0, 1), (0, 1))))
            return lax.dynamic_update_index_in_dim(w, new, t, 0, allow_negative_indices=False)

        w = jnp.moveaxis(repeat(taps, step, zeros((taps, B, G, K, x.shape[-1]), acc, x, y)), 0, 3)
    return w.reshape(w.shape[:3] + window.filter + w.shape[4:])


# More taps than this become a loop, since compile time grows with the program.
UNROLLED_TAPS = 64


def most_unrolled(open: str, C: int) -> int:
    """The most taps that are not a loop on CPUs, where a loop takes less memory, and as much time.

    XLA computes dots without input channels as one sum of products, for which no inputs are copied.
    """
    return UNROLLED_TAPS if open == "y" and C == 1 else 1


def _padded(x, window):
    """(B, N, *input, G, C) -> (B, G, N, *padded input, C), of which each view is copied without a transposition."""
    return padded(jnp.moveaxis(x, -2, 1), window, lead=3)


def _view(x, window, t):
    """The view of the tap with the traced index `t` in the order of `taps_of`: (B, G, N·output, C)."""
    tap, inner = [], math.prod(window.filter)
    for n in window.filter:
        inner //= n
        tap.append(lax.rem(lax.div(t, np.int32(inner)), np.int32(n)))
    seen = view_of_padded(x, window, tap, lead=3)
    return seen.reshape((*seen.shape[:2], -1, seen.shape[-1]))


def work(conv: Conv) -> Work | None:
    window, groups, C, K, size = conv.window, conv.groups, conv.C, conv.K, conv.dtype.itemsize
    padded_inside = any(map(any, window.padding))
    if conv.dilated or conv.open == "w" and conv.G > 1 and padded_inside:  # an infinity of y would meet zeros
        return None
    fprop, in_loop = conv.open == "y", conv.taps > most_unrolled(conv.open, C)
    if fprop and C == 1:
        return None if in_loop else Work(programs=1, fusions=1 + conv.taps / 8, reduced=conv.products, copied=size * (conv.x + conv.y))
    positions = groups * conv.N * conv.outputs
    view, rows = size * positions * C, positions * conv.taps
    copied = in_loop or groups > 1 or max(window.stride, default=1) > 1 or padded_inside
    results = size * conv.y
    if fprop:
        products = Work(matrix=matrix_product(rows, C, K), results=rows * K, copied=2 * results * conv.taps)
    else:
        products = Work(matrix=matrix_product(rows, K, C)) if C * K > 1 else Work(reduced=conv.products)
        products += Work(transposed=results)
    if in_loop:
        ends = size * (conv.w + (conv.x + conv.y * fprop) * (conv.G > 1))
        runs = rows / window.output[-1] if C == 1 else rows
        loop = Work(transposed=ends, copied=2 * view * conv.taps, runs=runs, steps=conv.taps, fusions=5)
        loop += Work(bytes=size * conv.x / math.prod(window.input) * padded_size(window) + view + results)
    else:
        fusions = 2 if copied else (1 if fprop else 3) if window.rank else 0
        loop = Work(transposed=view * (groups > 1), copied=2 * view * (copied and groups == 1), fusions=fusions)
        loop += Work(bytes=view * copied + results * (not fprop or groups > 1))
    converted = (conv.x + conv.y) * conv.short
    short = Work(copied=6 * converted, fusions=2 * conv.short, bytes=4 * converted)
    return products + loop + short + Work(programs=1, calls=groups * conv.taps)
