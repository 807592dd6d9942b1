"""Parts of kernels that multiply tiles, and that tell where a program's tile is and which of its elements exist."""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)  # tile rows of a band: what 132 programs read at once is then near its least


@triton.jit
def tile_indices(PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr):
    """This program's batch, split, tile row and tile column; within a band of GROUP rows, the row varies fastest."""
    TILE_ROWS: tl.constexpr = TILES[0]
    TILE_COLS: tl.constexpr = TILES[1]
    INDEX: tl.constexpr = tl.dtype(PROBLEM.index)
    program = tl.program_id(0)
    tile = program % (TILE_ROWS * TILE_COLS)
    part = program // (TILE_ROWS * TILE_COLS)
    BAND: tl.constexpr = TILE_ROWS if TILE_ROWS < GROUP else GROUP  # and so a band's tiles are no more than there are: 32 bits do
    first = tile // (BAND * TILE_COLS) * BAND
    height = tl.minimum(TILE_ROWS - first, BAND)
    within = tile % (BAND * TILE_COLS)
    batch, split = part // CONFIG.splits, part % CONFIG.splits
    row, col = first + within % height, within // height
    return batch.to(tl.int64), split.to(INDEX), row.to(INDEX), col.to(INDEX)


@triton.jit
def exists(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return whether each index is below SIZE; a constant, and so no mask, if SIZE is a multiple of the block."""
    if SIZE % max(1, BLOCK) == 0:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < SIZE


@triton.jit
def widened(index, LIMIT: tl.constexpr):
    """A factor of numbers below LIMIT, in 64 bits if they need them."""
    return tl.cast(index, tl.int64) if LIMIT >= 2**31 else index


@triton.jit
def multiply(lhs, rhs, total, PROBLEM: tl.constexpr):
    """total + lhs rhs, in the narrowest dtype that holds both; `turned` tiles are those whose depth is not contiguous in memory."""
    lhs, rhs = _alike(lhs, rhs)
    TF32: tl.constexpr = lhs.dtype == tl.float32 and PROBLEM.method == "tf32" and PROBLEM.arch >= 90 and PROBLEM.arch < 120
    if TF32 and PROBLEM.turned[0]:
        lhs = _to_tf32(lhs)
    if TF32 and PROBLEM.turned[1]:
        rhs = _to_tf32(rhs)
    # Hopper's tensor cores keep some 14 bits of a sum of 8-bit floats: each block's is added up in float32, here, because Triton itself
    # would add it before it has waited for it.
    if lhs.dtype.is_fp8() and PROBLEM.arch == 90:
        return total + tl.dot(lhs, rhs, out_dtype=total.dtype)
    else:
        return tl.dot(lhs, rhs, total, input_precision=PROBLEM.method, out_dtype=total.dtype)


@triton.jit
def _alike(lhs, rhs):
    if lhs.dtype == rhs.dtype or (lhs.dtype.primitive_bitwidth == 8 and rhs.dtype.primitive_bitwidth == 8):
        return lhs, rhs
    else:
        WIDER: tl.constexpr = lhs.dtype if lhs.dtype.primitive_bitwidth > rhs.dtype.primitive_bitwidth else rhs.dtype
        COMMON: tl.constexpr = tl.float32 if lhs.dtype.primitive_bitwidth == rhs.dtype.primitive_bitwidth else WIDER
        return lhs.to(COMMON), rhs.to(COMMON)


@triton.jit
def _to_tf32(x):
    """Drop the bits that tensor cores ignore in TF32.

    Hopper's and Blackwell's tensor cores read TF32 tiles from shared memory only if the contraction is contiguous, and Triton would copy
    other tiles there in pieces of 4 bytes.  This operation makes it load the tile through registers instead.
    """
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
