"""The launch of the CUDA kernels of a depthwise convolution (csrc/depthwise/depthwise.h): the config for each problem.

A config is judged by the vectors of channels that a multiprocessor loads and stores, and by its products, which are many where the filter
is large.  A thread has one vector of channels of y and walks along a strip of targets, a line of the last axis; `lanes` such vectors lie
side by side in a block, and strips fill the rest of its threads.  If several filters share a channel of x (K > 1), a vector meets fewer
channels of x, and in dgrad a thread sums the vectors of a channel.

Tensor cores take filters of several rows, in 16 bits and without strides or dilations (depthwise_mma.cuh, depthwise_mma_wgrad.cuh).  A
block walks down 16 lines, each of which is part of an image, in step; in wgrad it sums several such walks.
"""

from __future__ import annotations

import dataclasses
import math

from jaxext.kernels.depthwise.problem import Line
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.launch import BITS, cdiv, largest_block
from jaxext.kernels.machine import ISSUED, LEGACY, START, machine, stored
from jaxext.ops.conv.cuda_dense import refused_by

THREADS = 128  # of a block
VECTOR_BITS = 128
LANES = (1, 2, 4, 8, 16)  # 16 vectors are 256 neighbouring bytes; more would leave too few strips for rows to be shared
STRIPS = (4, 8, 16, 32, 64)  # a longer strip spends less on its first window, and leaves fewer threads
SUMS = 32  # of fprop and dgrad, that a thread with vectors holds at once; one without holds 8
WGRAD_TAPS, FEW_WGRAD_TAPS = 7, 4  # of a filter row whose sums a thread holds: with a window of sources for one filter, and otherwise
RESIDENT = 4  # blocks on a multiprocessor: about what the kernels' registers allow
MOST_SPLITS = 1024  # partial results are written and read again

# On tensor cores, of a block.
MMA_THREADS, MMA_RESIDENT = 256, 2
MMA_LINES, MMA_TARGETS, MMA_SOURCES, MMA_CHANNELS = 16, 8, 16, 16  # a product has so many lines, targets and sources; two channels a warp
MMA_ROWS = {"fprop": (5, 7), "dgrad": (5, 7), "wgrad": (3, 5, 7)}  # of a filter, for which there are kernels
MMA_COLUMNS = 9  # most taps of a filter row: 8 targets meet 16 sources
MMA_MOST_LINES = 32  # of targets that it walks down
MMA_MOST_ELEMENTS = 1 << 34  # of an array in wgrad, which numbers four at a time with 32 bits
# Bytes of shared memory for each step: sources and sums, or sources and targets, written and read.
MMA_SHARED = {"fprop": 4 * 8192, "dgrad": 4 * 8192, "wgrad": 2 * 12800}
# Instructions of a warp for each step, beside two products for each filter row, counted in its code; and those to begin a walk of wgrad.
MMA_ISSUED, MMA_WGRAD_ISSUED, MMA_BEGIN = 104, 83, 300
MMA_FEWEST_TAPS = 21  # of fprop and dgrad: with fewer, products outside tensor cores take less time than moving the arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthwiseConfig:
    lanes: int  # vectors of channels side by side in a block, a power of two
    strip: int  # targets in a row that a thread walks along
    pieces: int = 1  # wgrad: pieces of the filter that share a block, a power of two
    lines: int = 0  # on tensor cores, lines of targets that a warp walks down; 0 for the other kernels
    splits: int = 1  # wgrad: partial sums, along a leading axis of the result, which is float32 if there are several


def refused(problem: ConvProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    return refused_by("depthwise", problem)


def candidates(problem: ConvProblem) -> list[DepthwiseConfig]:
    """Strips of several lengths; the rest follows.

    The lanes are the most that leave at most an eighth of the threads without channels.  wgrad lets as many pieces of the filter as there
    are share a block, with at most a quarter idle, since they read the same targets; and it splits its sum until all multiprocessors are
    full, each block with at least 4 strips per thread.  The one that takes the fewest clocks is first, among equals the longest.  Tensor
    cores, where they take the problem, have a few more, of parts of images.
    """
    lanes = largest_block(LANES, _vectors(problem), idle=1 / 8)
    longest = max(1, cdiv(problem.axes[2].targets, _line(problem).spacing))
    strips = [strip for strip in STRIPS if strip < longest] + [min(longest, STRIPS[-1])]
    configs = [DepthwiseConfig(lanes=lanes, strip=strip) for strip in dict.fromkeys(strips)]
    configs = [_shared_out(problem, config) for config in configs] if problem.role == "wgrad" else configs
    configs += [other for config in _on_tensor_cores(problem, configs[-1]) for other in _splits_of_walks(problem, config)]
    return sorted(configs, key=lambda config: (clocks(problem, config), -config.lines, -config.strip))


def clocks(problem: ConvProblem, config: DepthwiseConfig) -> float:
    """Expected time, in clocks, in the rounds in which a multiprocessor gets blocks: of the vectors that it moves from the L2 cache, or of
    its products."""
    if config.lines:
        return _mma_clocks(problem, config)
    d, h, _ = problem.axes
    vector, columns = _vector(problem), _line(problem).taps
    of_x = 1 / min(problem.K, vector)  # of a vector
    if problem.role == "wgrad":
        most = _most_taps(problem)
        strips = cdiv(_strips(problem, config), _strip_lanes(config) * config.splits)
        moved = strips * (config.strip + of_x * (config.strip + min(columns, most) - 1))
        multiplied = strips * config.strip * cdiv(columns, cdiv(columns, most))
    else:
        of_source, of_target = (1, of_x) if problem.role == "dgrad" else (of_x, 1)
        rows = _folds(problem) * max(1, cdiv(d.R, d.step)) * max(1, cdiv(h.R, h.step))
        moved = stored(problem.epilogue) * of_target * config.strip + rows * of_source * (config.strip + columns - 1)
        chunk = 8 if vector == 1 else SUMS // vector  # targets that a thread sums at once
        multiplied = rows * columns * cdiv(config.strip, chunk) * chunk
    gpu, loaded = machine(problem.arch, problem.device), moved * THREADS * vector * BITS[problem.dtypes[0]] / 8
    of_block = gpu.tile(multiplied * THREADS * vector, gpu.fma, loaded)
    return gpu.rounds(math.prod(grid(problem, config)), RESIDENT) * RESIDENT * of_block


def _mma_clocks(problem: ConvProblem, config: DepthwiseConfig) -> float:
    """The same on tensor cores: of loads and stores, products, instructions, or shared memory, whichever takes longest, for each line of
    sources, in wgrad of all walks of a block; and of a block's start."""
    gpu, (_, h, w), lines = machine(problem.arch, problem.device), problem.axes, _walked(problem, config)
    wgrad = problem.role == "wgrad"
    rows, steps = next(rows for rows in MMA_ROWS[problem.role] if rows >= h.R), lines + h.R - 1
    positions = steps * (MMA_TARGETS + w.R - 1) + lines * MMA_TARGETS * stored(problem.epilogue)
    loaded = positions * MMA_LINES * MMA_CHANNELS * 2
    steps = cdiv(steps + 1, rows) * rows if wgrad else steps
    multiplied = steps * rows * MMA_CHANNELS * MMA_LINES * MMA_TARGETS * MMA_SOURCES
    issued = steps * ((MMA_WGRAD_ISSUED if wgrad else MMA_ISSUED) + 2 * rows) + (MMA_BEGIN if wgrad else 0)
    rate = gpu.products / (LEGACY if problem.arch >= 90 else 1)
    of_walk = max(gpu.tile(multiplied, rate, loaded), issued * MMA_THREADS / ISSUED, steps * MMA_SHARED[problem.role] / gpu.shared)
    of_block = of_walk * (cdiv(_walks(problem, config), config.splits) if wgrad else 1)
    return gpu.rounds(math.prod(grid(problem, config)), MMA_RESIDENT) * (START + MMA_RESIDENT * of_block)


def grid(problem: ConvProblem, config: DepthwiseConfig) -> tuple[int, int, int]:
    """Blocks, as csrc/depthwise/depthwise_plan.cc counts them."""
    d, h, w = problem.axes
    if config.lines:
        blocks = cdiv(problem.G, MMA_CHANNELS)
        return (blocks, config.splits, problem.B) if problem.role == "wgrad" else (_walks(problem, config) * blocks, 1, problem.B)
    channels = cdiv(_vectors(problem), config.lanes)
    if problem.role == "wgrad":
        return channels * cdiv(_pieces(problem), config.pieces), config.splits, problem.B
    return channels * cdiv(_strips(problem, config), _strip_lanes(config)), d.phases * h.phases * w.phases, problem.B


def fills_vectors(problem: ConvProblem) -> bool:
    """Return whether the channels of y divide into vectors, each of which meets neighbouring channels of x."""
    vector = VECTOR_BITS // BITS[problem.dtypes[0]]
    return problem.G * problem.K % vector == 0 and (vector % problem.K == 0 or problem.K % vector == 0)


def uses_tensor_cores(problem: ConvProblem) -> bool:
    """Return whether tensor cores take it."""
    d, h, w = problem.axes
    plain = BITS[problem.dtypes[0]] == 16 and problem.K == 1 and problem.G % 8 == 0
    elements = problem.B * problem.N * problem.G * max(math.prod(problem.input), math.prod(problem.output))
    if problem.role == "wgrad" and elements > MMA_MOST_ELEMENTS:
        return False
    planes = (d.R, d.T, d.offset) == (1, d.S, 0) and problem.stride[0] == problem.input_dilation[0] == 1
    steps = {*problem.stride[1:], *problem.input_dilation[1:], *problem.filter_dilation[1:]}
    return plain and planes and steps == {1} and 1 <= h.R <= MMA_ROWS[problem.role][-1] and 1 <= w.R <= MMA_COLUMNS and min(h.T, w.T) > 0


def _on_tensor_cores(problem: ConvProblem, other: DepthwiseConfig) -> list[DepthwiseConfig]:
    """Every length of parts of an image that have about the same number of lines.  The list does not depend on the number of images, so
    that a batch may have the config of a part of it.  Lanes and strip are for arrays that do not start at a multiple of a vector, which
    the other kernels take."""
    _, h, w = problem.axes
    few = h.R == 1 if problem.role == "wgrad" else h.R * w.R < MMA_FEWEST_TAPS
    if not uses_tensor_cores(problem) or few:
        return []
    lines = {cdiv(h.T, cdiv(h.T, most)) for most in range(1, min(h.T, MMA_MOST_LINES) + 1)}
    return [dataclasses.replace(other, lines=number) for number in sorted(lines)]


def _splits_of_walks(problem: ConvProblem, config: DepthwiseConfig) -> list[DepthwiseConfig]:
    """Return configs of wgrad whose walks are shared out to as many blocks as fill all multiprocessors once, and twice."""
    if problem.role != "wgrad":
        return [config]
    walks, blocks = _walks(problem, config), cdiv(problem.G, MMA_CHANNELS) * problem.B
    full = MMA_RESIDENT * machine(problem.arch, problem.device).multiprocessors // max(1, blocks)
    shares = {cdiv(walks, max(1, min(rounds * full, MOST_SPLITS))) for rounds in (1, 2)}
    return [dataclasses.replace(config, splits=max(1, cdiv(walks, max(1, share)))) for share in sorted(shares)]


def _walks(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Sets of 16 lines, times blocks of columns."""
    d, h, w = problem.axes
    return cdiv(problem.N * d.T * cdiv(h.T, _walked(problem, config)), MMA_LINES) * cdiv(w.T, MMA_TARGETS)


def _walked(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Lines of targets that a block walks down."""
    return min(config.lines, problem.axes[1].T)


def _shared_out(problem: ConvProblem, config: DepthwiseConfig) -> DepthwiseConfig:
    """Return the config with a wgrad's blocks shared between pieces, and its sum between blocks."""
    most = THREADS // config.lanes
    config = dataclasses.replace(config, pieces=largest_block([1 << i for i in range(most.bit_length())], _pieces(problem), idle=1 / 4))
    wanted = RESIDENT * machine(problem.arch, problem.device).multiprocessors // max(1, math.prod(grid(problem, config)))
    splits = min(wanted, _strips(problem, config) // (4 * _strip_lanes(config)), MOST_SPLITS)
    return dataclasses.replace(config, splits=max(1, splits))


def _vector(problem: ConvProblem) -> int:
    """Channels of an access to y."""
    return VECTOR_BITS // BITS[problem.dtypes[0]] if fills_vectors(problem) else 1


def _folds(problem: ConvProblem) -> int:
    """Vectors that a thread sums."""
    return max(1, problem.K // _vector(problem)) if problem.role == "dgrad" else 1


def _vectors(problem: ConvProblem) -> int:
    """Threads side by side for all channels."""
    return cdiv(problem.G * problem.K, _vector(problem) * _folds(problem))


def _line(problem: ConvProblem, strip: int = 1) -> Line:
    """The last axis, with its targets in strips."""
    return Line(**dataclasses.asdict(problem.axes[2]), strip=strip)


def _strip_lanes(config: DepthwiseConfig) -> int:
    return THREADS // (config.lanes * config.pieces)


def _strips(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Strips of one phase."""
    d, h, _ = problem.axes
    return problem.N * d.targets * h.targets * _line(problem, config.strip).strips


def _most_taps(problem: ConvProblem) -> int:
    """Return the most taps of a filter row, whose sums a thread of wgrad holds."""
    windowed = fills_vectors(problem) and problem.K == 1 and abs(_line(problem).hop) == 1
    return WGRAD_TAPS if windowed else FEW_WGRAD_TAPS


def _pieces(problem: ConvProblem) -> int:
    """Pieces of the filter whose sums a thread of wgrad holds."""
    d, h, w = problem.axes
    return d.R * h.R * min(w.step, w.R) * cdiv(cdiv(w.R, w.step), _most_taps(problem))
