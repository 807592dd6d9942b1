"""Random geometries of convolutions, of every kind that people use, and those that once were slow.

A draw is a function of a seed and a number.  First the channels, the filter and the strides are drawn.  Then the
images get the size for the wanted work, which is log-uniform with fewer at the top.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

from jax import lax

from jaxext.core.window import dilate

from .geometry import Geometry

LEAST_WORK, MOST_WORK = 1e5, 1e9  # multiply-adds
SKEW = 1.4  # above 1: more of the small ones
MOST_BYTES = 256 << 20  # of the arguments and the result
MOST_IMAGES = 1 << 16
BFLOAT16 = 0.12  # of all draws
ROLES = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass
class Draw:
    """A geometry before its images have sizes; C and K are per group."""

    rank: int
    C: int
    K: int
    taps: tuple[int, ...]
    groups: int = 1
    batch_groups: int = 1
    batch: int = 1
    mapped: str = ""
    stride: tuple[int, ...] = ()
    input_dilation: tuple[int, ...] = ()
    filter_dilation: tuple[int, ...] = ()
    padding: str = "any"
    images: tuple[int, int] = (1, 64)  # the least and most N, as far as the work allows
    extent: int = 0  # of the images, where N is what the work asks for
    role: str = ""

    def __post_init__(self):
        for name in ("stride", "input_dilation", "filter_dilation"):
            setattr(self, name, getattr(self, name) or (1,) * self.rank)


def draw(seed: int, number: int) -> tuple[str, Geometry]:
    """The kind and the geometry with that number; the kinds take turns."""
    kind, attempt = [*KINDS][number % len(KINDS)], 0
    while True:
        rng = random.Random(f"{seed} {number} {kind} {attempt}")
        wanted = LEAST_WORK * (MOST_WORK / LEAST_WORK) ** (rng.random() ** SKEW)
        geometry = _sized(rng, KINDS[kind](rng), wanted)
        if geometry and LEAST_WORK <= geometry.work <= MOST_WORK and wanted / 3 < geometry.work < 3 * wanted:
            return kind, geometry
        attempt += 1


def _sized(rng: random.Random, d: Draw, wanted: float) -> Geometry | None:
    """The geometry with images of about the wanted work; None if they would be empty or far too large."""
    each = d.batch * d.C * d.K * d.groups * math.prod(d.taps) / math.prod(d.input_dilation)
    positions = wanted / each  # of all images
    if positions < 1 / 2:
        return None
    least, most = d.images
    n = 1 if d.batch > 1 and rng.random() < 0.5 else _size(rng, least, max(least, min(most, positions)), round_to=1)
    if d.rank == 0 or d.extent:
        n = max(1, round(positions / d.extent**d.rank))
    if n > MOST_IMAGES:
        return None
    extent = d.extent or max(1.0, positions / n) ** (1 / max(d.rank, 1))
    axes = []
    for taps, stride, di, dr in zip(d.taps, d.stride, d.input_dilation, d.filter_dilation, strict=True):
        size = max(1, round(extent * rng.uniform(0.8, 1.25) * stride / di))
        low, high = _padding(rng, d.padding, dilate(size, di), dilate(taps, dr), stride)
        axes.append((size, (low, high)))
    geometry = Geometry(
        role=d.role or rng.choice(ROLES),
        dtype="bfloat16" if rng.random() < BFLOAT16 else "float32",
        x=(n * d.batch_groups, *(size for size, _ in axes), d.groups * d.C),
        w=(*d.taps, d.C, d.groups * d.K),
        stride=d.stride,
        padding=tuple(pads for _, pads in axes),
        input_dilation=d.input_dilation,
        filter_dilation=d.filter_dilation,
        groups=d.groups,
        batch_groups=d.batch_groups,
        batch=d.batch,
        mapped=d.mapped,
    )
    arrays = (geometry.x, geometry.w, geometry.y)
    return geometry if 4 * d.batch * sum(map(math.prod, arrays)) <= MOST_BYTES and all(geometry.y) else None


def _padding(rng: random.Random, style: str, size: int, span: int, stride: int) -> tuple[int, int]:
    """Random padding; `span` is the size of the dilated filter."""
    if style == "any":
        style = rng.choices(("SAME", "VALID", "full", "causal", "uneven", "cropped"), (60, 20, 4, 4, 8, 4))[0]
    if style in ("SAME", "VALID"):
        return lax.padtype_to_pads((size,), (span,), (stride,), style)[0]
    low, high = rng.randint(0, span), rng.randint(0, span)
    crop = min(2, size // 3)
    return {"full": (span - 1,) * 2, "causal": (span - 1, 0), "uneven": (low, high), "cropped": (-crop, high)}[style]


def _size(rng: random.Random, least: float, most: float, round_to: int = 8) -> int:
    """A log-uniform size; half of the sizes that are large enough are multiples of `round_to`."""
    n = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    if n > round_to and rng.random() < 0.5:
        n = max(round_to, n // round_to * round_to)
    return min(max(math.ceil(least), n), max(math.ceil(least), math.floor(most)))


def _taps(rng: random.Random, rank: int, least: int = 1, most: int = 7, total: int = 200) -> tuple[int, ...]:
    """A filter, mostly of equal and odd sizes; smaller with more axes, with at most `total` taps."""
    most = max(least, min(most, int(total ** (1 / max(rank, 1)))))
    n = min(most, rng.randint(least, most) | 1) if rng.random() < 0.8 else rng.randint(least, most)
    return (n,) * rank if rng.random() < 0.8 else tuple(rng.randint(least, most) for _ in range(rank))


def _steps(rng: random.Random, rank: int, least: int, most: int) -> tuple[int, ...]:
    n = min(rng.randint(least, most) for _ in range(2))
    steps = (n,) * rank if rng.random() < 0.8 else tuple(rng.randint(1, n) for _ in range(rank))
    return steps if least == 1 or max(steps, default=0) > 1 else (n,) * rank


def _rank(rng: random.Random, *weights: int) -> int:
    """Weights of 0 to 3 axes."""
    return rng.choices(range(4), weights)[0]


def _some(rng: random.Random, share: float, steps: tuple[int, ...]) -> tuple[int, ...]:
    return steps if rng.random() < share else ()


def _dense(rng):
    rank = _rank(rng, 0, 3, 5, 2)
    return Draw(rank, _size(rng, 4, 256), _size(rng, 4, 256), _taps(rng, rank, 2, 7), images=(1, 32))


def _pointwise(rng):
    rank = _rank(rng, 4, 2, 3, 1)
    groups = _size(rng, 2, 16, 2) if rng.random() < 0.2 else 1
    stride = _some(rng, 0.2, _steps(rng, rank, 1, 3))
    return Draw(rank, _size(rng, 4, 256), _size(rng, 4, 256), (1,) * rank, groups=groups, stride=stride)


def _stem(rng):
    rank = _rank(rng, 0, 3, 5, 2)
    return Draw(rank, rng.randint(1, 4), _size(rng, 8, 128), _taps(rng, rank, 3, 11), stride=_some(rng, 0.7, _steps(rng, rank, 1, 4)))


def _grouped(rng):
    rank = _rank(rng, 1, 3, 5, 2)
    stride = _some(rng, 0.25, _steps(rng, rank, 1, 3))
    dilation = _some(rng, 0.15, _steps(rng, rank, 1, 3))
    per_group = _size(rng, 4, 64)
    K = per_group if rng.random() < 0.6 else _size(rng, 2, 64)
    return Draw(rank, per_group, K, _taps(rng, rank), groups=_size(rng, 2, 64), stride=stride, filter_dilation=dilation, images=(1, 32))


def _depthwise(rng):
    rank = _rank(rng, 0, 3, 5, 2)
    stride = _some(rng, 0.3, _steps(rng, rank, 1, 3))
    dilation = _some(rng, 0.15, _steps(rng, rank, 1, 4))
    groups = _size(rng, 4, 512)
    return Draw(rank, 1, 1, _taps(rng, rank, 2, 15, 400), groups=groups, stride=stride, filter_dilation=dilation, images=(1, 32))


def _multiplier(rng):
    d = _depthwise(rng)
    d.K, d.groups = _size(rng, 2, 16, 2), _size(rng, 2, 96)
    return d


def _rgb(rng):
    d = _depthwise(rng)
    d.groups, d.K, d.images = rng.choice((1, 2, 3, 3, 3, 4)), rng.choice((1, 1, 1, 2, 8)), (1, 1000)
    return d


def _causal(rng):
    taps = rng.choice((2, 3, 4, 4, 4, 7, 8, 31, 128))
    dilation = _some(rng, 0.3, (2 ** rng.randint(1, 6),))
    if rng.random() < 0.7:
        return Draw(1, 1, 1, (taps,), groups=_size(rng, 16, 1024), filter_dilation=dilation, padding="causal", images=(1, 16))
    C = _size(rng, 4, 128)
    return Draw(1, C, C, (taps,), groups=rng.choice((1, 1, 2, 8)), filter_dilation=dilation, padding="causal", images=(1, 16))


def _batch_groups(rng):
    rank = _rank(rng, 1, 3, 5, 3)
    many = rng.choice((2, 2, 3, 4, 4, 8, 16))
    d = Draw(rank, _size(rng, 1, 128), many * _size(rng, 1, 16), _taps(rng, rank, 1, 5), batch_groups=many)
    d.stride, d.filter_dilation = _some(rng, 0.2, _steps(rng, rank, 1, 3)), _some(rng, 0.3, _steps(rng, rank, 1, 3))
    d.__post_init__()
    return d


def _transposed(rng):
    rank = _rank(rng, 0, 3, 5, 2)
    dilation = _steps(rng, rank, 2, 16 if rank == 1 else 4)
    taps = tuple(max(1, di * rng.choice((1, 2, 2, 2)) + rng.choice((-1, 0, 0, 1))) for di in dilation)
    depthwise = rng.random() < 0.2
    groups = _size(rng, 4, 128) if depthwise else rng.choice((1, 1, 1, 2, 8))
    C, K = (1, 1) if depthwise else (_size(rng, 2, 128), _size(rng, 2, 128))
    return Draw(rank, C, K, taps, groups=groups, input_dilation=dilation, padding=rng.choice(("SAME", "any")), images=(1, 32))


def _strided(rng):
    rank = _rank(rng, 0, 3, 5, 2)
    groups = 1 if rng.random() < 0.8 else rng.choice((2, 4, 16))
    return Draw(
        rank, _size(rng, 2, 128), _size(rng, 2, 256), _taps(rng, rank), groups=groups, stride=_steps(rng, rank, 2, 5), images=(1, 32)
    )


def _dilated(rng):
    rank = _rank(rng, 0, 4, 5, 2)
    groups = 1 if rng.random() < 0.8 else rng.choice((2, 4, 16))
    dilation = _steps(rng, rank, 2, 32 if rank == 1 else 6)
    return Draw(
        rank, _size(rng, 2, 128), _size(rng, 2, 128), _taps(rng, rank, 2, 5), groups=groups, filter_dilation=dilation, images=(1, 32)
    )


def _patchify(rng):
    rank = _rank(rng, 0, 3, 5, 2)
    steps = (rng.choice((2, 2, 4, 4, 8, 14, 16) if rank < 3 else (2, 4)),) * rank
    return Draw(rank, _size(rng, 1, 64, 4), _size(rng, 8, 256), steps, stride=steps, padding="VALID", images=(1, 32))


def _batched(rng):
    rank = _rank(rng, 1, 3, 5, 3)
    C, K = _size(rng, 1, 64), _size(rng, 1, 64)
    mapped = rng.choice(("xw", "xw", "xw", "w"))
    d = Draw(rank, C, K, _taps(rng, rank, 1, 5), batch=_size(rng, 2, 64), mapped=mapped, images=(1, 16))
    if rng.random() < 0.2:
        d.groups = _size(rng, 2, 32)
        d.C, d.K = (1, 1) if rng.random() < 0.5 else (min(C, 8), min(K, 8))
    d.stride, d.filter_dilation = _some(rng, 0.2, _steps(rng, rank, 1, 3)), _some(rng, 0.1, _steps(rng, rank, 1, 3))
    d.__post_init__()
    return d


def _per_example(rng):
    d = _batched(rng)
    d.mapped, d.role, d.images = "x", "wgrad", (1, 2)
    return d


def _tiny_images(rng):
    rank = _rank(rng, 0, 2, 5, 2)
    d = Draw(rank, _size(rng, 1, 64), _size(rng, 1, 64), _taps(rng, rank, 1, 3), extent=rng.randint(2, 8))
    if rng.random() < 0.4:
        d.groups = _size(rng, 2, 64)
        d.C, d.K = (1, 1) if rng.random() < 0.6 else (min(d.C, 8), min(d.K, 8))
    return d


def _long(rng):
    C, groups = rng.choice(((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (1, 8), (2, 2)))
    return Draw(1, C, rng.choice((1, 1, 1, 2, 4)), (_size(rng, 16, 1024),), groups=groups, images=(1, 4))


def _mixed(rng):
    """Stride and both dilations at once, with any groups."""
    rank = _rank(rng, 0, 3, 5, 3)
    depthwise = rng.random() < 0.3
    C, K = (1, rng.choice((1, 1, 2))) if depthwise else (_size(rng, 1, 64), _size(rng, 1, 64))
    groups = _size(rng, 2, 64) if depthwise else rng.choice((1, 1, 2, 3, 8))
    d = Draw(rank, C, K, _taps(rng, rank, 1, 5), groups=groups)
    d.stride, d.input_dilation, d.filter_dilation = (_steps(rng, rank, 1, 3) for _ in range(3))
    return d


KINDS: dict[str, Callable[[random.Random], Draw]] = {
    "dense": _dense,
    "pointwise": _pointwise,
    "stem": _stem,
    "grouped": _grouped,
    "depthwise": _depthwise,
    "multiplier": _multiplier,
    "rgb": _rgb,
    "causal": _causal,
    "batch-groups": _batch_groups,
    "transposed": _transposed,
    "strided": _strided,
    "dilated": _dilated,
    "patchify": _patchify,
    "batched": _batched,
    "per-example": _per_example,
    "tiny-images": _tiny_images,
    "long": _long,
    "mixed": _mixed,
}
