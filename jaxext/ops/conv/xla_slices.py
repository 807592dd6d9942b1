"""A convolution of three axes or more as convolutions without the first one, whose slices are their images.

XLA's CPU backend is fast at convolutions of two axes and slow at those of three.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import lax

from jaxext.core.window import Window
from jaxext.ops.conv import xla_views as views
from jaxext.ops.conv.xla_phases import place
from jaxext.ops.conv.xla_plan import Conv, ConvPlan, Work

# Up to this many channels, all taps of the first axis are channels of one convolution, for which the input is copied once for each tap.
# Beyond, each tap is a convolution of its own, which takes 2/3 to 9/10 of the time with 32 channels or more, but 2.5 times with 1 or 3.
MOST_CHANNELS = 48


class Slices(ConvPlan):
    """Convolutions of the slices of the first axis: one for each of its taps, or one with the taps as channels."""

    name = "slices"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        window, size, wgrad = conv.window, conv.dtype.itemsize, conv.open == "w"
        if window.rank < 3 or window.input_dilation[0] > 1 or not conv.local:
            return None
        pieces = _pieces(conv)
        most = 1 if wgrad and conv.G == 1 else MOST_PIECES  # dense gradients of each tap are no faster than dots, which build sooner
        if not 0 < len(pieces) <= most:
            return None
        alone, copies = len(pieces) == 1, window.filter[0] > 1 or window.stride[0] > 1
        seen = sum(len(taps) * len(outputs) for taps, outputs in pieces) * size * conv.x / window.input[0] * copies
        given = 0 if alone else sum(len(outputs) for _, outputs in pieces) * size * conv.y / window.output[0]
        padded = size * conv.x if alone and copies else 0
        return Work(
            programs=1,
            fusions=2 * len(pieces) + alone if copies else 0,
            copied=2 * (seen + padded) + (2 if wgrad else 3) * given,
            bytes=(seen + (1 if wgrad else 2) * given) / len(pieces) + padded,
        )

    @staticmethod
    def split(conv: Conv) -> list[Conv]:
        window = Window(**{name: value[1:] for name, value in vars(conv.window).items()})
        pieces = _pieces(conv)
        whole = dataclasses.replace(conv, window=window, result=conv.result if len(pieces) == 1 else conv.sums, dgrad=False)
        return [dataclasses.replace(whole, N=conv.N * len(outputs), C=conv.C * len(taps)) for taps, outputs in pieces]

    def run(self, a, b):
        conv, window, total = self.conv, self.conv.window, None
        B, N, G, C, K = conv.B, conv.N, conv.G, conv.C, conv.K
        for part, (taps, outputs) in zip(self.parts, _pieces(conv), strict=True):
            x = _images(a, window, taps, outputs)
            if conv.open == "y":
                w = views.moveaxis(lax.slice_in_dim(b, taps.start, taps.stop, axis=3), 3, -2)
                y = part.run(x, w.reshape((B, G, K, *window.filter[1:], -1)))
                y = y.astype(conv.sums).reshape((B, N, len(outputs), *window.output[1:], G, K))
                placed = place(y, (outputs,), window.output[:1], 2)
            else:
                y = lax.slice_in_dim(b, outputs.start, outputs.stop, axis=2)
                w = part.run(x, y.reshape((B, -1, *y.shape[3:]))).astype(conv.sums)
                w = views.moveaxis(w.reshape((B, G, K, *window.filter[1:], len(taps), C)), -2, 3)
                placed = place(w, (taps,), window.filter[:1], 3)
            total = placed if total is None else views.add(total, placed)
        return total


MOST_PIECES = 16  # each is compiled


def _pieces(conv: Conv) -> list[tuple[range, range]]:
    """The taps of the first axis, in ranges, and the outputs of this axis for which one of them meets the input."""
    window, filter, padded = conv.window, conv.window.filter[0], any(conv.window.padding[0])
    if 1 < filter <= MOST_CHANNELS / conv.C and not (conv.open == "w" and conv.G > 1 and padded):  # an infinity of y would meet zeros
        return [(range(filter), range(window.output[0]))]
    found = ((range(tap, tap + 1), _outputs(window, tap)) for tap in range(filter))
    return [(taps, outputs) for taps, outputs in found if outputs]


def _outputs(window: Window, tap: int) -> range:
    """The outputs of the first axis for which a tap meets the input."""
    first = window.filter_dilation[0] * tap - window.padding[0][0]  # the row of the input for output 0
    stride = window.stride[0]
    return range(max(0, -(first // stride)), min(window.output[0], (window.input[0] - 1 - first) // stride + 1))


def _images(x, window: Window, taps: range, outputs: range):
    """The slices of the input that the taps meet at these outputs, with the taps as channels: (B, N·outputs, *space, G, taps·C)."""
    stride, dilation, low = window.stride[0], window.filter_dilation[0], window.padding[0][0]
    span, first = stride * (len(outputs) - 1) + 1, stride * outputs.start - low
    before, after = max(0, -(first + dilation * taps[0])), max(0, first + dilation * taps[-1] + span - window.input[0])
    if before or after:
        x = lax.pad(x, np.zeros((), x.dtype), [(before, after, 0) if axis == 2 else (0, 0, 0) for axis in range(x.ndim)])
        x = lax.optimization_barrier(x)  # XLA's CPU backend would test for the border at each element of the slices
    starts = (first + before + dilation * tap for tap in taps)
    slices = [lax.slice_in_dim(x, start, start + span, stride, axis=2) for start in starts]
    x = slices[0] if len(slices) == 1 else lax.concatenate(slices, x.ndim - 1)
    return x.reshape((x.shape[0], -1, *x.shape[3:]))
