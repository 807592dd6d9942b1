"""How a dense convolution is launched on Hopper (csrc/conv.h): which problems the kernels take, and which tile is expected to be fastest.

The kernels are products of matrices that TMA gathers through a bounding box of pixels (csrc/conv_plan.h), whose limits `supports` knows:

    role    rows   columns   depth
    fprop   NOPQ   K         TRSC
    dgrad   NDHW   C         TRSK
    wgrad   K      TRSC      NOPQ

Tiles do not reach from one filter tap into the next.  Groups, the batch label and the pieces of a split sum are *parts*, several of which
make one launch.  It must not know JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re

from jaxext.kernels._geometry import ConvProblem
from jaxext.kernels._launch import cdiv, multiprocessors

DTYPES = ("bf16", "fp16")
MOST_PARTS = 64  # B·G·splits
PARTS_OF_LAUNCH = {"fprop": 8, "dgrad": 8, "wgrad": 30}  # as in csrc/conv_sm90.cuh
MOST_STRIDE = 8  # of a TMA box
CHANNELS = 8  # 16 bytes, which TMA reads at once
MOST_ELEMENTS = 2**39  # of an array: TMA wants strides below 2^40 bytes
MOST_PIXELS = 2**31 - 2**16  # numbered with 32 bits, and blocks overhang

# For `clocks`.  The first three are those of _cuda_matmul, from the data sheet; none is a measurement of these kernels.
_PRODUCTS = 2048 * 0.9  # multiply-adds of a multiprocessor per clock
_L2_BYTES = 24  # per clock and multiprocessor
_MEMORY_BYTES = 18  # per clock and multiprocessor
_FILL = 3000  # clocks of a block before its first product and after its last
_LAUNCH = 4000  # clocks of a launch more
_DEPTH = 64  # of a stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig:
    tile_m: int  # of the product that a block computes
    tile_n: int
    cluster_m: int  # blocks, one above the other, that load together what they share
    splits: int = 1  # wgrad: partial sums, along a leading axis of the result, which is float32 if there are several


_RESIDENT = {128: 1, 64: 2}  # tile_n -> blocks that fit on a multiprocessor


def supports(problem: ConvProblem) -> str | None:
    """None, or the reason for refusing."""
    if problem.arch != 90:
        return f"compute capability is {problem.arch / 10}, the conv kernels want 9.0"
    if not 1 <= _rank(problem) <= 3:
        return f"{_rank(problem)} spatial axes, it takes 1 to 3"
    first, second, result = problem.dtypes
    if first not in DTYPES or second != first:
        return f"the operands are {first} and {second}, it takes two of {' or '.join(DTYPES)}"
    if result not in (first, "fp32"):
        return f"the result is {result}, it gives {first} or fp32"
    sizes = (problem.B, problem.N, problem.G, problem.C, problem.K, *problem.input, *problem.filter, *problem.output)
    if 0 in sizes:
        return None  # then no kernel is called
    if max(*sizes, *problem.filter_dilation, *map(abs, problem.low)) >= 2**31:
        return "a size is 2^31 or more, it takes less"
    if (channels := next((c for c in (problem.C, problem.K) if c % CHANNELS), None)) is not None:
        return f"{channels} channels per group, TMA wants a multiple of {CHANNELS}"
    if max(problem.input_dilation) > 1:
        return f"an input dilation of {max(problem.input_dilation)}, TMA's boxes have no holes"
    if problem.role == "dgrad":
        if max(problem.stride) > 1:
            return f"a stride of {max(problem.stride)} in dgrad, it takes 1: CUTLASS's schedule for Hopper leaves out all phases but one"
        if min(problem.low) < 0:
            return f"padding {min(problem.low)} in dgrad, it takes none below 0: a crop's gradient has zeros that no box writes"
    if max(problem.stride) > MOST_STRIDE:
        return f"a stride of {max(problem.stride)}, a TMA box takes {MOST_STRIDE} at most"
    if (parts := problem.B * problem.G) > MOST_PARTS:
        return f"{parts} groups, with those of the batch label, it takes {MOST_PARTS} at most"
    taps = math.prod(problem.filter)
    elements = problem.B * problem.G * max(
        problem.N * math.prod(problem.input) * problem.C,
        problem.K * taps * problem.C,
        problem.N * math.prod(problem.output) * problem.K,
    )  # fmt: skip
    if elements >= MOST_ELEMENTS:
        return f"an array of {elements} elements, it takes fewer than 2^39"
    if (pixels := problem.N * max(math.prod(problem.input), math.prod(problem.output))) >= MOST_PIXELS:
        return f"{pixels} pixels, it takes fewer than 2^31 - 2^16"
    columns = taps * cdiv(problem.C, 64) if problem.role == "wgrad" else cdiv(problem.K if problem.role == "fprop" else problem.C, 64)
    if columns > 65535:
        return f"{columns} blocks side by side, it takes 65535 at most"
    return next(filter(None, (_outside_box(problem, axis) for axis in range(3 - _rank(problem), 3))), None)


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
    another's beginning and end, so that they are counted once.  Partial sums are written, and read by the kernel that adds them up.
    """
    taps = math.prod(problem.filter)
    x, y = problem.N * math.prod(problem.input), problem.N * math.prod(problem.output)
    rows, columns, steps = {
        "fprop": (y, cdiv(problem.K, config.tile_n), taps * cdiv(problem.C, _DEPTH)),
        "dgrad": (x, cdiv(problem.C, config.tile_n), taps * cdiv(problem.K, _DEPTH)),
        "wgrad": (problem.K, taps * cdiv(problem.C, config.tile_n), cdiv(cdiv(y, config.splits), _DEPTH)),
    }[problem.role]
    blocks = cdiv(rows, config.tile_m * config.cluster_m) * config.cluster_m * columns
    loaded = 2 * _DEPTH * (config.tile_m + config.tile_n / config.cluster_m)
    step = max(config.tile_m * config.tile_n * _DEPTH / _PRODUCTS, loaded / _L2_BYTES)
    processors = multiprocessors(problem.arch)

    def launch(parts: int) -> float:
        resident = max(1, min(_RESIDENT[config.tile_n], cdiv(blocks * parts, processors)))
        return cdiv(blocks * parts, processors * resident) * (resident * steps * step + _FILL)

    parts, most = problem.B * problem.G * config.splits, PARTS_OF_LAUNCH[problem.role]
    whole, rest = divmod(parts, most)
    total = whole * (launch(most) + _LAUNCH) + (launch(rest) + _LAUNCH if rest else 0)
    if config.splits > 1:
        total += 2 * 4 * parts * problem.K * taps * problem.C / (_MEMORY_BYTES * processors) + _LAUNCH
    return total


def _rank(problem: ConvProblem) -> int:
    """Spatial axes, of which the name tells."""
    (rank,) = re.findall(r"^conv(\d+)d", problem.name)
    return int(rank)


def _cuts(problem: ConvProblem, splits: int) -> bool:
    """Whether the contracted images, or else rows of each image, make this many parts, each with some of the input in it."""
    if splits <= problem.N or not problem.N:
        return splits <= problem.N
    axis = 3 - _rank(problem)
    slices, rest = divmod(splits, problem.N)
    reach = (problem.filter[axis] - 1) * problem.filter_dilation[axis]
    if rest or slices > problem.output[axis] or reach > _corner(problem):  # a part in the middle has no padding
        return False
    last_of_first = (problem.output[axis] // slices - 1) * problem.stride[axis] + reach - problem.low[axis]
    first_of_last = problem.output[axis] * (slices - 1) // slices * problem.stride[axis] - problem.low[axis]
    return last_of_first >= 0 and first_of_last < problem.input[axis]


def _corner(problem: ConvProblem) -> int:
    """The coordinates of a corner of TMA's box lie from minus this on below it."""
    return 1 << (16 // _rank(problem) - 1)


def _outside_box(problem: ConvProblem, axis: int) -> str | None:
    """Why TMA's bounding box cannot be that of this axis, or None: corners and offsets are kept in 16 bits that the axes share."""
    bits = 16 // _rank(problem)
    corner, most_offset, most_padding = _corner(problem), (1 << bits) - 2, {1: 65536, 2: 256, 3: 16}[_rank(problem)]
    inputs, outputs, low = problem.input[axis], problem.output[axis], problem.low[axis]
    reach = (problem.filter[axis] - 1) * problem.filter_dilation[axis]
    if problem.role == "dgrad":
        high, lower = 0, low - reach
        upper = lower + inputs - outputs
    else:
        last = (outputs - 1) * problem.stride[axis] + reach - low
        if last < 0 or -low >= inputs:
            return f"axis {'DHW'[axis]} lies in the padding altogether"
        low, high = max(0, low), max(0, last + 1 - inputs)
        lower, upper = -low, high - reach
    name = f"on axis {'DHW'[axis]}"
    if reach > most_offset:
        return f"a dilated filter of {reach + 1} {name}, TMA takes {most_offset + 1} at most with {_rank(problem)} axes"
    if not -corner <= min(lower, upper) <= max(lower, upper) < corner:
        return f"corners {lower} and {upper} of the box {name}, TMA takes {-corner} to {corner - 1} with {_rank(problem)} axes"
    if max(low, high) > most_padding:
        return f"padding of {max(low, high)} {name}, it takes {most_padding} at most with {_rank(problem)} axes"
    return None
