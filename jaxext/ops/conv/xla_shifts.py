"""A convolution as a sum over taps and input channels of shifted inputs times weights: elementwise, with G·K contiguous lanes.

Each fusion takes XLA's CPU backend tens of milliseconds to compile, longer than most layers run.  So one reduction computes many sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv.xla_plan import Conv, ConvPlan, Work
from jaxext.ops.conv.xla_views import divisor, lanes, outputs_last, padded, padded_size, repeat, taps_of, view, view_of_padded, zeros

# Beyond, the program or its sums are large.
MOST_TERMS, MOST_CHANNELS = 2048, 512
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
        padding = size * conv.x / math.prod(window.input) * padded_size(window)
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
    w = outputs_last(w).reshape(B, -1, C, G * K).astype(acc)  # (B, taps, C, lanes)
    x = x.astype(acc) if K > 1 else x  # once, and not for each of K lanes
    rest = math.prod(window.filter[1:])
    in_parts = math.prod(window.filter) * C > UNROLLED_TERMS.get(window.rank, UNROLLED_TERMS[3])

    def images(x, w, see):
        if not in_parts:
            return _shifted(x, w, window, see, K, acc)
        step, dilation, most = window.stride[0], window.filter_dilation[0], TERMS_OF_PART // (rest * C)
        at_once = divisor(window.filter[0], most)
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
    elif B * N == 1 or not in_parts and _pads_all(window, B * N, G, C, K):
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
# All images are padded at once up to this number of elements, or up to this multiple of the images and their results.
MOST_ELEMENTS, MOST_PADDED = 1 << 18, 1.5


def _pads_all(window, images, G, C, K):
    """Return whether to pad all images at once.  One at a time takes less memory."""
    size = padded_size(window) * C
    return size <= MOST_PADDED * (math.prod(window.input) * C + math.prod(window.output) * K) or images * G * size <= MOST_ELEMENTS


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
                row = seen if C == K == 1 else lanes(seen, c, K)
                yield lax.mul(row, lax.broadcast_in_dim(weights, shape, (0, 1, len(shape) - 1)))

    return functools.reduce(lax.add, terms())
