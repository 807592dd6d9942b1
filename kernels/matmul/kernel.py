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

from __future__ import annotations

import dataclasses
import math

import triton
import triton.language as tl

from .. import tile_epilogue as _fused
from ..launch import (
    BITS,
    MOST_INTEGER_PRODUCTS,
    MOST_PROGRAMS,
    SHARED_MEMORY,
    TENSOR_MEMORY,
    Launch,
    cdiv,
    kernel_name,
    lacking_memory,
    tensor_memory,
)
from ..machine import START, machine
from ..tile import refused_pair, to_tf32
from .problem import SLOTS, MatmulProblem

GROUP = tl.constexpr(8)  # tile rows of a band: what 132 programs read at once is then near its least
BEYOND = 1 << 15  # the depth that splits cover beyond its end is less: a block of up to 128 for each, and they are up to 148

_FLOATS = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
_EIGHTS = frozenset({"fp8e4nv", "fp8e5"})
_PRECISIONS = ("tf32", "tf32x3", "bf16x3", "bf16x6", "ieee")
# Those that split a float32 number, and the bytes of its right factor's parts in shared memory.
_PARTS = {"tf32x3": 8, "bf16x3": 4, "bf16x6": 6}

# Rows and columns of the tiles worth trying, and their warps.  An accumulator of 128x256 is 128 registers of each of 8 warps' threads.
_TILES = (
    *((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)),
    *((128, 16, 4), (16, 128, 4), (32, 32, 2), (16, 16, 1)),  # skinny; many small products
)
_FMA_TILES = ((128, 128, 8), (64, 64, 4), (64, 16, 2), (16, 64, 2), (32, 32, 2), (16, 16, 1))  # without tensor cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(MatmulProblem):
    """A product, with the facts that tiles depend on besides its sizes."""

    @property
    def pieces(self) -> tuple[int, int]:
        """How many numbers of the left and of the right operand can be copied at once from every row: 16 bytes at best."""
        lengths = max(self.lhs_strides), self.N if self.gated else max(self.rhs_strides)
        lhs, rhs = (math.gcd(length, 128 // BITS[dtype]) for length, dtype in zip(lengths, self.operand_dtypes, strict=True))
        return lhs, rhs

    @property
    def aligned(self) -> bool:
        """Whether all copies are of 16 bytes."""
        return all(piece * BITS[dtype] == 128 for piece, dtype in zip(self.pieces, self.operand_dtypes, strict=True))

    @property
    def common(self) -> tl.dtype | None:
        """The dtype to which operands are converted exactly if they differ; None if the tensor cores take them unchanged."""
        dtypes = set(self.operand_dtypes)
        if len(dtypes) == 1 or dtypes <= _EIGHTS:
            return None
        wide = dtypes - _EIGHTS
        return _FLOATS[wide.pop()] if len(wide) == 1 else tl.float32

    @property
    def bits(self) -> int:
        """Bits of a factor as it is multiplied."""
        return BITS[self.operand_dtypes[0]] if self.common is None else self.common.primitive_bitwidth

    @property
    def integers(self) -> bool:
        return self.dtypes[2] == "i32"

    @property
    def eights(self) -> bool:
        """Whether 8-bit floats are multiplied."""
        return self.bits == 8 and not self.integers

    @property
    def method(self) -> str:
        """How float32 factors are multiplied; factors converted from 16 bits are exact in TF32."""
        return self.precision if "fp32" in self.operand_dtypes else "tf32"

    @property
    def fma(self) -> bool:
        """Whether the products are float32's own, for which there are no tensor cores."""
        return self.bits == 32 and self.method == "ieee"

    @property
    def in_parts(self) -> bool:
        """Whether float32 numbers are split into parts for the tensor cores."""
        return self.bits == 32 and self.method in _PARTS

    @property
    def shared_factors(self) -> bool:
        """Whether the tensor cores read tiles from shared memory (wgmma and tcgen05): data-centre devices from 9.0 on."""
        return 90 <= self.arch < 120 and not self.fma

    @property
    def tcgen05(self) -> bool:
        """Whether the tensor cores have their own memory for sums and factors (tcgen05)."""
        return 100 <= self.arch < 120 and not self.fma

    @property
    def turned(self) -> tuple[bool, bool]:
        """Whether the left and the right tile must be transposed on the way to the tensor cores.

        These read 32-bit tiles from shared memory only if depth is contiguous, and Triton would copy others there in pieces of 4 bytes.
        """
        tf32 = self.shared_factors and self.bits == 32 and self.method == "tf32"
        lhs, rhs = self.operand_dtypes
        return tf32 and lhs == "fp32" and self.lhs_strides[1] != 1, tf32 and rhs == "fp32" and self.rhs_strides[0] != 1

    @property
    def index(self) -> tl.dtype:
        """The integer type for offsets in a matrix and for depths, including the depth that splits cover beyond the end."""
        sizes = self.rows * self.depth, self.depth * self.cols, self.rows * self.cols
        return tl.int32 if max(sizes) < 2**31 - BEYOND else tl.int64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A program's tile of the product, its step in depth, and how many programs share the depth.

    A gated product's tile is half of tile_n columns of the gate, and as many of the linear part.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def supports(problem: Problem) -> str | None:
    """None, or the reason if no config fits the problem."""
    epilogue = _fused.refused(problem.epilogue, problem.role, "nn", problem.dtypes[2], gates=True, ragged=problem.ragged)
    if reason := _refused_numbers(problem) or epilogue:
        return reason
    if problem.epilogue and problem.integers and not candidates(problem):
        return f"sums of {problem.depth} products of int8 are split, and no epilogue can follow their parts"
    smallest = problem.B * cdiv(problem.rows, 16) * cdiv(problem.cols, 16)
    if smallest > MOST_PROGRAMS and not candidates(problem):
        return f"{problem.B} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


def _refused_numbers(problem: Problem) -> str | None:
    """The reason if the device or Triton cannot multiply these numbers, or None."""
    first, second, result = problem.dtypes
    operands = {first, second}
    if problem.arch not in SHARED_MEMORY:
        return f"compute capability {problem.arch / 10} is not one of {', '.join(str(arch / 10) for arch in SHARED_MEMORY)}"
    if "i8" in operands or result == "i32":
        return None if problem.dtypes == ("i8", "i8", "i32") else f"{first} and {second} into {result} (integers: i8 and i8 into i32)"
    if not operands <= _EIGHTS | _FLOATS.keys() or result not in _FLOATS:
        return f"{first} and {second} into {result} (floats: {', '.join((*_FLOATS, *sorted(_EIGHTS)))} into {', '.join(_FLOATS)})"
    if operands & _EIGHTS and problem.arch < 89:
        return f"8-bit floats need compute capability 8.9, got {problem.arch / 10}"
    if problem.bits == 32 and problem.precision not in _PRECISIONS:
        return f"precision {problem.precision!r} of float32 (want one of {', '.join(_PRECISIONS)})"
    return refused_pair(problem.arch, *problem.operand_dtypes, problem.method, problem.turned[1])


def candidates(problem: Problem) -> list[Config]:
    """The tiles that fit; if the result has fewer tiles than the device has multiprocessors, also with the depth split.

    The one with the fewest clocks, by a rough model, is first.
    """
    configs = []
    for rows, cols, warps in _FMA_TILES if problem.fma else _TILES:
        # An accumulator this large leaves no registers for the parts of float32 numbers, for sums of 8-bit floats that are kept apart,
        # or for the many addresses of copies in pieces of less than 16 bytes; nor, where factors are read from registers, for those of
        # 256 rows or of 8 bits.
        cramped = problem.bits == 32 or problem.eights or not problem.aligned
        cramped |= not problem.shared_factors and (rows > 128 or problem.bits == 8)
        if rows * cols > 128 * 128 and cramped:
            continue
        # The parts of even a small tile are many registers of few threads: these are spread, or not tried.
        small = rows * cols < 64 * 64
        if problem.in_parts and small and warps < 4:
            continue
        warps = 8 if problem.in_parts and small else warps
        # So are the addresses of copies in small pieces, beside factors in registers.
        warps *= 2 if problem.fma and not problem.aligned and small else 1
        config = Config(tile_m=rows, tile_n=cols, tile_k=_depth(problem, rows, cols, warps), num_warps=warps)
        if _tensor_memory(problem, config) <= TENSOR_MEMORY and (stages := _stages(problem, config)):
            config = dataclasses.replace(config, num_stages=stages)
            splits = 1 if problem.epilogue else _splits(problem, config)
            configs += [dataclasses.replace(config, splits=splits) for splits in sorted({1, splits})]
    configs = [config for config in configs if not _saturates(problem, config)]
    configs = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(configs, key=lambda config: clocks(problem, config))


def _depth(problem: Problem, rows: int, cols: int, warps: int) -> int:
    """The depth of a step: 128 bytes, a cache line and the widest swizzle of shared memory.

    16 numbers if a longer step would only take more registers.  Copies of less than 16 bytes are many and hold their addresses in
    registers, so steps are shortened until a thread makes at most 16 of them per operand, if possible.
    """
    small = rows * cols < 64 * 64
    six_parts_on_tcgen05 = problem.method == "bf16x6" and problem.tcgen05
    if problem.fma or (problem.in_parts and (small or six_parts_on_tcgen05 or not problem.shared_factors)):
        return 16
    depth = 1024 // problem.bits
    copies = max(rows // problem.pieces[0], cols // problem.pieces[1]) * depth // (32 * warps)
    return depth if problem.aligned else max(_least_depth(problem), depth * 16 // max(16, copies))


def _least_depth(problem: Problem) -> int:
    """The depth of one tensor core instruction."""
    return max(16, 256 // problem.bits)


def _stages(problem: Problem, config: Config) -> int | None:
    """3 or 4, so that two programs fit a multiprocessor if possible: one multiplies while the other begins or stores its result."""
    memory = SHARED_MEMORY[problem.arch]
    for share in (memory // 2, memory):
        for stages in (4, 3):
            if _shared_memory(problem, dataclasses.replace(config, num_stages=stages)) <= share:
                return stages
    return None


def _shared_memory(problem: Problem, config: Config) -> int:
    """Bytes of the stages (one less if the tensor cores read from registers) and of right factors made from them.

    Rearranging the result takes less than any device has.
    """
    lhs, rhs = (BITS[dtype] // 8 for dtype in problem.operand_dtypes)
    stage = (config.tile_m * lhs + config.tile_n * rhs) * config.tile_k
    if not problem.shared_factors:
        return stage * (config.num_stages - 1)
    factors = config.tile_n * config.tile_k
    if problem.in_parts:
        return stage * (config.num_stages - 1) + factors * _PARTS[problem.method]
    return stage * config.num_stages + (factors * problem.bits // 8 if problem.common else 0)


def _tensor_memory(problem: Problem, config: Config) -> int:
    parts = problem.method if problem.in_parts else ""
    return tensor_memory(problem.arch, config.tile_m, config.tile_n, config.tile_k, parts)


def _splits(problem: Problem, config: Config) -> int:
    """As many programs per tile as fill the device once, each with at least 4 steps of depth if possible and never with none; more for
    integers whose sum could exceed int32."""
    rows, cols, steps = tiles(problem, config)
    wanted = machine(problem.arch, problem.device).multiprocessors // max(1, rows * cols * problem.B)
    if problem.integers:
        wanted = max(wanted, cdiv(steps, (MOST_INTEGER_PRODUCTS - 1) // config.tile_k))
    return cdiv(steps, max(4, cdiv(steps, max(1, wanted)))) or 1


def _saturates(problem: Problem, config: Config) -> bool:
    return problem.integers and tiles(problem, config)[2] * config.tile_k >= MOST_INTEGER_PRODUCTS


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


def clocks(problem: Problem, config: Config) -> float:
    """The time of one multiprocessor's programs, each a start and its depth, and of adding partial results if the depth is split."""
    gpu, depth = machine(problem.arch, problem.device), tiles(problem, config)[2] * config.tile_k
    lhs, rhs = (BITS[dtype] / 8 for dtype in problem.operand_dtypes)
    rate, loaded = gpu.rate(problem.bits, problem.method), config.tile_m * lhs + config.tile_n * rhs
    of_programs = gpu.rounds(grid(problem, config)[0]) * (START + depth * gpu.tile(config.tile_m * config.tile_n, rate, loaded))
    partial = 4 * config.splits * problem.B * problem.rows * problem.cols
    return of_programs + (gpu.adding(partial) if config.splits > 1 else 0)


def tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """The numbers of tile rows and tile columns, and of each program's steps in depth."""
    steps = cdiv(cdiv(problem.depth, config.tile_k), config.splits)
    return cdiv(problem.rows, config.tile_m), cdiv(problem.cols, config.tile_n), steps


def grid(problem: Problem, config: Config) -> tuple[int]:
    rows, cols, _ = tiles(problem, config)
    return (rows * cols * config.splits * problem.B,)


def launch(problem: Problem, config: Config) -> Launch:
    """The launch; raises ValueError if the device or the kernel does not support the config."""
    if reason := supports(problem):
        raise ValueError(f"{problem.name}: {reason}")
    least = {"tile_m": 16, "tile_n": 16, "tile_k": _least_depth(problem)}
    for field, size in least.items():
        if (got := getattr(config, field)) < size or got & (got - 1):
            raise ValueError(f"{problem.name}: {field} is {got} (want a power of two, at least {size})")
    if config.splits < 1:
        raise ValueError(f"{problem.name}: splits is {config.splits} (want at least 1)")
    if problem.epilogue and config.splits > 1:
        raise ValueError(f"{problem.name}: splits is {config.splits} (want 1: an epilogue cannot follow parts of a sum)")
    if _saturates(problem, config):
        products = tiles(problem, config)[2] * config.tile_k
        raise ValueError(f"{problem.name}: {config} adds up {products} products of int8, tensor cores may saturate: it wants more splits")
    needs = {"shared": _shared_memory(problem, config), "tensor": _tensor_memory(problem, config)}
    if reason := lacking_memory(problem.arch, **needs):
        raise ValueError(f"{problem.name}: {config} {reason}")
    if (programs := grid(problem, config)[0]) > MOST_PROGRAMS:
        raise ValueError(f"{problem.name}: {config} makes {programs} programs, a grid has at most {MOST_PROGRAMS}")
    rows, cols, steps = tiles(problem, config)
    plain = Launch(
        name=problem.name,
        kernel=matmul,
        operands=SLOTS[problem.role],
        grid=(programs,),
        constants={"PROBLEM": problem, "CONFIG": config, "TILE_ROWS": rows, "TILE_COLS": cols, "STEPS": steps},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        splits=config.splits,
    )
    return _fused.launch(plain, matmul_fused, problem.epilogue) if problem.epilogue else plain


@triton.jit(repr=kernel_name)
def matmul(
    lhs_ptr, rhs_ptr, result_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    _matmul(lhs_ptr, rhs_ptr, None, None, result_ptr, None, PROBLEM, CONFIG, TILE_ROWS, TILE_COLS, STEPS)


@triton.jit(repr=kernel_name)
def matmul_fused(
    lhs_ptr, rhs_ptr, bias_ptr, residual_ptr, result_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    _matmul(lhs_ptr, rhs_ptr, bias_ptr, residual_ptr, result_ptr, saved_ptr, PROBLEM, CONFIG, TILE_ROWS, TILE_COLS, STEPS)


@triton.jit
def _matmul(
    lhs_ptr, rhs_ptr, bias_ptr, residual_ptr, result_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = PROBLEM.rows
    COLS: tl.constexpr = PROBLEM.cols
    DEPTH: tl.constexpr = PROBLEM.depth
    BLOCK_ROWS: tl.constexpr = CONFIG.tile_m
    BLOCK_COLS: tl.constexpr = CONFIG.tile_n
    BLOCK_DEPTH: tl.constexpr = CONFIG.tile_k
    SUM: tl.constexpr = tl.int32 if PROBLEM.integers else tl.float32

    batch, split, tile_row, tile_col = _place(PROBLEM, CONFIG, TILE_ROWS, TILE_COLS)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile_col * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    depth = split * (STEPS * BLOCK_DEPTH) + tl.arange(0, BLOCK_DEPTH)
    row_in = _inside(row, ROWS, TILE_ROWS * BLOCK_ROWS)
    col_in = _inside(col, COLS, TILE_COLS * BLOCK_COLS)
    if PROBLEM.gated:
        col, col_in = _gate_and_linear(tile_col, PROBLEM.N, TILE_COLS, BLOCK_COLS)
    lhs_at = row[:, None] * PROBLEM.lhs_strides[0] + depth[None, :] * PROBLEM.lhs_strides[1]
    rhs_at = depth[:, None] * PROBLEM.rhs_strides[0] + col[None, :] * PROBLEM.rhs_strides[1]
    lhs_ptr += batch * (ROWS * DEPTH)
    rhs_ptr += batch * (DEPTH * COLS)

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), SUM)
    for _ in range(STEPS):
        depth_in = _inside(depth, DEPTH, CONFIG.splits * STEPS * BLOCK_DEPTH)
        lhs = tl.load(lhs_ptr + lhs_at, mask=row_in[:, None] & depth_in[None, :], other=0.0)
        rhs = tl.load(rhs_ptr + rhs_at, mask=depth_in[:, None] & col_in[None, :], other=0.0)
        total = _multiply_add(lhs, rhs, total, PROBLEM)
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
        sums, linear = _fused.halves(total) if PROBLEM.gated else (total, None)
        _fused.finish(
            sums,
            linear,
            bias_ptr + batch * PROBLEM.N,
            residual_ptr + batch * (ROWS * PROBLEM.N),
            result_ptr + batch * (ROWS * PROBLEM.N),
            saved_ptr,
            row[:, None] * PROBLEM.N,
            row_in[:, None],
            tile_col * sums.shape[1],
            PROBLEM,
            PROBLEM.N,
            TILE_COLS * BLOCK_COLS == COLS,
            CONFIG.num_warps,
        )


@triton.jit
def _gate_and_linear(tile_col, N: tl.constexpr, TILE_COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The columns of a gated product's tile, those of the gate first, and whether they exist."""
    HALF: tl.constexpr = BLOCK_COLS // 2
    place = tl.arange(0, BLOCK_COLS)
    col = tile_col * HALF + place % HALF
    return col + place // HALF * N, _inside(col, N, TILE_COLS * HALF)


@triton.jit
def _place(PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """This program's batch, split, tile row and tile column; within a band of GROUP rows, the row varies fastest."""
    program = tl.program_id(0)
    tile = program % (TILE_ROWS * TILE_COLS)
    part = program // (TILE_ROWS * TILE_COLS)
    BAND: tl.constexpr = TILE_ROWS if TILE_ROWS < GROUP else GROUP  # and so a band's tiles are no more than there are: 32 bits do
    first = tile // (BAND * TILE_COLS) * BAND
    height = tl.minimum(TILE_ROWS - first, BAND)
    within = tile % (BAND * TILE_COLS)
    batch, split = part // CONFIG.splits, part % CONFIG.splits
    row, col = first + within % height, within // height
    return batch.to(tl.int64), split.to(PROBLEM.index), row.to(PROBLEM.index), col.to(PROBLEM.index)


@triton.jit
def _inside(index, LIMIT: tl.constexpr, COVERED: tl.constexpr):
    """Whether each index is below LIMIT; a constant, and so no mask, if the blocks cover exactly LIMIT."""
    if LIMIT == COVERED:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < LIMIT


@triton.jit
def _multiply_add(lhs, rhs, total, PROBLEM: tl.constexpr):
    if PROBLEM.common is not None:
        lhs = lhs.to(PROBLEM.common)
        rhs = rhs.to(PROBLEM.common)
    if PROBLEM.turned[0]:
        lhs = to_tf32(lhs)
    if PROBLEM.turned[1]:
        rhs = to_tf32(rhs)
    # Hopper's tensor cores keep some 14 bits of a sum of 8-bit floats: each block's is added up in float32, here, because Triton itself
    # would add it before it has waited for it.
    if PROBLEM.eights and PROBLEM.arch == 90:
        return total + tl.dot(lhs, rhs, out_dtype=total.dtype)
    else:
        return tl.dot(lhs, rhs, total, input_precision=PROBLEM.method, out_dtype=total.dtype)
