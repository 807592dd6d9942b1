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

from __future__ import annotations

import dataclasses
import functools
import math

import triton
import triton.language as tl

from ..launch import BITS, MOST_PROGRAMS, SHARED_MEMORY, Launch, kernel_name, lacking_memory
from ..matmul import kernel as matmul
from ..matmul.kernel import Config, _inside, _place
from ..tile import refused_pair, to_tf32

LEAST_STEP = 32  # of the depth, whose product is scaled: tensor cores take so many numbers of 8 bits at once
_EIGHTS = frozenset({"fp8e4nv", "fp8e5"})
_FLOATS = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
LEFT, RIGHT, OPEN = {"nn": "x", "nt": "y", "tn": "x"}, {"nn": "w", "nt": "w", "tn": "y"}, {"nn": "y", "nt": "x", "tn": "w"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(matmul.Problem):
    """M, K and N are whole axes; I, S and J tell in how many blocks they lie.  A packed factor has the dtype i8."""

    I: int  # noqa: E741 (the letter of the label)
    S: int
    J: int
    scaled: tuple[str, ...]  # the slots that have scales, which are float32
    packed: bool = False  # w

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Of rows, columns and the depth."""
        return {"nn": (self.I, self.J, self.S), "nt": (self.I, self.S, self.J), "tn": (self.S, self.J, self.I)}[self.role]

    @property
    def step(self) -> int:
        """The largest power of two that divides a block of the depth."""
        block = self.depth // self.blocks[2]
        return block & -block

    @property
    def in_steps(self) -> bool:
        """Whether the product of each step is scaled."""
        return self.blocks[2] > 1 and self.step >= LEAST_STEP

    @property
    def fine(self) -> bool:
        """Whether factors are scaled in registers."""
        return self.blocks[2] > 1 and self.step < LEAST_STEP

    @property
    def has_left(self) -> bool:
        return LEFT[self.role] in self.scaled

    @property
    def has_right(self) -> bool:
        return RIGHT[self.role] in self.scaled

    @property
    def has_result(self) -> bool:
        return OPEN[self.role] in self.scaled

    @property
    def left_strides(self) -> tuple[int, int]:
        """Of the left scale: of a block of rows, and of the depth."""
        rows, _, depth = self.blocks
        return (1, rows) if self.role == "tn" else (depth, 1)

    @property
    def right_strides(self) -> tuple[int, int]:
        """Of the right scale: of a block of the depth, and of columns."""
        _, cols, depth = self.blocks
        return (1, depth) if self.role == "nt" else (cols, 1)

    @property
    def pieces(self) -> tuple[int, int]:
        lhs, rhs = super().pieces
        return lhs, math.gcd(max(self.rhs_strides), 32) if self.packed else rhs

    @property
    def aligned(self) -> bool:
        (lhs, rhs), (left, right) = self.pieces, (BITS[dtype] for dtype in self.operand_dtypes)
        return lhs * left == 128 and rhs * (4 if self.packed else right) == 128

    @property
    def whole_numbers(self) -> bool:
        """Whether the factors are multiplied as integers."""
        return {*self.operand_dtypes} == {"i8"} and not self.fine

    @property
    def eights(self) -> bool:
        return self.bits == 8 and not self.whole_numbers

    @property
    def method(self) -> str:
        """How float32 factors are multiplied: what is exact in TF32 only if it is not scaled before."""
        return self.precision if "fp32" in self.operand_dtypes or self.fine else "tf32"

    @property
    def common(self) -> tl.dtype | None:
        dtypes = {*self.operand_dtypes}
        if self.fine and (self.dtypes[2] == "fp32" or "fp16" in dtypes):  # a scale may leave the range of float16
            return tl.float32
        if not self.fine and (len(dtypes) == 1 or dtypes <= _EIGHTS):
            return None
        wide = dtypes - _EIGHTS - {"i8"}
        return tl.bfloat16 if not wide else _FLOATS[wide.pop()] if len(wide) == 1 else tl.float32


def supports(problem: Problem) -> str | None:
    """None, or why no config fits the problem."""
    operands = {*problem.operand_dtypes}
    if problem.arch not in SHARED_MEMORY:
        return f"compute capability {problem.arch / 10} is not one of {', '.join(str(arch / 10) for arch in SHARED_MEMORY)}"
    if not operands <= {*_EIGHTS, *_FLOATS, "i8"} or problem.dtypes[2] not in _FLOATS:
        return f"{' and '.join(problem.operand_dtypes)} into {problem.dtypes[2]}"
    if operands & _EIGHTS and problem.arch < 89:
        return f"8-bit floats need compute capability 8.9, got {problem.arch / 10}"
    if problem.bits == 32 and problem.precision not in ("tf32", "ieee"):
        return f"precision {problem.precision!r} of float32 (want tf32 or ieee)"
    if reason := refused_pair(problem.arch, *problem.operand_dtypes, problem.method, problem.turned[1]):
        return reason
    if problem.packed and max(problem.rhs_strides) % 2:
        return f"packed rows of {max(problem.rhs_strides)} numbers, want an even number"
    if not candidates(problem):
        return f"{problem.B} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products, whose steps lie within blocks.  The one that takes the fewest clocks, by a rough model, is first."""
    configs = []
    for config in matmul.candidates(problem):
        if problem.in_steps:
            # Beside two sums, int8 and what they become are too much for older devices' threads.
            most = 32 if problem.arch < 90 and problem.common is not None and not problem.packed else config.tile_k
            config = dataclasses.replace(config, tile_k=min(most, problem.step))
        # The sum of a step and that of all are in registers at the same time; so are tiles before and after they are scaled.
        if (problem.in_steps or problem.fine or problem.whole_numbers) and config.tile_m * config.tile_n > 128 * 16 * config.num_warps:
            continue
        if problem.packed and min(config.tile_n, config.tile_k) < 32:
            continue
        # Unpacked int4 and converted 8-bit floats need more registers than int8: they are spread over more threads.
        converted = problem.packed or _EIGHTS & {*problem.operand_dtypes}
        if problem.common is not None and converted and (config.tile_m, config.tile_n) == (16, 128):
            config = dataclasses.replace(config, num_warps=8)
        if config not in configs and matmul.grid(problem, config)[0] <= MOST_PROGRAMS:
            configs.append(config)
    return sorted(configs, key=lambda config: matmul.clocks(problem, config))


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


clocks, grid, tiles = matmul.clocks, matmul.grid, matmul.tiles


def launch(problem: Problem, config: Config) -> Launch:
    """Raises ValueError where the device or the kernel lacks what is asked."""
    if reason := supports(problem):
        raise ValueError(f"{problem.name}: {reason}")
    for field, least in {"tile_m": 16, "tile_n": 16, "tile_k": matmul._least_depth(problem)}.items():
        if (got := getattr(config, field)) < least or got & (got - 1):
            raise ValueError(f"{problem.name}: {field} is {got} (want a power of two, at least {least})")
    if problem.in_steps and problem.step % config.tile_k:
        raise ValueError(f"{problem.name}: tile_k is {config.tile_k} (want a divisor of {problem.step}: a step lies within a block)")
    if config.splits < 1:
        raise ValueError(f"{problem.name}: splits is {config.splits} (want at least 1)")
    if (programs := grid(problem, config)[0]) > MOST_PROGRAMS:
        raise ValueError(f"{problem.name}: {config} makes {programs} programs, a grid has at most {MOST_PROGRAMS}")
    if reason := lacking_memory(problem.arch, shared=matmul._shared_memory(problem, config), tensor=matmul._tensor_memory(problem, config)):
        raise ValueError(f"{problem.name}: {config} {reason}")
    left, right, open = (slots[problem.role] for slots in (LEFT, RIGHT, OPEN))
    rows, cols, steps = tiles(problem, config)
    return Launch(
        name=problem.name,
        kernel=scaled_dot,
        # An absent scale is the left factor again, through which nothing is read.
        operands=(left, right, *(f"{slot}_scale" if slot in problem.scaled else left for slot in (left, right, open))),
        grid=(programs,),
        constants={"PROBLEM": problem, "CONFIG": config, "TILE_ROWS": rows, "TILE_COLS": cols, "STEPS": steps},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        splits=config.splits,
    )


@triton.jit(repr=kernel_name)
def scaled_dot(
    lhs_ptr, rhs_ptr, lhs_scale_ptr, rhs_scale_ptr, scale_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    ROW_BLOCKS: tl.constexpr = PROBLEM.blocks[0]
    COL_BLOCKS: tl.constexpr = PROBLEM.blocks[1]
    DEPTH_BLOCKS: tl.constexpr = PROBLEM.blocks[2]

    batch, split, tile_row, tile_col = _place(PROBLEM, CONFIG, TILE_ROWS, TILE_COLS)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    first = split * (STEPS * BLOCK_DEPTH)
    depth = first + tl.arange(0, BLOCK_DEPTH)
    row_in = _inside(row, ROWS, TILE_ROWS * BLOCK_ROWS)
    col_in = _inside(col, COLS, TILE_COLS * BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    lhs_ptr += batch * (ROWS * DEPTH)
    lhs_scale_ptr += batch * (ROW_BLOCKS * DEPTH_BLOCKS)
    rhs_scale_ptr += batch * (DEPTH_BLOCKS * COL_BLOCKS)
    lhs_scale_at = row // (ROWS // ROW_BLOCKS) * PROBLEM.left_strides[0]
    rhs_scale_at = col // (COLS // COL_BLOCKS) * PROBLEM.right_strides[1]

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    # No step begins beyond the end of the depth, where there are no scales.
    for _ in range(STEPS if CONFIG.splits == 1 else tl.minimum(STEPS, tl.cdiv(DEPTH, BLOCK_DEPTH) - split * STEPS)):
        depth_in = _inside(depth, DEPTH, CONFIG.splits * STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = _right(rhs_ptr, batch, first, tile_col * BLOCK_COLS, depth, depth_in, col, col_in, PROBLEM, CONFIG)
        if PROBLEM.fine:
            block = depth // (DEPTH // DEPTH_BLOCKS)
            if PROBLEM.has_left:
                at = lhs_scale_at[:, None] + (block * PROBLEM.left_strides[1])[None, :]
                lhs = lhs.to(tl.float32) * tl.load(lhs_scale_ptr + at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
            if PROBLEM.has_right:
                at = (block * PROBLEM.right_strides[0])[:, None] + rhs_scale_at[None, :]
                rhs = rhs.to(tl.float32) * tl.load(rhs_scale_ptr + at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
            total = _product(lhs, rhs, total, PROBLEM)
        elif PROBLEM.in_steps:
            block = first // (DEPTH // DEPTH_BLOCKS)
            of_step = _product(lhs, rhs, tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32), PROBLEM)
            if PROBLEM.has_left:
                at = lhs_scale_at + block * PROBLEM.left_strides[1]
                of_step *= tl.load(lhs_scale_ptr + at, mask=row_in, other=0.0)[:, None]
            if PROBLEM.has_right:
                at = rhs_scale_at + block * PROBLEM.right_strides[0]
                of_step *= tl.load(rhs_scale_ptr + at, mask=col_in, other=0.0)[None, :]
            total += of_step
        else:
            total = _product(lhs, rhs, total, PROBLEM)
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
def _right(rhs_ptr, batch, first, first_col, depth, depth_in, col, col_in, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
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
def _product(lhs, rhs, total, PROBLEM: tl.constexpr):
    if PROBLEM.common is not None:
        lhs = lhs.to(PROBLEM.common)
        rhs = rhs.to(PROBLEM.common)
    if PROBLEM.turned[0]:
        lhs = to_tf32(lhs)
    if PROBLEM.turned[1]:
        rhs = to_tf32(rhs)
    if PROBLEM.whole_numbers:
        return total + tl.dot(lhs, rhs, out_dtype=tl.int32).to(tl.float32)
    # As in `matmul`: Hopper's tensor cores keep some 14 bits of a sum of 8-bit floats.
    elif PROBLEM.eights and PROBLEM.arch == 90:
        return total + tl.dot(lhs, rhs, out_dtype=tl.float32)
    else:
        return tl.dot(lhs, rhs, total, input_precision=PROBLEM.method, out_dtype=tl.float32)
