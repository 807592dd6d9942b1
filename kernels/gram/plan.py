"""The tiles of a product with its own transpose: those of matrix products that a triangle can be made of."""

import dataclasses
import functools
from collections.abc import Iterator

from ..checks import check
from ..epilogue import FLOATS
from ..launch import MOST_PROGRAMS, Launch, cdiv, plain_launch
from ..matmul import plan as matmul
from ..matmul.plan import Config
from ..matmul.problem import Problem as MatmulTiles
from .problem import Problem

RATIOS = (1, 2)


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.integers or "i8" in problem.dtypes:
        return f"{problem.dtypes[0]} into {problem.dtypes[2]}, want floats"
    if reason := matmul.refused_numbers(problem):
        return reason
    if problem.addend not in (None, *FLOATS):
        return f"addend is {problem.addend}, want one of {', '.join(FLOATS)}"
    return None if candidates(problem) else f"{problem.B} results of {problem.rows} rows have more tiles than a grid has programs"


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products that a triangle is made of.  The one that takes the fewest clocks, by a rough model, is first."""
    configs = []
    for tile in dict.fromkeys(dataclasses.replace(config, splits=1) for config in matmul.candidates(problem)):
        # Sums of so many numbers leave no registers for those to be added.
        cramped = problem.addend is not None and tile.tile_m * tile.tile_n > matmul.LARGE
        # Triton 3.6 keeps an address of the loop in memory there.
        cramped |= problem.tcgen05 and (tile.tile_m, tile.tile_n) == (128, 64)
        if tile.tile_m in (ratio * tile.tile_n for ratio in RATIOS) and not cramped:
            splits = {1, matmul.shares(problem, tile, grid(problem, tile)[0]) if problem.plain else 1}
            configs += [dataclasses.replace(tile, splits=n) for n in sorted(splits)]
    configs = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(configs, key=lambda config: clocks(problem, config))


def clocks(problem: Problem, config: Config) -> float:
    return matmul.clocks_of_programs(problem, config, grid(problem, config)[0], tiles(problem, config)[2])


def share(problem: Problem) -> float:
    """The clocks of this kernel over those of the kernel that computes the whole product, by the models."""
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(MatmulTiles)}
    plain = MatmulTiles(**fields)
    return clocks(problem, candidates(problem)[0]) / matmul.clocks(plain, matmul.candidates(plain)[0])


def tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Rows and columns of the rectangle of tiles, and of each program's steps in depth."""
    count, ratio = cdiv(problem.rows, config.tile_m), config.tile_m // config.tile_n
    width = ratio * (count + 1 - count % 2)
    steps = cdiv(cdiv(problem.depth, config.tile_k), config.splits)
    return ratio * (count * (count + 1) // 2) // width, width, steps


def grid(problem: Problem, config: Config) -> tuple[int]:
    rows, cols, _ = tiles(problem, config)
    return (rows * cols * config.splits * problem.B,)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    operands = "c", "addend" if problem.addend else "c"  # through which nothing is read then
    return plain_launch(problem, config, kernel.gram, operands, grid(problem, config), TILES=tiles(problem, config))


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield matmul.wrong_tile(problem, config)
    if config.tile_m not in (ratio * config.tile_n for ratio in RATIOS):
        yield f"tiles are {config.tile_m} by {config.tile_n}, want as many columns as rows, or half as many"
    if config.splits > 1 and not problem.plain:
        yield f"splits is {config.splits}, want 1: something follows the sum"
    yield matmul.lacking_device(problem, config, grid(problem, config)[0])
