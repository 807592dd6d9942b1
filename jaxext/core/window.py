"""The geometry of a convolution's window, the same for all three roles.

Along one axis, with x̃ the input after dilation and padding,

    y[p] = Σ_r  x̃[stride·p + filter_dilation·r] · w[r],
    x̃[input_dilation·i + low] = x[i],  x̃ = 0 elsewhere.

Negative padding crops.  A `Window` holds the sizes of the input and the filter, and derives the output's, so the same object serves fprop,
dgrad and wgrad and does not change under transposition.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math


def labels(rank: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The labels of the spatial axes of input, filter and output: DHW, TRS and OPQ, as in cuDNN."""

    def letters(last_three):
        return (*(f"{last_three[0]}{i}" for i in range(1, rank - 2)), *last_three[max(0, 3 - rank) :])

    return letters("DHW"), letters("TRS"), letters("OPQ")


def dilate(size, dilation):
    """The size of an axis with `dilation - 1` zeros between neighbours."""
    return 0 if isinstance(size, int) and size == 0 else (size - 1) * dilation + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Sizes and strides of a window, one entry per spatial axis; `padding` holds (low, high) pairs."""

    input: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    filter_dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.input)

    @property
    def plain_square(self) -> bool:
        """Return whether there are two axes, a filter as high as it is wide, and neither strides nor dilations."""
        steps = self.stride + self.input_dilation + self.filter_dilation
        return self.rank == 2 and len({*self.filter}) == 1 and {*steps} == {1}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each window label (`labels`)."""
        inputs, filters, outputs = labels(self.rank)
        return dict(zip(inputs + filters + outputs, self.input + self.filter + self.output, strict=True))

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(
            _output(low + dilate(i, di) + high, dilate(r, dr), s)
            for i, r, s, (low, high), di, dr in zip(
                self.input, self.filter, self.stride, self.padding, self.input_dilation, self.filter_dilation, strict=True
            )
        )

    @property
    def read(self) -> tuple[tuple[int, int], ...]:
        """The padding that is read: the last tap of the last output is its last element.  Less than `padding` if strides leave a rest."""
        axes = zip(self.padding, self.output, self.stride, self.filter, self.filter_dilation, self.input, self.input_dilation, strict=True)
        return tuple((low, dilate(o, s) + dilate(r, dr) - 1 - low - dilate(i, di)) for (low, _), o, s, r, dr, i, di in axes)

    @property
    def cropped(self) -> tuple[tuple[slice, ...], Window]:
        """The slices of the input that remain after negative padding, and the same window over them, without negative padding.

        If nothing of an axis remains, its slice is empty.  Symbolic axes do not change.
        """
        slices, inputs, padding = [], [], []
        for size, ends, dilation in zip(self.input, self.padding, self.input_dilation, strict=True):
            start, stop = 0, size
            if all(isinstance(n, int) for n in (size, *ends)) and min(ends) < 0:
                low, high = ends
                start = min(max(0, -(low // dilation)), size)
                stop = max(min(size, size + high // dilation), start)
                kept = (low + start * dilation, high + (size - stop) * dilation)
                ends = kept if start < stop else (max(0, low + dilate(size, dilation) + high), 0)
            slices.append(slice(start, stop))
            inputs.append(stop - start if isinstance(size, int) else size)
            padding.append(ends)
        return tuple(slices), dataclasses.replace(self, input=tuple(inputs), padding=tuple(padding))

    @property
    def transposed(self) -> Window:
        """The window of dgrad as a forward convolution: y is its input, x its output, and its filter is w reversed.

        x[i] sums w[r]·y[p] over all p with  stride·p + filter_dilation·r = input_dilation·i + low,  so stride and input dilation are
        swapped.  The padding of y follows from the sizes of both ends.
        """
        padding = []
        for i, r, o, (low, _), s, di, dr in zip(
            self.input, self.filter, self.output, self.padding, self.stride, self.input_dilation, self.filter_dilation, strict=True
        ):
            before = dilate(r, dr) - 1 - low
            padding.append((before, dilate(i, di) + dilate(r, dr) - 1 - dilate(o, s) - before))
        return Window(
            input=self.output,
            filter=self.filter,
            stride=self.input_dilation,
            padding=tuple(padding),
            input_dilation=self.stride,
            filter_dilation=self.filter_dilation,
        )

    @property
    def phases(self) -> list[tuple[tuple[range, ...], tuple[range, ...], Window]]:
        """This window decomposed into windows without input dilation: (outputs, taps, window) for each, both as ranges per axis.

        Only the taps with  filter_dilation·r ≡ low - stride·p (mod input_dilation)  meet an element of x; the others meet a zero of the
        dilation.  So outputs of one residue see one residue of taps, densely.  Outputs and taps in no phase contribute nothing.
        """
        axes = zip(self.filter, self.output, self.padding, self.stride, self.input_dilation, self.filter_dilation, strict=True)
        phases = []
        for parts in itertools.product(*(list(_phases(*axis)) for axis in axes)):
            outputs, taps, lows, strides, dilations = zip(*parts, strict=True) if parts else ((),) * 5
            sizes = zip(self.input, map(len, taps), map(len, outputs), lows, strides, dilations, strict=True)
            window = Window(
                input=self.input,
                filter=tuple(map(len, taps)),
                stride=strides,
                padding=tuple((low, s * (o - 1) + d * (r - 1) + 1 - i - low) for i, r, o, low, s, d in sizes),
                input_dilation=(1,) * self.rank,
                filter_dilation=dilations,
            )
            phases.append((outputs, taps, window))
        return phases


def meetings(window: Window, axis: int) -> int:
    """The number of pairs of an output and a tap that meet a row of the input, and not a zero."""
    stride, dilation, (low, _) = window.stride[axis], window.input_dilation[axis], window.padding[axis]
    outputs, period, pairs = window.output[axis], dilation // math.gcd(stride, dilation), 0
    for r in range(window.filter[axis]):
        start = window.filter_dilation[axis] * r - low
        places = range(start, start + stride * outputs, stride)  # of this tap in x̃, counted from row 0 of the input, output by output
        rows = next((places[p::period] for p in range(min(period, outputs)) if places[p] % dilation == 0), range(0))
        pairs += bisect.bisect_left(rows, dilation * window.input[axis]) - bisect.bisect_left(rows, 0)
    return pairs


def _phases(r, o, padding, stride, di, dr):
    """Phases of one axis: outputs, taps, low padding, stride and filter dilation."""
    low, _ = padding
    period, step = di // math.gcd(stride, di), di // math.gcd(dr, di)
    for p in range(min(period, o)):
        for t in range(min(step, r)):
            offset, rest = divmod(stride * p + dr * t - low, di)
            if rest == 0:
                yield range(p, o, period), range(t, r, step), -offset, stride * period // di, dr * step // di


def _output(padded, filter, stride):
    """The number of positions of a filter in a padded input.  A filter that does not fit has none."""
    if all(isinstance(n, int) for n in (padded, filter)):
        return max(0, (max(0, padded) - filter) // stride + 1)
    return (padded - filter) // stride + 1
