"""Rewrites of convolutions in plain XLA ops, for cases that lax's own convolution computes slowly or wrongly.

Each computes, for arrays with one axis per label,

    y[b,n,p,g,k] = Σ_{r,c} view_r(x)[b,n,p,g,c] · w[b,g,k,r,c]        view_r(x)[p] = x̃[stride·p + filter_dilation·r]

or the same form with w open.  `view` is the input as filter tap r sees it.  It contains all the geometry, so every rewrite supports every
window.  Sums are accumulated in `acc`; the caller rounds them.

Two properties of XLA's CPU backend matter:

- A convolution inside a loop is as fast as outside only in XLA's own layout, NHWC with the filter HWIO.  In other layouts it is some
  fifteen times slower.
- Each fusion takes tens of milliseconds to compile, longer than most layers run.  So one reduction computes many sums.
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
    x, w = x.reshape(x.shape[:-2] + (-1,)), _outputs_last(w)

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


def _outputs_last(w):
    """(B, G, K, *filter, C) -> (B, *filter, C, G·K)

    G and K are merged before they move, so that XLA sees that an HWIO filter is already in this order, and does not copy it.
    """
    B, inner = w.shape[0], w.shape[3:]
    if B == 1:
        return jnp.moveaxis(w.reshape((-1,) + inner), 0, -1)[None]
    return jnp.moveaxis(w.reshape((B, -1) + inner), 1, -1)


def outputs_first(w, G):
    """The inverse of `_outputs_last`."""
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


def shifts_fprop(x, w, window: Window, *, acc, fold):
    """The sum over taps and input channels of the shifted x times a row of weights: elementwise, with G·K contiguous lanes.

    With `fold`, padding and sum are one pass over x, which tests for the border at every term.  Otherwise x is padded first, one image at a
    time if padding all images would take much memory.  If there are very many terms, only some filter rows at a time are unrolled.
    """
    B, G, K = w.shape[:3]
    N, C = x.shape[1], x.shape[-1]
    w = _outputs_last(w).reshape(B, -1, C, G * K).astype(acc)  # (B, taps, C, lanes)
    rest = math.prod(window.filter[1:])
    in_parts = math.prod(window.filter) * C > UNROLLED_TERMS[window.rank]

    def images(x, w, see):
        if not in_parts:
            return _shifted(x, w, window, see, K, acc)
        at_once = _divisor(window.filter[0], TERMS_OF_PART // (rest * C))
        step, dilation = window.stride[0], window.filter_dilation[0]
        rows = step * (window.output[0] - 1) + dilation * (at_once - 1) + 1  # of x for each part
        w = w.reshape((w.shape[0], -1, at_once * rest, *w.shape[2:]))
        of_part = dataclasses.replace(
            window,
            input=(rows, *x.shape[3 : 2 + window.rank]),
            filter=(at_once, *window.filter[1:]),
            padding=((0, 0),) * window.rank,
            input_dilation=(1,) * window.rank,
        )

        def part(i, y):
            weights = lax.dynamic_index_in_dim(w, i, 1, keepdims=False, allow_negative_indices=False)
            if C == 1:  # each view is read once, and need not be an array

                def see_from(x, _, tap):
                    return see(x, window, (i * np.int32(at_once) + np.int32(tap[0]), *tap[1:]))

                return lax.add(y, _shifted(x, weights, of_part, see_from, K, acc))
            seen = lax.dynamic_slice_in_dim(x, i * np.int32(dilation * at_once), rows, axis=2, allow_negative_indices=False)
            return lax.add(y, _shifted(seen, weights, of_part, see, K, acc))

        return repeat(w.shape[1], part, zeros((*x.shape[:2], *window.output, G * K), acc, x, w))

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
