"""The tiles of convolutions: which problems a kernel takes, the configs worth trying, a model of their time, and the launch."""

import dataclasses
import functools
import math

from .. import epilogue
from ..checks import check, lacking, refused_device, refused_pair, tensor_memory, wrong_field
from ..epilogue import FLOATS
from ..geometry import MOST_POSITIONS, ConvProblem
from ..launch import BITS, EIGHTS, MOST_INTEGER_PRODUCTS, MOST_PROGRAMS, SHARED_MEMORY, Launch, cdiv, fused, plain_launch
from ..machine import START, machine

Problem = ConvProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A program computes tile_m rows by tile_n columns, tile_k of the contraction at a time."""

    tile_m: int
    tile_n: int
    tile_k: int
    groups: int = 1  # neighbouring groups in one tile, a divisor of G
    packed: bool = False  # whether a tile spans taps
    splits: int = 1  # shares of the contraction, which go to programs of their own
    num_warps: int = 4
    num_stages: int = 3


HALF = {"bf16", "fp16"}

# tile_m, tile_n, bytes of tile_k, warps, stages.  Large tiles re-read least, small ones are many and waste little.  Those of 256 rows
# read the filter half as often; they are for gathers on 9.0, where factors take no registers.
SHAPES = (
    (256, 128, 128, 8, 3), (128, 256, 128, 8, 3), (128, 128, 128, 8, 3), (256, 64, 128, 8, 3), (128, 64, 128, 4, 3), (64, 128, 128, 4, 3),
    (64, 64, 128, 4, 4), (128, 64, 64, 4, 4), (128, 32, 64, 4, 4), (128, 16, 64, 4, 4), (32, 64, 64, 4, 4), (16, 64, 64, 4, 4),
    (16, 16, 128, 1, 3),
)  # fmt: skip

MOST_SUMS = 128  # of a thread, half of its registers; half as many beside parts of float32 numbers, or if a block's sum is apart
MOST_LOADS = 16  # of a thread for an operand in a step, since each has its address in a register
MOST_SHARED = 64  # channels of the groups that share a tile: of more, most products are with zeros
PACKED_SHARE = 3 / 4  # of the tiles; packing saves at least the rest, or is not worth its divisions
LEAST_STEPS = 8  # of a program that shares a sum: to fill its 3 or 4 stages is little beside them
LEAST_PROGRAMS = 2  # of a multiprocessor, one of which multiplies while the other begins or ends
STEP = 50  # clocks of a step for addresses and barriers
MOST_WARPS = 48  # of a multiprocessor: as many as one of 8.6, 8.9 and 12.0 holds, three quarters of the others'


def refuses(problem: Problem) -> str | None:
    first, second, result = problem.dtypes
    kinds = {first, second}
    if reason := epilogue.refused(problem.epilogue, problem.role, "fprop", result):
        return reason
    if reason := refused_device(problem.arch, eights=bool(kinds & EIGHTS)):
        return reason
    if kinds == {"i8"}:
        if problem.epilogue and not candidates(problem):
            return f"sums of {problem.C * math.prod(problem.filter)} products of int8 are split, and no epilogue can follow their parts"
        return None if result in ("i8", "i32") else f"int8 gives int8 or int32, not {result}"
    if not kinds <= {*FLOATS, *EIGHTS} or result not in FLOATS:
        return (
            f"operands {first} and {second} into {result}, it takes floats of 8 to 32 bits into fp32, bf16 or fp16, and i8 into i8 or i32"
        )
    left, right = (first, second) if problem.role == "fprop" else (second, first)
    if reason := refused_pair(problem.arch, left, right, problem.precision, turned=right == "fp32" and problem.role != "fprop"):
        return reason
    axes = problem.axes
    if (positions := problem.N * math.prod(axis.period * axis.targets for axis in axes)) >= MOST_POSITIONS:
        return f"{positions} positions, it takes fewer than {MOST_POSITIONS}"
    if (largest := max(axis.largest(axis.period * axis.targets - 1, axis.R - 1) for axis in axes)) >= MOST_POSITIONS:
        return f"a spatial axis that reaches to {largest}, it takes less than {MOST_POSITIONS}"
    if (elements := problem.G * problem.K * problem.C * math.prod(axis.R for axis in axes)) >= MOST_POSITIONS:
        return f"a filter of {elements} elements, it takes fewer than {MOST_POSITIONS}"
    most = math.prod(_tiles(problem, Config(tile_m=16, tile_n=16, tile_k=16)))
    if most > MOST_PROGRAMS and not candidates(problem):
        return f"{most} small tiles, and no larger ones that suit it are {MOST_PROGRAMS} or fewer"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The tile shapes that fit and are at least half full, each with suitable groups, packing and splits.

    The one with the fewest clocks, by a rough model, is first.
    """
    tall = problem.arch == 90 and problem.role != "wgrad" and not _splits_factors(problem)
    configs = [_complete(problem, shape) for shape in SHAPES if tall or shape[0] <= 128]
    fitting = (config for config in configs if _refusal(problem, config) is None and _fills(problem, config))
    return sorted(fitting, key=functools.partial(clocks, problem))


def grid(problem: Problem, config: Config) -> tuple[int]:
    return (math.prod(_tiles(problem, config)),)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, [refuses(problem) or _refusal(problem, config)])
    jitted = kernel.conv_wgrad if problem.role == "wgrad" else kernel.conv_gather
    operands = {"fprop": ("x", "w"), "dgrad": ("y", "w"), "wgrad": ("y", "x")}[problem.role]
    tiles, axes = _tiles(problem, config), problem.axes
    plain = plain_launch(problem, config, jitted, operands, grid(problem, config), TILES=tiles, AXES=axes)
    return fused(plain, kernel.conv_fused, problem.epilogue) if problem.epilogue else plain


def _refusal(problem: Problem, config: Config) -> str | None:
    """Return the reason if the config does not fit the problem, or None."""
    if problem.epilogue and config.splits > 1:
        return f"splits is {config.splits}, want 1: an epilogue cannot follow parts of a sum"
    if reason := wrong_field(config, {"tile_m": 16, "tile_n": 16, "tile_k": _least_k(problem)}, ("groups", "splits")):
        return reason
    if problem.G % config.groups:
        return f"{config} has {config.groups} groups to a tile, which do not divide {problem.G}"
    if config.packed and problem.role == "wgrad" and any(axis.d > 1 for axis in problem.axes):
        return f"{config} is packed, but an input dilation gives each tap its own targets"
    apart = _bits(problem) == 32 and problem.precision != "tf32" or {*problem.dtypes[:2]} <= EIGHTS
    if (sums := config.tile_m * config.tile_n // (32 * config.num_warps)) > (limit := MOST_SUMS // 2 if apart else MOST_SUMS):
        return f"{config} has {sums} sums to a thread, registers hold {limit} beside the factors"
    if "i8" in problem.dtypes and (n := cdiv(_extent(problem, config)[2], config.splits) * config.tile_k) >= MOST_INTEGER_PRODUCTS:
        return f"{config} adds up {n} products of int8, tensor cores may saturate with {MOST_INTEGER_PRODUCTS}: it wants more splits"
    stage = (config.tile_m + config.tile_n) * config.tile_k * _bits(problem) // 8
    parts = problem.precision if _splits_factors(problem) else ""
    tensor = tensor_memory(problem.arch, config.tile_m, config.tile_n, config.tile_k, parts)
    return lacking(config, problem.arch, grid(problem, config)[0], stage * config.num_stages, tensor)


def _fills(problem: Problem, config: Config) -> bool:
    """Return whether the result fills at least half of the tile, so that blocks of half the size would be more blocks.

    Columns are also not cut into narrow blocks if there are many rows, since each block of columns reads all sources again.
    """
    rows, columns, _ = _extent(problem, config)
    m, n = config.tile_m, config.tile_n
    halved_rows = _extent(problem, dataclasses.replace(config, tile_m=m // 2))[0]
    halved_columns = _extent(problem, dataclasses.replace(config, tile_n=n // 2))[1]
    narrow = problem.role != "wgrad" and m > n < 64 and columns > 1
    return (m == 16 or halved_rows > rows) and (n == 16 or halved_columns > columns) and not narrow


def _bits(problem: Problem) -> int:
    """Bits of a factor as it is multiplied."""
    first, second, _ = problem.dtypes
    return 32 if {first, second} == HALF else max(BITS[first], BITS[second])


def _least_k(problem: Problem) -> int:
    """The depth of one tensor core instruction."""
    return max(16, 256 // _bits(problem))


def _splits_factors(problem: Problem) -> bool:
    """Return whether float32 numbers are split into parts for the tensor cores."""
    return _bits(problem) == 32 and problem.precision not in ("tf32", "ieee")


def _blocks(taps: int, channels: int, block: int, packed: bool) -> int:
    return cdiv(taps * channels, block) if packed else taps * cdiv(channels, block)


def _extent(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks of rows, of columns and of the contraction, in the largest phase."""
    c, k = problem.C * config.groups, problem.K * config.groups
    positions = problem.N * math.prod(axis.targets for axis in problem.axes)
    if problem.role == "wgrad":
        taps = math.prod(axis.R for axis in problem.axes)
        return cdiv(k, config.tile_m), _blocks(taps, c, config.tile_n, config.packed), cdiv(positions, config.tile_k)
    taps = math.prod(cdiv(axis.R, axis.step) for axis in problem.axes)
    contracted, columns = (c, k) if problem.role == "fprop" else (k, c)
    return cdiv(positions, config.tile_m), cdiv(columns, config.tile_n), _blocks(taps, contracted, config.tile_k, config.packed)


def _tiles(problem: Problem, config: Config) -> tuple[int, int, int, int, int, int]:
    """The numbers of blocks of columns, blocks of groups, phases, blocks of rows, splits and batch elements."""
    rows, columns, _ = _extent(problem, config)
    phases = 1 if problem.role == "wgrad" else math.prod(axis.phases for axis in problem.axes)
    return columns, problem.G // config.groups, phases, rows, config.splits, problem.B


def _complete(problem: Problem, shape: tuple[int, int, int, int, int]) -> Config:
    """The config of a tile shape: warps, depth, groups, packing and splits that suit the problem.

    Three rules avoid register spills.  If an odd number of channels is loaded one by one, more warps, then shorter steps, limit a thread to
    MOST_LOADS.  Steps are halved if tensor cores read 8-bit factors, or parts of float32 numbers, from registers.  With tcgen05 more than 4
    warps load both factors of a wgrad tile of 64 by 128.
    Groups share a tile while all their channels fit its narrow side, and MOST_SHARED.  Tiles are packed if that saves a quarter of them.
    The contraction is split, into at least LEAST_STEPS each, if there are fewer than LEAST_PROGRAMS per multiprocessor, and if a sum of
    integers could exceed int32.
    """
    m, n, k_bytes, warps, stages = shape
    vector, k, least = math.gcd(problem.C, problem.K, 128 // _bits(problem)), k_bytes * 8 // _bits(problem), _least_k(problem)
    if problem.role == "wgrad" and 100 <= problem.arch < 120 and m * n >= 64 * 128:
        warps = 8
    if not 90 <= problem.arch < 120 and (_bits(problem) == 8 or _splits_factors(problem)):
        k = max(least, k // 2)
    while warps < 8 and max(m, n) * k > MOST_LOADS * (32 * warps * vector):
        warps *= 2
    while k > least and max(m, n) * k > MOST_LOADS * (32 * warps * vector):
        k //= 2
    config = Config(tile_m=m, tile_n=n, tile_k=k, num_warps=warps, num_stages=stages)
    room = min(m, n, MOST_SHARED) // max(problem.C, problem.K, 1)
    config = dataclasses.replace(config, groups=max((g for g in range(1, room + 1) if problem.G % g == 0), default=1))
    packed = dataclasses.replace(config, packed=True)
    if _refusal(problem, packed) is None and math.prod(_extent(problem, packed)) <= PACKED_SHARE * math.prod(_extent(problem, config)):
        config = packed
    steps, programs = _extent(problem, config)[2], math.prod(_tiles(problem, config))
    shares = min(steps // LEAST_STEPS, LEAST_PROGRAMS * machine(problem.arch, problem.device).multiprocessors // max(programs, 1))
    if problem.epilogue:
        return config
    least = cdiv(steps, (MOST_INTEGER_PRODUCTS - 1) // config.tile_k) if "i8" in problem.dtypes else 1
    splits = (dataclasses.replace(config, splits=n) for n in (max(1, least), max(1, least, shares)))
    return min(splits, key=functools.partial(clocks, problem))


def clocks(problem: Problem, config: Config) -> float:
    """The time of one multiprocessor's programs, which hide one another's start, and of adding partial results if sums are split."""
    gpu, bits, programs = machine(problem.arch, problem.device), _bits(problem), grid(problem, config)[0]
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    loaded = (m + n) * k * bits // 8
    step = gpu.tile(m * n * k, gpu.rate(bits, problem.precision), loaded) + STEP
    resident = max(1, min(SHARED_MEMORY[problem.arch] // (loaded * config.num_stages), MOST_WARPS // config.num_warps))
    busy = gpu.rounds(programs) * (cdiv(_extent(problem, config)[2], config.splits) * step + START / resident)
    return busy + (gpu.adding(4 * programs * m * n) if config.splits > 1 else 0)
