"""Errors of float32 products by Triton's kernels, on operands that are hard to multiply.

The compilers' PTX is executed.  The interpreter rounds the sum of each instruction once; tensor cores may keep fewer bits of it.
"""

import collections
import functools
import re

import accuracy
import numpy as np
import pytest
import test_conv
import test_matmul
from triton_kernels import LATE, Call, skip_without_compiler

from jaxext.kernels import conv, matmul
from jaxext.kernels.launch import PRODUCTS_OF_PARTS

skip_without_compiler()

SIZES = (1, 64, 64, 96)  # B, M, N, K
EACH = [(80, "tf32x3"), (90, "bf16x6"), (90, "ieee")]


@functools.cache
def kernel(arch: int, precision: str) -> Call:
    problem = test_matmul.a_problem("nn", SIZES, precision=precision, arch=arch)
    return Call("matmul", problem, matmul.Config(tile_m=64, tile_n=64, tile_k=32, num_warps=4))


def product(arch, precision, pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The operands, and what the kernel makes of them."""
    _, rows, columns, depth = SIZES
    a, b = pair(np.random.default_rng(0), rows, depth, columns)
    return a, b, kernel(arch, precision).execute({"a": a[None], "b": b[None]}, LATE)[0][0]


@pytest.mark.parametrize(("arch", "precision"), EACH)
def test_finite_operands(arch, precision):
    for name, pair in accuracy.FINITE.items():
        a, b, got = product(arch, precision, pair)
        error, own = accuracy.error(got, a, b), accuracy.error(accuracy.fma(a, b), a, b)
        assert (error <= 2 * own) == (name in accuracy.EXACT.get(precision, ())), (name, error, own)


@pytest.mark.parametrize(("arch", "precision"), EACH)
def test_special_operands(arch, precision):
    """An infinity stays one.  Times a subnormal number, which has no bits among those of TF32 and bfloat16, it is NaN."""
    for name, pair in accuracy.SPECIAL.items():
        a, b, got = product(arch, precision, pair)
        alike = precision == "ieee" or "subnormal" not in name
        assert accuracy.same_special(got, accuracy.fma(a, b)) == alike, name


def test_convolutions_are_as_exact_as_products():
    """Convolutions of images of one pixel are products."""
    _, rows, columns, depth = SIZES
    pixels = dict(N=rows, C=depth, K=columns, input=(1,), filter=(1,), padding=((0, 0),))
    problem = test_conv.a_problem("fprop", **pixels, dtypes=("fp32",) * 3, precision="ieee", arch=80)
    of_conv = Call("conv", problem, conv.Config(tile_m=64, tile_n=64, tile_k=32, num_warps=4))
    for name, pair in accuracy.FINITE.items():
        a, b, of_product = product(80, "ieee", pair)
        operands = {"x": a.reshape(test_conv.shape(problem, "x")), "w": np.ascontiguousarray(b.T).reshape(test_conv.shape(problem, "w"))}
        np.testing.assert_array_equal(of_conv.execute(operands, LATE)[0].reshape(rows, columns), of_product, name)


@pytest.mark.parametrize("precision", PRODUCTS_OF_PARTS)
def test_small_terms_are_added_first(precision):
    """They go into one sum, from zero; the product of the large parts is the last, and that sum is added to the others in float32."""
    code = kernel(80, precision).compiled.asm["ttgir"]
    dots = re.findall(r"(%\w+) = tt\.dot (%\w+), (%\w+), (%\w+)", code)
    without_nans = dict(re.findall(r"(%\w+) = arith\.select %\w+, %cst\w*, (%\w+)", code))
    assert len(dots) == PRODUCTS_OF_PARTS[precision] and dots[0][3].startswith("%cst")
    for (before, *_), (*_, added) in zip(dots, dots[1:], strict=False):
        assert without_nans.get(added, added) == before
    total, *last, _ = dots[-1]
    for side, large in zip((1, 2), last, strict=True):
        ((most, _),) = collections.Counter(dot[side] for dot in dots).most_common(1)
        assert large == most
    assert re.search(rf"arith\.addf {total}, %arg\d+", code)
