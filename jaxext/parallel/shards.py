"""The geometry of a convolution whose spatial axes are split over devices: the rows that each part reads, and its halo.

An axis with input H and output P is split into n equal parts, with h = H/n and q = P/n.  Part i holds rows [i·h, (i+1)·h) of the input and
computes y[i·q], ..., y[(i+1)·q - 1].  These outputs read the dilated and padded input x̃ (`core/window`) from stride·q·i on, over a span of

    reach = stride·(q - 1) + (filter - 1)·filter_dilation + 1.

Row j of the input is at input_dilation·j + low in x̃.  The halo of part i is the rows that it reads but does not hold.
"""

from __future__ import annotations

import dataclasses

from jaxext.core.window import Window, dilate


def halo(window: Window, axis: int, parts: int) -> tuple[int, int]:
    """The numbers of rows received from below and from above, each for the part that needs most.

    All rows of a part's span count, also those that no tap meets.  `parts` must divide the input and the output.
    """
    size, step, reach = window.input[axis], _step(window, axis, parts), _reach(window, axis, parts)
    dilation, held = window.input_dilation[axis], size // parts
    low = high = 0
    for i in range(parts):
        position = step * i - window.padding[axis][0]  # in x̃, counted from row 0 of the input
        first = max(_ceil(position, dilation), 0)
        stop = min(_ceil(position + reach, dilation), size)
        if first < stop:
            low, high = max(low, held * i - first), max(high, stop - held * (i + 1))
    return low, high


def senders(rows: int, held: int, parts: int) -> list[int]:
    """Return how many of a halo's rows each part on one side sends, the next part first, if a part holds `held`."""
    return [take for i in range(parts - 1) if (take := min(held, rows - held * i)) > 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The way in which each part convolves its rows along one axis.

    Part i adds its `halo` to its rows, dilates them by `dilation`, adds `margin` zeros, takes `rows` rows from row `first + step·i` on, and
    convolves them with `padding` and `input_dilation`.  All fields are the same on all parts.
    """

    halo: tuple[int, int]
    dilation: int
    margin: tuple[int, int]
    first: int
    step: int
    rows: int
    padding: tuple[int, int]
    input_dilation: int

    @classmethod
    def of(cls, window: Window, axis: int, parts: int) -> Part:
        """The convolution applies the input's dilation, unless parts see different phases of it; then the rows are dilated first."""
        low, high = halo(window, axis, parts)
        held, dilation = window.input[axis] // parts, window.input_dilation[axis]
        step, reach = _step(window, axis, parts), _reach(window, axis, parts)
        kept = dilation if step % dilation == 0 else 1
        start = dilation * low - window.padding[axis][0]  # of part 0's span, counted from the first row of its halo
        first, step = _ceil(start, kept), (step - dilation * held) // kept
        before = kept * first - start
        rows = max(0, _ceil(reach - before, kept))
        ends = first, first + step * (parts - 1)
        below = max(0, -min(ends))
        above = max(0, max(ends) + rows - dilate(low + held + high, dilation // kept))
        return cls(
            halo=(low, high),
            dilation=dilation // kept,
            margin=(below, above),
            first=below + first,
            step=step,
            rows=rows,
            padding=(before, reach - before - dilate(rows, kept)),
            input_dilation=kept,
        )


def _step(window, axis, parts):
    """The distance in x̃ between the spans of neighbouring parts."""
    return window.stride[axis] * (window.output[axis] // parts)


def _reach(window, axis, parts):
    each, span = window.output[axis] // parts, dilate(window.filter[axis], window.filter_dilation[axis])
    return window.stride[axis] * (each - 1) + span if each else 0


def _ceil(a, b):
    return -(-a // b)
