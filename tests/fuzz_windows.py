"""Random geometries of convolutions, for the fuzz test.

They lean to what breaks convolutions: tiny and empty axes, padding beyond the filter, crops of all there is, groups, dilations, and numbers
of channels and positions on both sides of the bounds in `ops/conv/xla.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from direct_sum import Convolution
from jax import lax

# Multiplications in one product and elements of an array, as many as numpy takes a few milliseconds for; those of a large call.
MOST_WORK, MOST_ELEMENTS = 1_000_000, 200_000
LARGE = range(300_000, 4_000_000)


def convolution(draw) -> tuple[Convolution, dict[str, Any]]:
    """A call of `lax.conv_general_dilated`: its truth and keywords."""
    large = draw.chance(5)
    while True:
        rank = draw.weighted({0: 2, 1: 35, 2: 48, 3: 15})
        truth, more = geometry(draw, rank, large, **groups(draw))
        elements = [math.prod(shape) for shape in (truth.x, truth.w, truth.output)]
        work = elements[2] * elements[1] // max(1, truth._sizes("w")[0])
        fits = work in LARGE if large else work <= MOST_WORK and (elements[2] or draw.chance(20))
        if fits and max(elements) <= MOST_ELEMENTS:
            break
    if all(d == 1 for d in truth.input_dilation) and draw.chance(80):
        del more["lhs_dilation"]
    if all(d == 1 for d in truth.filter_dilation) and draw.chance(80):
        del more["rhs_dilation"]
    if truth.feature_groups == 1:
        del more["feature_group_count"]
    if truth.batch_groups == 1:
        del more["batch_group_count"]
    return truth, more


def groups(draw):
    """Batch, channels, and how they are grouped."""
    kind = draw.weighted({"plain": 30, "feature": 25, "depthwise": 20, "batch": 20, "both": 1})
    count = draw.weighted({2: 8, 3: 4, 4: 3, 5: 1, 8: 3, 16: 2, 17: 3, 34: 1, 68: 1, 136: 1})

    def channels():
        return draw.weighted({1: 6, 2: 6, 3: 3, 4: 2, 5: 1, 8: 2, 16: 2, 17: 1, 32: 1, 68: 1, 136: 1})

    inputs = 1 if kind == "depthwise" else channels()
    feature = count if kind in ("feature", "depthwise") else 2 if kind == "both" else 1
    batch = count if kind == "batch" else 2 if kind == "both" else 1
    factor = draw.weighted({1: 12, 2: 6, 3: 3, 16: 1, 64: 1, 512: 1})
    sizes = [factor * batch, inputs * feature, channels() * feature * batch, inputs]
    if draw.chance(2):  # a wrong number of something
        sizes[draw.randrange(4)] += 1
    elif draw.chance(3):
        which = draw.choice([(0,), (1, 3), (2,)])
        sizes = [0 if i in which else n for i, n in enumerate(sizes)]
    return {"sizes": sizes, "feature": feature, "batch": batch}


def geometry(draw, rank, large, sizes, feature, batch):
    """A direct sum, and the keywords of `lax.conv_general_dilated` that ask for it."""
    batch_size, inputs, filters, inputs_per_group = sizes
    most = draw.choice([20, 100, 3000]) if large else draw.weighted({3: 6, 6: 3, 20: 1})

    def each(weights, rarely=1):
        return tuple(draw.weighted(weights) if draw.chance(100 / rarely) else 1 for _ in range(rank))

    extents = tuple(0 if draw.chance(0.5) else draw.randint(1, most) for _ in range(rank))
    taps = tuple(draw.weighted({0: 0.1, 1: 6, 2: 6, 3: 6, 4: 2, 5: 1, 9: 0.3, 16: 0.2}) for _ in range(rank))
    strides = each({1: 6, 2: 5, 3: 2, 4: 1, 5: 1}, draw.choice([1, 1, 1000]))
    input_dilation = each({1: 3, 2: 5, 3: 2, 4: 1, 5: 1}, draw.choice([1, 1000, 1000]))
    filter_dilation = each({1: 5, 2: 3, 3: 2, 4: 1}, draw.choice([1, 1000, 1000]))
    dilated = [
        (i and (i - 1) * di + 1, r and (r - 1) * dr + 1)
        for i, r, di, dr in zip(extents, taps, input_dilation, filter_dilation, strict=True)
    ]
    names = 1 if max(input_dilation, default=1) == 1 else 0.1  # where lax refuses them
    wild = draw.weighted({"none": 1, "some": 3, "beyond": 3, "crop": 3, "names": names})
    pads = tuple(padding(draw, wild, i, r) for i, r in dilated)
    said: Any = pads
    if wild == "names":
        said = draw.choice(["SAME", "VALID", "SAME_LOWER"])
        pads = tuple(named(said, i, r, s) for i, (_, r), s in zip(extents, dilated, strides, strict=True))
    layouts: Any = tuple(draw.order(rank + 2) for _ in range(3)) if draw.chance(60) else (tuple(range(rank + 2)),) * 3

    def laid_out(sizes, layout):
        return tuple(sizes[i] for i in np.argsort(layout))

    x, w = laid_out((batch_size, inputs, *extents), layouts[0]), laid_out((filters, inputs_per_group, *taps), layouts[1])
    truth = Convolution(x, w, strides, pads, input_dilation, filter_dilation, feature, batch, layouts)
    return truth, {
        "window_strides": strides,
        "padding": said,
        "lhs_dilation": input_dilation,
        "rhs_dilation": filter_dilation,
        "dimension_numbers": dimension_numbers(draw, layouts),
        "feature_group_count": feature,
        "batch_group_count": batch,
    }


def dimension_numbers(draw, layouts):
    """The layouts as lax takes them: None, strings, or axes."""
    if all(layout == tuple(range(len(layout))) for layout in layouts) and draw.chance(50):
        return None
    in_order = list(layouts[1][2:]) == sorted(layouts[1][2:])  # lax counts the letters of space in the order of the filter's
    if draw.chance(50) or not in_order:
        return lax.ConvDimensionNumbers(*layouts)
    names = ("NC", "OI", "NC")
    space = "HWD"[: len(layouts[0]) - 2]
    return tuple("".join((name + space)[i] for i in np.argsort(layout)) for name, layout in zip(names, layouts, strict=True))


def padding(draw, wild, i, r):
    """(low, high) of an axis whose dilated input and filter are of these extents."""
    if wild == "none":
        return 0, 0
    if wild == "some":
        return draw.randint(-1, 2), draw.randint(-1, 2)
    if wild == "beyond":
        return tuple(draw.randint(0, 2) + (r if draw.chance(40) else 0) for _ in range(2))
    low = draw.randint(-i, r + 1)
    high = draw.randint(-i - min(low, 0), r + 1)
    if draw.chance(20):
        high = draw.randint(-i - low, r + 1)  # crop what low pads
    if draw.chance(0.5):
        low -= i + 1  # which lax refuses, for the most part
    return (low, high) if draw.chance(50) else (high, low)


def named(name, i, r, stride):
    """The padding that a name stands for; lax does not count the input's dilation in it."""
    total = 0 if name == "VALID" else max(0, (-(-i // stride) - 1) * stride + r - i)
    low = total // 2 if name == "SAME" else total - total // 2
    return low, total - low


def transposed(draw) -> tuple[Transposed, dict[str, Any]]:
    """A call of `lax.conv_transpose`: its truth and keywords; the input is dilated by the strides."""
    while True:
        rank = draw.randint(0, 3)
        batch, c, k = draw.randint(1, 3), *(draw.weighted({1: 3, 2: 3, 3: 2, 8: 1, 17: 1, 68: 1}) for _ in range(2))
        extents, taps = (tuple(draw.randint(1, 4) for _ in range(rank)) for _ in range(2))
        strides = tuple(draw.weighted({1: 2, 2: 4, 3: 2, 5: 1}) for _ in range(rank))
        dilation = tuple(draw.weighted({1: 4, 2: 1, 3: 1}) for _ in range(rank))
        dilated = [(r - 1) * dr + 1 for r, dr in zip(taps, dilation, strict=True)]
        said: Any = draw.choice(["SAME", "VALID", "numbers"])
        if said == "numbers":
            said = pads = tuple((draw.randint(-1, r + 1), draw.randint(0, r + 1)) for r in dilated)
        else:
            pads = tuple(named_transposed(said, r, s) for r, s in zip(dilated, strides, strict=True))
        layouts: Any = tuple(draw.order(rank + 2) for _ in range(3))
        flip = draw.chance(50)
        x = tuple(np.array((batch, c, *extents))[np.argsort(layouts[0])].tolist())
        w = tuple(np.array((c, k, *taps) if flip else (k, c, *taps))[np.argsort(layouts[1])].tolist())
        truth = Transposed(x, w, (1,) * rank, pads, strides, dilation, layouts=layouts, flip=flip)
        if math.prod(truth.output) * c * math.prod(taps) <= MOST_WORK:
            break
    more = {"strides": strides, "padding": said, "dimension_numbers": dimension_numbers(draw, layouts), "transpose_kernel": flip}
    if more["dimension_numbers"] is None:
        more["dimension_numbers"] = lax.ConvDimensionNumbers(*layouts)
    if any(d > 1 for d in dilation):
        more["rhs_dilation"] = dilation
    return truth, more


def named_transposed(name, r, stride):
    """Return the padding that lengthens an axis by `stride` (SAME), or by what a VALID convolution of that stride would take off."""
    total = r + stride - 2 + (max(r - stride, 0) if name == "VALID" else 0)
    low = r - 1 if name == "VALID" or stride > r - 1 else -(-total // 2)
    return low, total - low


@dataclasses.dataclass(frozen=True)
class Transposed(Convolution):
    """A convolution whose filter may come as that of the convolution which this one transposes: reversed, its channel axes exchanged."""

    flip: bool = False

    def _turned(self, w):
        first, second, *space = self._layout("w")
        return np.flip(w, tuple(space)).swapaxes(first, second) if self.flip else w

    def _sizes(self, slot):
        first, second, *space = super()._sizes(slot)
        return (second, first, *space) if slot == "w" and self.flip else (first, second, *space)

    def y(self, x, w):
        return super().y(x, self._turned(w))

    def dx(self, y, w):
        return super().dx(y, self._turned(w))

    def dw(self, x, y):
        return self._turned(super().dw(x, y))
