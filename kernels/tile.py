"""Helpers of the kernels that multiply tiles."""

import re

import triton
import triton.language as tl

from .launch import BITS


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


def refused_pair(arch: int, left: str, right: str, method: str, turned: bool) -> str | None:
    """The reason if Triton overwrites the left factor while tensor cores still read it, or None.

    Triton before 3.8 does so on 9.0 if the left factor alone is converted: it is then read from registers, which the next step's conversion
    writes (triton-lang/triton#9433).  If the right factor is converted or `turned` too, each product is waited for; so are those of parts.
    """
    if arch != 90 or triton_version() >= (3, 8) or BITS[left] >= BITS[right] or turned or BITS[right] == 32 and method != "tf32":
        return None
    version = ".".join(map(str, triton_version()))
    return f"{left} by {right} on compute capability 9.0, where Triton {version} overwrites factors that are being read: want 3.8 or newer"


@triton.jit
def to_tf32(x):
    """Drop the bits that tensor cores ignore in TF32.

    Hopper's and Blackwell's tensor cores read TF32 tiles from shared memory only if the contraction is contiguous, and Triton would copy
    other tiles there in pieces of 4 bytes.  This operation makes it load the tile through registers instead.
    """
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
