"""The product of a matrix with its own transpose:  y[row, col] = scale Σ_depth x[row, depth] x[col, depth] + of_addend addend[row, col].

The programs compute the tiles that have an element on or below the diagonal.  Each writes those elements of its tile, and the same numbers
above the diagonal, mirrored, so y is symmetric to the last bit.  The addend is symmetric too, and is read by the same tiles.

A tile has `ratio` times as many rows as columns, so the tile row i has `ratio` (i + 1) tiles.  Short tile rows are laid behind long ones:
that makes a rectangle, whose bands the programs go through as those of `matmul` do.
"""

from __future__ import annotations

import dataclasses
import functools

import triton
import triton.language as tl

from ..launch import MOST_PROGRAMS, Launch, cdiv, kernel_name, lacking_memory
from ..machine import START, machine
from ..matmul import kernel as matmul
from ..matmul.kernel import Config, _inside, _multiply_add, _place

RATIOS = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(matmul.Problem):
    """The role nt of a product, whose two operands are the slot c."""

    addend: str | None = None  # its dtype
    scale: float = 1.0
    of_addend: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether nothing follows the sum, so that the depth can be split."""
        return self.addend is None and self.scale == 1


def supports(problem: Problem) -> str | None:
    """None, or the reason if no config fits the problem."""
    if problem.integers or "i8" in problem.dtypes:
        return f"{problem.dtypes[0]} into {problem.dtypes[2]}, want floats"
    if reason := matmul._refused_numbers(problem):
        return reason
    if problem.addend not in (None, *matmul._FLOATS):
        return f"addend is {problem.addend}, want one of {', '.join(matmul._FLOATS)}"
    return None if candidates(problem) else f"{problem.B} results of {problem.rows} rows have more tiles than a grid has programs"


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products that a triangle is made of.  The one that takes the fewest clocks, by a rough model, is first."""
    configs = []
    for tile in dict.fromkeys(dataclasses.replace(config, splits=1) for config in matmul.candidates(problem)):
        # Sums of so many numbers leave no registers for those to be added.
        cramped = problem.addend is not None and tile.tile_m * tile.tile_n > 128 * 128
        # Triton 3.6 keeps an address of the loop in memory there.
        cramped |= problem.tcgen05 and (tile.tile_m, tile.tile_n) == (128, 64)
        if tile.tile_m in (ratio * tile.tile_n for ratio in RATIOS) and not cramped:
            splits = {1, _splits(problem, tile) if problem.plain else 1}
            configs += [dataclasses.replace(tile, splits=n) for n in sorted(splits)]
    configs = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(configs, key=lambda config: clocks(problem, config))


def _splits(problem: Problem, config: Config) -> int:
    """As many programs per tile as fill the device once, each with at least 4 steps of depth if possible."""
    steps = cdiv(problem.depth, config.tile_k)
    wanted = machine(problem.arch, problem.device).multiprocessors // max(1, grid(problem, config)[0])
    return cdiv(steps, max(4, cdiv(steps, max(1, wanted)))) or 1


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


def clocks(problem: Problem, config: Config) -> float:
    """As of a matrix product with fewer programs."""
    gpu = machine(problem.arch, problem.device)
    multiplied, loaded = config.tile_m * config.tile_n, (config.tile_m + config.tile_n) * problem.bits / 8
    depth = tiles(problem, config)[2] * config.tile_k
    of_program = START + depth * gpu.tile(multiplied, gpu.rate(problem.bits, problem.method), loaded)
    partial = 4 * config.splits * problem.B * problem.rows * problem.cols
    return gpu.rounds(grid(problem, config)[0]) * of_program + (gpu.adding(partial) if config.splits > 1 else 0)


def share(problem: Problem) -> float:
    """The clocks of this kernel over those of the kernel that computes the whole product, by the models."""
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(matmul.Problem)}
    plain = matmul.Problem(**fields)
    return clocks(problem, pick(problem)) / matmul.clocks(plain, matmul.pick(plain))


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
    """The launch; raises ValueError if the device or the kernel does not support the config."""
    if reason := supports(problem):
        raise ValueError(f"{problem.name}: {reason}")
    for field, least in {"tile_m": 16, "tile_n": 16, "tile_k": matmul._least_depth(problem)}.items():
        if (got := getattr(config, field)) < least or got & (got - 1):
            raise ValueError(f"{problem.name}: {field} is {got} (want a power of two, at least {least})")
    if config.tile_m not in (ratio * config.tile_n for ratio in RATIOS):
        raise ValueError(f"{problem.name}: tiles are {config.tile_m} by {config.tile_n} (want as many columns as rows, or half as many)")
    if config.splits < 1 or config.splits > 1 and not problem.plain:
        raise ValueError(f"{problem.name}: splits is {config.splits} (want 1, or more where nothing follows the sum)")
    if reason := lacking_memory(problem.arch, shared=matmul._shared_memory(problem, config), tensor=matmul._tensor_memory(problem, config)):
        raise ValueError(f"{problem.name}: {config} {reason}")
    if (programs := grid(problem, config)[0]) > MOST_PROGRAMS:
        raise ValueError(f"{problem.name}: {config} makes {programs} programs, a grid has at most {MOST_PROGRAMS}")
    rows, cols, steps = tiles(problem, config)
    return Launch(
        name=problem.name,
        kernel=gram,
        operands=("c", "addend" if problem.addend else "c"),  # through which nothing is read then
        grid=(programs,),
        constants={"PROBLEM": problem, "CONFIG": config, "TILE_ROWS": rows, "TILE_COLS": cols, "STEPS": steps},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        splits=config.splits,
    )


@triton.jit(repr=kernel_name)
def gram(
    x_ptr, addend_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = PROBLEM.rows
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    RATIO: tl.constexpr = CONFIG.tile_m // CONFIG.tile_n
    COUNT: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS

    batch, split, folded_row, folded_col = _place(PROBLEM, CONFIG, TILE_ROWS, TILE_COLS)
    tile_row, tile_col = _unfolded(folded_row, folded_col, COUNT, RATIO)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = split * (STEPS * BLOCK_DEPTH) + tl.arange(0, BLOCK_DEPTH)
    row_in = _inside(row, ROWS, COUNT * BLOCK_ROWS)
    col_in = _inside(col, ROWS, COUNT * BLOCK_ROWS)
    x_ptr += batch * (ROWS * DEPTH)
    lhs_at = row[:, None] * DEPTH + depth[None, :]
    rhs_at = depth[:, None] + col[None, :] * DEPTH

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in range(STEPS):
        depth_in = _inside(depth, DEPTH, CONFIG.splits * STEPS * BLOCK_DEPTH)
        lhs = tl.load(x_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = tl.load(x_ptr + rhs_at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        total = _multiply_add(lhs, rhs, total, PROBLEM)
        x_ptr += BLOCK_DEPTH
        depth += BLOCK_DEPTH

    if PROBLEM.scale != 1.0:
        total *= PROBLEM.scale
    at = row[:, None] * ROWS + col[None, :]
    if PROBLEM.addend is not None:
        addend = tl.load(addend_ptr + batch * (ROWS * ROWS) + at, mask=row_in[:, None] & col_in[None, :], other=0.0)
        total += addend.to(tl.float32) * PROBLEM.of_addend
    result_ptr += (split * PROBLEM.B + batch) * (ROWS * ROWS)
    y = total.to(result_ptr.dtype.element_ty)
    mirrored_at = row[:, None] + col[None, :] * ROWS  # neighbours along the rows of the tile
    # The columns of a row below the diagonal are no more than the rows, so that `col_in` says nothing more.
    if ROWS % 8 == 0:
        # A mask that changes within 16 bytes makes stores narrow, so tiles that lie below the diagonal as a whole have others.
        if tile_row * RATIO > tile_col:
            tl.store(result_ptr + at, y, mask=row_in[:, None])
            tl.store(result_ptr + mirrored_at, y, mask=row_in[:, None])
        else:
            _store(result_ptr, at, mirrored_at, y, row, col, row_in)
    else:
        _store(result_ptr, at, mirrored_at, y, row, col, row_in)


@triton.jit
def _store(result_ptr, at, mirrored_at, y, row, col, row_in):
    """What is on and below the diagonal, and the same above it."""
    tl.store(result_ptr + at, y, mask=row_in[:, None] & (row[:, None] >= col[None, :]))
    tl.store(result_ptr + mirrored_at, y, mask=row_in[:, None] & (row[:, None] > col[None, :]))


@triton.jit
def _unfolded(row, col, COUNT: tl.constexpr, RATIO: tl.constexpr):
    """The tile row and column of a place in the rectangle.

    Each of its rows holds a short tile row, of the first half, and behind it the long one that fills it up.  The longest of an odd number
    of tile rows is alone.
    """
    EVEN: tl.constexpr = 1 - COUNT % 2
    short = row + EVEN  # the number of the short tile row, counted from 1
    in_short = col < RATIO * short
    return tl.where(in_short, short - 1, COUNT - 1 + EVEN - short), tl.where(in_short, col, col - RATIO * short)
