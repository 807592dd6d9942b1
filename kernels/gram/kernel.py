"""The product of a matrix with its own transpose:  y[row, col] = scale Σ_depth x[row, depth] x[col, depth] + of_addend addend[row, col].

The programs compute the tiles that have an element on or below the diagonal.  Each writes those elements of its tile, and the same numbers
above the diagonal, mirrored, so y is symmetric to the last bit.  The addend is symmetric too, and is read by the same tiles.

A tile has `ratio` times as many rows as columns, so the tile row i has `ratio` (i + 1) tiles.  Short tile rows are laid behind long ones:
that makes a rectangle, whose bands the programs go through as those of `matmul` do.
"""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists, multiply, tile_indices


@triton.jit(repr=kernel_name)
def gram(x_ptr, addend_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr):
    ROWS: tl.constexpr = PROBLEM.rows
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    STEPS: tl.constexpr = TILES[2]
    RATIO: tl.constexpr = CONFIG.tile_m // CONFIG.tile_n
    COUNT: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS

    batch, split, folded_row, folded_col = tile_indices(PROBLEM, CONFIG, TILES)
    tile_row, tile_col = _unfolded(folded_row, folded_col, COUNT, RATIO)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = split * (STEPS * BLOCK_DEPTH) + tl.arange(0, BLOCK_DEPTH)
    row_in = exists(row, ROWS, BLOCK_ROWS)
    col_in = exists(col, ROWS, BLOCK_ROWS)
    x_ptr += batch * (ROWS * DEPTH)
    lhs_at = row[:, None] * DEPTH + depth[None, :]
    rhs_at = depth[:, None] + col[None, :] * DEPTH

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in range(STEPS):
        depth_in = exists(depth, DEPTH, CONFIG.splits * STEPS * BLOCK_DEPTH)
        lhs = tl.load(x_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = tl.load(x_ptr + rhs_at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        total = multiply(lhs, rhs, total, PROBLEM)
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
    """Store what is on and below the diagonal, and the same above it."""
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
