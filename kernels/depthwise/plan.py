"""The tiles of depthwise convolutions: which problems a kernel takes, the configs worth trying, a model of their time, and the launch."""

import dataclasses
from collections.abc import Iterator

from .. import epilogue
from ..checks import check, lacking, refused_device, wrong_field
from ..epilogue import FLOATS
from ..geometry import Axis, ConvProblem
from ..launch import BITS, Launch, cdiv, fused, largest_block, plain_launch
from ..machine import machine
from .problem import FARTHEST, MOST_COLUMNS, Line

Problem = ConvProblem

VECTOR_BITS = 128  # the widest load
NUM_WARPS = 4
WIDTHS = (14, 8, 7, 4, 2, 1)  # 7 and 14 divide the images of many networks
MOST_PHASES = 64  # their tables are unrolled: with 640, compiling took 39 s
REGISTERS = 255  # of a thread
FEW_REGISTERS = 184  # by the count of `registers`, which is somewhat high: three programs then fit a multiprocessor (170 each)
ADDRESSES = 16  # registers of a thread
MOST_STRIPS = 2**31 - 2**20  # kernels number them with 32 bits, and up to 6·148 splits of 512 strips overhang
PROGRAMS = 6  # of a multiprocessor that share a sum, two waves of three: more would only write more partial results
LEAST_TILES = 4  # of a program that shares a sum
IDLE_CHANNELS, IDLE_PIECES = 1 / 8, 1 / 4  # the most of the lanes; pieces of a tile read the same y, which is worth more idle ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tile_g: int  # channels of a tile, a power of two
    strips: int  # strips of a tile, a power of two
    strip: int  # targets of a strip
    pieces: int = 1  # wgrad: pieces of the filter that share a tile, a power of two
    splits: int = 1  # wgrad: parts of the sum over targets
    num_warps: int


def axes(problem: Problem, config: Config) -> tuple[Axis, Axis, Line]:
    d, h, w = problem.axes
    return d, h, Line(**dataclasses.asdict(w), strip=config.strip)


def classes(axis: Axis) -> int:
    """The number of residues of taps; a phase meets one of them, or none."""
    return min(axis.step, axis.R)


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.C != 1:
        return f"{problem.C} input channels per group, it takes 1"
    if unknown := [dtype for dtype in problem.dtypes if dtype not in FLOATS]:
        return f"dtype {unknown[0]}, it takes {', '.join(FLOATS)}"
    if reason := epilogue.refused(problem.epilogue, problem.role, "fprop", problem.dtypes[2]):
        return reason
    if (period := max(axis.period for axis in problem.axes)) > MOST_PHASES:
        return f"{period} phases along an axis, it takes {MOST_PHASES} at most"
    if (farthest := _farthest(problem)) >= FARTHEST:
        return f"places up to {farthest} along an axis, it takes those below {FARTHEST}"
    narrowest = Config(tile_g=1, strips=1, strip=1, num_warps=NUM_WARPS)  # the others have fewer strips
    if (count := strips(problem, narrowest)) >= MOST_STRIPS:
        return f"{count} strips, it takes fewer than {MOST_STRIPS}"
    return refused_device(problem.arch)


def _farthest(problem: Problem) -> int:
    """The largest distance from 0 of a target or (before the division by d) a source, including those of overhanging strips and pieces.

    A strip is no wider than REGISTERS, since each of its targets takes one.
    """
    lines = [Line(**dataclasses.asdict(axis), strip=1) for axis in problem.axes]
    return max(line.largest(line.T + line.period * line.spacing * REGISTERS, line.R + line.step * MOST_COLUMNS) for line in lines)


def candidates(problem: Problem) -> list[Config]:
    """Configs for several widths of a strip; the width determines the rest.

    A thread has one strip and 16 bytes of channels (of the widest dtype).  The block of channels is the largest power of two, up to eight
    such vectors, that leaves few lanes idle.  A wgrad tile has as many pieces of the filter as leave few lanes idle, since they read the
    same y.  The sum of wgrad is split until there are PROGRAMS per multiprocessor, each with at least LEAST_TILES.  The width with the
    fewest clocks is first, among equals the widest.
    """
    vector = VECTOR_BITS // max(BITS[dtype] for dtype in problem.dtypes)
    channels = max(1, _target_channels(problem))
    block = largest_block([min(vector << i, 1 << (channels - 1).bit_length()) for i in range(4)], channels, IDLE_CHANNELS)
    rows = max(1, 32 * NUM_WARPS * vector // block)
    configs = [Config(tile_g=block, strips=rows, strip=width, num_warps=NUM_WARPS) for width in WIDTHS]
    if problem.role == "wgrad":
        configs = [_split(problem, config) for config in configs]
    few = (config for config in configs if registers(problem, config) <= FEW_REGISTERS)
    return sorted(few, key=lambda config: (clocks(problem, config), -config.strip))


def _split(problem: Problem, config: Config) -> Config:
    """The config with the tile's rows divided between strips and lanes, and the sum between programs."""
    rows = config.strips
    lanes = largest_block([1 << i for i in range(rows.bit_length())], filter_pieces(problem, config), IDLE_PIECES)
    config = dataclasses.replace(config, pieces=lanes, strips=rows // lanes)
    wanted = PROGRAMS * machine(problem.arch, problem.device).multiprocessors // max(1, grid(problem, config)[0])
    return dataclasses.replace(config, splits=max(1, min(wanted, strips(problem, config) // (LEAST_TILES * config.strips))))


def clocks(problem: Problem, config: Config) -> float:
    """The time to load a multiprocessor's vectors from the L2 cache.

    For each tile a thread moves its targets, `strip` vectors, and for each row of the filter a row of sources and a share of the taps.
    Programs run in waves, so a few wide ones may be slower than more narrow ones.
    """
    line = axes(problem, config)[2]
    if problem.role == "wgrad":
        clocks_of_one = cdiv(strips(problem, config), config.strips * config.splits) * (config.strip + line.sources)
    else:
        rows = problem.filter[0] * problem.filter[1] * line.pieces
        clocks_of_one = config.strip + rows * (line.sources + line.COLUMNS / 2)
    gpu, vectors = machine(problem.arch, problem.device), 32 * config.num_warps * VECTOR_BITS // 8
    return gpu.rounds(grid(problem, config)[0]) * clocks_of_one * vectors / gpu.l2


def registers(problem: Problem, config: Config) -> int:
    """The approximate number of registers of a thread: sums and taps in float32, sources and targets in their own dtype, addresses."""
    line = axes(problem, config)[2]
    vector = cdiv(config.strips * config.pieces * config.tile_g, 32 * config.num_warps)
    loaded = vector * max(BITS[dtype] for dtype in problem.dtypes) // 32
    if problem.role == "wgrad":
        return vector * line.COLUMNS + loaded * (line.sources + config.strip) + ADDRESSES
    return vector * (config.strip + line.COLUMNS) + loaded * line.sources + ADDRESSES


def strips(problem: Problem, config: Config) -> int:
    """The number of strips of one phase."""
    d, h, w = axes(problem, config)
    return problem.N * d.targets * h.targets * w.strips


def _target_channels(problem: Problem) -> int:
    """The number of channels of the result; x has the same channels, or is a sum over K of them."""
    return problem.G if problem.role == "dgrad" else problem.G * problem.K


def filter_pieces(problem: Problem, config: Config) -> int:
    d, h, w = axes(problem, config)
    return d.R * h.R * classes(w) * w.pieces


def grid(problem: Problem, config: Config) -> tuple[int]:
    d, h, w = problem.axes
    if problem.role == "wgrad":
        blocks = cdiv(_target_channels(problem), config.tile_g) * cdiv(filter_pieces(problem, config), config.pieces)
        return (blocks * config.splits * problem.B,)
    blocks = cdiv(_target_channels(problem), config.tile_g) * cdiv(strips(problem, config), config.strips)
    return (blocks * d.period * h.period * w.period * problem.B,)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    jitted = kernel.depthwise_wgrad if problem.role == "wgrad" else kernel.depthwise_gather
    operands = {"fprop": ("x", "w"), "dgrad": ("y", "w"), "wgrad": ("x", "y")}[problem.role]
    plain = plain_launch(problem, config, jitted, operands, grid(problem, config), AXES=axes(problem, config))
    return fused(plain, kernel.depthwise_fused, problem.epilogue) if problem.epilogue else plain


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield wrong_field(config, {"tile_g": 1, "strips": 1, "pieces": 1}, ("strip", "splits"))
    if problem.role != "wgrad" and (config.pieces, config.splits) != (1, 1):
        yield f"pieces={config.pieces} and splits={config.splits}, want 1 for {problem.role}"
    if (needed := registers(problem, config)) > REGISTERS:
        yield f"{config} needs {needed} registers per thread, there are {REGISTERS}"
    if (count := strips(problem, config) + config.splits * config.strips) > 2**31:
        yield f"{config} numbers {count} strips, the limit is 2^31"
    yield lacking(config, problem.arch, grid(problem, config)[0])
