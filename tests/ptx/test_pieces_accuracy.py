"""Errors of float32 products by the CUDA kernels, on operands that are hard to multiply.

The interpreter rounds the sum of each instruction once; tensor cores may keep fewer bits of it.
"""

import dataclasses

import accuracy
import numpy as np
import pytest
from cuda_calls import matmul_call
from cuda_kernels import execute
from cuda_launches import PIECES
from ptxsim import LATE

pytestmark = pytest.mark.cuda

ROWS, DEPTH, COLUMNS = 64, 96, 64
ROLES = {"nn": lambda a, b: (a, b), "nt": lambda a, b: (b.T, a), "tn": lambda a, b: (a.T, b)}  # operands in the order of slots
QUICK = {("nn", 3), ("tn", 2)}
EACH = [
    pytest.param(row, id=f"{row['role']}-{row['pieces']}", marks=() if (row["role"], row["pieces"]) in QUICK else pytest.mark.slow)
    for row in PIECES
]
LARGEST = "largest"  # three pieces have it too: the first is rounded towards zero


def product(row, a, b):
    """Return the kernel's product of these factors."""
    call = matmul_call(row, 1, len(a), b.shape[1], a.shape[1])
    operands = {slot: np.ascontiguousarray(x)[None] for slot, x in zip(call.operands, ROLES[row["role"]](a, b), strict=True)}
    (result,) = execute(dataclasses.replace(call, operands=operands), LATE).values()
    return result[0]


def errors(row, pair, depth=DEPTH):
    """The kernel's, and float32's own."""
    a, b = pair(np.random.default_rng(0), ROWS, depth, COLUMNS)
    return accuracy.error(product(row, a, b), a, b), accuracy.error(accuracy.fma(a, b), a, b)


@pytest.mark.parametrize("row", EACH)
def test_finite_operands(row):
    """Three pieces are within a factor of two of float32's own, but for numbers without a last piece; two keep 16 bits."""
    for name, pair in accuracy.FINITE.items():
        error, own = errors(row, pair)
        exact = row["pieces"] == 3 and name in (*accuracy.ORDINARY, LARGEST)
        assert (error <= 2 * own) == exact, (name, error, own)
        assert error <= 2**9 or name not in accuracy.ORDINARY, (name, error)


@pytest.mark.parametrize("row", EACH)
def test_special_operands(row):
    """An infinity stays one, on either side.  Times a subnormal number, which has no bits among those of bfloat16, it is NaN."""
    for name, pair in accuracy.SPECIAL.items():
        a, b = pair(np.random.default_rng(0), ROWS, DEPTH, COLUMNS)
        for left, right in ((a, b), (b.T, a.T)):
            alike = "subnormal" not in name
            assert accuracy.same_special(product(row, left, right), accuracy.fma(left, right)) == alike, name


def test_an_infinity_is_where_it_belongs():
    """It stays in one row or one column; all others have the bits that they have without it."""
    a, b = accuracy.FINITE["of one size"](np.random.default_rng(0), 140, DEPTH, 132)
    without = product(PIECES[-1], a, b)
    a[3, 5], b[7, 131] = np.inf, -np.inf
    got, want = product(PIECES[-1], a, b), accuracy.fma(a, b)
    assert accuracy.same_special(got, want)
    others = np.isfinite(want)
    assert others.sum() == 139 * 131
    np.testing.assert_array_equal(got[others], without[others])


@pytest.mark.parametrize("pieces", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_long_sums_of_one_sign(pieces):
    """Each step of 32 is added to the others in float32, as float32's own products are one by one."""
    row = next(row for row in PIECES if row["pieces"] == pieces)
    positive = lambda rng, rows, depth, columns: tuple(np.abs(x) for x in accuracy.FINITE["of one size"](rng, rows, depth, columns))
    error, own = errors(row, positive, depth=1024)
    assert error <= (own if pieces == 3 else 40)
