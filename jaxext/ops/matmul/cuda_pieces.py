"""The launch of a product of float32 numbers in pieces of bfloat16 on Hopper (csrc/pieces/pieces.h): in how many parts.

`table` is the list of kernels that were compiled, which the module tells.  There is one tile for each number of pieces.  Its time for a
step of the sum is the longest of: multiplying, loading, moving bytes of shared memory, and issuing the instructions that split factors and
add sums.  TMA writes both factors to shared memory, from which each is read once, the pieces of the right one are written, and wgmma reads
them for each product and each 64 rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxext.backends.cuda.cuda_binding import fields_named, refusal, split_configs
from jaxext.backends.cuda.cuda_tiles import FEWEST_STEPS
from jaxext.kernels.launch import PRODUCTS_OF_PARTS, cdiv
from jaxext.kernels.machine import ISSUED, REACHED, START, STORED, machine
from jaxext.kernels.matmul.problem import MatmulProblem

PIECES = {"bf16x3": 2, "bf16x6": 3}  # of a factor, by the precisions that the kernels have
_STEP = 32  # elements of the sum
# Instructions of all warps of a block in a step, as ptxas 13.0 made them, without the way of sums that are NaN: eight multiply, four split.
_INSTRUCTIONS = {2: 8 * 260 + 4 * 150, 3: 8 * 310 + 4 * 240}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecesConfig:
    tile_m: int
    tile_n: int
    pieces: int
    splits: int = 1  # partial results along a leading axis of the result


def refused(problem: MatmulProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    return refusal(f"pieces_{problem.role}", fields_named(problem, "BMNK"), problem.dtypes, problem.arch)


def candidates(problem: MatmulProblem, table: Sequence[Mapping[str, Any]]) -> list[PiecesConfig]:
    """The tiles of the precision, in one part and in those that TMA can find.  The one with the fewest expected clocks is first."""
    rows = [row for row in table if row["pieces"] == PIECES[problem.precision]]
    return sorted(
        split_configs(PiecesConfig, rows, lambda row, parts: _divides(problem, parts)), key=lambda config: clocks(problem, config)
    )


def clocks(problem: MatmulProblem, config: PiecesConfig) -> float:
    """Expected time of the product, in clocks of a multiprocessor."""
    gpu, m, n = machine(problem.arch, problem.device), config.tile_m, config.tile_n
    products = PRODUCTS_OF_PARTS[problem.precision]
    in_shared_memory = 2 * 4 * (m + n) + 2 * config.pieces * n + products * m // 64 * 2 * n
    step = max(
        gpu.tile(m * n * products, gpu.rate(16) * REACHED[128], 4 * (m + n)),
        in_shared_memory / gpu.shared,
        _INSTRUCTIONS[config.pieces] * 32 / ISSUED / _STEP,
    )
    tiles = cdiv(problem.rows, m) * cdiv(problem.cols, n) * problem.B * config.splits
    depth = cdiv(problem.depth, config.splits * _STEP) * _STEP
    written = 4 * problem.rows * problem.cols * problem.B * config.splits
    computed = gpu.rounds(tiles) * (START + depth * step + 4 * m * n / STORED)
    return gpu.product(computed, 4 * (problem.rows + problem.cols) * problem.depth * problem.B, written, config.splits)


def _divides(problem: MatmulProblem, splits: int) -> bool:
    """Return whether parts are equal, begin at multiples of 16 bytes, and are long enough."""
    return problem.B == 1 and problem.depth % (splits * 4) == 0 and problem.depth // splits >= FEWEST_STEPS * _STEP
