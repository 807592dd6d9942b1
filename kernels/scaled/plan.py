"""The tiles of products of scaled numbers: those of matrix products, whose steps lie within blocks of one scale."""

import dataclasses
import functools
from collections.abc import Iterator

from ..checks import check, refused_device, refused_pair
from ..epilogue import FLOATS
from ..launch import EIGHTS, MOST_PROGRAMS, Launch, plain_launch
from ..matmul import plan as matmul
from ..matmul.plan import Config, clocks, grid, tiles
from .problem import LEAST_STEP, LEFT, OPEN, RIGHT, Problem

MOST_SUMS = 64  # of a thread that has another sum or tile in registers at the same time


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    operands = {*problem.operand_dtypes}
    if not operands <= {*EIGHTS, *FLOATS, "i8"} or problem.dtypes[2] not in FLOATS:
        return f"{' and '.join(problem.operand_dtypes)} into {problem.dtypes[2]}"
    if reason := refused_device(problem.arch, eights=bool(operands & EIGHTS)):
        return reason
    if problem.bits == 32 and problem.precision not in ("tf32", "ieee"):
        return f"precision {problem.precision!r} of float32 (want tf32 or ieee)"
    left_alone = problem.fine and problem.has_left and not problem.has_right and problem.operand_dtypes[1] == problem.common
    if reason := refused_pair(problem.arch, *problem.operand_dtypes, problem.method, problem.turned[1], scaled=left_alone):
        return reason
    if problem.packed and max(problem.rhs_strides) % 2:
        return f"packed rows of {max(problem.rhs_strides)} numbers, want an even number"
    if not candidates(problem):
        return f"{problem.B} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products, whose steps lie within blocks.  The one that takes the fewest clocks, by a rough model, is first."""
    configs = []
    for config in matmul.candidates(problem):
        if problem.scales_steps:
            # Beside two sums, int8 and what they become are too much for older devices' threads.
            most = LEAST_STEP if problem.arch < 90 and problem.common is not None and not problem.packed else config.tile_k
            config = dataclasses.replace(config, tile_k=min(most, problem.step))
        # The sum of a step and that of all are in registers at the same time; so are tiles before and after they are scaled.
        twice = problem.scales_steps or problem.fine or problem.whole_numbers
        if twice and config.tile_m * config.tile_n > MOST_SUMS * 32 * config.num_warps:
            continue
        if problem.packed and min(config.tile_n, config.tile_k) < LEAST_STEP:
            continue
        # Unpacked int4 and converted 8-bit floats need more registers than int8: they are spread over more threads.
        converted = problem.packed or EIGHTS & {*problem.operand_dtypes}
        if problem.common is not None and converted and (config.tile_m, config.tile_n) == (16, 128):
            config = dataclasses.replace(config, num_warps=8)
        if config not in configs and grid(problem, config)[0] <= MOST_PROGRAMS:
            configs.append(config)
    return sorted(configs, key=lambda config: clocks(problem, config))


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    left, right, open = (slots[problem.role] for slots in (LEFT, RIGHT, OPEN))
    # An absent scale is the left factor again, through which nothing is read.
    operands = left, right, *(f"{slot}_scale" if slot in problem.scaled else left for slot in (left, right, open))
    return plain_launch(problem, config, kernel.scaled_dot, operands, grid(problem, config), TILES=tiles(problem, config))


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield matmul.wrong_tile(problem, config)
    yield wrong_step(problem, config)
    yield matmul.lacking_device(problem, config, grid(problem, config)[0])


def wrong_step(problem: Problem, config: Config) -> str | None:
    """Return the reason if a step of the depth reaches into another block, or None."""
    if problem.scales_steps and problem.step % config.tile_k:
        return f"tile_k is {config.tile_k}, want a divisor of {problem.step}: a step lies within a block"
    return None
