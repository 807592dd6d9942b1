"""Views of the input as the taps of a filter see it, from which the rewrites of convolutions are made.

Each rewrite computes, for arrays with one axis per label,

    y[b,n,p,g,k] = Σ_{r,c} view_r(x)[b,n,p,g,c] · w[b,g,k,r,c]        view_r(x)[p] = x̃[stride·p + filter_dilation·r]

or the same form with w open.  `view` contains all the geometry, so every rewrite supports every window.  Sums are accumulated in `acc`; the
caller rounds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._compat import align_varying
from jaxext.core.window import Window, dilate


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
    x = lax.dynamic_slice(x, [lax.convert_element_type(i, np.int32) for i in start], size, allow_negative_indices=False)
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
    zero, *_ = align_varying(lax.full((), 0, dtype), *operands)
    return lax.broadcast(zero, shape)


def add(a, b):
    """The sum.  For booleans it is `or`, as in XLA's own products."""
    return lax.bitwise_or(a, b) if a.dtype == bool else lax.add(a, b)


def repeat(count, step, total):
    """Runs `total = step(i, total)` for i < count.  i is an int32 even under x64.  `lax.fori_loop` takes longer to trace: it is a scan."""

    def body(carry):
        i, total = carry
        return lax.add(i, np.int32(1)), step(i, total)

    return lax.while_loop(lambda carry: lax.lt(carry[0], np.int32(count)), body, (lax.full((), 0, np.int32), total))[1]


def pair(i, B, G):
    """b and g of step i."""
    zero = np.int32(0)
    return (i, zero) if G == 1 else (zero, i) if B == 1 else (lax.div(i, np.int32(G)), lax.rem(i, np.int32(G)))


def moveaxis(x, source: int | Sequence[int], destination: int | Sequence[int]):
    """Move axes as `jnp.moveaxis` does, which takes ten times as long to trace."""
    pairs = zip(np.atleast_1d(source).tolist(), np.atleast_1d(destination).tolist(), strict=True)
    placed = {to % x.ndim: of % x.ndim for of, to in pairs}
    others = (axis for axis in range(x.ndim) if axis not in placed.values())
    order = [placed[axis] if axis in placed else next(others) for axis in range(x.ndim)]
    return lax.transpose(x, order)


def outputs_last(w):
    """(B, G, K, *filter, C) -> (B, *filter, C, G·K)

    G and K are merged before they move, so that XLA sees that an HWIO filter is already in this order, and does not copy it.
    """
    B, inner = w.shape[0], w.shape[3:]
    if B == 1:
        return lax.expand_dims(moveaxis(w.reshape((-1,) + inner), 0, -1), (0,))
    return moveaxis(w.reshape((B, -1) + inner), 1, -1)


def outputs_first(w, G):
    """The inverse of `outputs_last`."""
    B, inner = w.shape[0], w.shape[1:-1]
    w = moveaxis(lax.squeeze(w, (0,)), -1, 0) if B == 1 else moveaxis(w, -1, 1)
    return w.reshape((B, G, -1) + inner)


def padded_size(window):
    axes = zip(window.input, window.padding, window.input_dilation, strict=True)
    return math.prod(low + dilate(i, d) + high for i, (low, high), d in axes)


def sums(terms, axes):
    """The sum of each array over its first `axes` axes, stacked.

    One reduction computes up to MOST_SUMS.  It compiles as fast as that of a single array, and reads data shared by its terms only once.
    """

    def reduced(terms):
        return lax.reduce(terms, [np.zeros((), term.dtype) for term in terms], lambda a, b: [*map(lax.add, a, b)], range(axes))

    return jnp.stack([total for i in range(0, len(terms), MOST_SUMS) for total in reduced(terms[i : i + MOST_SUMS])])


# The most sums in one reduction.
MOST_SUMS = 32


def lanes(x, c, K):
    """Channel c of each group, repeated for the K outputs of its group: (..., G, C) -> (..., G·K)."""
    x = lax.slice_in_dim(x, c, c + 1, axis=-1)
    if K > 1:
        x = lax.broadcast_in_dim(x, x.shape[:-1] + (K,), tuple(range(x.ndim)))
    return x.reshape((*x.shape[:-2], -1))


def divisor(n, most):
    """The largest divisor of n that is at most `most`, or 1."""
    return next((d for d in range(min(n, most), 1, -1) if n % d == 0), 1)
