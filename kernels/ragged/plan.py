"""The tiles of ragged products: those of matrix products, with a program for each visit or, in tn, for each group."""

import dataclasses
from collections.abc import Iterator

from ..checks import check
from ..launch import BITS, MOST_PROGRAMS, Launch, cdiv, plain_launch
from ..machine import LAUNCH, machine
from ..matmul import plan as matmul
from .problem import SLOTS, Problem, RaggedProblem

LISTING = 3 * LAUNCH  # clocks of the kernels of XLA that list the visits
FINDING = 500  # clocks in which a program finds its own: a scan and three sums over the groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(matmul.Config):
    """A tile of a matrix product; `finds_visit` says that each program of nn or nt finds its visit, which else is listed before."""

    finds_visit: bool = False


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.integers:
        return "integers, want floats"
    if problem.gathered and problem.role == "nt":
        return "the rows of x are the result, and are not gathered"
    if reason := matmul.refuses(problem):
        return reason
    if not candidates(problem):
        return f"{problem.batches} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products, without splits, the one that is expected to be fastest first."""
    tiles = {dataclasses.replace(config, splits=1) for config in matmul.candidates(problem)}
    if problem.arch < 90 and (problem.role == "nt" or problem.epilogue):
        # Beside 128 sums, a thread has no registers for what tells rows of a group from others.
        tiles = {config for config in tiles if config.tile_m * config.tile_n < 128 * 32 * config.num_warps}
    configs = [Config(**dataclasses.asdict(config), finds_visit=found) for config in tiles for found in _finds_visit(problem)]
    fit = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(fit, key=lambda config: order(problem, config))


def order(problem: RaggedProblem, config: matmul.Config) -> tuple:
    """The key of a config in sorting, least for the one that is expected to be fastest: clocks, by a rough model.

    Where reading the matrices takes longer than all else, as for few rows of each group, many take as long: then the rows of a tile.
    """
    return clocks(problem, config), config.tile_m, -config.tile_n, dataclasses.astuple(config)


def _finds_visit(problem: Problem) -> tuple[bool, ...]:
    """The values that `Config.finds_visit` may have."""
    return (False,) if problem.role == "tn" else (True,) if problem.gathered else (False, True)


def clocks(problem: RaggedProblem, config: matmul.Config) -> float:
    """The time of one multiprocessor's programs if half of the groups end within a tile of rows, or that of reading the matrices."""
    gpu = machine(problem.arch, problem.device)
    programs = problem.batches * problem.expected_tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n)
    computed = matmul.clocks_of_programs(problem, config, programs, cdiv(problem.expected_depth, config.tile_k))
    if problem.role == "tn":
        return computed
    matrices = problem.B * min(problem.G, problem.P * problem.M) * problem.depth * problem.cols
    read = gpu.moving(matrices * BITS[problem.operand_dtypes[1]] / 8)
    if getattr(config, "finds_visit", True):
        return max(computed + FINDING * gpu.rounds(programs), read)
    return max(computed, read) + LISTING


def grid(problem: Problem, config: Config) -> tuple[int]:
    return (problem.batches * problem.tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n),)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    first, second = SLOTS[problem.role]
    tiles = problem.tiles_down(config.tile_m), cdiv(problem.cols, config.tile_n), cdiv(problem.depth, config.tile_k)
    epilogue, row = problem.epilogue, "row" if problem.gathered else first  # an operand that is absent is the first one again
    bias, scale = "bias" if epilogue and epilogue.bias else first, "scale" if epilogue and epilogue.scale else first
    absent = {} if epilogue and epilogue.saves else {"saved_ptr": None}
    if problem.role == "tn":
        jitted, operands = (
            (kernel.ragged_sum_gathered, (first, second, "begin", "end", row))
            if problem.gathered
            else (kernel.ragged_sum, (first, second, "begin", "end"))
        )
        absent = {}
    elif config.finds_visit:
        jitted, operands = kernel.ragged_rows_found, (first, second, bias, scale, "begin", "end", row)
    elif epilogue:
        jitted, operands = kernel.ragged_rows_fused, (first, second, bias, scale, "visits")
    else:
        jitted, operands, absent = kernel.ragged_rows, (first, second, "visits"), {}
    plain = plain_launch(problem, config, jitted, operands, grid(problem, config), TILES=tiles, **absent)
    return dataclasses.replace(plain, results=2) if epilogue and epilogue.saves else plain


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield matmul.wrong_tile(problem, config)
    if config.splits != 1:
        yield f"splits is {config.splits}, want 1"
    if config.finds_visit not in (wanted := _finds_visit(problem)):
        yield f"finds_visit is {config.finds_visit}, want {wanted[0]}"
    yield matmul.lacking_device(problem, config, grid(problem, config)[0])
