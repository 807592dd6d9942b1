"""Rewrites of convolutions with a dilated input as convolutions without one: by the residues of the outputs (`Window.phases`).

Only every `input_dilation`-th tap meets an element of x, the others meet zeros.  So outputs of one residue see one residue of taps: a part
computes each convolution that remains.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv import xla_views as views
from jaxext.ops.conv.xla_lax import cropped
from jaxext.ops.conv.xla_plan import Conv, ConvPlan, Work

# The most convolutions of their own.
MOST_PHASES = 64


class Phases(ConvPlan):
    """Convolutions without input dilation: one for each residue of outputs and taps, or in fprop one for all residues of outputs that see
    equally many taps, where they see the same input.  The gradient of the taps of one residue depends on one residue of outputs."""

    name = "phases"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        size, phases, few = conv.dtype.itemsize, residues(conv.window), conv.open == "y" and foldable(conv.window)
        if not conv.dilated or not few and phases > MOST_PHASES:
            return None
        filters = size * conv.w
        if conv.open == "w":
            return Work(programs=1, fusions=phases, copied=2 * size * conv.y + 2 * filters * phases, bytes=size * conv.y + filters)
        if few:
            copied = 2 * size * conv.y
            return Work(programs=1, fusions=3, transposed=size * conv.y + filters, copied=copied, bytes=copied + filters)
        return Work(programs=1, fusions=phases, copied=3 * size * conv.y * phases, bytes=2 * size * conv.y + filters)

    @staticmethod
    def split(conv: Conv) -> list[Conv]:
        window = conv.window
        if conv.open == "w" or not foldable(window):
            return [_part(conv, sub) for _, _, sub in window.phases]
        every = (zip(*parts, strict=True) for parts in itertools.product(*(groups for groups, _, _ in _residues(window))))
        return [_part(conv, _undilated(window, taps, padding), residues) for residues, taps, padding in every if 0 not in taps]

    def run(self, a, b):
        conv, window = self.conv, self.conv.window
        if conv.open == "y" and foldable(window):
            return _folded_fprop(self, a, b)
        total = views.zeros(conv.shape, conv.sums, a, b)
        for part, (outputs, taps, sub) in zip(self.parts, window.phases, strict=True):
            if conv.open == "y":
                y = _computed(part, sub, a, b[(slice(None),) * 3 + _slices(taps)], conv.sums)
                placed = place(y, outputs, window.output, 2)
            else:
                w = _computed(part, sub, a, b[(slice(None),) * 2 + _slices(outputs)], conv.sums)
                placed = place(w, taps, window.filter, 3)
            total = views.add(total, placed)
        return total


def _part(conv: Conv, window: Window, residues: tuple[range, ...] = ()) -> Conv:
    """A part of a convolution, whose channels of the result are these residues of outputs, too."""
    return dataclasses.replace(conv, K=conv.K * math.prod(map(len, residues)), window=window.cropped[1], dgrad=False)


def _undilated(window: Window, filter: tuple[int, ...], padding: tuple[tuple[int, int], ...]) -> Window:
    return dataclasses.replace(window, filter=filter, padding=padding, input_dilation=(1,) * window.rank)


def _computed(part: ConvPlan, window: Window, a, b, dtype):
    a, _ = cropped(a, window)
    return part.run(a, b).astype(dtype)


def place(part, ranges, sizes, lead):
    """Put the elements of a part at `ranges` of axes with these sizes, which come after `lead` others.  The rest is zeros."""
    config = [(0, 0, 0)] * part.ndim
    config[lead : lead + len(ranges)] = [(r[0], n - 1 - r[-1], r.step - 1) for r, n in zip(ranges, sizes, strict=True)]
    return lax.pad(part, np.zeros((), part.dtype), config)


def _folded_fprop(plan: ConvPlan, x, w):
    """One convolution without input dilation for all residues of outputs that see equally many taps: they become its channels.

    Output p and tap r = di·j + σ meet x[q + j] where  p = di·q + low - σ.  The filter is cut into residues σ and their taps j, the last σ
    first, which is the order of the outputs.
    """
    window, acc, parts = plan.conv.window, plan.conv.sums, iter(plan.parts)
    B, G, K, C, rank, periods = *w.shape[:3], w.shape[-1], window.rank, window.input_dilation
    most = [-(-r // di) for r, di in zip(window.filter, periods, strict=True)]
    config = [(0, n * di - r, 0) for n, di, r in zip(most, periods, window.filter, strict=True)]
    w = lax.pad(w, np.zeros((), w.dtype), [(0, 0, 0)] * 3 + config + [(0, 0, 0)])
    w = w.reshape((B, G, K, *itertools.chain(*zip(most, periods, strict=True)), C))
    w = lax.rev(views.moveaxis(w, range(4, 4 + 2 * rank, 2), range(2, 2 + rank)), range(2, 2 + rank))  # (B, G, *residues, K, *taps, C)
    parts_of_axes, starts, counts = zip(*_residues(window), strict=True)

    def joined(*of_axes):
        """The results for these parts of the first axes and all parts of the others: (B, N, *outputs, G, *residues, K)."""
        if len(of_axes) < rank:
            return lax.concatenate([joined(*of_axes, one) for one in parts_of_axes[len(of_axes)]], 3 + rank + len(of_axes))
        residues, taps, padding = zip(*of_axes, strict=True)
        shape = (B, x.shape[1], *counts, G, *map(len, residues), K)
        if 0 in taps:
            return views.zeros(shape, acc, x, w)
        filters = w[(slice(None), slice(None), *_slices(residues), slice(None), *map(slice, taps))].reshape((B, G, -1, *taps, C))
        return _computed(next(parts), _undilated(window, taps, padding), x, filters, acc).reshape(shape)

    y = views.moveaxis(joined(), range(3 + rank, 3 + 2 * rank), range(3, 3 + 2 * rank, 2))  # residues after the outputs of their axis
    y = y.reshape((*y.shape[:2], *(n * di for n, di in zip(counts, periods, strict=True)), G, K))
    stops = (start + o for start, o in zip(starts, window.output, strict=True))
    return y[(slice(None), slice(None), *map(slice, starts, stops))]


def _residues(window):
    """Return for each axis the groups of residues with equally many taps (residues, taps, padding), where output 0 lies among all, and the
    outputs of each residue."""
    axes = zip(window.input, window.filter, window.output, window.padding, window.input_dilation, strict=True)
    return [_residues_of_axis(*axis) for axis in axes]


def _residues_of_axis(i, r, o, padding, di):
    if di == 1:
        return [(range(1), r, padding)], 0, o
    low, (taps, rest) = padding[0], divmod(r, di)
    before = low // di
    count = (o + di - 2 - low) // di + before + 1
    parts = [(range(di - rest), taps), (range(di - rest, di), taps + 1)]
    return [(residues, j, (before, count - 1 + j - i - before)) for residues, j in parts if residues], di - 1 - low % di, count


def foldable(window: Window) -> bool:
    """Return whether each residue of outputs sees one residue of the taps, and all residues the same input."""
    axes = zip(window.stride, window.input_dilation, window.filter_dilation, strict=True)
    return all(di == 1 or s == dr == 1 for s, di, dr in axes)


def residues(window: Window) -> int:
    """The number of residues of outputs that see taps: each would be a phase."""
    return math.prod(map(min, window.filter, window.input_dilation))


class Folded(ConvPlan):
    """A plan as `Phases`, in wgrad, with the residues of outputs of one size as channels of one convolution."""

    name = "folded"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        if conv.open == "y" or not conv.dilated or not folds(conv.window):
            return None
        size = conv.dtype.itemsize
        return Work(
            programs=1,
            fusions=3,
            transposed=size * (conv.y + conv.w),
            copied=2 * size * (conv.y + conv.w),
            bytes=size * (conv.y + 2 * conv.w),
        )

    @staticmethod
    def split(conv: Conv) -> list[Conv]:
        return [_part(conv, sub, residues) for residues, sub in folded(conv.window)]

    def run(self, a, b):
        conv, window = self.conv, self.conv.window
        B, G, K, C, rank, periods = b.shape[0], *b.shape[-2:], a.shape[-1], window.rank, window.input_dilation
        total = None
        for part, (residues, sub) in zip(self.parts, folded(window), strict=True):
            of_part = b
            for axis, (size, o, di, r) in enumerate(zip(sub.output, window.output, periods, residues, strict=True)):
                at = 2 + 2 * axis  # each axis becomes outputs and residues
                of_part = lax.pad(of_part, np.zeros((), b.dtype), [(0, size * di - o if i == at else 0, 0) for i in range(of_part.ndim)])
                of_part = of_part.reshape((*of_part.shape[:at], size, di, *of_part.shape[at + 1 :]))
                of_part = lax.slice_in_dim(of_part, r.start, r.stop, axis=at + 1)
            of_part = views.moveaxis(of_part, range(3, 3 + 2 * rank, 2), range(3 + rank, 3 + 2 * rank))  # (B, N, *outputs, G, *residues, K)
            w = _computed(part, sub, a, of_part.reshape((*of_part.shape[: 3 + rank], -1)), conv.sums)
            w = w.reshape((B, G, *map(len, residues), K, *sub.filter, C))
            of_residues = [(r.start, di - r.stop, 0) for r, di in zip(residues, periods, strict=True)]
            w = lax.pad(w, np.zeros((), w.dtype), [(0, 0, 0)] * 2 + of_residues + [(0, 0, 0)] * (rank + 2))
            total = w if total is None else views.add(total, w)
        assert total is not None
        w = views.moveaxis(
            lax.rev(total, tuple(range(2, 2 + rank))), range(2, 2 + rank), range(4, 4 + 2 * rank, 2)
        )  # a residue after its taps
        axes = list(zip(window.filter, _folded_filter(window), periods, strict=True))
        w = w.reshape((B, G, K, *(taps * di for _, (_, taps), di in axes), C))
        starts = (0, 0, 0, *(first for _, (first, _), _ in axes), 0)
        return lax.slice(w, starts, (B, G, K, *(first + r for r, (first, _), _ in axes), C))


def folds(window: Window) -> bool:
    """Return whether `Folded` computes several residues at once."""
    return foldable(window) and len(folded(window)) < math.prod(window.input_dilation)


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
        (residues, _undilated(window, taps, padding))
        for residues, padding in (zip(*parts, strict=True) for parts in itertools.product(*of_axes))
    ]


def _folded_filter(window):
    """Yield for each axis the place of the first tap in whole periods, and the number of these."""
    for r, (low, _), di in zip(window.filter, window.padding, window.input_dilation, strict=True):
        first = (-1 - low) % di
        yield first, -(-(first + r) // di)


def _slices(ranges):
    return tuple(slice(r.start, r.stop, r.step) for r in ranges)
