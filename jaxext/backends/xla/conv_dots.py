"""A convolution as products of matrices, one for each tap of the filter, batched over B and G."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.backends.xla.conv_views import add, padded, taps_of, view, view_of_padded, zeros
from jaxext.backends.xla.conv_work import Conv, Work, matrix_product
from jaxext.forms.window import Window


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


# More taps than this become a loop, since compile time grows with the program.
UNROLLED_TAPS = 64


def _unravel(t, window):
    """The tap with the traced index `t` in the order of `taps_of`."""
    tap = []
    for n in reversed(window.filter):
        tap.append(t % n)
        t = t // n
    return tap[::-1]


def work(conv: Conv) -> Work | None:
    """XLA computes dots without input channels as one sum of products, for which no inputs are copied."""
    window, groups, N, C, K, size = conv.window, conv.groups, conv.N, conv.C, conv.K, conv.dtype.itemsize
    padded_inside = any(map(any, window.padding))
    if conv.taps > MOST_TAPS or conv.dilated or conv.open == "w" and conv.G > 1 and padded_inside:  # an infinity of y would meet zeros
        return None
    if conv.open == "y" and C == 1:
        return Work(programs=1, fusions=1 + conv.taps / 8, reduced=conv.products, copied=size * (conv.x + conv.y))
    views = size * groups * N * C * conv.outputs * conv.taps
    viewed = conv.taps > 1 or max(window.stride, default=1) > 1 or padded_inside
    rows = groups * N * conv.outputs * conv.taps
    if conv.open == "y":
        results = size * conv.y * conv.taps
        products = Work(matrix=matrix_product(rows, C, K), results=rows * K, copied=2 * results)
        products += Work(bytes=results if conv.taps > 1 or groups > 1 else 0)
    else:
        products = Work(matrix=matrix_product(rows, K, C)) if C * K > 1 else Work(reduced=conv.products)
        products += Work(transposed=size * conv.y, bytes=size * conv.y)
    if viewed or groups > 1:
        fusions = 1 + conv.taps
    else:
        fusions = (1 if conv.open == "y" else 3) if window.rank else 0
    return products + Work(
        programs=1,
        fusions=fusions + 2 * conv.short,
        calls=groups * conv.taps,
        transposed=views if groups > 1 else 0,
        copied=(2 * views if viewed and groups == 1 else 0) + 6 * (conv.x + conv.y) * conv.short,
        bytes=views * (viewed or groups > 1) + 4 * (conv.x + conv.y) * conv.short,
    )


# With more taps, the copies of the input take too much memory.
MOST_TAPS = 27
