"""Ragged products in Triton: a kernel for nn and nt, with a program for each visit, and a kernel for tn (both defined in problem.py)."""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..matmul.kernel import gate_and_linear
from ..tile import exists, multiply, tile_indices
from ..tile_epilogue import finish
from .problem import NUMBERS_OF_VISIT

VISIT_NUMBERS = tl.constexpr(NUMBERS_OF_VISIT)


@triton.jit(repr=kernel_name)
def ragged_rows(
    lhs_ptr, rhs_ptr, visits_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, None, None, visits_ptr, result_ptr, None, PROBLEM, CONFIG, TILES)


@triton.jit(repr=kernel_name)
def ragged_rows_fused(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr, PROBLEM, CONFIG, TILES)


@triton.jit
def _ragged_rows(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """nn and nt: a visit and a tile of columns."""
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    STEPS: tl.constexpr = TILES[2]
    batch, _, visit, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    visits_ptr += ((batch // PROBLEM.R) * TILES[0] + visit) * VISIT_NUMBERS
    group = tl.load(visits_ptr)
    first, last = tl.load(visits_ptr + 1), tl.load(visits_ptr + 2)
    low, high = tl.load(visits_ptr + 3), tl.load(visits_ptr + 4)

    row = (low // BLOCK_ROWS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.dtype(PROBLEM.index))
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = tl.arange(0, BLOCK_DEPTH).to(tl.dtype(PROBLEM.index))
    row_in = (row >= first) & (row < last)
    col_in = exists(col, COLS, BLOCK_COLS)
    if PROBLEM.gated:
        col, col_in = gate_and_linear(tile_col, PROBLEM.N, BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    rhs_at = depth[:, None] * PROBLEM.rhs_strides[0] + col[None, :] * PROBLEM.rhs_strides[1]
    lhs_ptr += batch * (PROBLEM.M * DEPTH)
    matrix = batch // (PROBLEM.P * PROBLEM.R) * PROBLEM.G + group
    rhs_ptr += matrix * (DEPTH * COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in range(tl.where(first < last, STEPS, 0)):
        depth_in = exists(depth, DEPTH, STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = tl.load(rhs_ptr + rhs_at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        total = multiply(lhs, rhs, total, PROBLEM)
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
        pointers = bias_ptr + matrix * PROBLEM.N, None, result_ptr + batch * (PROBLEM.M * PROBLEM.N), saved_ptr
        rows, present = row[:, None] * PROBLEM.N, row_in[:, None]
        finish(total, pointers, rows, written[:, None], tile_col, PROBLEM, CONFIG, PROBLEM.N, scale, present)


@triton.jit(repr=kernel_name)
def ragged_sum(
    lhs_ptr, rhs_ptr, begin_ptr, end_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """tn: a tile of a group's matrix."""
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    batch, _, tile_row, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    group = batch % PROBLEM.G
    part = batch // PROBLEM.G * PROBLEM.P  # the first one of this b
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_in = exists(row, ROWS, BLOCK_ROWS)
    col_in = exists(col, COLS, BLOCK_COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for p in range(PROBLEM.P):
        begin = tl.load(begin_ptr + (part + p) * PROBLEM.G + group)
        end = tl.load(end_ptr + (part + p) * PROBLEM.G + group)
        for r in range(PROBLEM.R):
            matrix = (part + p) * PROBLEM.R + r
            left, right = lhs_ptr + matrix * (PROBLEM.M * ROWS), rhs_ptr + matrix * (PROBLEM.M * COLS)
            for start in range(begin, end, BLOCK_DEPTH):
                depth = (start + tl.arange(0, BLOCK_DEPTH)).to(tl.dtype(PROBLEM.index))
                depth_in = depth < end
                lhs = tl.load(left + (row[:, None] + depth[None, :] * ROWS), mask=row_in[:, None] & depth_in[None, :], other=0.0)
                rhs = tl.load(right + (depth[:, None] * COLS + col[None, :]), mask=depth_in[:, None] & col_in[None, :], other=0.0)
                total = multiply(lhs, rhs, total, PROBLEM)

    result_ptr += batch * (ROWS * COLS)
    tl.store(result_ptr + row[:, None] * COLS + col[None, :], total.to(result_ptr.dtype.element_ty), mask=row_in[:, None] & col_in[None, :])
