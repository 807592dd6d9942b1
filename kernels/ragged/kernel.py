"""Ragged products in Triton: a kernel for nn and nt, with a program for each visit, and a kernel for tn (both defined in problem.py).

Each has a variant that takes the row of each place, if rows are gathered; that of nn and nt finds its visits itself.  Two further kernels
compute tn in chunks of rows: the partial sums of all visits, and then the sums of these for each group.
"""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..matmul.kernel import gate_and_linear
from ..tile import exists, multiply, tile_indices
from ..tile_epilogue import finish
from .problem import NUMBERS_OF_VISIT

VISIT_NUMBERS = tl.constexpr(NUMBERS_OF_VISIT)
UNROLLED = tl.constexpr(8)  # partial sums that a thread loads at once: one after the other, each would take the latency of memory


@triton.jit(repr=kernel_name)
def ragged_rows(
    lhs_ptr, rhs_ptr, visits_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, None, None, visits_ptr, None, None, result_ptr, None, PROBLEM, CONFIG, TILES)


@triton.jit(repr=kernel_name)
def ragged_rows_fused(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, result_ptr, saved_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, None, None, result_ptr, saved_ptr, PROBLEM, CONFIG, TILES)


@triton.jit(repr=kernel_name)
def ragged_rows_found(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, begin_ptr, end_ptr, row_ptr, result_ptr, saved_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    _ragged_rows(lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, begin_ptr, end_ptr, row_ptr, result_ptr, saved_ptr, PROBLEM, CONFIG, TILES)


@triton.jit
def first_visits(begin_ptr, end_ptr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """The numbers of all groups, which of them have rows, and share a tile with one before; and the first visit of each that has rows."""
    number = tl.arange(0, triton.next_power_of_2(GROUPS))
    begin = tl.load(begin_ptr + number, mask=number < GROUPS, other=0)
    end = tl.load(end_ptr + number, mask=number < GROUPS, other=0)
    least = tl.load(begin_ptr)
    # A group that begins within a tile, after another one, has a visit of that tile too.
    shares = (end > begin) & (begin > least) & (begin % TILE > 0)
    return number, end > begin, shares, begin // TILE + tl.cumsum(shares.to(tl.int32), 0)


@triton.jit
def found_visit(begin_ptr, end_ptr, visit, PROBLEM: tl.constexpr, TILE: tl.constexpr):
    """The numbers of a visit of a tile of rows, as `visits` lists them, from the ranges of all groups."""
    ROWS: tl.constexpr = PROBLEM.M
    number, has_rows, shares, its_first = first_visits(begin_ptr, end_ptr, PROBLEM.G, TILE)
    least = tl.load(begin_ptr)
    group = tl.max(tl.where(has_rows & (its_first <= visit), number, -1), 0)
    more = tl.sum((shares & (number <= group)).to(tl.int32), 0)
    another = tl.sum((shares & (its_first == visit + 1)).to(tl.int32), 0) > 0  # the next visit is of the same tile

    tile = tl.minimum(visit - more, (ROWS + TILE - 1) // TILE)  # of a surplus visit: one that is not there
    start = tile * TILE
    stop = tl.minimum(start + TILE, ROWS)
    inside = start < ROWS
    first = tl.load(begin_ptr + tl.maximum(group, 0))
    last = tl.load(end_ptr + tl.maximum(group, 0))
    multiplies = (group >= 0) & inside & (start < last)
    shared = multiplies & (first > least) & (first > start)
    first = tl.where(multiplies, tl.maximum(first, start), start)
    last = tl.where(multiplies, tl.minimum(last, stop), start)
    low = tl.where(inside, tl.where(shared, first, start), 0)
    high = tl.where(inside, tl.where(another, last, stop), 0)
    return tl.maximum(group, 0), first, last, low, high


@triton.jit
def listed_visit(visits_ptr):
    group = tl.load(visits_ptr)
    first, last = tl.load(visits_ptr + 1), tl.load(visits_ptr + 2)
    low, high = tl.load(visits_ptr + 3), tl.load(visits_ptr + 4)
    return group, first, last, low, high


@triton.jit
def _ragged_rows(
    lhs_ptr, rhs_ptr, bias_ptr, scale_ptr, visits_ptr, end_ptr, row_ptr, result_ptr, saved_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """nn and nt: a visit and a tile of columns.  In place of visits, the begin of each range, if `end_ptr` points to the ends."""
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    STEPS: tl.constexpr = TILES[2]
    batch, _, visit, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    if end_ptr is None:
        group, first, last, low, high = listed_visit(visits_ptr + ((batch // PROBLEM.R) * TILES[0] + visit) * VISIT_NUMBERS)
    else:
        ranges = batch // PROBLEM.R * PROBLEM.G
        group, first, last, low, high = found_visit(visits_ptr + ranges, end_ptr + ranges, visit, PROBLEM, BLOCK_ROWS)

    row = (low // BLOCK_ROWS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.dtype(PROBLEM.index))
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = tl.arange(0, BLOCK_DEPTH).to(tl.dtype(PROBLEM.index))
    row_in = (row >= first) & (row < last)
    col_in = exists(col, COLS, BLOCK_COLS)
    if PROBLEM.gated:
        col, col_in = gate_and_linear(tile_col, PROBLEM.N, BLOCK_COLS)
    of_lhs, lhs_in = row, row_in
    if PROBLEM.gathered:
        of_lhs, lhs_in = gathered_rows(row_ptr + batch // PROBLEM.R * PROBLEM.M, row, row_in, PROBLEM)
    lhs_at = of_lhs[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    rhs_at = depth[:, None] * PROBLEM.rhs_strides[0] + col[None, :] * PROBLEM.rhs_strides[1]
    lhs_ptr += batch * ((PROBLEM.S if PROBLEM.gathered else PROBLEM.M) * DEPTH)
    matrix = batch // (PROBLEM.P * PROBLEM.R) * PROBLEM.G + group
    rhs_ptr += matrix * (DEPTH * COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for _ in range(tl.where(first < last, STEPS, 0)):
        depth_in = exists(depth, DEPTH, STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=lhs_in[:, None] & depth_in[None, :], other=0.0)
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


@triton.jit
def gathered_rows(row_ptr, place, place_in, PROBLEM: tl.constexpr):
    """The rows at these places, and which of them exist."""
    row = tl.load(row_ptr + place, mask=place_in, other=0)
    return row.to(tl.dtype(PROBLEM.index)), place_in & (row >= 0) & (row < PROBLEM.S)


@triton.jit(repr=kernel_name)
def ragged_sum(
    lhs_ptr, rhs_ptr, begin_ptr, end_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    _ragged_sum(lhs_ptr, rhs_ptr, begin_ptr, end_ptr, None, result_ptr, PROBLEM, CONFIG, TILES)


@triton.jit(repr=kernel_name)
def ragged_sum_gathered(
    lhs_ptr, rhs_ptr, begin_ptr, end_ptr, row_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    _ragged_sum(lhs_ptr, rhs_ptr, begin_ptr, end_ptr, row_ptr, result_ptr, PROBLEM, CONFIG, TILES)


@triton.jit
def _ragged_sum(
    lhs_ptr, rhs_ptr, begin_ptr, end_ptr, row_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """tn: a tile of a group's matrix."""
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
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
        total = multiplied_rows(lhs_ptr, rhs_ptr, row_ptr, part + p, begin, end, row, col, total, PROBLEM, CONFIG)

    result_ptr += batch * (ROWS * COLS)
    tl.store(result_ptr + row[:, None] * COLS + col[None, :], total.to(result_ptr.dtype.element_ty), mask=row_in[:, None] & col_in[None, :])


@triton.jit
def multiplied_rows(
    lhs_ptr, rhs_ptr, row_ptr, part, begin, end, row, col, total, PROBLEM: tl.constexpr, CONFIG: tl.constexpr
):  # fmt: skip
    """`total` and a tile of the products of rows from `begin` up to `end`, of all r; `part` numbers b and p."""
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    row_in = exists(row, ROWS, CONFIG.tile_m)
    col_in = exists(col, COLS, CONFIG.tile_n)
    for r in range(PROBLEM.R):
        matrix = part * PROBLEM.R + r
        left = lhs_ptr + matrix * ((PROBLEM.S if PROBLEM.gathered else PROBLEM.M) * ROWS)
        right = rhs_ptr + matrix * (PROBLEM.M * COLS)
        for start in range(begin, end, BLOCK_DEPTH):
            depth = (start + tl.arange(0, BLOCK_DEPTH)).to(tl.dtype(PROBLEM.index))
            depth_in = depth < end
            of_lhs, lhs_in = depth, depth_in
            if PROBLEM.gathered:
                of_lhs, lhs_in = gathered_rows(row_ptr + part * PROBLEM.M, depth, depth_in, PROBLEM)
            lhs = tl.load(left + (row[:, None] + of_lhs[None, :] * ROWS), mask=row_in[:, None] & lhs_in[None, :], other=0.0)
            rhs = tl.load(right + (depth[:, None] * COLS + col[None, :]), mask=depth_in[:, None] & col_in[None, :], other=0.0)
            total = multiply(lhs, rhs, total, PROBLEM)
    return total


@triton.jit(repr=kernel_name)
def ragged_chunks(
    lhs_ptr, rhs_ptr, begin_ptr, end_ptr, row_ptr, partial_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """tn in chunks: a tile of the partial sum of a visit's rows.  A visit without rows writes nothing."""
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    VISITS: tl.constexpr = TILES[2]
    batch, _, tile_row, tile_col = tile_indices(PROBLEM, CONFIG, TILES)
    part = batch // VISITS
    ranges = part * PROBLEM.G
    _, first, last, _, _ = found_visit(begin_ptr + ranges, end_ptr + ranges, (batch % VISITS).to(tl.int32), PROBLEM, CONFIG.chunk)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    total = multiplied_rows(lhs_ptr, rhs_ptr, row_ptr, part, first, last, row, col, total, PROBLEM, CONFIG)
    written = (row < tl.where(first < last, ROWS, 0))[:, None] & exists(col, COLS, BLOCK_COLS)[None, :]
    tl.store(partial_ptr + batch * (ROWS * COLS) + (row[:, None] * COLS + col[None, :]), total, mask=written)


@triton.jit(repr=kernel_name)
def ragged_chunks_sum(
    partial_ptr, begin_ptr, end_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, VISITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """tn in chunks: the sum of the partial ones of a group's visits, for a block of the elements of its matrix."""
    CHUNK: tl.constexpr = CONFIG.chunk
    SIZE: tl.constexpr = PROBLEM.rows * PROBLEM.cols
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    matrix = (program // BLOCKS).to(tl.int64)
    group = matrix % PROBLEM.G
    element = (program % BLOCKS).to(tl.dtype(PROBLEM.index)) * BLOCK + tl.arange(0, BLOCK)
    inside = exists(element, SIZE, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for p in range(PROBLEM.P):
        part = matrix // PROBLEM.G * PROBLEM.P + p
        begins, ends = begin_ptr + part * PROBLEM.G, end_ptr + part * PROBLEM.G
        number, _, _, its_first = first_visits(begins, ends, PROBLEM.G, CHUNK)
        begin, end = tl.load(begins + group), tl.load(ends + group)
        visits = tl.where(begin < end, (end - 1) // CHUNK - begin // CHUNK + 1, 0)
        partial = partial_ptr + (part * VISITS + tl.sum(tl.where(number == group, its_first, 0), 0)) * SIZE
        for _ in tl.range(visits, loop_unroll_factor=UNROLLED):
            total += tl.load(partial + element, mask=inside, other=0.0)
            partial += SIZE
    tl.store(result_ptr + matrix * SIZE + element, total.to(result_ptr.dtype.element_ty), mask=inside)
