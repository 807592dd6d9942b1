"""The launch of a dense convolution on Hopper (csrc/conv/conv.h): which tile is expected to be fastest.

The kernels are products of matrices that TMA gathers through a bounding box of pixels (csrc/conv/conv_plan.h):

    role    rows   columns   depth
    fprop   NOPQ   K         TRSC
    dgrad   NDHW   C         TRSK
    wgrad   K      TRSC      NOPQ

Tiles do not reach from one filter tap into the next.  Groups, the batch label, the pieces of a split sum and the phases of a strided dgrad
are *parts*, several of which make one launch.  The limits of TMA and of the kernels stand in conv_plan.cc.  `table` is the list of
kernels that were compiled, which the module tells.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxext.backends.cuda.cuda_binding import config_of, fields_named, refusal, refused_epilogue
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import LAUNCH, REACHED, START, STORED, machine, stored

GEOMETRY = ("input", "filter", "output", "stride", "low", "input_dilation", "filter_dilation")
PARTS_OF_LAUNCH = {"fprop": 8, "dgrad": 8, "wgrad": 30}  # kParts in csrc/conv/conv_sm90.cuh
_DEPTH = 64  # of a stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    tile_m: int  # of the product that a block computes
    tile_n: int
    cluster: int  # blocks that load together what they share: one above the other, in wgrad side by side
    splits: int = 1  # wgrad: partial sums, along a leading axis of the result, which is float32 if there are several


def fields(problem: ConvProblem) -> dict[str, Any]:
    """Return the fields of jaxext::ConvProblem."""
    return fields_named(problem, (*"BNGCK", *GEOMETRY))


def refused(problem: ConvProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    return refused_by("conv", problem)


def refused_by(family: str, problem: ConvProblem) -> str | None:
    """Return the reason why the dense or the depthwise kernels do not take a convolution, or None."""
    if not 1 <= (axes := rank(problem)) <= 3:
        return f"{axes} spatial axes, want 1 to 3"
    target = f"{family}{axes}d_{'bias_act' if problem.epilogue else problem.role}"
    return refused_epilogue(problem) or refusal(target, fields(problem), problem.dtypes, problem.arch)


def candidates(problem: ConvProblem, table: Sequence[Mapping[str, Any]]) -> list[ConvConfig]:
    """Every tile of the role, the axes and the operands' dtype; in wgrad with every number of partial sums that cuts the images, or the
    rows of each image, into parts.

    The one that is expected to take the fewest clocks is first.  Those of which half is empty come last, if others are not: the model would
    take some for their loads, but the zeros that they multiply cost power.
    """
    kind = rank(problem), problem.role, problem.dtypes[0]
    configs = []
    for row in table:
        if (row["rank"], row["role"], row["operands"]) == kind:
            most = row["most_parts"] // max(1, problem.B * problem.G) if problem.role == "wgrad" else 1
            pieces = [splits for splits in range(2, most + 1) if _cuts(problem, splits)]
            configs += [config_of(ConvConfig, row, splits=splits) for splits in (1, *pieces)]
    return sorted(configs, key=lambda config: (_half_empty(problem, config), clocks(problem, config)))


def _half_empty(problem: ConvProblem, config: ConvConfig) -> bool:
    rows = problem.K if problem.role == "wgrad" else config.tile_m
    columns = problem.K if problem.role == "fprop" else problem.C
    return config.tile_m >= 2 * rows or config.tile_n >= 2 * columns


def clocks(problem: ConvProblem, config: ConvConfig) -> float:
    """Expected time, in clocks.

    A launch deals its blocks out to the multiprocessors in rounds.  Those which share a multiprocessor multiply in turns and hide one
    another's beginning and end, so that they are counted once.  Each tap belongs to one phase, and the blocks of all phases run together.
    """
    gpu = machine(problem.arch, problem.device)
    taps, phases = math.prod(problem.filter), phases_of(problem)
    x, y = (problem.N * math.prod(sizes) for sizes in (map(cdiv, problem.input, phases), problem.output))
    rows, columns, channels, steps = {
        "fprop": (y, problem.K, problem.C, taps),
        "dgrad": (x, problem.C, problem.K, taps / math.prod(phases)),
        "wgrad": (problem.K, problem.C, _DEPTH, cdiv(cdiv(y, config.splits), _DEPTH)),
    }[problem.role]
    steps *= cdiv(channels, _DEPTH)
    across, pair = cdiv(columns, config.tile_n), config.cluster
    existing = _filled(columns, config.tile_n) * config.tile_n  # TMA reads nothing for the zeros beyond an array
    if problem.role == "wgrad":
        blocks = cdiv(rows, config.tile_m) * cdiv(taps * across, pair) * pair
        loaded = 2 * _DEPTH * (_filled(rows, config.tile_m) * config.tile_m / pair + existing)
    else:
        blocks = cdiv(rows, config.tile_m * pair) * pair * across
        loaded = 2 * _DEPTH * _filled(channels, _DEPTH) * (config.tile_m + existing / pair)
    tile, bits = config.tile_m * config.tile_n, 32 if config.splits > 1 else BITS[problem.dtypes[2]]
    step = gpu.tile(tile * _DEPTH, gpu.rate(16) * REACHED[min(config.tile_m, 128)], loaded)

    def launch(parts: int) -> float:
        resident = max(1, min(2 if config.tile_n == 64 else 1, gpu.rounds(blocks * parts)))
        return LAUNCH + gpu.rounds(blocks * parts, resident) * (
            START + resident * steps * step + stored(problem.epilogue) * tile * bits / 8 / STORED
        )

    parts, most = problem.B * problem.G * config.splits * math.prod(phases), PARTS_OF_LAUNCH[problem.role]
    whole, rest = divmod(parts, most)
    total = whole * launch(most) + (launch(rest) if rest else 0)
    return total + gpu.adding(4 * parts * problem.K * taps * problem.C) if config.splits > 1 else total


def _filled(size: int, tile: int) -> float:
    """The share of its tiles that an axis fills."""
    return size / (cdiv(size, tile) * tile) if size else 1


def phases_of(problem: ConvProblem) -> tuple[int, ...]:
    """Return how many phases each axis has: the pixels of dgrad by their residues modulo the stride."""
    return tuple(max(1, min(sizes)) if problem.role == "dgrad" else 1 for sizes in zip(problem.stride, problem.input, strict=True))


def rank(problem: ConvProblem) -> int:
    """Spatial axes, of which the name tells."""
    (axes,) = re.findall(r"^conv(\d+)d", problem.name)
    return int(axes)


def _cuts(problem: ConvProblem, splits: int) -> bool:
    """Return whether the contracted images, or else rows of each image, make this many parts, each with some of the input in it."""
    if splits <= problem.N or not problem.N:
        return splits <= problem.N
    axis = 3 - rank(problem)
    slices, rest = divmod(splits, problem.N)
    reach = (problem.filter[axis] - 1) * problem.filter_dilation[axis]
    corner = 1 << (16 // rank(problem) - 1)  # the coordinates of a corner of TMA's box lie from minus this on below it
    if rest or slices > problem.output[axis] or reach > corner:  # a part in the middle has no padding
        return False
    last_of_first = (problem.output[axis] // slices - 1) * problem.stride[axis] + reach - problem.low[axis]
    first_of_last = problem.output[axis] * (slices - 1) // slices * problem.stride[axis] - problem.low[axis]
    return last_of_first >= 0 and first_of_last < problem.input[axis]
