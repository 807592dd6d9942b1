"""The tiles of ragged products: those of matrix products, with a program for each visit or, in tn, for each group."""

import dataclasses
from collections.abc import Iterator

from ..checks import check
from ..launch import MOST_PROGRAMS, Launch, cdiv, plain_launch
from ..matmul import plan as matmul
from ..matmul.plan import Config
from .problem import SLOTS, Problem


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.integers:
        return "integers, want floats"
    if reason := matmul.refuses(problem):
        return reason
    if not candidates(problem):
        return f"{problem.batches} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products, without splits.  The one with the fewest clocks, by a rough model, is first."""
    configs = {dataclasses.replace(config, splits=1) for config in matmul.candidates(problem)}
    if problem.arch < 90 and (problem.role == "nt" or problem.epilogue):
        # Beside 128 sums, a thread has no registers for what tells rows of a group from others.
        configs = {config for config in configs if config.tile_m * config.tile_n < 128 * 32 * config.num_warps}
    fit = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(fit, key=lambda config: (clocks(problem, config), dataclasses.astuple(config)))


def clocks(problem: Problem, config: Config) -> float:
    """The time of one multiprocessor's programs if half of the groups end within a tile of rows."""
    programs = problem.batches * problem.expected_tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n)
    return matmul.clocks_of_programs(problem, config, programs, cdiv(problem.expected_depth, config.tile_k))


def grid(problem: Problem, config: Config) -> tuple[int]:
    return (problem.batches * problem.tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n),)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    first, second = SLOTS[problem.role]
    tiles = problem.tiles_down(config.tile_m), cdiv(problem.cols, config.tile_n), cdiv(problem.depth, config.tile_k)
    if epilogue := problem.epilogue:
        bias, scale = "bias" if epilogue.bias else first, "scale" if epilogue.scale else first
        jitted, operands = kernel.ragged_rows_fused, (first, second, bias, scale, "visits")
    elif problem.role == "tn":
        jitted, operands = kernel.ragged_sum, (first, second, "begin", "end")
    else:
        jitted, operands = kernel.ragged_rows, (first, second, "visits")
    absent = {} if not epilogue or epilogue.saves else {"saved_ptr": None}
    plain = plain_launch(problem, config, jitted, operands, grid(problem, config), TILES=tiles, **absent)
    return dataclasses.replace(plain, results=2) if epilogue and epilogue.saves else plain


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield matmul.wrong_tile(problem, config)
    if config.splits != 1:
        yield f"splits is {config.splits}, want 1"
    yield matmul.lacking_device(problem, config, grid(problem, config)[0])
