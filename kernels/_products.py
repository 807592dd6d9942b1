"""What the kernels that multiply tiles have in common."""

import triton
import triton.language as tl


@triton.jit
def to_tf32(x):
    """Drops the bits that tensor cores ignore in TF32.

    Those of Hopper and Blackwell read TF32 tiles from shared memory only with the contraction contiguous, and Triton would copy others
    there in pieces of 4 bytes.  This takes the tile through registers instead.
    """
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
