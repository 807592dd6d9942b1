"""The tolerances of a kernel's result against float64: none for sums of small integers, else what rounding explains.

The laws bound each element by the sum of the magnitudes of its terms, whatever the other elements are.  `timing.law` is of another kind:
in the norm, for results of any implementation.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# How far a sum of products may be off, over the sum of their magnitudes.  The products of 16-bit operands are exact.  Hopper's tensor cores
# cut their float32 sums off, which adds up where all terms have one sign: 528 squares were 1.2e-6 too small, by any kernel.  TF32 keeps 10
# bits of each float32 operand.
SUMS = 2.0**-18
FLOAT32 = 2.0**-20  # of sums outside of the tensor cores, which are rounded: by far less than 8 roundings of float32
TF32 = 2.0**-9 + SUMS
# The same by how float32 factors are multiplied, as kernels name it: if they are split, by what is left out.
STRAY = {"ieee": FLOAT32, "tf32": TF32, "tf32x3": 2.0**-18, "bf16x3": 2.0**-14, "bf16x6": 2.0**-18}
IN_REGISTERS = 2.0**-7  # of factors that are scaled in registers, and rounded to bfloat16 there
EIGHT_BITS = 2.0**-10  # of 8-bit floats, of whose sums Hopper's tensor cores keep some 14 bits in each step
FUSED = 2.0**-12  # of activations, over the largest element of the result: their approximations, where their slope hides the sum's size


def exact(got: np.ndarray, truth: np.ndarray) -> str | None:
    """None if every element is the truth rounded once, or a sentence about the first that is not."""
    if reason := _unwritten(got, truth):
        return reason
    rounded = truth.astype(np.int64).astype(got.dtype) if is_integer(got.dtype) else truth.astype(got.dtype)  # integers wrap
    return _first(got != rounded, got, rounded)


def near(got: np.ndarray, truth: np.ndarray, magnitudes: np.ndarray, stray: float, roundings: float = 1, largest: float = 0) -> str | None:
    """None if every element is within `stray` of the sum of its magnitudes and `roundings` of the result, or a sentence about the first
    that is not.

    `largest` allows each element so much of the largest one besides.  Integers must be exact.
    """
    if is_integer(got.dtype):
        return exact(got, truth)
    if reason := _unwritten(got, truth):
        return reason
    info = ml_dtypes.finfo(got.dtype)
    allowed = stray * magnitudes + roundings * float(info.eps) / 2 * (1 + stray) * np.abs(truth) + float(info.smallest_subnormal)
    if largest and truth.size:
        allowed = allowed + largest * np.abs(truth).max()
    return _first(np.abs(wide(got) - truth) > allowed, got, truth.astype(got.dtype))


def errors(got: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The relative error in the norm, and the largest difference over the largest element of the truth; NaN stays NaN."""
    if not truth.size:
        return 0.0, 0.0
    sizes = [(np.linalg.norm(x.ravel()), np.abs(x).max()) for x in (wide(got) - wide(truth), wide(truth))]
    with np.errstate(divide="ignore", invalid="ignore"):
        return tuple(0.0 if difference == 0 else float(difference / size) for difference, size in zip(*sizes, strict=True))  # type: ignore[return-value]


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def is_integer(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.integer)


def _unwritten(got: np.ndarray, truth: np.ndarray) -> str | None:
    if got.shape != truth.shape:
        return f"the result has the shape {got.shape}, want {truth.shape}"
    finite = np.isfinite(wide(got))
    if finite.all():
        return None
    places = np.argwhere(~finite)[:5].tolist()
    return f"{places} and others ({(~finite).sum()} of {got.size}) were never written, or are NaN"


def _first(wrong: np.ndarray, got: np.ndarray, want: np.ndarray) -> str | None:
    if not wrong.any():
        return None
    place = np.unravel_index(int(wrong.argmax()), wrong.shape)
    at = tuple(map(int, place))
    return f"{int(wrong.sum())} of {got.size} are wrong, the first at {at}: got {got[place]}, want {want[place]}"
