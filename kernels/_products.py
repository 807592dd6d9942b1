"""Helpers of the kernels that multiply tiles."""

import re

import triton
import triton.language as tl


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


@triton.jit
def to_tf32(x):
    """Drop the bits that tensor cores ignore in TF32.

    Hopper's and Blackwell's tensor cores read TF32 tiles from shared memory only if the contraction is contiguous, and Triton would copy
    other tiles there in pieces of 4 bytes.  This operation makes it load the tile through registers instead.
    """
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
