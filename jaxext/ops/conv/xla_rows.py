"""The gradient of the filter as a loop over blocks of output rows: elementwise, with G·K contiguous lanes."""

from __future__ import annotations

import functools
import math

import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv.xla_plan import LANES, Conv, ConvPlan, Work
from jaxext.ops.conv.xla_views import MOST_SUMS, divisor, lanes, outputs_first, padded, pair, repeat, sums, taps_of, view_of_padded, zeros

# Beyond, the program or its sums are large.
MOST_CHANNELS, MOST_TERMS = 512, 128


class Rows(ConvPlan):
    """A loop over output rows, for wgrad."""

    name = "rows"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        window, C, K, lanes_of_row = conv.window, conv.C, conv.K, conv.G * conv.K
        if conv.open != "w" or not window.rank or conv.dilated or lanes_of_row == 1 or C * K > MOST_CHANNELS:
            return None
        few = conv.products * max(0, LANES / lanes_of_row - 1)
        if fits_line(C, K, window):
            block = block_of(window)
            steps = conv.B * conv.N * window.output[0] / block
            return Work(programs=1, fusions=5, terms=block, lines=conv.products, few=few, steps=steps)
        taps = math.prod(window.filter[1:]) * C
        if taps > MOST_TERMS or window.rank == 1 and conv.taps > MOST_TAPS:
            return None
        block, at_once = _blocks(window, lanes_of_row, C)
        steps = conv.B * conv.N * -(-window.output[0] // block) * window.filter[0] / at_once
        size = conv.dtype.itemsize
        read = size * steps * block * conv.outputs / window.output[0] * conv.G * (K + at_once * C)
        return Work(programs=1, fusions=4, terms=taps * at_once, rows=conv.products, few=few, copied=read, steps=steps)

    def run(self, a, b):
        conv = self.conv
        wgrad = line_wgrad if fits_line(conv.C, conv.K, conv.window) else rows_wgrad
        return wgrad(a, b, conv.window, acc=conv.sums)


def rows_wgrad(x, y, window: Window, *, acc):
    """A loop over blocks of output rows.  While a block is in cache, it is added to the sums of all taps, some rows of taps at a time."""
    B, N, G, K = y.shape[0], y.shape[1], *y.shape[-2:]
    C, first, taps = x.shape[-1], window.output[0], math.prod(window.filter[1:])
    block, at_once = _blocks(window, G * K, C)
    blocks = -(-first // block)
    rest = Window(**{name: value[1:] for name, value in vars(window).items()})
    (low, _), s, di, dr = window.padding[0], window.stride[0], window.input_dilation[0], window.filter_dilation[0]

    def step(i, total, x, y):
        n, j = pair(i, N, blocks)
        p = j * np.int32(block) + np.arange(block, dtype=np.int32)
        x, y = (lax.dynamic_index_in_dim(a, n, 0, keepdims=False, allow_negative_indices=False) for a in (x, y))
        y = _rows(y, p).astype(acc)  # (block, *output[1:], G·K)

        def some(j, total):
            """Adds to the sums of `at_once` rows of the filter, from row j · at_once on."""
            r = j * at_once + np.arange(at_once, dtype=np.int32)[:, None]
            h = s * p[None] + (dr * r - low)
            h = h if di == 1 else lax.select(h % di == 0, h // di, lax.full_like(h, -1))  # (at_once, block)
            met = (h >= 0) & (h < window.input[0])
            seen = padded(_rows(x, h.reshape(-1)).reshape((-1,) + rest.input + (G, C)), rest, lead=1)
            of_channels = [lanes(seen, c, K).astype(acc).reshape((at_once, block, *seen.shape[1:-2], -1)) for c in range(C)]

            # y is masked too: infinity times a zero of the padding would be NaN.
            given = [lax.select(lax.broadcast_in_dim(met[i], y.shape, (0,)), y, lax.full_like(y, 0)) for i in range(at_once)]
            new = sums(
                [
                    lax.mul(view_of_padded(of_c[i], rest, tap, lead=1), given[i])
                    for i in range(at_once)
                    for tap in taps_of(rest)
                    for of_c in of_channels
                ],
                window.rank,
            )
            total_of_j = lax.dynamic_index_in_dim(total, j, 0, keepdims=False, allow_negative_indices=False)
            return lax.dynamic_update_index_in_dim(total, total_of_j + new, j, 0, allow_negative_indices=False)

        return some(0, total) if at_once == window.filter[0] else repeat(window.filter[0] // at_once, some, total)

    def one(xy):
        total = zeros((window.filter[0] // at_once, at_once * taps * C, G * K), acc, *xy)
        return repeat(N * blocks, lambda i, total: step(i, total, *xy), total)

    # G·C and G·K in one axis each: the loop would copy an array whose last axis has size 1.
    x, y = x.reshape((B, N) + window.input + (G * C,)), y.reshape((B, N) + window.output + (G * K,))
    w = one((x[0], y[0]))[None] if B == 1 else lax.map(one, (x, y))
    return outputs_first(w.reshape((B,) + window.filter + (C, G * K)), G)


# Output positions in one step, with one spatial axis.
POSITIONS = 64
# Elements of y in one step, with more than one spatial axis.  They fit into a cache, with the elements of x that they meet.
BLOCK = 20_000


def _blocks(window, lanes_of_row, C):
    """The rows of outputs in a block, and the rows of taps that it is added to at once."""
    first, *others = window.output
    block = POSITIONS if window.rank == 1 else 1 if max(window.stride) > 1 else max(1, BLOCK // (math.prod(others) * lanes_of_row))
    return min(block, first), divisor(window.filter[0], MOST_SUMS // (math.prod(window.filter[1:]) * C))


def _rows(x, index):
    """x[index], with zeros where an index is out of range."""
    numbers = lax.GatherDimensionNumbers(offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.gather(x, index[:, None], numbers, (1,) + x.shape[1:], mode=mode, fill_value=0)


BLOCKS = (16, 8, 4)  # positions of a step on a line
MOST_TAPS = 64  # on a line: beyond, the border is too long


def fits_line(C: int, K: int, window: Window) -> bool:
    return C == K == window.rank == 1 and window.input_dilation == (1,) and window.filter[0] <= MOST_TAPS and block_of(window) > 0


def _unmasked(window: Window) -> range:
    """The positions of which every tap meets x."""
    (low, _), (stride,), (dilation,) = window.padding[0], window.stride, window.filter_dilation
    last = window.input[0] - 1 + low - dilation * (window.filter[0] - 1)
    return range(max(0, -(-low // stride)), min(window.output[0], last // stride + 1))


def block_of(window: Window) -> int:
    """The positions of a step, 0 if there are not as many."""
    fit = (block for block in BLOCKS if block <= len(_unmasked(window)))
    return next(fit, 0)


def line_wgrad(x, y, window: Window, *, acc):
    """A loop over blocks of positions that are written out, if there is one axis and the filter is depthwise:

        w[b,g,r] = Σ_{n,p} x[b,n,stride·p + filter_dilation·r - low,g] · y[b,n,p,g]

    Where all taps meet x nothing is masked: a step of the loop is one fusion, which reads its rows of x and y once, with the sums in
    registers.  What is left, at the borders, are a few positions.
    """
    B, N, G, taps = *x.shape[:2], x.shape[-2], window.filter[0]
    inner, block = _unmasked(window), block_of(window)
    blocks, (low, _), (stride,), (dilation,) = len(inner) // block, window.padding[0], window.stride, window.filter_dilation
    # What is left of the inner positions goes to a border that there is, so that a causal filter has one.
    start = inner.start if inner.stop < window.output[0] else inner.stop - blocks * block
    done = start + blocks * block
    rows = stride * (block - 1) + dilation * (taps - 1) + 1  # of x in a step

    def step(i, total, x, y):
        n, j = pair(i, N, blocks)
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
        parts = [repeat(N * blocks, lambda i, total: step(i, total, x, y), zeros((taps, G), acc, x, y))]
        parts += [_border(x, y, window, part, acc) for part in (range(start), range(done, window.output[0])) if part]
        return functools.reduce(lax.add, parts)

    x, y = x.reshape(B, N, -1, G), y.reshape(B, N, -1, G)
    w = one((x[0], y[0]))[None] if B == 1 else lax.map(one, (x, y))
    return outputs_first(w.reshape(B, taps, 1, G), G)


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
    return sums(terms, 2)
