"""How the CUDA kernels of a depthwise convolution are launched (csrc/depthwise.h): the config for each problem.

They move bytes, so a config is judged by the vectors of channels that a multiprocessor loads and stores.  A thread has one vector of
channels and walks along a strip of targets, a line of the width axis; `lanes` such vectors lie side by side in a block, and strips fill
the rest of its threads.
"""

from __future__ import annotations

import dataclasses
import math

from jaxext.kernels._geometry import Axis, ConvProblem
from jaxext.kernels._launch import BITS, cdiv, largest_block
from jaxext.kernels._roofline import machine, stored

THREADS = 128  # of a block
VECTOR_BITS = 128
LANES = (1, 2, 4, 8, 16)  # 16 vectors are 256 neighbouring bytes; more would leave too few strips for rows to be shared
STRIPS = (4, 8, 16, 32, 64)  # a chunk of 16-bit targets is 4; a longer strip spends less on its first window, and leaves fewer threads
WGRAD_TAPS = 7  # of a filter row whose sums a thread holds
RESIDENT = 4  # blocks on a multiprocessor: about what the kernels' registers allow
MOST_SPLITS = 1024  # partial results are written and read again


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthwiseConfig:
    lanes: int  # vectors of channels side by side in a block, a power of two
    strip: int  # targets in a row that a thread walks along
    pieces: int = 1  # wgrad: pieces of the filter that share a block, a power of two
    splits: int = 1  # wgrad: partial sums, along a leading axis of the result, which is float32 if there are several


def candidates(problem: ConvProblem) -> list[DepthwiseConfig]:
    """Strips of several lengths; the rest follows.

    The lanes are the most that leave at most an eighth of the threads without channels.  wgrad lets as many pieces of the filter as there
    are share a block, with at most a quarter idle, since they read the same targets; and it splits its sum until all multiprocessors are
    full, each block with at least 4 strips per thread.  The one that takes the fewest clocks is first, among equals the longest.
    """
    vectors = cdiv(problem.G, _vector(problem))
    lanes = largest_block(LANES, vectors, idle=1 / 8)
    longest = max(1, cdiv(problem.axes[2].targets, _spacing(problem.axes[2])))
    strips = [strip for strip in STRIPS if strip < longest] + [min(longest, STRIPS[-1])]
    configs = [DepthwiseConfig(lanes=lanes, strip=strip) for strip in dict.fromkeys(strips)]
    configs = [_shared_out(problem, config) for config in configs] if problem.role == "wgrad" else configs
    return sorted(configs, key=lambda config: (clocks(problem, config), -config.strip))


def pick(problem: ConvProblem) -> DepthwiseConfig:
    return candidates(problem)[0]


def clocks(problem: ConvProblem, config: DepthwiseConfig) -> float:
    """Expected time, in clocks: the vectors that a multiprocessor moves, in the rounds in which it gets blocks, from the L2 cache."""
    _, h, w = problem.axes
    window = cdiv(w.R, w.step) - 1
    if problem.role == "wgrad":
        of_block = cdiv(_strips(problem, config), _strip_lanes(config) * config.splits) * (2 * config.strip + min(window, WGRAD_TAPS - 1))
    else:
        of_block = stored(problem.epilogue) * config.strip + max(1, cdiv(h.R, h.step)) * (config.strip + window)
    gpu, vectors = machine(problem.arch), THREADS * _vector(problem) * BITS[problem.dtypes[0]] // 8
    return gpu.rounds(math.prod(grid(problem, config)), RESIDENT) * RESIDENT * of_block * vectors / gpu.l2


def grid(problem: ConvProblem, config: DepthwiseConfig) -> tuple[int, int, int]:
    """Blocks, as csrc/depthwise_plan.cc counts them."""
    _, h, w = problem.axes
    channels = cdiv(problem.G, config.lanes * _vector(problem))
    if problem.role == "wgrad":
        return channels * cdiv(_pieces(problem), config.pieces), config.splits, problem.B
    return channels * cdiv(_strips(problem, config), _strip_lanes(config)), h.phases * w.phases, problem.B


def _shared_out(problem: ConvProblem, config: DepthwiseConfig) -> DepthwiseConfig:
    """With a wgrad's blocks shared between pieces, and its sum between blocks."""
    most = THREADS // config.lanes
    config = dataclasses.replace(config, pieces=largest_block([1 << i for i in range(most.bit_length())], _pieces(problem), idle=1 / 4))
    wanted = RESIDENT * machine(problem.arch).multiprocessors // max(1, math.prod(grid(problem, config)))
    splits = min(wanted, _strips(problem, config) // (4 * _strip_lanes(config)), MOST_SPLITS)
    return dataclasses.replace(config, splits=max(1, splits))


def _vector(problem: ConvProblem) -> int:
    """Channels of an access."""
    vector = VECTOR_BITS // BITS[problem.dtypes[0]]
    return 1 if problem.G % vector else vector


def _spacing(axis: Axis) -> int:
    """Of the targets of a strip, within their phase."""
    return _tap_stride(axis) // math.gcd(axis.target_stride, _tap_stride(axis))


def _tap_stride(axis: Axis) -> int:
    """The distance of neighbouring taps' sources; any will do for a single tap, and the target's leaves no holes in a strip."""
    return abs(axis.tap_stride) if cdiv(axis.R, axis.step) > 1 else axis.target_stride


def _strip_lanes(config: DepthwiseConfig) -> int:
    return THREADS // (config.lanes * config.pieces)


def _strips(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Strips of one phase."""
    _, h, w = problem.axes
    spacing = _spacing(w)
    return problem.N * h.targets * spacing * cdiv(cdiv(w.targets, spacing), config.strip)


def _pieces(problem: ConvProblem) -> int:
    """Pieces of the filter whose sums a thread of wgrad holds."""
    _, h, w = problem.axes
    windowed = problem.G % (VECTOR_BITS // BITS[problem.dtypes[0]]) == 0 and _spacing(w) * w.target_stride == _tap_stride(w)
    return h.R * min(w.step, w.R) * cdiv(cdiv(w.R, w.step), WGRAD_TAPS if windowed else 4)
