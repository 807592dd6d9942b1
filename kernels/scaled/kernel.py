"""Products of scaled numbers:  result[row, col] = scale[row, col] Σ_depth (left_scale left)[row, depth] (right_scale right)[depth, col].

    role  result    left     right    row   column  contracted
    nn    y[B,IM,JN]   x        w        i m   j n     s k
    nt    x[B,IM,SK]   y        wᵀ       i m   s k     j n
    tn    w[B,SK,JN]   xᵀ       y        s k   j n     i m

x_scale[B,I,S], w_scale[B,S,J] and y_scale[B,I,J] have an element for each block of I M rows, and so on; a slot without one is not scaled.

A scale that does not change along the depth multiplies the finished sum.  Where one does, in blocks of multiples of 32, a step of the depth
lies within a block, and the product of the step is multiplied before it is added: 8-bit factors go to the tensor cores as they are.  Finer
scales multiply the factors in registers, which are rounded to 16 bits then, if the result has so many.  Integers beside floats become
these, exactly, in registers.  `packed` right factors have two int4 in a byte, neighbours along the last axis, the first in the low half.
"""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists, multiply, tile_indices


@triton.jit(repr=kernel_name)
def scaled_dot(
    lhs_ptr, rhs_ptr, lhs_scale_ptr, rhs_scale_ptr, scale_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    STEPS: tl.constexpr = TILES[2]
    ROW_BLOCKS: tl.constexpr = PROBLEM.blocks[0]
    COL_BLOCKS: tl.constexpr = PROBLEM.blocks[1]
    DEPTH_BLOCKS: tl.constexpr = PROBLEM.blocks[2]

    batch, split, tile_row, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    first = split * (STEPS * BLOCK_DEPTH)
    depth = first + tl.arange(0, BLOCK_DEPTH)
    row_in = exists(row, ROWS, BLOCK_ROWS)
    col_in = exists(col, COLS, BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    lhs_ptr += batch * (ROWS * DEPTH)
    lhs_scale_ptr += batch * (ROW_BLOCKS * DEPTH_BLOCKS)
    rhs_scale_ptr += batch * (DEPTH_BLOCKS * COL_BLOCKS)
    lhs_scale_at = row // (ROWS // ROW_BLOCKS) * PROBLEM.left_strides[0]
    rhs_scale_at = col // (COLS // COL_BLOCKS) * PROBLEM.right_strides[1]

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    # No step begins beyond the end of the depth, where there are no scales.
    for _ in range(STEPS if CONFIG.splits == 1 else tl.minimum(STEPS, tl.cdiv(DEPTH, BLOCK_DEPTH) - split * STEPS)):
        depth_in = exists(depth, DEPTH, CONFIG.splits * STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = right_tile(rhs_ptr, batch, first, tile_col * BLOCK_COLS, depth, depth_in, col, col_in, PROBLEM, CONFIG)
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
    inside = row_in[:, None] & col_in[None, :]
    if PROBLEM.has_result:
        at = (row // (ROWS // ROW_BLOCKS) * COL_BLOCKS)[:, None] + (col // (COLS // COL_BLOCKS))[None, :]
        total *= tl.load(scale_ptr + batch * (ROW_BLOCKS * COL_BLOCKS) + at, mask=inside, other=0.0)
    result_ptr += (split * PROBLEM.B + batch) * (ROWS * COLS)
    tl.store(result_ptr + row[:, None] * COLS + col[None, :], total.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit
def right_tile(rhs_ptr, batch, first, first_col, depth, depth_in, col, col_in, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
    """The tile of the right factor, unpacked."""
    DEPTH: tl.constexpr = PROBLEM.depth
    COLS: tl.constexpr = PROBLEM.cols
    if not PROBLEM.packed:
        rhs_ptr += batch * (DEPTH * COLS)
        at = depth[:, None] * PROBLEM.rhs_strides[0] + col[None, :] * PROBLEM.rhs_strides[1]
        return tl.load(rhs_ptr + at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
    elif PROBLEM.role == "nt":  # depth is the last axis
        rhs_ptr += batch * (DEPTH * COLS // 2)
        pair = first // 2 + tl.arange(0, CONFIG.tile_k // 2)
        inside = col_in[:, None] & (pair < DEPTH // 2)[None, :]
        return tl.trans(_unpacked(tl.load(rhs_ptr + col[:, None] * (DEPTH // 2) + pair[None, :], mask=inside, other=0)))
    else:
        rhs_ptr += batch * (DEPTH * COLS // 2)
        pair = first_col // 2 + tl.arange(0, CONFIG.tile_n // 2)
        inside = depth_in[:, None] & (pair < COLS // 2)[None, :]
        return _unpacked(tl.load(rhs_ptr + depth[:, None] * (COLS // 2) + pair[None, :], mask=inside, other=0))


@triton.jit
def _unpacked(pairs):
    """int4 in the halves of bytes, beside each other along the last axis, as int8."""
    low, high = (pairs << 4) >> 4, pairs >> 4
    return tl.interleave(low.to(tl.int8), high.to(tl.int8))


@triton.jit
def added(
    lhs, rhs, total, lhs_scale_ptr, rhs_scale_ptr, lhs_scale_at, rhs_scale_at, first, depth, row_in, col_in, depth_in, PROBLEM: tl.constexpr
):  # fmt: skip
    """total + the scaled product of a step of the depth, which begins at `first`.  `lhs_scale_at`, `rhs_scale_at`: the offsets of the first
    scale of each row and column."""
    DEPTH: tl.constexpr = PROBLEM.depth
    DEPTH_BLOCKS: tl.constexpr = PROBLEM.blocks[2]
    if PROBLEM.fine:
        block = depth // (DEPTH // DEPTH_BLOCKS)
        if PROBLEM.has_left:
            at = lhs_scale_at[:, None] + (block * PROBLEM.left_strides[1])[None, :]
            lhs = lhs.to(tl.float32) * tl.load(lhs_scale_ptr + at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        if PROBLEM.has_right:
            at = (block * PROBLEM.right_strides[0])[:, None] + rhs_scale_at[None, :]
            rhs = rhs.to(tl.float32) * tl.load(rhs_scale_ptr + at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        return _product(lhs, rhs, total, PROBLEM)
    elif PROBLEM.scales_steps:
        block = first // (DEPTH // DEPTH_BLOCKS)
        product = _product(lhs, rhs, tl.zeros(total.shape, tl.float32), PROBLEM)
        if PROBLEM.has_left:
            at = lhs_scale_at + block * PROBLEM.left_strides[1]
            product *= tl.load(lhs_scale_ptr + at, mask=row_in, other=0.0)[:, None]
        if PROBLEM.has_right:
            at = rhs_scale_at + block * PROBLEM.right_strides[0]
            product *= tl.load(rhs_scale_ptr + at, mask=col_in, other=0.0)[None, :]
        return total + product
    else:
        return _product(lhs, rhs, total, PROBLEM)


@triton.jit
def _product(lhs, rhs, total, PROBLEM: tl.constexpr):
    if PROBLEM.common is not None:
        lhs = lhs.to(tl.dtype(PROBLEM.common))
        rhs = rhs.to(tl.dtype(PROBLEM.common))
    if PROBLEM.whole_numbers:
        return total + tl.dot(lhs, rhs, out_dtype=tl.int32).to(tl.float32)
    else:
        return multiply(lhs, rhs, total, PROBLEM)
