"""Ragged products of scaled numbers in Triton: a kernel for nn and nt, with a program for each visit, and a kernel for tn (problem.py)."""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..ragged.kernel import found_visit
from ..scaled.kernel import added, right_tile
from ..tile import exists, tile_indices


@triton.jit(repr=kernel_name)
def ragged_scaled_rows(
    lhs_ptr, rhs_ptr, lhs_scale_ptr, rhs_scale_ptr, scale_ptr, begin_ptr, end_ptr, result_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """nn and nt: a visit and a tile of columns."""
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    STEPS: tl.constexpr = TILES[2]
    COL_BLOCKS: tl.constexpr = PROBLEM.blocks[1]
    DEPTH_BLOCKS: tl.constexpr = PROBLEM.blocks[2]
    batch, _, visit, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    ranges = batch // PROBLEM.R * PROBLEM.G
    group, begin, end, low, high = found_visit(begin_ptr + ranges, end_ptr + ranges, visit, PROBLEM, BLOCK_ROWS)
    matrix = batch // (PROBLEM.P * PROBLEM.R) * PROBLEM.G + group

    row = (low // BLOCK_ROWS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.dtype(PROBLEM.index))
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = tl.arange(0, BLOCK_DEPTH).to(tl.dtype(PROBLEM.index))
    row_in = (row >= begin) & (row < end)
    col_in = exists(col, COLS, BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    lhs_ptr += batch * (PROBLEM.M * DEPTH)
    lhs_scale_ptr += batch * (PROBLEM.M * DEPTH_BLOCKS)
    rhs_scale_ptr += matrix * (DEPTH_BLOCKS * COL_BLOCKS)
    lhs_scale_at = row * PROBLEM.left_strides[0]
    rhs_scale_at = col // (COLS // COL_BLOCKS) * PROBLEM.right_strides[1]

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    first = tl.cast(0, tl.dtype(PROBLEM.index))
    for _ in range(tl.where(begin < end, STEPS, 0)):
        depth_in = exists(depth, DEPTH, STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = right_tile(rhs_ptr, matrix, first, tile_col * BLOCK_COLS, depth, depth_in, col, col_in, PROBLEM, CONFIG)
        total = added(
            lhs, rhs, total, lhs_scale_ptr, rhs_scale_ptr, lhs_scale_at, rhs_scale_at, first, depth, row_in, col_in, depth_in, PROBLEM
        )
        lhs_ptr += BLOCK_DEPTH * PROBLEM.lhs_strides[1]
        first += BLOCK_DEPTH
        depth += BLOCK_DEPTH

    if DEPTH_BLOCKS == 1:
        if PROBLEM.has_left:
            total *= tl.load(lhs_scale_ptr + lhs_scale_at, mask=row_in, other=0.0)[:, None]
        if PROBLEM.has_right:
            total *= tl.load(rhs_scale_ptr + rhs_scale_at, mask=col_in, other=0.0)[None, :]
    if PROBLEM.has_result:
        at = (row * COL_BLOCKS)[:, None] + (col // (COLS // COL_BLOCKS))[None, :]
        total *= tl.load(scale_ptr + batch * (PROBLEM.M * COL_BLOCKS) + at, mask=row_in[:, None] & col_in[None, :], other=0.0)
    # A row of no group is a product with zeros, which an infinity in the group's matrix makes NaN.
    result = tl.where(row_in[:, None], total, 0.0).to(result_ptr.dtype.element_ty)
    written = (row >= low) & (row < high)
    result_ptr += batch * (PROBLEM.M * COLS)
    tl.store(result_ptr + row[:, None] * COLS + col[None, :], result, mask=written[:, None] & col_in[None, :])


@triton.jit(repr=kernel_name)
def ragged_scaled_sum(
    lhs_ptr, rhs_ptr, lhs_scale_ptr, rhs_scale_ptr, scale_ptr, begin_ptr, end_ptr, result_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """tn: a tile of a group's matrix."""
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    ROW_BLOCKS: tl.constexpr = PROBLEM.blocks[0]
    COL_BLOCKS: tl.constexpr = PROBLEM.blocks[1]
    batch, _, tile_row, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    group = batch % PROBLEM.G
    part = batch // PROBLEM.G * PROBLEM.P  # the first one of this b
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_in = exists(row, ROWS, BLOCK_ROWS)
    col_in = exists(col, COLS, BLOCK_COLS)
    row_block, col_block = row // (ROWS // ROW_BLOCKS), col // (COLS // COL_BLOCKS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for p in range(PROBLEM.P):
        begin = tl.load(begin_ptr + (part + p) * PROBLEM.G + group)
        end = tl.load(end_ptr + (part + p) * PROBLEM.G + group)
        for r in range(PROBLEM.R):
            rows = ((part + p) * PROBLEM.R + r) * PROBLEM.M  # before those of this matrix
            left, right = lhs_ptr + rows * ROWS, rhs_ptr + rows * COLS
            left_scale, right_scale = lhs_scale_ptr + rows * ROW_BLOCKS, rhs_scale_ptr + rows * COL_BLOCKS
            for start in range(begin, end, BLOCK_DEPTH):
                depth = (start + tl.arange(0, BLOCK_DEPTH)).to(tl.dtype(PROBLEM.index))
                depth_in = depth < end
                lhs = tl.load(left + (row[:, None] + depth[None, :] * ROWS), mask=row_in[:, None] & depth_in[None, :], other=0.0)
                rhs = tl.load(right + (depth[:, None] * COLS + col[None, :]), mask=depth_in[:, None] & col_in[None, :], other=0.0)
                total = added(
                    lhs, rhs, total, left_scale, right_scale, row_block, col_block, start, depth, row_in, col_in, depth_in, PROBLEM
                )

    inside = row_in[:, None] & col_in[None, :]
    if PROBLEM.has_result:
        at = (row_block * COL_BLOCKS)[:, None] + col_block[None, :]
        total *= tl.load(scale_ptr + batch * (ROW_BLOCKS * COL_BLOCKS) + at, mask=inside, other=0.0)
    result_ptr += batch * (ROWS * COLS)
    tl.store(result_ptr + row[:, None] * COLS + col[None, :], total.to(result_ptr.dtype.element_ty), mask=inside)
