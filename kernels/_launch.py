"""What a kernel file hands to whoever launches its kernel, and what it must know of the device.

Every kernel takes three pointers, two operands and the result, row-major and aligned to 16 bytes, and static arguments.  It writes every
element of the result and none beside it.  It must not know JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Compute capability -> shared memory that one program may use, in bytes (CUDA C++ Programming Guide, table of technical specifications:
# the multiprocessor's, less the 1 KiB that the system keeps).
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 120: 99 << 10}

# Compute capability -> multiprocessors of its largest common device: A100, H100/H200, B200; only to judge how many programs fill one.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8, "fp8e5": 8, "i32": 32, "i8": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: `kernel[grid](first, second, result, **constants)`.

    With `splits` > 1 the result has a further axis in front: that many partial results, float32 (int32 for integers), which add up to it.
    The kernel goes by the name `name`, that of the primitive, in profiles.
    """

    name: str
    kernel: Any
    operands: tuple[str, str]  # the slots of the form, in the order of the kernel's pointers
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    splits: int = 1


def kernel_name(specialization) -> str:
    """For `triton.jit(repr=kernel_name)`: a kernel whose constant PROBLEM has a name goes by that."""
    return specialization.constants["PROBLEM"].name


def check_shared_memory(name: str, config, stage_bytes: int, stages: int, arch: int) -> None:
    """Raise if the tiles that the pipeline holds at once do not fit."""
    if (needed := stage_bytes * stages) > (limit := SHARED_MEMORY.get(arch, 99 << 10)):
        raise ValueError(f"{name}: {config} needs {needed} bytes of shared memory, compute capability {arch / 10} has {limit}")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
