"""Rewrites of convolutions with a dilated input as convolutions without one: by the residues of the outputs (`Window.phases`).

Only every `input_dilation`-th tap meets an element of x, the others meet zeros.  So outputs of one residue see one residue of taps:
`part` computes each convolution that remains.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.backends.xla import conv_rewrites as rewrites
from jaxext.forms.window import Window


def phases_fprop(x, w, window: Window, *, part, acc):
    """Interleaved convolutions without input dilation: one for all residues of outputs that see equally many taps."""
    K = w.shape[2]
    longest = [-(-o // period) for o, period in zip(window.output, window.periods, strict=True)]
    found = {}
    for sub, members in window.merged_phases:
        filters = jnp.concatenate([w[(slice(None),) * 3 + _slices(taps)] for _, taps, _ in members], 2)
        y = part(x, filters, sub).astype(acc)
        for i, (outputs, _, shifts) in enumerate(members):
            space = tuple(slice(shift, shift + n) for shift, n in zip(shifts, longest, strict=True))
            found[tuple(r[0] for r in outputs)] = y[(slice(None), slice(None), *space, slice(None), slice(i * K, (i + 1) * K))]
    missing = rewrites.zeros(x.shape[:2] + tuple(longest) + w.shape[1:3], acc, x, w)
    return _interleave(found, missing, window.periods, window.output)


def _interleave(parts, missing, periods, sizes, residues=()):
    """Interleave `parts`, keyed by the residues of their outputs, into one array.  Its axes after the first two have `sizes`."""
    done = len(residues)
    if done == len(sizes):
        return parts.get(residues, missing)
    inner = [_interleave(parts, missing, periods, sizes, (*residues, i)) for i in range(periods[done])]
    y = jnp.stack(inner, done + 3)
    y = y.reshape(y.shape[: done + 2] + (-1,) + y.shape[done + 4 :])
    return lax.slice_in_dim(y, 0, sizes[done], axis=done + 2)


def phases_wgrad(x, y, window: Window, *, part, acc):
    """One convolution without input dilation for each residue of outputs and taps (`Window.phases`).

    The gradient of the taps of one residue depends on one residue of outputs.
    """
    B, G, K, C = y.shape[0], *y.shape[-2:], x.shape[-1]
    total = rewrites.zeros((B, G, K) + window.filter + (C,), acc, x, y)
    for outputs, taps, sub in window.phases:
        w = part(x, y[(slice(None),) * 2 + _slices(outputs)], sub).astype(acc)
        config = [(0, 0, 0)] * w.ndim
        config[3:-1] = [(r[0], n - 1 - r[-1], r.step - 1) for r, n in zip(taps, window.filter, strict=True)]
        total = rewrites.add(total, lax.pad(w, np.zeros((), w.dtype), config))
    return total


def foldable(window: Window) -> bool:
    """Whether residues of outputs see all taps of a residue, and some are of one size."""
    axes = zip(window.stride, window.input_dilation, window.filter_dilation, strict=True)
    return all(di == 1 or s == dr == 1 for s, di, dr in axes) and len(folded(window)) < math.prod(window.input_dilation)


def folded(window: Window) -> list[tuple[tuple[range, ...], Window]]:
    """The residues of outputs of one size, as a range for each axis, and the window of each of them, without input dilation.

    Output p = di·q + ρ and tap r meet x[q + j - low // di] where  r + (-1 - low) mod di = di·j + di - 1 - ρ.  The window has all j of the
    axis, in which some residues have no tap.
    """
    taps = tuple(taps for _, taps in _folded_filter(window))
    of_axes = []
    for i, o, (low, high), di, j in zip(window.input, window.output, window.padding, window.input_dilation, taps, strict=True):
        long, rest = divmod(o, di)
        parts = [(range(rest), long + 1), (range(rest, di), long)] if di > 1 else [(range(1), o)]
        pads = [(low, high) if di == 1 else (low // di, size + j - 1 - i - low // di) for _, size in parts]
        of_axes.append([(residues, pad) for (residues, size), pad in zip(parts, pads, strict=True) if residues and size])
    return [
        (residues, dataclasses.replace(window, filter=taps, padding=padding, input_dilation=(1,) * window.rank))
        for residues, padding in (zip(*parts, strict=True) for parts in itertools.product(*of_axes))
    ]


def _folded_filter(window):
    """For each axis the place of the first tap in whole periods, and the number of these."""
    for r, (low, _), di in zip(window.filter, window.padding, window.input_dilation, strict=True):
        first = (-1 - low) % di
        yield first, -(-(first + r) // di)


def folded_wgrad(x, y, window: Window, *, part, acc):
    """As `phases_wgrad`, with the residues of outputs of one size as channels of one convolution."""
    B, G, K, C, rank, periods = y.shape[0], *y.shape[-2:], x.shape[-1], window.rank, window.input_dilation
    total = None
    for residues, sub in folded(window):
        of_part = y
        for axis, (size, o, di, r) in enumerate(zip(sub.output, window.output, periods, residues, strict=True)):
            at = 2 + 2 * axis  # each axis becomes outputs and residues
            of_part = lax.pad(of_part, np.zeros((), y.dtype), [(0, size * di - o if i == at else 0, 0) for i in range(of_part.ndim)])
            of_part = of_part.reshape((*of_part.shape[:at], size, di, *of_part.shape[at + 1 :]))
            of_part = lax.slice_in_dim(of_part, r.start, r.stop, axis=at + 1)
        of_part = jnp.moveaxis(of_part, range(3, 3 + 2 * rank, 2), range(3 + rank, 3 + 2 * rank))  # (B, N, *outputs, G, *residues, K)
        w = part(x, of_part.reshape((*of_part.shape[: 3 + rank], -1)), sub).astype(acc)
        w = w.reshape((B, G, *map(len, residues), K, *sub.filter, C))
        of_residues = [(r.start, di - r.stop, 0) for r, di in zip(residues, periods, strict=True)]
        w = lax.pad(w, np.zeros((), w.dtype), [(0, 0, 0)] * 2 + of_residues + [(0, 0, 0)] * (rank + 2))
        total = w if total is None else rewrites.add(total, w)
    assert total is not None
    w = jnp.moveaxis(lax.rev(total, tuple(range(2, 2 + rank))), range(2, 2 + rank), range(4, 4 + 2 * rank, 2))  # a residue after its taps
    axes = list(zip(window.filter, _folded_filter(window), periods, strict=True))
    w = w.reshape((B, G, K, *(taps * di for _, (_, taps), di in axes), C))
    starts = (0, 0, 0, *(first for _, (first, _), _ in axes), 0)
    return lax.slice(w, starts, (B, G, K, *(first + r for r, (first, _), _ in axes), C))


def _slices(ranges):
    return tuple(slice(r.start, r.stop, r.step) for r in ranges)


def larger_than_output(x, window: Window):
    """x, padded if it is smaller than the output, which is the filter of wgrad's convolution.

    XLA would exchange the two, and its CPU backend has no fast convolution for the result.
    """
    return padded_apart(x, window) if math.prod(window.output) > math.prod(window.input) else (x, window)


def padded_apart(x, window: Window):
    """x, padded, and the window that is left, if no input is dilated.  The barrier keeps the padding out of the convolution.

    XLA's CPU backend is slow at padding images of a single channel, which one image is in wgrad.
    """
    if max(window.input_dilation, default=1) > 1 or {(0, 0)} >= {*window.padding}:
        return x, window
    x = lax.optimization_barrier(rewrites.padded(x, window))
    return x, dataclasses.replace(window, input=x.shape[2:-2], padding=((0, 0),) * window.rank)
