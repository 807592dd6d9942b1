"""Rewrites of convolutions with few channels per group: elementwise products with G·K contiguous lanes, in place of products of matrices.

`shifts_fprop` computes y and `rows_wgrad` w, of the form that `conv_rewrites` has, from the same views.

Each fusion takes XLA's CPU backend tens of milliseconds to compile, longer than most layers run.  So one reduction computes many sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.backends.xla.conv_rewrites import outputs_first, outputs_last, padded, pair, repeat, taps_of, view, view_of_padded, zeros
from jaxext.forms.window import Window, dilate


def shifts_fprop(x, w, window: Window, *, acc, fold):
    """The sum over taps and input channels of the shifted x times a row of weights: elementwise, with G·K contiguous lanes.

    With `fold`, padding and sum are one pass over x, which tests for the border at every term.  Otherwise x is padded first, one image at a
    time if padding all images would take much memory.  If there are very many terms, only some filter rows at a time are unrolled.
    """
    B, G, K = w.shape[:3]
    N, C = x.shape[1], x.shape[-1]
    w = outputs_last(w).reshape(B, -1, C, G * K).astype(acc)  # (B, taps, C, lanes)
    x = x.astype(acc) if K > 1 else x  # once, and not for each of K lanes
    rest = math.prod(window.filter[1:])
    in_parts = math.prod(window.filter) * C > UNROLLED_TERMS.get(window.rank, UNROLLED_TERMS[3])

    def images(x, w, see):
        if not in_parts:
            return _shifted(x, w, window, see, K, acc)
        step, dilation, most = window.stride[0], window.filter_dilation[0], TERMS_OF_PART // (rest * C)
        at_once = _divisor(window.filter[0], most)
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

        y = repeat(parts, part, zeros((*x.shape[:2], *window.output, G * K), acc, x, w))
        return added(y, last, np.int32(parts * at_once), left) if left else y

    if fold:
        y = images(x, w, view)
    elif (
        B * N == 1 or not in_parts and padded_size(window) * C <= MOST_PADDED * (math.prod(window.input) * C + math.prod(window.output) * K)
    ):
        y = images(lax.optimization_barrier(padded(x, window)), w, view_of_padded)
    else:

        def step(i_x):
            i, x = i_x
            x = padded(x.reshape((1, 1) + window.input + (G, C)), window)
            return images(x, lax.dynamic_index_in_dim(w, lax.div(i, np.int32(N)), 0, allow_negative_indices=False), view_of_padded)[0, 0]

        # G·C in one axis: the loop would copy an x whose last axis has size 1.
        y = lax.map(step, (np.arange(B * N, dtype=np.int32), x.reshape((B * N,) + window.input + (G * C,))))
    return y.reshape((B, N) + window.output + (G, K))


# The most terms of an unrolled sum by rank: each takes XLA a millisecond or two to compile, and with three axes more are slow.
UNROLLED_TERMS = {1: 64, 2: 128, 3: 100}
# The most terms of a part of a longer sum.
TERMS_OF_PART = 32
# The most memory for padding all images at once, in multiples of the images and their results.
MOST_PADDED = 1.5


def padded_size(window):
    axes = zip(window.input, window.padding, window.input_dilation, strict=True)
    return math.prod(low + dilate(i, d) + high for i, (low, high), d in axes)


def _shifted(x, w, window, see, K, acc):
    """The sum over all taps of the view `see` of x times w (b, taps, C, lanes): (b, n, *output, lanes)."""
    C, shape = x.shape[-1], (*x.shape[:2], *window.output, w.shape[-1])
    if C == K == 1:
        x = x.reshape(x.shape[:-1])
    w = w.reshape((w.shape[0], -1, w.shape[-1]))

    def terms():
        for t, tap in enumerate(taps_of(window)):
            seen = see(x, window, tap).astype(acc)
            for c in range(C):
                weights = lax.slice_in_dim(w, t * C + c, t * C + c + 1, axis=1)
                lanes = seen if C == K == 1 else _lanes(seen, c, K)
                yield lax.mul(lanes, lax.broadcast_in_dim(weights, shape, (0, 1, len(shape) - 1)))

    return functools.reduce(lax.add, terms())


def _lanes(x, c, K):
    """Channel c of each group, repeated for the K outputs of its group: (..., G, C) -> (..., G·K)."""
    x = lax.slice_in_dim(x, c, c + 1, axis=-1)
    if K > 1:
        x = lax.broadcast_in_dim(x, x.shape[:-1] + (K,), tuple(range(x.ndim)))
    return x.reshape((*x.shape[:-2], -1))


def rows_wgrad(x, y, window: Window, *, acc):
    """A loop over blocks of output rows.  While a block is in cache, it is added to the sums of all taps, some rows of taps at a time."""
    B, N, G, K = y.shape[0], y.shape[1], *y.shape[-2:]
    C, first, taps = x.shape[-1], window.output[0], math.prod(window.filter[1:])
    block = POSITIONS if window.rank == 1 else 1 if max(window.stride) > 1 else max(1, BLOCK // math.prod(y.shape[3:]))
    block = min(block, first)
    blocks = -(-first // block)
    at_once = _divisor(window.filter[0], MOST_SUMS // (taps * C))
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
            lanes = [_lanes(seen, c, K).astype(acc).reshape((at_once, block, *seen.shape[1:-2], -1)) for c in range(C)]

            # y is masked too: infinity times a zero of the padding would be NaN.
            given = [lax.select(lax.broadcast_in_dim(met[i], y.shape, (0,)), y, lax.full_like(y, 0)) for i in range(at_once)]
            new = sums(
                [
                    lax.mul(view_of_padded(of_c[i], rest, tap, lead=1), given[i])
                    for i in range(at_once)
                    for tap in taps_of(rest)
                    for of_c in lanes
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


# The most sums in one reduction.
MOST_SUMS = 32
# Output positions in one step, with one spatial axis.
POSITIONS = 64
# Elements of y in one step, with more than one spatial axis.  They fit into a cache, with the elements of x that they meet.
BLOCK = 20_000


def sums(terms, axes):
    """The sum of each array over its first `axes` axes, stacked.

    One reduction computes up to MOST_SUMS.  It compiles as fast as that of a single array, and reads data shared by its terms only once.
    """

    def reduced(terms):
        return lax.reduce(terms, [np.zeros((), term.dtype) for term in terms], lambda a, b: [*map(lax.add, a, b)], range(axes))

    return jnp.stack([total for i in range(0, len(terms), MOST_SUMS) for total in reduced(terms[i : i + MOST_SUMS])])


def _divisor(n, most):
    """The largest divisor of n that is at most `most`, or 1."""
    return next((d for d in range(min(n, most), 1, -1) if n % d == 0), 1)


def _rows(x, index):
    """x[index], with zeros where an index is out of range."""
    numbers = lax.GatherDimensionNumbers(offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.gather(x, index[:, None], numbers, (1,) + x.shape[1:], mode=mode, fill_value=0)
