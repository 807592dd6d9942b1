"""What a kernel file hands to whoever launches its kernel, and what it must know of the device.

Every kernel takes pointers, those of its operands and results, row-major and aligned to 16 bytes, and static arguments.  It writes every
element of a result and none beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Compute capability -> shared memory that one program may use, in bytes (CUDA C++ Programming Guide, table of technical specifications:
# the multiprocessor's, less the 1 KiB that the system keeps).
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 120: 99 << 10}

MOST_PROGRAMS = 2**31 - 1  # of a grid, along its first axis

TENSOR_MEMORY = 512  # columns, of the devices that have it

PRODUCTS_OF_PARTS = {"tf32x3": 3, "bf16x3": 3, "bf16x6": 6}  # of the precisions that split float32 numbers

# Products of -128 and -128 whose sum exceeds int32: in one accumulator tensor cores may saturate there (mma's satfinite), so that longer
# sums are split.  Those of the parts wrap, as XLA's integers do.
MOST_INTEGER_PRODUCTS = 1 << 17

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8, "fp8e5": 8, "i32": 32, "i8": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: `kernel[grid](*operands, *results, **constants)`.

    With `splits` > 1 a result has a further axis in front: that many partial results, float32 (int32 for integers), which add up to it.
    The kernel goes by the name `name`, that of the primitive, in profiles.
    """

    name: str
    kernel: Any
    operands: tuple[str, ...]  # the slots of the form, in the order of the kernel's pointers
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    splits: int = 1
    results: int = 1  # 2: y, and the z of an epilogue that saves it
    whole: tuple[int, ...] = ()  # the results, by number, that have no partial results for all that


def kernel_name(specialization) -> str:
    """For `triton.jit(repr=kernel_name)`: a kernel whose constant PROBLEM has a name goes by that."""
    return specialization.constants["PROBLEM"].name


def tensor_memory(arch: int, rows: int, cols: int, depth: int, parts: str) -> int:
    """Columns, at most, of the sums and the left factors of a product of tiles, where tcgen05 makes it; `parts` splits float32 factors.

    Triton 3.6 keeps the sums of all parts of float32 numbers apart; and where they do not fit it compiles an empty kernel, without a word.
    """
    if not 100 <= arch < 120 or rows < 64:
        return 0
    sums = cdiv(rows, 128) * cols
    return PRODUCTS_OF_PARTS[parts] * sums + depth if parts in PRODUCTS_OF_PARTS else sums


def lacking_memory(arch: int, *, shared: float, tensor: int) -> str | None:
    """What is needed, in bytes and in columns, and what there is; None where that is enough."""
    if shared > SHARED_MEMORY[arch]:
        return f"needs {shared} bytes of shared memory, compute capability {arch / 10} has {SHARED_MEMORY[arch]}"
    if tensor > TENSOR_MEMORY:
        return f"needs {tensor} columns of tensor memory, compute capability {arch / 10} has {TENSOR_MEMORY}"
    return None


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def largest_block(blocks: Sequence[int], size: int, idle: float) -> int:
    """The largest of those that leave at most this share of their lanes idle, or the least idle one."""
    shares = {block: 1 - size / max(1, cdiv(size, block) * block) for block in blocks}
    return max((block for block in blocks if shares[block] <= idle), default=min(blocks, key=shares.__getitem__))
