"""Convolutions without products of matrices: elementwise, with G·K contiguous lanes.

`Shifts`, for fprop, is a sum over taps and input channels of shifted inputs times weights.  Each fusion takes XLA's CPU backend tens of
milliseconds to compile, longer than most layers run.  So one reduction computes many sums.  `Rows`, for wgrad, is a loop over blocks of
output rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv import xla_views as views
from jaxext.ops.conv.xla_plan import LANES, Conv, ConvPlan, Work

# Beyond, the program or its sums are large.
MOST_TERMS, MOST_TERMS_OF_ROWS, MOST_CHANNELS = 2048, 128, 512
# Up to this many terms, XLA's CPU compiler computes padding and sum in one pass, as fast as the sum alone.
FOLDED_ON_CPU = 4
# Up to this C·K and this many terms, XLA's GPU compiler fuses padding, elementwise sum and the operations after it into one kernel.
FEW_ON_GPU, FOLDED_ON_GPU = 16, 9


class Shifts(ConvPlan):
    """A sum of shifts, for fprop."""

    name = "shifts"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        window, C, K = conv.window, conv.C, conv.K
        terms, lanes_of_row = C * conv.taps, conv.G * K
        if conv.open != "y" or not window.rank or conv.dilated or lanes_of_row == 1 or terms > MOST_TERMS or C * K > MOST_CHANNELS:
            return None
        unrolled = UNROLLED_TERMS.get(window.rank, UNROLLED_TERMS[3])
        of_row = C * math.prod(window.filter[1:])
        if of_row > unrolled:
            return None
        size = conv.dtype.itemsize
        in_parts = terms > unrolled
        parts = terms / max(TERMS_OF_PART, of_row) if in_parts else 1
        padding = size * conv.x / math.prod(window.input) * views.padded_size(window)
        single = conv.G == 1 or C == K == 1
        one_by_one = conv.B * conv.N > 1 and (in_parts or not _pads_all(window, conv.B * conv.N, conv.G, C, K))
        return Work(
            programs=1,
            fusions=2 + (K > 1) + in_parts,
            terms=min(terms, max(TERMS_OF_PART, of_row)) if in_parts else terms,
            elementwise=conv.products,
            repeated=0 if single else conv.products / K,
            copied=padding + size * conv.x + 2 * size * conv.y * parts,
            steps=parts if in_parts else 0,
            bytes=(padding / conv.B / conv.N if one_by_one else padding) + 4 * conv.x * (K > 1) * conv.short,
        )

    def run(self, a, b):
        conv, on_cpu = self.conv, self.conv.platform == "cpu"
        fold = conv.C * conv.taps <= (FOLDED_ON_CPU if on_cpu else FOLDED_ON_GPU)
        y = shifts_fprop(a, b, conv.window, acc=conv.sums, fold=fold).astype(conv.result)
        # XLA would compute the sum again in each fusion that reads it.
        return lax.optimization_barrier(y) if on_cpu and not fold else y


def shifts_fprop(x, w, window: Window, *, acc, fold):
    """The sum over taps and input channels of the shifted x times a row of weights: elementwise, with G·K contiguous lanes.

    With `fold`, padding and sum are one pass over x, which tests for the border at every term.  Otherwise x is padded first, one image at a
    time if padding all images would take much memory.  If there are very many terms, only some filter rows at a time are unrolled.
    """
    B, G, K = w.shape[:3]
    N, C = x.shape[1], x.shape[-1]
    w = views.outputs_last(w).reshape(B, -1, C, G * K).astype(acc)  # (B, taps, C, lanes)
    x = x.astype(acc) if K > 1 else x  # once, and not for each of K lanes
    rest = math.prod(window.filter[1:])
    in_parts = math.prod(window.filter) * C > UNROLLED_TERMS.get(window.rank, UNROLLED_TERMS[3])

    def images(x, w, see):
        if not in_parts:
            return _shifted(x, w, window, see, K, acc)
        step, dilation, most = window.stride[0], window.filter_dilation[0], TERMS_OF_PART // (rest * C)
        at_once = views.divisor(window.filter[0], most)
        at_once = at_once if 2 * at_once >= most else most  # else the last rows are a part of their own
        parts, left = divmod(window.filter[0], at_once)

        def added(y, weights, first, rows):
            """y and the terms of `rows` rows of the filter, from the row `first` on."""
            of_x = step * (window.output[0] - 1) + dilation * (rows - 1) + 1
            of_part = dataclasses.replace(
                window,
                input=(of_x, *x.shape[3 : 2 + window.rank]),
                filter=(rows, *window.filter[1:]),
                padding=((0, 0),) * window.rank,
                input_dilation=(1,) * window.rank,
            )
            if C == 1:  # each view is read once, and need not be an array

                def see_from(x, _, tap):
                    return see(x, window, (first + np.int32(tap[0]), *tap[1:]))

                return lax.add(y, _shifted(x, weights, of_part, see_from, K, acc))
            seen = lax.dynamic_slice_in_dim(x, first * np.int32(dilation), of_x, axis=2, allow_negative_indices=False)
            return lax.add(y, _shifted(seen, weights, of_part, see, K, acc))

        in_loop, last = jnp.split(w, [parts * at_once * rest], 1)
        in_loop = in_loop.reshape((w.shape[0], parts, -1, *w.shape[2:]))

        def part(i, y):
            weights = lax.dynamic_index_in_dim(in_loop, i, 1, keepdims=False, allow_negative_indices=False)
            return added(y, weights, i * np.int32(at_once), at_once)

        y = views.repeat(parts, part, views.zeros((*x.shape[:2], *window.output, G * K), acc, x, w))
        return added(y, last, np.int32(parts * at_once), left) if left else y

    if fold:
        y = images(x, w, views.view)
    elif B * N == 1 or not in_parts and _pads_all(window, B * N, G, C, K):
        y = images(lax.optimization_barrier(views.padded(x, window)), w, views.view_of_padded)
    else:

        def step(i_x):
            i, x = i_x
            x = views.padded(x.reshape((1, 1) + window.input + (G, C)), window)
            weights = lax.dynamic_index_in_dim(w, lax.div(i, np.int32(N)), 0, allow_negative_indices=False)
            return images(x, weights, views.view_of_padded)[0, 0]

        # G·C in one axis: the loop would copy an x whose last axis has size 1.
        y = lax.map(step, (np.arange(B * N, dtype=np.int32), x.reshape((B * N,) + window.input + (G * C,))))
    return y.reshape((B, N) + window.output + (G, K))


# The most terms of an unrolled sum by rank: each takes XLA a millisecond or two to compile, and with three axes more are slow.
UNROLLED_TERMS = {1: 64, 2: 128, 3: 100}
# The most terms of a part of a longer sum.
TERMS_OF_PART = 32
# All images are padded at once up to this number of elements, or up to this multiple of the images and their results.
MOST_ELEMENTS, MOST_PADDED = 1 << 18, 1.5


def _pads_all(window, images, G, C, K):
    """Return whether to pad all images at once.  One at a time takes less memory."""
    size = views.padded_size(window) * C
    return size <= MOST_PADDED * (math.prod(window.input) * C + math.prod(window.output) * K) or images * G * size <= MOST_ELEMENTS


def _shifted(x, w, window, see, K, acc):
    """The sum over all taps of the view `see` of x times w (b, taps, C, lanes): (b, n, *output, lanes)."""
    C, shape = x.shape[-1], (*x.shape[:2], *window.output, w.shape[-1])
    if C == K == 1:
        x = x.reshape(x.shape[:-1])
    w = w.reshape((w.shape[0], -1, w.shape[-1]))

    def terms():
        for t, tap in enumerate(views.taps_of(window)):
            seen = see(x, window, tap).astype(acc)
            for c in range(C):
                weights = lax.slice_in_dim(w, t * C + c, t * C + c + 1, axis=1)
                row = seen if C == K == 1 else views.lanes(seen, c, K)
                yield lax.mul(row, lax.broadcast_in_dim(weights, shape, (0, 1, len(shape) - 1)))

    return functools.reduce(lax.add, terms())


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
        if taps > MOST_TERMS_OF_ROWS or window.rank == 1 and conv.taps > MOST_TAPS:
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
        n, j = views.pair(i, N, blocks)
        p = j * np.int32(block) + np.arange(block, dtype=np.int32)
        x, y = (lax.dynamic_index_in_dim(a, n, 0, keepdims=False, allow_negative_indices=False) for a in (x, y))
        y = _rows(y, p).astype(acc)  # (block, *output[1:], G·K)

        def some(j, total):
            """Adds to the sums of `at_once` rows of the filter, from row j · at_once on."""
            r = j * at_once + np.arange(at_once, dtype=np.int32)[:, None]
            h = s * p[None] + (dr * r - low)
            h = h if di == 1 else lax.select(h % di == 0, h // di, lax.full_like(h, -1))  # (at_once, block)
            met = (h >= 0) & (h < window.input[0])
            seen = views.padded(_rows(x, h.reshape(-1)).reshape((-1,) + rest.input + (G, C)), rest, lead=1)
            of_channels = [views.lanes(seen, c, K).astype(acc).reshape((at_once, block, *seen.shape[1:-2], -1)) for c in range(C)]

            # y is masked too: infinity times a zero of the padding would be NaN.
            given = [lax.select(lax.broadcast_in_dim(met[i], y.shape, (0,)), y, lax.full_like(y, 0)) for i in range(at_once)]
            new = views.sums(
                [
                    lax.mul(views.view_of_padded(of_c[i], rest, tap, lead=1), given[i])
                    for i in range(at_once)
                    for tap in views.taps_of(rest)
                    for of_c in of_channels
                ],
                window.rank,
            )
            total_of_j = lax.dynamic_index_in_dim(total, j, 0, keepdims=False, allow_negative_indices=False)
            return lax.dynamic_update_index_in_dim(total, total_of_j + new, j, 0, allow_negative_indices=False)

        return some(0, total) if at_once == window.filter[0] else views.repeat(window.filter[0] // at_once, some, total)

    def one(xy):
        total = views.zeros((window.filter[0] // at_once, at_once * taps * C, G * K), acc, *xy)
        return views.repeat(N * blocks, lambda i, total: step(i, total, *xy), total)

    # G·C and G·K in one axis each: the loop would copy an array whose last axis has size 1.
    x, y = x.reshape((B, N) + window.input + (G * C,)), y.reshape((B, N) + window.output + (G * K,))
    w = one((x[0], y[0]))[None] if B == 1 else lax.map(one, (x, y))
    return views.outputs_first(w.reshape((B,) + window.filter + (C, G * K)), G)


# Output positions in one step, with one spatial axis.
POSITIONS = 64
# Elements of y in one step, with more than one spatial axis.  They fit into a cache, with the elements of x that they meet.
BLOCK = 20_000


def _blocks(window, lanes_of_row, C):
    """The rows of outputs in a block, and the rows of taps that it is added to at once."""
    first, *others = window.output
    block = POSITIONS if window.rank == 1 else 1 if max(window.stride) > 1 else max(1, BLOCK // (math.prod(others) * lanes_of_row))
    return min(block, first), views.divisor(window.filter[0], views.MOST_SUMS // (math.prod(window.filter[1:]) * C))


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
