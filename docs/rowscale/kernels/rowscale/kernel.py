"""Rows times numbers: y[b,m,n] = x[b,m,n] scale[m]. A program computes a block of a row."""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists


@triton.jit(repr=kernel_name)
def rowscale(x_ptr, scale_ptr, y_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
    BLOCK: tl.constexpr = CONFIG.block
    BLOCKS: tl.constexpr = (PROBLEM.N + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // BLOCKS
    col = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * PROBLEM.N + col
    mask = exists(col, PROBLEM.N, BLOCK)
    x = tl.load(x_ptr + at, mask=mask)
    y = x.to(tl.float32) * tl.load(scale_ptr + row % PROBLEM.M)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
