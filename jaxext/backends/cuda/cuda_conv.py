"""How a dense convolution is launched on Hopper (csrc/conv.h): which tile is expected to be fastest.

The kernels are products of matrices that TMA gathers through a bounding box of pixels (csrc/conv_plan.h):

    role    rows   columns   depth
    fprop   NOPQ   K         TRSC
    dgrad   NDHW   C         TRSK
    wgrad   K      TRSC      NOPQ

Tiles do not reach from one filter tap into the next.  Groups, the batch label and the pieces of a split sum are *parts*, several of which
make one launch.  The limits of TMA and of the kernels stand in csrc/conv_plan.cc.
"""

from __future__ import annotations

import dataclasses
import math
import re

from jaxext.kernels._geometry import ConvProblem
from jaxext.kernels._launch import BITS, cdiv
from jaxext.kernels._roofline import LAUNCH, REACHED, START, STORED, machine, stored

MOST_PARTS = 64  # B·G·splits, as in csrc/conv_plan.h
PARTS_OF_LAUNCH = {"fprop": 8, "dgrad": 8, "wgrad": 30}  # as in csrc/conv_sm90.cuh
_DEPTH = 64  # of a stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    tile_m: int  # of the product that a block computes
    tile_n: int
    cluster_m: int  # blocks, one above the other, that load together what they share
    splits: int = 1  # wgrad: partial sums, along a leading axis of the result, which is float32 if there are several


_RESIDENT = {128: 1, 64: 2}  # tile_n -> blocks that fit on a multiprocessor


def candidates(problem: ConvProblem) -> list[ConvConfig]:
    """Both tiles; in wgrad with every number of partial sums that cuts the images, or the rows of each image, into parts.

    The one that is expected to take the fewest clocks is first.
    """
    pair = 1 if problem.role == "wgrad" else 2
    tiles = [ConvConfig(tile_m=128, tile_n=128, cluster_m=pair), ConvConfig(tile_m=128, tile_n=64, cluster_m=pair)]
    most = MOST_PARTS // max(1, problem.B * problem.G) if problem.role == "wgrad" else 1
    pieces = [splits for splits in range(2, most + 1) if _cuts(problem, splits)]
    configs = [dataclasses.replace(tile, splits=splits) for tile in tiles for splits in (1, *pieces)]
    return sorted(configs, key=lambda config: clocks(problem, config))


def pick(problem: ConvProblem) -> ConvConfig:
    return candidates(problem)[0]


def clocks(problem: ConvProblem, config: ConvConfig) -> float:
    """Expected time, in clocks.

    A launch deals its blocks out to the multiprocessors in rounds.  Those which share a multiprocessor multiply in turns and hide one
    another's beginning and end, so that they are counted once.
    """
    gpu = machine(problem.arch)
    taps = math.prod(problem.filter)
    x, y = problem.N * math.prod(problem.input), problem.N * math.prod(problem.output)
    rows, columns, steps = {
        "fprop": (y, cdiv(problem.K, config.tile_n), taps * cdiv(problem.C, _DEPTH)),
        "dgrad": (x, cdiv(problem.C, config.tile_n), taps * cdiv(problem.K, _DEPTH)),
        "wgrad": (problem.K, taps * cdiv(problem.C, config.tile_n), cdiv(cdiv(y, config.splits), _DEPTH)),
    }[problem.role]
    blocks = cdiv(rows, config.tile_m * config.cluster_m) * config.cluster_m * columns
    loaded = 2 * _DEPTH * (config.tile_m + config.tile_n / config.cluster_m)
    tile, bits = config.tile_m * config.tile_n, 32 if config.splits > 1 else BITS[problem.dtypes[2]]
    step = gpu.tile(tile * _DEPTH, gpu.rate(16) * REACHED[config.tile_m], loaded)

    def launch(parts: int) -> float:
        resident = max(1, min(_RESIDENT[config.tile_n], gpu.rounds(blocks * parts)))
        return LAUNCH + gpu.rounds(blocks * parts, resident) * (
            START + resident * steps * step + stored(problem.epilogue) * tile * bits / 8 / STORED
        )

    parts, most = problem.B * problem.G * config.splits, PARTS_OF_LAUNCH[problem.role]
    whole, rest = divmod(parts, most)
    total = whole * launch(most) + (launch(rest) if rest else 0)
    return total + gpu.adding(4 * parts * problem.K * taps * problem.C) if config.splits > 1 else total


def rank(problem: ConvProblem) -> int:
    """Spatial axes, of which the name tells."""
    (axes,) = re.findall(r"^conv(\d+)d", problem.name)
    return int(axes)


def _cuts(problem: ConvProblem, splits: int) -> bool:
    """Whether the contracted images, or else rows of each image, make this many parts, each with some of the input in it."""
    if splits <= problem.N or not problem.N:
        return splits <= problem.N
    axis = 3 - rank(problem)
    slices, rest = divmod(splits, problem.N)
    reach = (problem.filter[axis] - 1) * problem.filter_dilation[axis]
    if rest or slices > problem.output[axis] or reach > _corner(problem):  # a part in the middle has no padding
        return False
    last_of_first = (problem.output[axis] // slices - 1) * problem.stride[axis] + reach - problem.low[axis]
    first_of_last = problem.output[axis] * (slices - 1) // slices * problem.stride[axis] - problem.low[axis]
    return last_of_first >= 0 and first_of_last < problem.input[axis]


def _corner(problem: ConvProblem) -> int:
    """The coordinates of a corner of TMA's box lie from minus this on below it."""
    return 1 << (16 // rank(problem) - 1)
