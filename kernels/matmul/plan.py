"""The tiles of matrix products: which products a kernel takes, the configs worth trying, a model of their time, and the launch."""

import dataclasses
from collections.abc import Iterator

from .. import epilogue
from ..checks import check, lacking, refused_device, refused_pair, tensor_memory, wrong_field
from ..epilogue import FLOATS
from ..launch import BITS, EIGHTS, MOST_INTEGER_PRODUCTS, MOST_PROGRAMS, SHARED_MEMORY, TENSOR_MEMORY, Launch, cdiv, fused, plain_launch
from ..machine import START, machine
from .problem import SLOTS, Problem

# Those that split a float32 number, and the bytes of its right factor's parts in shared memory.
_PARTS = {"tf32x3": 8, "bf16x3": 4, "bf16x6": 6}
_PRECISIONS = ("tf32", *_PARTS, "ieee")

# Rows and columns of the tiles worth trying, and their warps.  An accumulator of 128x256 is 128 registers of each of 8 warps' threads.
_TILES = (
    *((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)),
    *((128, 16, 4), (16, 128, 4), (32, 32, 2), (16, 16, 1)),  # skinny; many small products
)
_FMA_TILES = ((128, 128, 8), (64, 64, 4), (64, 16, 2), (16, 64, 2), (32, 32, 2), (16, 16, 1))  # without tensor cores

SMALL = 64 * 64  # sums of a tile; smaller ones are skinny, or have 1 or 2 warps
LARGE = 128 * 128  # sums of a tile; larger ones leave a thread registers for little else
MOST_COPIES = 16  # of a thread for one operand in a step, since each has its address in a register
LEAST_STEPS = 4  # of a program that shares the depth, about as many as there are stages to fill


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A program's tile of the product, its step in depth, and how many programs share the depth.

    A gated product's tile is half of tile_n columns of the gate, and as many of the linear part.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    fuses = epilogue.refused(problem.epilogue, problem.role, "nn", problem.dtypes[2], gates=True, ragged=problem.ragged)
    if reason := refused_numbers(problem) or fuses:
        return reason
    if problem.epilogue and problem.integers and not candidates(problem):
        return f"sums of {problem.depth} products of int8 are split, and no epilogue can follow their parts"
    smallest = problem.B * cdiv(problem.rows, 16) * cdiv(problem.cols, 16)
    if smallest > MOST_PROGRAMS and not candidates(problem):
        return f"{problem.B} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


def refused_numbers(problem: Problem) -> str | None:
    """Return the reason if the device or Triton cannot multiply these numbers, or None."""
    first, second, result = problem.dtypes
    operands = {first, second}
    if reason := refused_device(problem.arch):
        return reason
    if "i8" in operands or result == "i32":
        return None if problem.dtypes == ("i8", "i8", "i32") else f"{first} and {second} into {result} (integers: i8 and i8 into i32)"
    if not operands <= {*EIGHTS, *FLOATS} or result not in FLOATS:
        return f"{first} and {second} into {result} (floats: {', '.join((*FLOATS, *sorted(EIGHTS)))} into {', '.join(FLOATS)})"
    if reason := refused_device(problem.arch, eights=bool(operands & EIGHTS)):
        return reason
    if problem.bits == 32 and problem.precision not in _PRECISIONS:
        return f"precision {problem.precision!r} of float32 (want one of {', '.join(_PRECISIONS)})"
    return refused_pair(problem.arch, *problem.operand_dtypes, problem.method, problem.turned[1])


def candidates(problem: Problem) -> list[Config]:
    """The tiles that fit; if the result has fewer tiles than the device has multiprocessors, also with the depth split.

    The one with the fewest clocks, by a rough model, is first.
    """
    configs = []
    for rows, cols, warps in _FMA_TILES if problem.fma else _TILES:
        # An accumulator this large leaves no registers for the parts of float32 numbers, for sums of 8-bit floats that are kept apart,
        # or for the many addresses of copies in pieces of less than 16 bytes; nor, where factors are read from registers, for those of
        # 256 rows or of 8 bits.
        cramped = problem.bits == 32 or problem.eights or not problem.aligned
        cramped |= not problem.shared_factors and (rows > 128 or problem.bits == 8)
        if rows * cols > LARGE and cramped:
            continue
        # The parts of even a small tile are many registers of few threads: these are spread, or not tried.
        small = rows * cols < SMALL
        if problem.splits_factors and small and warps < 4:
            continue
        warps = 8 if problem.splits_factors and small else warps
        # So are the addresses of copies in small pieces, beside factors in registers.
        warps *= 2 if problem.fma and not problem.aligned and small else 1
        config = Config(tile_m=rows, tile_n=cols, tile_k=_depth(problem, rows, cols, warps), num_warps=warps)
        if tensor_columns(problem, config) <= TENSOR_MEMORY and (stages := _stages(problem, config)):
            config = dataclasses.replace(config, num_stages=stages)
            splits = 1 if problem.epilogue else shares(problem, config, grid(problem, config)[0])
            configs += [dataclasses.replace(config, splits=splits) for splits in sorted({1, splits})]
    configs = [config for config in configs if not _saturates(problem, config)]
    configs = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(configs, key=lambda config: clocks(problem, config))


def _depth(problem: Problem, rows: int, cols: int, warps: int) -> int:
    """The depth of a step: 128 bytes, a cache line and the widest swizzle of shared memory.

    16 numbers if a longer step would only take more registers.  Copies of less than 16 bytes are many and hold their addresses in
    registers, so steps are shortened until a thread makes at most MOST_COPIES of them per operand, if possible.
    """
    small = rows * cols < SMALL
    six_parts_on_tcgen05 = problem.method == "bf16x6" and problem.tcgen05
    if problem.fma or (problem.splits_factors and (small or six_parts_on_tcgen05 or not problem.shared_factors)):
        return 16
    depth = 1024 // problem.bits
    copies = max(rows // problem.pieces[0], cols // problem.pieces[1]) * depth // (32 * warps)
    return depth if problem.aligned else max(least_depth(problem), depth * MOST_COPIES // max(MOST_COPIES, copies))


def least_depth(problem: Problem) -> int:
    """The depth of one tensor core instruction."""
    return max(16, 256 // problem.bits)


def _stages(problem: Problem, config: Config) -> int | None:
    """3 or 4, so that two programs fit a multiprocessor if possible: one multiplies while the other begins or stores its result."""
    memory = SHARED_MEMORY[problem.arch]
    for share in (memory // 2, memory):
        for stages in (4, 3):
            if shared_memory(problem, dataclasses.replace(config, num_stages=stages)) <= share:
                return stages
    return None


def shared_memory(problem: Problem, config: Config) -> int:
    """Bytes of the stages (one less if the tensor cores read from registers) and of right factors made from them.

    Rearranging the result takes less than any device has.
    """
    lhs, rhs = problem.staged
    stage = (config.tile_m * lhs + config.tile_n * rhs) * config.tile_k
    if not problem.shared_factors:
        return stage * (config.num_stages - 1)
    factors = config.tile_n * config.tile_k
    if problem.splits_factors:
        return stage * (config.num_stages - 1) + factors * _PARTS[problem.method]
    return stage * config.num_stages + (factors * problem.bits // 8 if problem.common else 0)


def tensor_columns(problem: Problem, config: Config) -> int:
    parts = problem.method if problem.splits_factors else ""
    return tensor_memory(problem.arch, config.tile_m, config.tile_n, config.tile_k, parts)


def shares(problem: Problem, config: Config, programs: int) -> int:
    """Return how many programs share the depth of a tile, so that they fill the device once, beside so many without splits.

    Each has at least LEAST_STEPS of depth if possible and never none; integers whose sum could exceed int32 are split further.
    """
    steps = cdiv(problem.depth, config.tile_k)
    wanted = machine(problem.arch, problem.device).multiprocessors // max(1, programs)
    if problem.integers:
        wanted = max(wanted, cdiv(steps, (MOST_INTEGER_PRODUCTS - 1) // config.tile_k))
    return cdiv(steps, max(LEAST_STEPS, cdiv(steps, max(1, wanted)))) or 1


def _saturates(problem: Problem, config: Config) -> bool:
    return problem.integers and tiles(problem, config)[2] * config.tile_k >= MOST_INTEGER_PRODUCTS


def clocks(problem: Problem, config: Config) -> float:
    return clocks_of_programs(problem, config, grid(problem, config)[0], tiles(problem, config)[2])


def clocks_of_programs(problem: Problem, config: Config, programs: int, steps: int) -> float:
    """The time of one multiprocessor's programs, each a start and its depth, and of adding partial results if the depth is split."""
    gpu, depth = machine(problem.arch, problem.device), steps * config.tile_k
    lhs, rhs = (BITS[dtype] / 8 for dtype in problem.operand_dtypes)
    rate, loaded = gpu.rate(problem.bits, problem.method), config.tile_m * lhs + config.tile_n * rhs
    multiplied = gpu.rounds(programs) * (START + depth * gpu.tile(config.tile_m * config.tile_n, rate, loaded))
    partial = 4 * config.splits * problem.B * problem.rows * problem.cols
    return multiplied + (gpu.adding(partial) if config.splits > 1 else 0)


def tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """The numbers of tile rows and tile columns, and of each program's steps in depth."""
    steps = cdiv(cdiv(problem.depth, config.tile_k), config.splits)
    return cdiv(problem.rows, config.tile_m), cdiv(problem.cols, config.tile_n), steps


def grid(problem: Problem, config: Config) -> tuple[int]:
    rows, cols, _ = tiles(problem, config)
    return (rows * cols * config.splits * problem.B,)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    plain = plain_launch(problem, config, kernel.matmul, SLOTS[problem.role], grid(problem, config), TILES=tiles(problem, config))
    return fused(plain, kernel.matmul_fused, problem.epilogue) if problem.epilogue else plain


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield wrong_tile(problem, config)
    if problem.epilogue and config.splits > 1:
        yield f"splits is {config.splits}, want 1: an epilogue cannot follow parts of a sum"
    if _saturates(problem, config):
        products = tiles(problem, config)[2] * config.tile_k
        yield f"{config} adds up {products} products of int8, tensor cores may saturate: it wants more splits"
    yield lacking_device(problem, config, grid(problem, config)[0])


def wrong_tile(problem: Problem, config: Config) -> str | None:
    """Return the reason if a tile is too small for tensor cores or its sizes are not powers of two, or None."""
    return wrong_field(config, {"tile_m": 16, "tile_n": 16, "tile_k": least_depth(problem)})


def lacking_device(problem: Problem, config: Config, programs: int) -> str | None:
    """Return the reason if the device has no room for the config, or None."""
    return lacking(config, problem.arch, programs, shared_memory(problem, config), tensor_columns(problem, config))
