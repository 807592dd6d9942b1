"""The gradient of a depthwise filter along one axis, in plain XLA ops: a loop over blocks of positions that are written out.

    w[b,g,r] = Σ_{n,p} x[b,n,stride·p + filter_dilation·r - low,g] · y[b,n,p,g]

Where all taps meet x nothing is masked: a step of the loop is one fusion, which reads its rows of x and y once, with the sums in registers.
What is left, at the borders, are a few positions.
"""

from __future__ import annotations

import functools

import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv import xla_views as views

BLOCKS = (16, 8, 4)  # positions of a step
MOST_TAPS = 64  # beyond, the border is too long


def fits(C: int, K: int, window: Window) -> bool:
    return C == K == window.rank == 1 and window.input_dilation == (1,) and window.filter[0] <= MOST_TAPS and block_of(window) > 0


def _inner(window: Window) -> range:
    """The positions of which every tap meets x."""
    (low, _), (stride,), (dilation,) = window.padding[0], window.stride, window.filter_dilation
    last = window.input[0] - 1 + low - dilation * (window.filter[0] - 1)
    return range(max(0, -(-low // stride)), min(window.output[0], last // stride + 1))


def block_of(window: Window) -> int:
    """The positions of a step, 0 if there are not as many."""
    fit = (block for block in BLOCKS if block <= len(_inner(window)))
    return next(fit, 0)


def wgrad(x, y, window: Window, *, acc):
    B, N, G, taps = *x.shape[:2], x.shape[-2], window.filter[0]
    inner, block = _inner(window), block_of(window)
    blocks, (low, _), (stride,), (dilation,) = len(inner) // block, window.padding[0], window.stride, window.filter_dilation
    # What is left of the inner positions goes to a border that there is, so that a causal filter has one.
    start = inner.start if inner.stop < window.output[0] else inner.stop - blocks * block
    done = start + blocks * block
    rows = stride * (block - 1) + dilation * (taps - 1) + 1  # of x in a step

    def step(i, total, x, y):
        n, j = views.pair(i, N, blocks)
        p = j * np.int32(block) + np.int32(start)
        seen = _from(x, n, np.int32(stride) * p - np.int32(low), rows).astype(acc)
        given = _from(y, n, p, block).astype(acc)

        def of_position(u):  # what all taps meet there, times the row of y
            met = lax.slice_in_dim(seen, stride * u, stride * u + dilation * (taps - 1) + 1, dilation)
            return lax.mul(met, lax.broadcast_in_dim(lax.slice_in_dim(given, u, u + 1), met.shape, (0, 1)))

        # a sum of its own: one long chain of sums would lose bits
        return lax.add(total, functools.reduce(lax.add, map(of_position, range(block))))

    def one(xy):
        x, y = xy
        parts = [views.repeat(N * blocks, lambda i, total: step(i, total, x, y), views.zeros((taps, G), acc, x, y))]
        parts += [_border(x, y, window, part, acc) for part in (range(start), range(done, window.output[0])) if part]
        return functools.reduce(lax.add, parts)

    x, y = x.reshape(B, N, -1, G), y.reshape(B, N, -1, G)
    w = one((x[0], y[0]))[None] if B == 1 else lax.map(one, (x, y))
    return views.outputs_first(w.reshape(B, taps, 1, G), G)


def _from(x, n, start, size):
    return lax.dynamic_slice(x, (n, start, np.int32(0)), (1, size, x.shape[2]), allow_negative_indices=False)[0]


def _border(x, y, window: Window, positions: range, acc):
    """The sums over these positions.  y is masked, not x alone: infinity times a zero of the padding would be NaN."""
    (low, _), (stride,), (dilation,), (size,) = window.padding[0], window.stride, window.filter_dilation, window.input
    y = lax.slice_in_dim(y, positions.start, positions.stop, axis=1).astype(acc)
    terms = []
    for r in range(window.filter[0]):
        met = stride * np.array(positions) + dilation * r - low
        seen = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (-int(met[0]), int(met[-1]) + 1 - size, 0), (0, 0, 0)])
        inside = np.broadcast_to(((met >= 0) & (met < size))[None, :, None], y.shape)
        terms.append(lax.slice_in_dim(seen, 0, None, stride, 1).astype(acc) * lax.select(inside, y, lax.full_like(y, 0)))
    return views.sums(terms, 2)
