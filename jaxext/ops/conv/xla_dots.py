"""A convolution as products of matrices, one for each tap of the filter, batched over B and G."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.ops.conv.xla_plan import Conv, ConvPlan, Work, matrix_product
from jaxext.ops.conv.xla_views import add, moveaxis, padded, padded_size, repeat, taps_of, view, view_of_padded, zeros


class Dots(ConvPlan):
    """A batched dot per tap: written out, or a loop.  Their work is that of a loop on CPUs, or of one dot."""

    name = "dots"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        window, groups, C, K, size = conv.window, conv.groups, conv.C, conv.K, conv.dtype.itemsize
        padded_inside = any(map(any, window.padding))
        if conv.dilated or conv.open == "w" and conv.G > 1 and padded_inside:  # an infinity of y would meet zeros
            return None
        fprop, in_loop = conv.open == "y", conv.taps > most_written_out(conv.open, C, True)
        if fprop and C == 1:
            return None if in_loop else Work(programs=1, fusions=1 + conv.taps / 8, reduced=conv.products, copied=size * (conv.x + conv.y))
        positions = groups * conv.N * conv.outputs
        seen, rows, results = size * positions * C, positions * conv.taps, size * conv.y
        if fprop:
            products = Work(matrix=matrix_product(rows, C, K), results=rows * K, copied=2 * results * conv.taps)
        else:
            products = Work(matrix=matrix_product(rows, K, C)) if C * K > 1 else Work(reduced=conv.products)
            products += Work(transposed=results)
        if in_loop:
            ends = size * (conv.w + (conv.x + conv.y * fprop) * (conv.G > 1))
            runs = rows / window.output[-1] if C == 1 else rows
            held = conv.x / math.prod(window.input) * padded_size(window) + positions * C + conv.y + conv.w * (1 + fprop)
            copies = Work(transposed=ends, copied=2 * seen * conv.taps, runs=runs, steps=conv.taps, fusions=5, bytes=max(size, 4) * held)
        elif groups > 1 or max(window.stride, default=1) > 1 or padded_inside:
            copies = Work(transposed=seen * (groups > 1), copied=2 * seen * (groups == 1), fusions=2)
            copies += Work(bytes=seen + results * (not fprop or groups > 1))
        else:
            copies = Work(fusions=(1 if fprop else 2) if window.rank else 0, bytes=0 if fprop else results)
        converted = (conv.x + conv.y) * conv.short
        short = Work(copied=6 * converted, fusions=2 * conv.short, bytes=4 * converted)
        return products + copies + short + Work(programs=1, calls=groups * conv.taps)

    def run(self, a, b):
        return (dots_fprop if self.conv.open == "y" else dots_wgrad)(self.conv, *self.conv.widened(a, b))


def dots_fprop(conv: Conv, x, w):
    """The sum over filter taps of a dot, batched over B and G.

    If XLA splits the program, the dot's batch, contracted and free axes are whole labels.  XLA's partitioner therefore splits it correctly,
    unlike a grouped convolution.
    """
    window, B, N, G, C, K = conv.window, conv.B, conv.N, conv.G, conv.C, conv.K
    w = w.reshape((B, G, K, -1, C))  # (B, G, K, taps, C)
    dot = functools.partial(lax.dot_general, precision=conv.precision, preferred_element_type=conv.sums)
    if conv.taps <= most_written_out("y", C, conv.local):
        numbers = (((x.ndim - 1,), (3,)), ((0, x.ndim - 2), (0, 1)))
        y = functools.reduce(add, (dot(view(x, window, tap), w[:, :, :, t], numbers) for t, tap in enumerate(taps_of(window))))
    else:
        x, w = lax.optimization_barrier((_padded(x, window), moveaxis(w, (3, 4), (0, 3))))
        positions = _positions(conv)
        numbers = (((2 + len(positions),), (2,)), ((0, 1), (0, 1)))

        def step(t, y):
            weights = lax.dynamic_index_in_dim(w, t, 0, keepdims=False, allow_negative_indices=False)
            return add(y, dot(_view(x, window, t).reshape((B, G, *positions, C)), weights, numbers))

        y = repeat(conv.taps, step, zeros((B, G, *positions, K), conv.sums, x, w)).reshape((B, G, N, *window.output, K))
    return moveaxis(y, 1, -2)  # (B, G, N, *output, K)


def dots_wgrad(conv: Conv, x, y):
    """A dot for each filter tap, batched over B and G, stacked."""
    window, B, G, C, K = conv.window, conv.B, conv.G, conv.C, conv.K
    dot = functools.partial(lax.dot_general, precision=conv.precision, preferred_element_type=conv.sums)
    if conv.taps <= most_written_out("w", C, conv.local):
        space, batch = tuple(range(1, y.ndim - 2)), (0, y.ndim - 2)
        w = jnp.stack([dot(y, view(x, window, tap), ((space, space), (batch, batch))) for tap in taps_of(window)], 3)
    else:
        positions = _positions(conv)
        y = moveaxis(y, (-2, -1), (1, 2)).reshape((B, G, K, *positions))
        x, y = lax.optimization_barrier((_padded(x, window), y))
        contracted = tuple(range(3, y.ndim)), tuple(range(2, y.ndim - 1))

        def step(t, w):
            new = dot(y, _view(x, window, t).reshape((B, G, *positions, C)), (contracted, ((0, 1), (0, 1))))
            return lax.dynamic_update_index_in_dim(w, new, t, 0, allow_negative_indices=False)

        w = moveaxis(repeat(conv.taps, step, zeros((conv.taps, B, G, K, C), conv.sums, x, y)), 0, 3)
    return w.reshape(conv.shape)


# More taps are a loop on GPUs, and where XLA may split the program, since compile time grows with it.
WRITTEN_OUT = 64


def most_written_out(open: str, C: int, local: bool) -> int:
    """The most taps that are not a loop.  On CPUs a loop takes less memory, and as much time.

    XLA computes dots of one input channel as one sum of products, for which no inputs are copied.
    """
    return 1 if local and not (open == "y" and C == 1) else WRITTEN_OUT


def _positions(conv):
    """The axes of N and output, in one axis if XLA does not split them: its loops over many axes are slower."""
    return (conv.N * conv.outputs,) if conv.local else (conv.N, *conv.window.output)


def _padded(x, window):
    """(B, N, *input, G, C) -> (B, G, N, *padded input, C), of which each view is copied without a transposition."""
    return padded(moveaxis(x, -2, 1), window, lead=3)


def _view(x, window, t):
    """The view of the tap with the traced index `t` in the order of `taps_of`: (B, G, N, *output, C)."""
    tap, inner = [], math.prod(window.filter)
    for n in window.filter:
        inner //= n
        tap.append(lax.rem(lax.div(t, np.int32(inner)), np.int32(n)))
    return view_of_padded(x, window, tap, lead=3)
