"""Matrix multiplication: one kernel for the three roles of  c[b,m,n] = Σ_k a[b,m,k] b[b,k,n].

    role  result        product        row  column  contracted
    nn    c[M,N]        a b            m    n       k
    nt    a[M,K]        c bᵀ           m    k       n
    tn    b[K,N]        aᵀ c           k    n       m

Every role is  result[row, col] = Σ_depth lhs[row, depth] rhs[depth, col]  over strides that are compile-time constants, so no operand
is ever transposed or copied in memory: Triton lays each tile out along whichever axis has stride 1, and the tensor cores take either.
The programs of a grid go through the result in bands of GROUP tile rows, so that concurrent programs share data in the L2 cache.  If the
result has few tiles, `splits` programs share a tile, each with a part of the depth, and write float32 partial results.  The caller adds
them in order, so the sum always has the same bits.
"""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists, multiply, tile_indices
from ..tile_epilogue import finish


@triton.jit(repr=kernel_name)
def matmul(lhs_ptr, rhs_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr):
    _matmul(lhs_ptr, rhs_ptr, None, None, result_ptr, None, PROBLEM, CONFIG, TILES)


@triton.jit(repr=kernel_name)
def matmul_fused(
    lhs_ptr, rhs_ptr, bias_ptr, residual_ptr, result_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    _matmul(lhs_ptr, rhs_ptr, bias_ptr, residual_ptr, result_ptr, saved_ptr, PROBLEM, CONFIG, TILES)


@triton.jit
def _matmul(
    lhs_ptr, rhs_ptr, bias_ptr, residual_ptr, result_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    STEPS: tl.constexpr = TILES[2]
    SUM: tl.constexpr = tl.int32 if PROBLEM.integers else tl.float32

    batch, split, tile_row, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = split * (STEPS * BLOCK_DEPTH) + tl.arange(0, BLOCK_DEPTH)
    row_in = exists(row, ROWS, BLOCK_ROWS)
    col_in = exists(col, COLS, BLOCK_COLS)
    if PROBLEM.gated:
        col, col_in = gate_and_linear(tile_col, PROBLEM.N, BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    rhs_at = depth[:, None] * PROBLEM.rhs_strides[0] + col[None, :] * PROBLEM.rhs_strides[1]
    lhs_ptr += batch * (ROWS * DEPTH)
    rhs_ptr += batch * (DEPTH * COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), SUM)
    for _ in range(STEPS):
        depth_in = exists(depth, DEPTH, CONFIG.splits * STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = tl.load(rhs_ptr + rhs_at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        total = multiply(lhs, rhs, total, PROBLEM)
        lhs_ptr += BLOCK_DEPTH * PROBLEM.lhs_strides[1]
        rhs_ptr += BLOCK_DEPTH * PROBLEM.rhs_strides[0]
        depth += BLOCK_DEPTH

    if PROBLEM.epilogue is None:
        result_ptr += (split * PROBLEM.B + batch) * (ROWS * COLS)
        result = total.to(result_ptr.dtype.element_ty)
        tl.store(result_ptr + row[:, None] * COLS + col[None, :], result, mask=row_in[:, None] & col_in[None, :])
    else:
        if PROBLEM.epilogue.saves:
            saved_ptr += batch * (ROWS * COLS)
        results = batch * (ROWS * PROBLEM.N)
        pointers = bias_ptr + batch * PROBLEM.N, residual_ptr + results, result_ptr + results, saved_ptr
        finish(total, pointers, row[:, None] * PROBLEM.N, row_in[:, None], tile_col, PROBLEM, CONFIG, PROBLEM.N)


@triton.jit
def gate_and_linear(tile_col, N: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The columns of a gated product's tile, those of the gate first, and whether they exist."""
    HALF: tl.constexpr = BLOCK_COLS // 2
    place = tl.arange(0, BLOCK_COLS)
    col = tile_col * HALF + place % HALF
    return col + place // HALF * N, exists(col, N, HALF)
