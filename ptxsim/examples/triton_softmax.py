"""A softmax of the rows of a matrix in Triton, compiled for an H100 that need not be there.  It runs clean, and races without its mask."""

import numpy as np
import ptxsim
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A program has a row, of which BLOCK columns are in registers."""
    column = tl.arange(0, BLOCK)
    inside = column < (columns if MASKED else BLOCK)
    place = tl.program_id(0) * columns + column
    values = tl.load(x + place, mask=inside, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + place, weights / tl.sum(weights, axis=0), mask=inside)


def softmax_of_rows(x: np.ndarray, masked: bool = True) -> np.ndarray:
    """Compile the kernel, and run it on a program for each row."""
    rows, columns = x.shape
    signature = {"x": "*fp32", "y": "*fp32", "columns": "i32", "BLOCK": "constexpr", "MASKED": "constexpr"}
    constants = {"BLOCK": triton.next_power_of_2(columns), "MASKED": masked}
    source, options = ASTSource(softmax, signature, constants), {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    y = np.zeros_like(x)
    block, shared = (32 * compiled.metadata.num_warps,), compiled.metadata.shared
    module = ptxsim.Module(compiled.asm["ptx"])
    module.run("softmax", (rows,), block, [ptxsim.Input(x), ptxsim.Output(y), np.int32(columns)], shared=shared)
    return y


def main() -> None:
    x = np.random.default_rng(0).standard_normal((3, 200), np.float32)
    expected = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    print("largest error:", f"{np.abs(softmax_of_rows(x) - expected).max():.0e}")
    try:
        softmax_of_rows(x, masked=False)
    except ptxsim.Fault as fault:
        print("without the mask:", fault)


if __name__ == "__main__":
    main()
