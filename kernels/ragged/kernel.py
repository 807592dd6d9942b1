"""Ragged products in Triton: a kernel for nn and nt, with a program for each visit, and a kernel for tn (both defined in problem.py)."""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

from .. import tile_epilogue as _fused
from ..launch import BITS, MOST_PROGRAMS, Launch, cdiv, kernel_name
from ..machine import START, machine
from ..matmul import kernel as matmul
from ..matmul.kernel import Config, _gate_and_linear, _inside, _multiply_add, _place
from .problem import NUMBERS_OF_VISIT, SLOTS, RaggedProblem

OF_VISIT = tl.constexpr(NUMBERS_OF_VISIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(RaggedProblem, matmul.Problem):
    """A ragged product, with the facts that tiles depend on besides its sizes."""


def supports(problem: Problem) -> str | None:
    """None, or the reason if no config fits the problem."""
    if problem.integers:
        return "integers, want floats"
    if reason := matmul.supports(problem):
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


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


def clocks(problem: Problem, config: Config) -> float:
    """The time of one multiprocessor's programs if half of the groups end within a tile of rows."""
    gpu = machine(problem.arch, problem.device)
    lhs, rhs = (BITS[dtype] / 8 for dtype in problem.operand_dtypes)
    loaded = config.tile_m * lhs + config.tile_n * rhs
    programs = problem.batches * problem.expected_tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n)
    tile = gpu.tile(config.tile_m * config.tile_n, gpu.rate(problem.bits, problem.method), loaded)
    return gpu.rounds(programs) * (START + cdiv(problem.expected_depth, config.tile_k) * config.tile_k * tile)


def grid(problem: Problem, config: Config) -> tuple[int]:
    return (problem.batches * problem.tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n),)


def launch(problem: Problem, config: Config) -> Launch:
    """The launch; raises ValueError if the device or the kernel does not support the config."""
    plain = matmul.launch(dataclasses.replace(problem, P=1, R=1), dataclasses.replace(config, splits=1))
    if reason := supports(problem):
        raise ValueError(f"{problem.name}: {reason}")
    if config.splits != 1:
        raise ValueError(f"{problem.name}: splits is {config.splits} (want 1)")
    of_tn, epilogue = problem.role == "tn", problem.epilogue
    tiles = {"TILE_ROWS": problem.tiles_down(config.tile_m), "TILE_COLS": cdiv(problem.cols, config.tile_n)}
    constants = {**plain.constants, "PROBLEM": problem, "CONFIG": config, **tiles}
    first, second = SLOTS[problem.role]
    if epilogue:
        kernel, operands = (
            ragged_rows_fused,
            (first, second, "bias" if epilogue.bias else first, "scale" if epilogue.scale else first, "visits"),
        )
    elif of_tn:
        kernel, operands = ragged_sum, (first, second, "begin", "end")
        constants.pop("STEPS")
    else:
        kernel, operands = ragged_rows, (first, second, "visits")
    return dataclasses.replace(plain, kernel=kernel, operands=operands, grid=grid(problem, config), constants=constants)


@triton.jit(repr=kernel_name)
def ragged_rows(
    lhs_ptr, rhs_ptr, visits_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, None, None, visits_ptr, result_ptr, None, PROBLEM, CONFIG, TILE_ROWS, TILE_COLS, STEPS)


@triton.jit(repr=kernel_name)
def ragged_rows_fused(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr, PROBLEM, CONFIG, TILE_ROWS, TILE_COLS, STEPS)


@triton.jit
def _ragged_rows(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """nn and nt: a visit and a tile of columns."""
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    batch, _, visit, tile_col = _place(PROBLEM, CONFIG, TILE_ROWS, TILE_COLS)
    visits_ptr += ((batch // PROBLEM.R) * TILE_ROWS + visit) * OF_VISIT
    group = tl.load(visits_ptr)
    first, last = tl.load(visits_ptr + 1), tl.load(visits_ptr + 2)
    low, high = tl.load(visits_ptr + 3), tl.load(visits_ptr + 4)

    row = (low // BLOCK_ROWS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(PROBLEM.index)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = tl.arange(0, BLOCK_DEPTH).to(PROBLEM.index)
    row_in = (row >= first) & (row < last)
    col_in = _inside(col, COLS, TILE_COLS * BLOCK_COLS)
    if PROBLEM.gated:
        col, col_in = _gate_and_linear(tile_col, PROBLEM.N, TILE_COLS, BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    rhs_at = depth[:, None] * PROBLEM.rhs_strides[0] + col[None, :] * PROBLEM.rhs_strides[1]
    lhs_ptr += batch * (PROBLEM.M * DEPTH)
    matrix = batch // (PROBLEM.P * PROBLEM.R) * PROBLEM.G + group
    rhs_ptr += matrix * (DEPTH * COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in range(tl.where(first < last, STEPS, 0)):
        depth_in = _inside(depth, DEPTH, STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = tl.load(rhs_ptr + rhs_at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        total = _multiply_add(lhs, rhs, total, PROBLEM)
        lhs_ptr += BLOCK_DEPTH * PROBLEM.lhs_strides[1]
        rhs_ptr += BLOCK_DEPTH * PROBLEM.rhs_strides[0]
        depth += BLOCK_DEPTH

    written = (row >= low) & (row < high)
    # A row of no group is a product with zeros, which an infinity in the group's matrix makes NaN.
    total = tl.where(row_in[:, None], total, 0.0)
    if PROBLEM.epilogue is None:
        result = total.to(result_ptr.dtype.element_ty)
        result_ptr += batch * (PROBLEM.M * COLS)
        tl.store(result_ptr + row[:, None] * COLS + col[None, :], result, mask=written[:, None] & col_in[None, :])
    else:
        if PROBLEM.epilogue.saves:
            saved_ptr += batch * (PROBLEM.M * COLS)
        scale = None
        if PROBLEM.epilogue.scale is not None:
            scale = tl.load(scale_ptr + batch * PROBLEM.M + row, mask=row_in, other=0).to(tl.float32)[:, None]
        sums, linear = _fused.halves(total) if PROBLEM.gated else (total, None)
        _fused.finish(
            sums,
            linear,
            bias_ptr + matrix * PROBLEM.N,
            None,
            result_ptr + batch * (PROBLEM.M * PROBLEM.N),
            saved_ptr,
            row[:, None] * PROBLEM.N,
            written[:, None],
            tile_col * sums.shape[1],
            PROBLEM,
            PROBLEM.N,
            TILE_COLS * BLOCK_COLS == COLS,
            CONFIG.num_warps,
            scale,
            row_in[:, None],
        )


@triton.jit(repr=kernel_name)
def ragged_sum(
    lhs_ptr, rhs_ptr, begin_ptr, end_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
):  # fmt: skip
    """tn: a tile of a group's matrix."""
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    batch, _, tile_row, tile_col = _place(PROBLEM, CONFIG, TILE_ROWS, TILE_COLS)
    group = batch % PROBLEM.G
    part = batch // PROBLEM.G * PROBLEM.P  # the first one of this b
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_in = _inside(row, ROWS, TILE_ROWS * BLOCK_ROWS)
    col_in = _inside(col, COLS, TILE_COLS * BLOCK_COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for p in range(PROBLEM.P):
        begin = tl.load(begin_ptr + (part + p) * PROBLEM.G + group)
        end = tl.load(end_ptr + (part + p) * PROBLEM.G + group)
        for r in range(PROBLEM.R):
            matrix = (part + p) * PROBLEM.R + r
            left, right = lhs_ptr + matrix * (PROBLEM.M * ROWS), rhs_ptr + matrix * (PROBLEM.M * COLS)
            for start in range(begin, end, BLOCK_DEPTH):
                depth = (start + tl.arange(0, BLOCK_DEPTH)).to(PROBLEM.index)
                depth_in = depth < end
                lhs = tl.load(left + (row[:, None] + depth[None, :] * ROWS), mask=row_in[:, None] & depth_in[None, :], other=0.0)
                rhs = tl.load(right + (depth[:, None] * COLS + col[None, :]), mask=depth_in[:, None] & col_in[None, :], other=0.0)
                total = _multiply_add(lhs, rhs, total, PROBLEM)

    result_ptr += batch * (ROWS * COLS)
    tl.store(result_ptr + row[:, None] * COLS + col[None, :], total.to(result_ptr.dtype.element_ty), mask=row_in[:, None] & col_in[None, :])
