"""The Triton kernel of scaled.py: a tile of a matrix product, whose columns, or whose left factor's, are scaled."""

import dataclasses

import triton
import triton.language as tl

from jaxext.kernels.launch import Launch, cdiv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    open: str
    B: int
    N: int
    M: int
    K: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Config:
    block: int  # rows, columns and depth of a tile


def refuses(problem: Problem) -> str | None:
    return None if problem.dtype == "fp32" else f"the operands are {problem.dtype}, want fp32"


def candidates(problem: Problem) -> list[Config]:
    return [Config(16), Config(32)]


def launch(problem: Problem, config: Config) -> Launch:
    """Operands, sizes and strides (row, column) of the left factor, the right one and the result, and whether the depth is scaled."""
    N, M, K = problem.N, problem.M, problem.K
    operands, rows, cols, depth, lhs, rhs, deep = {
        "y": (("x", "w", "s"), N, M, K, (K, 1), (M, 1), False),
        "x": (("y", "w", "s"), N, K, M, (M, 1), (1, M), True),
        "w": (("x", "y", "s"), K, M, N, (1, K), (M, 1), False),
    }[problem.open]
    return Launch(
        name=f"scaled_{problem.open}",
        kernel=scaled,
        operands=operands,
        grid=(cdiv(rows, config.block) * cdiv(cols, config.block), problem.B),
        constants=dict(
            ROWS=rows, COLS=cols, DEPTH=depth, LHS_ROW=lhs[0], LHS_COL=lhs[1], RHS_ROW=rhs[0], RHS_COL=rhs[1], DEEP=deep, BLOCK=config.block
        ),
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def scaled(
    lhs,
    rhs,
    scale,
    result,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    LHS_ROW: tl.constexpr,
    LHS_COL: tl.constexpr,
    RHS_ROW: tl.constexpr,
    RHS_COL: tl.constexpr,
    DEEP: tl.constexpr,  # scales lie along the depth, else along the columns
    BLOCK: tl.constexpr,
):
    tiles: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    batch = tl.program_id(1)
    row = tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    lhs += batch * ROWS * DEPTH
    rhs += batch * DEPTH * COLS
    scale += batch * (DEPTH if DEEP else COLS)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, DEPTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(lhs + row[:, None] * LHS_ROW + k[None, :] * LHS_COL, (row[:, None] < ROWS) & (k[None, :] < DEPTH), 0.0)
        b = tl.load(rhs + k[:, None] * RHS_ROW + col[None, :] * RHS_COL, (k[:, None] < DEPTH) & (col[None, :] < COLS), 0.0)
        if DEEP:
            a *= tl.load(scale + k, k < DEPTH, 0.0)[None, :]
        total = tl.dot(a, b, total, input_precision="ieee")
    if not DEEP:
        total *= tl.load(scale + col, col < COLS, 0.0)[None, :]
    tl.store(result + batch * ROWS * COLS + row[:, None] * COLS + col[None, :], total, (row[:, None] < ROWS) & (col[None, :] < COLS))
