"""The launch of a kernel, and the limits of devices that kernel files need.

Every kernel takes pointers to its operands and results, row-major and aligned to 16 bytes, and static arguments.  It writes every element
of a result, and nothing else.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .epilogue import Epilogue

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
EIGHTS = frozenset({"fp8e4nv", "fp8e5"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: `kernel[grid](*operands, *results, **constants)`.

    If there is another launch to be run `then`, the result is `partial`, in float32, of this shape, an operand of that launch.
    With `splits` > 1 a result has a further axis in front, of that many partial results, in float32 (int32 for integers), to be added up.
    Profiles show the kernel under `name`, the name of the primitive.
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
    partial: tuple[int, ...] = ()
    then: "Launch | None" = None


def kernel_name(specialization) -> str:
    """Name a kernel after its constant PROBLEM, as `triton.jit(repr=kernel_name)` asks."""
    return specialization.constants["PROBLEM"].name


def plain_launch(problem: Any, config: Any, kernel: Any, operands: tuple[str, ...], grid: tuple[int], **constants: Any) -> Launch:
    """Return the launch of a kernel without an epilogue.

    Kernels without tile products have no stages, and no pipeline: more programs per multiprocessor hide the latency.
    """
    return Launch(
        name=problem.name,
        kernel=kernel,
        operands=operands,
        grid=grid,
        constants={"PROBLEM": problem, "CONFIG": config, **constants},
        num_warps=config.num_warps,
        num_stages=getattr(config, "num_stages", 1),
        splits=config.splits,
    )


def fused(plain: Launch, kernel: Any, epilogue: Epilogue) -> Launch:
    """Return the launch of the kernel's fused variant.

    In place of an absent operand the left one is passed again and not read.  An absent second result is None.
    """
    first, second = plain.operands
    return dataclasses.replace(
        plain,
        kernel=kernel,
        operands=(first, second, "bias" if epilogue.bias else first, "residual" if epilogue.residual else first),
        results=2 if epilogue.saves else 1,
        constants=plain.constants if epilogue.saves else {**plain.constants, "saved_ptr": None},
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def largest_block(blocks: Sequence[int], size: int, idle: float) -> int:
    """The largest block that leaves at most this share of its lanes idle, or otherwise the block with the fewest idle lanes."""
    shares = {block: 1 - size / max(1, cdiv(size, block) * block) for block in blocks}
    return max((block for block in blocks if shares[block] <= idle), default=min(blocks, key=shares.__getitem__))
