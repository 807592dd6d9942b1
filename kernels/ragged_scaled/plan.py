"""The tiles of ragged products of scaled numbers: those of products of scaled numbers, with a program for each visit or group."""

import dataclasses
from collections.abc import Iterator

from ..checks import check
from ..launch import MOST_PROGRAMS, Launch, cdiv, plain_launch
from ..matmul import plan as matmul
from ..matmul.plan import Config
from ..ragged.plan import grid, many_groups, order
from ..scaled import plan as scaled
from ..scaled.plan import MOST_SUMS
from ..scaled.problem import LEFT, OPEN, RIGHT
from .problem import Problem


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if reason := scaled.refuses(problem):
        return reason
    if problem.role != "tn" and (reason := many_groups(problem)):
        return reason
    if not candidates(problem):
        return f"{problem.batches} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The tiles of products of scaled numbers, without splits.  The one with the fewest clocks, by a rough model, is first."""
    configs = {dataclasses.replace(config, splits=1) for config in scaled.candidates(problem)}
    if problem.arch < 90:
        # Beside 128 sums, a thread has no registers for what tells rows of a group from others.
        configs = {config for config in configs if _sums(config) < 128}
        if problem.packed and problem.scales_steps:  # nor beside 64 and unpacked int4: these are spread over more threads, or not tried
            configs = {dataclasses.replace(config, num_warps=8) if _sums(config) == MOST_SUMS else config for config in configs}
            configs = {config for config in configs if _sums(config) < MOST_SUMS}
    fit = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(fit, key=lambda config: order(problem, config))


def _sums(config: Config) -> int:
    """The sums of a thread."""
    return config.tile_m * config.tile_n // (32 * config.num_warps)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    left, right, open = (slots[problem.role] for slots in (LEFT, RIGHT, OPEN))
    # An absent scale is the left factor again, through which nothing is read.
    scales = (f"{slot}_scale" if slot in problem.scaled else left for slot in (left, right, open))
    jitted = kernel.ragged_scaled_sum if problem.role == "tn" else kernel.ragged_scaled_rows
    tiles = problem.tiles_down(config.tile_m), cdiv(problem.cols, config.tile_n), cdiv(problem.depth, config.tile_k)
    return plain_launch(problem, config, jitted, (left, right, *scales, "begin", "end"), grid(problem, config), TILES=tiles)


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield matmul.wrong_tile(problem, config)
    yield scaled.wrong_step(problem, config)
    if config.splits != 1:
        yield f"splits is {config.splits}, want 1"
    yield matmul.lacking_device(problem, config, grid(problem, config)[0])
