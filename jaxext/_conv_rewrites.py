"""Convolutions without a convolution: rewrites in plain XLA ops of what lax's own convolution does slowly or wrongly.

Each computes, for arrays with one axis per label,

    y[b,n,p,g,k] = Σ_{r,c} view_r(x)[b,n,p,g,c] · w[b,g,k,r,c]        view_r(x)[p] = x̃[stride·p + filter_dilation·r]

or the same form with w open.  `view` is the input as filter tap r sees it, and holds all the geometry, so every rewrite is right for every
window.  Accumulation is in `acc`; who calls rounds.  A rewrite must not know when it is worth while: `_conv_xla.plan` decides that.

Two facts of XLA's CPU backend shape them.  A convolution inside a loop runs some fifteen times slower than outside, so those are unrolled.
A loop whose step is one small elementwise fusion is fast and needs no memory but the step's.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._window import Window, dilate

# More taps than this are a loop: the time to compile grows with the program.
UNROLLED_TAPS = 64


def view(x, window: Window, tap, lead=2):
    """x as filter tap `tap` sees it: the spatial axes, which follow `lead` others, become those of the output."""
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
    """`view`, of an x that is `padded` already; `tap` may be traced."""
    start, size = [0] * x.ndim, list(x.shape)
    for axis, (r, _, o, _, s, _, dr) in enumerate(_axes(window, tap), lead):
        start[axis], size[axis] = dr * r, s * (o - 1) + 1
    if all(isinstance(i, int) for i in start):
        x = lax.slice(x, start, [i + n for i, n in zip(start, size, strict=True)])
    else:
        x = lax.dynamic_slice(x, [lax.convert_element_type(i, np.int32) for i in start], size)
    return _stride(x, window, lead)


def _axes(window, tap):
    return zip(tap, window.input, window.output, window.padding, window.stride, window.input_dilation, window.filter_dilation, strict=True)


def _stride(x, window, lead):
    strides = [1] * x.ndim
    strides[lead : lead + window.rank] = window.stride
    return lax.slice(x, [0] * x.ndim, x.shape, strides)


def _zero(x):
    return np.zeros((), x.dtype)


def taps_of(window: Window):
    return itertools.product(*map(range, window.filter))


def zeros(shape, dtype, *operands):
    """Zeros that vary over the same manual axes as the operands: the carry of a loop must, and so must a result."""
    total = np.zeros((), np.int32)
    for x in operands:
        nothing = lax.slice_in_dim(x, 0, 0)
        total = total + lax.reduce_sum(lax.convert_element_type(lax.ne(nothing, nothing), np.int32), tuple(range(x.ndim)))
    return lax.broadcast(lax.convert_element_type(total, dtype), shape)


def add(a, b):
    """Sum, which for booleans is `or`, as in XLA's own products."""
    return lax.bitwise_or(a, b) if a.dtype == bool else lax.add(a, b)


def dots_fprop(x, w, window: Window, *, acc, precision):
    """One dot, batched over B and G, for each filter tap, summed.

    Its batch, contracted and free axes are the labels', so XLA's partitioner splits it right where it splits a grouped convolution wrong.
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
    """One dot, batched over B and G, for each filter tap, stacked."""
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


def loop_fprop(x, w, window: Window, **how):
    """`dots_fprop`, one b after the other."""
    return lax.map(lambda xw: dots_fprop(xw[0][None], xw[1][None], window, **how)[0], (x, w))


def loop_wgrad(x, y, window: Window, **how):
    """`dots_wgrad`, one b after the other."""
    return lax.map(lambda xy: dots_wgrad(xy[0][None], xy[1][None], window, **how)[0], (x, y))


def _unravel(t, window):
    """The tap whose number, in the order of `taps_of`, is the traced `t`."""
    tap = []
    for n in reversed(window.filter):
        tap.append(t % n)
        t = t // n
    return tap[::-1]


def shifts_fprop(x, w, window: Window, *, acc, precision):
    """Sum over taps and input channels of x, shifted, times one row of weights: elementwise, with G·K contiguous lanes.

    With few taps XLA folds the padding into the one pass that this becomes.  With more it would test for the border at every tap, so an
    image at a time is padded first: a loop, whose memory is one padded image.
    """
    B, G, K = w.shape[:3]
    N, C = x.shape[1], x.shape[-1]
    w = jnp.moveaxis(w, (1, 2), (-2, -1)).reshape(B, -1, C, G * K).astype(acc)  # (B, taps, C, lanes)

    def image(x, w, see):
        """y of x, both (B, N, ...) with any B and N."""
        lanes = [_lanes(x, c, K) for c in range(C)]
        w = w.reshape(w.shape[:1] + (1,) * (window.rank + 1) + w.shape[1:])
        terms = (see(lanes[c], window, tap).astype(acc) * w[..., t, c, :] for t, tap in enumerate(taps_of(window)) for c in range(C))
        return functools.reduce(lax.add, terms)

    if math.prod(window.filter) * C <= FUSED_TERMS:
        y = image(x, w, view)
    else:

        def step(i_x):
            i, x = i_x
            x = padded(x.reshape((1, 1) + window.input + (G, C)), window)
            return image(x, lax.dynamic_index_in_dim(w, i // N, 0), view_of_padded)[0, 0]

        # G·C in one axis: the loop would copy an x whose last axis has size 1.
        y = lax.map(step, (np.arange(B * N, dtype=np.int32), x.reshape((B * N,) + window.input + (G * C,))))
    return y.reshape((B, N) + window.output + (G, K))


# Terms of a sum over taps and channels that XLA may compute with padding and all in one pass.
FUSED_TERMS = 9


def _lanes(x, c, K):
    """Channel c of each group, repeated for the K outputs of its group: (..., G, C) -> (..., G·K)."""
    x = x[..., c : c + 1]
    return lax.broadcast_in_dim(x, x.shape[:-1] + (K,), tuple(range(x.ndim))).reshape(x.shape[:-2] + (-1,))


def rows_wgrad(x, y, window: Window, *, acc, precision):
    """A scan over blocks of output rows that accumulates every tap while a block is in cache."""
    B, N, G, K = y.shape[0], y.shape[1], *y.shape[-2:]
    C, first = x.shape[-1], window.output[0]
    block = 1 if window.rank > 1 else ROW_BLOCK
    blocks = -(-first // block)
    rest = Window(**{name: value[1:] for name, value in vars(window).items()})
    (low, _), s, di, dr = window.padding[0], window.stride[0], window.input_dilation[0], window.filter_dilation[0]

    def step(total, i, x, y):
        p = (i % blocks) * block + np.arange(block, dtype=np.int32)
        n = i // blocks
        rows = _rows(lax.dynamic_index_in_dim(y, n, 0, keepdims=False), p).astype(acc)  # (block, *output[1:], G·K)
        image = lax.dynamic_index_in_dim(x, n, 0, keepdims=False)
        sums = []
        for r in range(window.filter[0]):
            h = s * p + dr * r - low
            seen = _rows(image, lax.select(h % di == 0, h // di, lax.full_like(h, -1))).reshape((block,) + rest.input + (G, C))
            seen = padded(seen, rest, lead=1)
            lanes = [_lanes(seen, c, K).astype(acc) for c in range(C)]
            for tap in taps_of(rest):
                for c in range(C):
                    product = view_of_padded(lanes[c], rest, tap, lead=1) * rows
                    sums.append(lax.reduce_sum(product, tuple(range(window.rank))))
        return total + jnp.stack(sums), None

    def one(xy):
        x, y = xy
        total = zeros((math.prod(window.filter) * C, G * K), acc, x, y)
        return lax.scan(lambda total, i: step(total, i, x, y), total, np.arange(N * blocks, dtype=np.int32))[0]

    # G·C and G·K in one axis each: the loop would copy an array whose last axis has size 1.
    x, y = x.reshape((B, N) + window.input + (G * C,)), y.reshape((B, N) + window.output + (G * K,))
    w = one((x[0], y[0]))[None] if B == 1 else lax.map(one, (x, y))
    return jnp.moveaxis(w.reshape((B,) + window.filter + (C, G, K)), (-2, -1), (1, 2))


# Output positions of one step in one dimension.
ROW_BLOCK = 64


def _rows(x, index):
    """x[index], and zeros where index is outside."""
    numbers = lax.GatherDimensionNumbers(offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.gather(x, index[:, None], numbers, (1,) + x.shape[1:], mode=mode, fill_value=0)


def blocks_fprop(x, w, window: Window, *, dense, merged):
    """One dense convolution for each b and each block of `merged` groups, whose filters stand on the diagonal of the block's."""
    B, G, K = w.shape[:3]
    C = x.shape[-1]

    def block(b, g):
        xs = x[b : b + 1, ..., g : g + merged, :].reshape(x.shape[1:-2] + (merged * C,))
        y = dense(xs[None, ..., None, :], _diagonal(w[b, g : g + merged])[None, None], window)
        return y.reshape((1, x.shape[1]) + window.output + (merged, K))

    ys = [jnp.concatenate([block(b, g) for g in range(0, G, merged)], -2) for b in range(B)]
    return jnp.concatenate(ys, 0)


def _diagonal(w):
    """(M, K, *filter, C) -> (M·K, *filter, M·C), zero between different groups."""
    M, C = w.shape[0], w.shape[-1]
    inner = [(0, 0, 0)] * (w.ndim - 2)
    return jnp.concatenate([lax.pad(w[m], _zero(w), [*inner, (m * C, (M - 1 - m) * C, 0)]) for m in range(M)], 0)


def blocks_wgrad(x, y, window: Window, *, dense, merged):
    """One dense filter gradient for each b and each block of `merged` groups, of which the diagonal is kept."""
    B, G, K, C = y.shape[0], *y.shape[-2:], x.shape[-1]

    def block(b, g):
        xs, ys = (a[b : b + 1, ..., g : g + merged, :].reshape((1,) + a.shape[1:-2] + (1, -1)) for a in (x, y))
        w = dense(xs, ys, window)[0, 0]  # (M·K, *filter, M·C)
        return jnp.stack([w[m * K : (m + 1) * K, ..., m * C : (m + 1) * C] for m in range(merged)])

    return jnp.stack([jnp.concatenate([block(b, g) for g in range(0, G, merged)]) for b in range(B)])


def phases_fprop(x, w, window: Window, *, part, acc):
    """One convolution without input dilation for each residue of outputs and taps (`Window.phases`), interleaved."""
    parts = [(outputs, part(x, w[(slice(None),) * 3 + _slices(taps)], sub).astype(acc)) for outputs, taps, sub in window.phases]
    return _interleave(parts, window.output, 2, zeros(x.shape[:2] + window.output + w.shape[1:3], acc, x, w))


def phases_wgrad(x, y, window: Window, *, part, acc):
    """As `phases_fprop`: the taps of one residue get their gradient from one residue of outputs."""
    parts = [(taps, part(x, y[(slice(None),) * 2 + _slices(outputs)], sub).astype(acc)) for outputs, taps, sub in window.phases]
    B, G, K, C = y.shape[0], *y.shape[-2:], x.shape[-1]
    return _interleave(parts, window.filter, 3, zeros((B, G, K) + window.filter + (C,), acc, x, y))


def _slices(ranges):
    return tuple(slice(r.start, r.stop, r.step) for r in ranges)


def _interleave(parts, sizes, lead, total):
    """Sum of the parts, each at its ranges of the `sizes` axes that follow `lead` others."""
    for ranges, part in parts:
        config = [(0, 0, 0)] * part.ndim
        config[lead : lead + len(sizes)] = [(r[0], n - 1 - r[-1], r.step - 1) for r, n in zip(ranges, sizes, strict=True)]
        total = add(total, lax.pad(part, _zero(part), config))
    return total
