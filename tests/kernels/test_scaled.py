"""A user's kernel with a third operand (scaled_kernel.py) in Triton's interpreter, through the conformance kit."""

import functools
import os

import numpy as np
import pytest
import scaled
from cases import random

import jaxext

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
X, W, S = (random(shape, np.float32, seed, integers=True) for seed, shape in enumerate([(4, 6), (6, 8), (8,)]))
# The interpreter is a callback into Python, and cannot stand in a program that XLA splits or exports.


@pytest.fixture(scope="module")
def form():
    return scaled.form()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (17, 40, 33), (16, 32, 16)])
def test_edges_of_tiles(form, sizes):
    n, k, m = sizes
    args = [random(shape, np.float32, seed, integers=True) for seed, shape in enumerate([(n, k), (k, m), (m,)])]
    y = scaled.product(form, *args, implementation="triton")
    np.testing.assert_array_equal(y, args[0] @ args[1] * args[2])


def test_what_the_kernel_refuses(form):
    with pytest.raises(NotImplementedError, match="scaled_y: implementation 'triton' does not support this call: the dtypes are .*float64"):
        scaled.product(form, *(a.astype(np.float64) for a in (X, W, S)), implementation="triton")
    (row,) = jaxext.explain(functools.partial(scaled.product, form))(X, W, S).rows
    assert row.refused["triton"].startswith("the interpreter is slow")
