"""Random geometries of convolutions, in which each kind of channels meets each kind of window.

A draw is a function of a seed and a number.  First the channels and the window are drawn.  Then the images get the size for the wanted
work, which is log-uniform with fewer at the top.
"""

from __future__ import annotations

import itertools
import math
import random

from jax import lax

from jaxext.core.window import dilate

from .geometry import Geometry

LEAST_WORK, MOST_WORK = 1e5, 1e9  # multiply-adds, of which the most counts those with zeros that strides and dilations put in gradients
SKEW = 1.4  # above 1: more of the small ones
MOST_BYTES = 256 << 20  # of the arguments and the result
MOST_IMAGES = 1 << 16
MOST_TAPS = 1024
BFLOAT16 = 0.12  # of all draws
TINY = 0.06  # of all draws: images of 2 to 8 places on an axis

# The least and the most of each size, which is 1 if it is left out.  C and K are those of a group; `batch` is mapped over, as MAPPED says.
CHANNELS: dict[str, dict[str, tuple[int, int]]] = {
    "dense": dict(C=(4, 256), K=(4, 256)),
    "stem": dict(C=(1, 4), K=(8, 128)),
    "grouped": dict(C=(4, 64), K=(2, 64), groups=(2, 64)),
    "depthwise": dict(groups=(4, 512)),
    "multiplier": dict(K=(1, 16), groups=(1, 96)),
    "batch groups": dict(C=(1, 128), K=(1, 16), batch_groups=(2, 16)),
    "batched filters": dict(C=(1, 64), K=(1, 64), groups=(1, 4), batch=(2, 64)),
    "ensemble": dict(C=(1, 64), K=(1, 64), batch=(2, 64)),
    "per example": dict(C=(1, 64), K=(1, 64), batch=(2, 64)),
}
MAPPED = {"batched filters": "xw", "ensemble": "w", "per example": "x"}
# The least and the most on an axis, likewise.
WINDOWS: dict[str, dict[str, tuple[int, int]]] = {
    "plain": dict(taps=(2, 7)),
    "pointwise": dict(taps=(1, 1), stride=(1, 2)),
    "wide": dict(taps=(5, 15)),
    "strided": dict(taps=(1, 7), stride=(2, 5)),
    "patches": dict(stride=(2, 16)),  # taps as strides
    "dilated": dict(taps=(2, 5), filter_dilation=(2, 6)),
    "transposed": dict(taps=(2, 8), input_dilation=(2, 4)),
    "mixed": dict(taps=(1, 5), stride=(1, 3), input_dilation=(1, 3), filter_dilation=(1, 3)),
    "causal": dict(taps=(2, 128), filter_dilation=(1, 16)),
    "long": dict(taps=(16, 1024)),
}
ONE_AXIS = ("causal", "long")


def draw(seed: int, number: int) -> Geometry:
    """The geometry with that number; the kinds take turns."""
    channels, window = ([*kinds][number % len(kinds)] for kinds in (CHANNELS, WINDOWS))
    attempts = (_geometry(random.Random(f"{seed} {number} {attempt}"), channels, window) for attempt in itertools.count())
    return next(filter(None, attempts))


def _geometry(rng: random.Random, channels: str, window: str) -> Geometry | None:
    """A random geometry; None if its images would be empty or far too large."""
    wanted = LEAST_WORK * (MOST_WORK / LEAST_WORK) ** (rng.random() ** SKEW)
    sizes = ("C", "K", "groups", "batch_groups", "batch")
    C, K, groups, batch_groups, batch = (_size(rng, *CHANNELS[channels].get(name, (1, 1))) for name in sizes)
    rank = 1 if window in ONE_AXIS else rng.choices(range(4), (1, 3, 4, 3))[0]
    ranges = (WINDOWS[window].get(name, (1, 1)) for name in ("taps", "stride", "input_dilation", "filter_dilation"))
    taps, stride, input_dilation, filter_dilation = (_on_axes(rng, rank, *limits) for limits in ranges)
    if window == "patches":
        taps = stride
    w = (*taps, C, groups * batch_groups * K)
    positions = wanted * math.prod(input_dilation) / (batch * math.prod(w))  # of all images
    if positions < 1 / 2:
        return None
    if rank == 0 or rng.random() < TINY:
        extent = rng.randint(2, 8)
        n = max(1, round(positions / extent**rank))
    else:
        n = 1 if batch > 1 and rng.random() < 0.5 else _size(rng, 1, min(64, math.ceil(positions)))
        extent = max(1.0, positions / n) ** (1 / rank)
    space, padding = [], []
    for r, s, di, dr in zip(taps, stride, input_dilation, filter_dilation, strict=True):
        space.append(max(1, round(extent * rng.uniform(0.8, 1.25) * s / di)))
        style = {"causal": "causal", "patches": "VALID"}.get(window)
        padding.append(_padding(rng, style, dilate(space[-1], di), dilate(r, dr), s))
    geometry = Geometry(
        role="wgrad" if channels == "per example" else rng.choice(("fprop", "dgrad", "wgrad")),
        dtype="bfloat16" if rng.random() < BFLOAT16 else "float32",
        x=(n * batch_groups, *space, groups * C),
        w=w,
        stride=stride,
        padding=tuple(padding),
        input_dilation=input_dilation,
        filter_dilation=filter_dilation,
        groups=groups,
        batch_groups=batch_groups,
        batch=batch,
        mapped=MAPPED.get(channels, "") if batch > 1 else "",
    )
    arrays = (geometry.x, geometry.w, geometry.y)
    most = min(MOST_WORK / math.prod((*stride, *input_dilation)), 3 * wanted)
    fits = n <= MOST_IMAGES and math.prod(taps) <= MOST_TAPS and 4 * batch * sum(map(math.prod, arrays)) <= MOST_BYTES
    return geometry if fits and all(geometry.y) and max(LEAST_WORK, wanted / 3) <= geometry.work <= most else None


def _padding(rng: random.Random, style: str | None, size: int, span: int, stride: int) -> tuple[int, int]:
    """Padding of this style or of a random one; `span` is the size of the dilated filter."""
    style = style or rng.choices(("SAME", "VALID", "full", "causal", "uneven", "cropped"), (60, 20, 4, 4, 8, 4))[0]
    if style in ("SAME", "VALID"):
        return lax.padtype_to_pads((size,), (span,), (stride,), style)[0]
    low, high = rng.randint(0, span), rng.randint(0, span)
    crop = min(2, size // 3)
    return {"full": (span - 1,) * 2, "causal": (span - 1, 0), "uneven": (low, high), "cropped": (-crop, high)}[style]


def _size(rng: random.Random, least: int, most: int) -> int:
    """A log-uniform size; half of those above 8 are multiples of 8."""
    n = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    return n // 8 * 8 if n > 8 and rng.random() < 0.5 else n


def _on_axes(rng: random.Random, rank: int, least: int, most: int) -> tuple[int, ...]:
    """A log-uniform size for each axis, the same for all in most draws."""
    sizes = [round(math.exp(rng.uniform(math.log(least), math.log(most)))) for _ in range(rank)]
    return tuple(sizes) if rng.random() < 0.2 else tuple(sizes[:1]) * rank
