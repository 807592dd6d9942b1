"""Products of float32 in pieces on Hopper before any launch: a family of test_cuda_families.py, and the precisions that it has."""

import functools
import itertools

import pytest
import test_cuda_matmul

from jaxext.kernels.machine import machine
from jaxext.ops.matmul import cuda_pieces
from jaxext.ops.matmul.cuda import CudaMatmul
from jaxext.ops.matmul.cuda_pieces import PiecesConfig, candidates, clocks

TABLE = [
    dict(operands="fp32", pieces=pieces, tile_m=128, tile_n=128, most_splits=32) for pieces in (2, 3)
]  # that of tests/csrc/host_code.cc


product = functools.partial(test_cuda_matmul.product, dtypes=("fp32",) * 3, precision="bf16x6")
FAMILY, SMALL, SIZES = cuda_pieces, product(64, 64, 64), "BMNK"
REFUSED = {
    "an operand's dtype": (product(64, 64, 64, dtypes=("fp32", "bf16", "fp32")), "fp32 times bf16 into fp32, want fp32 alone"),
    "a result's dtype": (product(64, 64, 64, dtypes=("fp32", "fp32", "bf16")), "fp32 times fp32 into bf16, want fp32 alone"),
    "left rows": (product(64, 64, 62), "a row of the left operand has 248 bytes, TMA wants a multiple of 16: pad K to 64"),
    "right rows": (product(64, 63, 64), "a row of the right operand has 252 bytes, TMA wants a multiple of 16: pad N to 64"),
    "left rows, nt": (product(64, 64, 61, role="nt"), "a row of the left operand has 244 bytes, TMA wants a multiple of 16: pad N to 64"),
    "left rows, tn": (product(62, 64, 64, role="tn"), "a row of the left operand has 248 bytes, TMA wants a multiple of 16: pad K to 64"),
    "elements": (product(2**20, 2**18, 64), "an array of B=1 M=1048576 N=262144 K=64 has 2^38 elements or more, want fewer"),
}
TAKEN = [product(64, 63, 64, role="nt"), product(64, 64, 63, role="tn"), product(63, 64, 64), product(64, 64, 0)]
TAKEN += [
    product(m, 264, k, role=role, precision=precision)
    for role, precision, m, k in itertools.product(("nn", "nt", "tn"), cuda_pieces.PIECES, (4, 1000), (4, 1024))
]
PICKS = {"large": (product(4096, 4096, 4096), dict(splits=1)), "small": (product(256, 256, 16384), dict(splits=32))}
PARTS, deep = {4: 1, 124: 1, 128: 1, 260: 1, 2048: 16, 2052: 1, 16384: 32, 16384 + 8: 2}, functools.partial(product, 64, 64)


@pytest.mark.parametrize(("precision", "pieces"), [("bf16x3", 2), ("bf16x6", 3)])
def test_the_precision_is_the_number_of_pieces(precision, pieces):
    for role in ("nn", "nt", "tn"):
        found = candidates(product(512, 512, 4096, role=role, precision=precision), TABLE)
        assert {config.pieces for config in found} == {pieces}


def test_products_are_the_limit_of_three_pieces_and_loads_of_two():
    """A large product reaches 0.9 of the rate of six products, or the rate at which the L2 cache brings both factors."""
    gpu = machine(90)
    for precision, step in (("bf16x6", 128 * 128 * 6 / (0.9 * gpu.products)), ("bf16x3", 256 * 4 / gpu.l2)):
        config = PiecesConfig(tile_m=128, tile_n=128, pieces=cuda_pieces.PIECES[precision])
        long = clocks(product(128, 128, 1 << 22, precision=precision), config)
        assert long == pytest.approx(step * (1 << 22), rel=1e-3)


def test_six_products_are_expected_in_half_of_the_time_of_float32s_own():
    problem = product(8192, 8192, 8192)
    own = 8192**3 / machine(90).rate(32, "ieee") / machine(90).multiprocessors
    assert 0.35 < clocks(problem, candidates(problem, TABLE)[0]) / own < 0.5


def test_how_float32_is_multiplied_is_told():
    assert CudaMatmul().multiplied(product(64, 64, 64)) == "bf16x6"
    assert CudaMatmul().multiplied(product(64, 64, 64, precision="tf32")) == "tf32"
    assert CudaMatmul().multiplied(product(64, 64, 64, dtypes=("bf16", "bf16", "fp32"))) == "ieee"
