"""Products of float32 in pieces on Hopper: the number of parts, on a table as the compiled module tells it; what csrc/ refuses
(host_code.py), which needs g++; and which precisions the implementation takes.  No GPU."""

import itertools

import pytest
from host_code import refuses

from jaxext.backends.cuda import cuda_pieces
from jaxext.backends.cuda.cuda_matmul import CudaMatmul
from jaxext.backends.cuda.cuda_pieces import PiecesConfig, candidates, clocks, pick
from jaxext.kernels.machine import machine
from jaxext.kernels.matmul.problem import MatmulProblem

TABLE = [
    dict(operands="fp32", pieces=pieces, tile_m=128, tile_n=128, most_splits=32) for pieces in (2, 3)
]  # that of tests/csrc/host_code.cc


def product(m, n, k, *, B=1, role="nn", dtypes=("fp32",) * 3, precision="bf16x6", arch=90) -> MatmulProblem:
    """Of this many rows, columns and contracted elements, in this role."""
    sizes = {"nn": dict(M=m, N=n, K=k), "nt": dict(M=m, K=n, N=k), "tn": dict(K=m, N=n, M=k)}[role]
    return MatmulProblem(name=f"matmul_{role}", role=role, B=B, **sizes, dtypes=dtypes, precision=precision, arch=arch)


@pytest.mark.parametrize(("precision", "pieces"), [("bf16x3", 2), ("bf16x6", 3)])
def test_the_precision_is_the_number_of_pieces(precision, pieces):
    for role in ("nn", "nt", "tn"):
        found = candidates(product(512, 512, 4096, role=role, precision=precision), TABLE)
        assert {config.pieces for config in found} == {pieces}


def test_large_products_are_in_one_part_and_small_ones_in_several():
    assert pick(product(4096, 4096, 4096), TABLE).splits == 1
    assert pick(product(256, 256, 16384), TABLE).splits == 32
    assert {config.splits for config in candidates(product(256, 256, 16384, B=2), TABLE)} == {1}


def test_parts_are_equal_long_enough_and_begin_where_tma_reads():
    for depth in (4, 124, 128, 260, 2048, 2052, 16384 + 8):
        for config in candidates(product(64, 64, depth), TABLE):
            part = depth // config.splits
            assert config.splits == 1 or (part * config.splits == depth and part % 4 == 0 and part >= 4 * 32)


def test_products_are_the_limit_of_three_pieces_and_loads_of_two():
    """Of a large product: at 0.9 of the rate of six products, and at the rate at which the L2 cache brings both factors."""
    gpu = machine(90)
    for precision, step in (("bf16x6", 128 * 128 * 6 / (0.9 * gpu.products)), ("bf16x3", 256 * 4 / gpu.l2)):
        config = PiecesConfig(tile_m=128, tile_n=128, pieces=cuda_pieces.PIECES[precision])
        long = clocks(product(128, 128, 1 << 22, precision=precision), config)
        assert long == pytest.approx(step * (1 << 22), rel=1e-3)


def test_six_products_are_expected_in_half_of_the_time_of_float32s_own():
    problem = product(8192, 8192, 8192)
    own = 8192**3 / machine(90).rate(32, "ieee") / machine(90).multiprocessors
    assert 0.35 < clocks(problem, pick(problem, TABLE)) / own < 0.5


REFUSALS = {
    "another GPU": (dict(arch=100), "compute capability is 10.0, the pieces kernels want 9.0"),
    "an operand's dtype": (dict(dtypes=("fp32", "bf16", "fp32")), "fp32 times bf16 into fp32, want fp32 alone"),
    "a result's dtype": (dict(dtypes=("fp32", "fp32", "bf16")), "fp32 times fp32 into bf16, want fp32 alone"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    changes, reason = REFUSALS[case]
    assert refuses(product(64, 64, 64, **changes), cuda_pieces) == reason


@pytest.mark.parametrize(
    ("role", "sizes", "reason"),
    [
        ("nn", (64, 64, 62), "a row of the left operand has 248 bytes, TMA wants a multiple of 16: pad K to 64"),
        ("nn", (64, 63, 64), "a row of the right operand has 252 bytes, TMA wants a multiple of 16: pad N to 64"),
        ("nt", (64, 64, 61), "a row of the left operand has 244 bytes, TMA wants a multiple of 16: pad N to 64"),
        ("tn", (62, 64, 64), "a row of the left operand has 248 bytes, TMA wants a multiple of 16: pad K to 64"),
        ("nn", (2**20, 2**18, 64), "an array of B=1 M=1048576 N=262144 K=64 has 2^38 elements or more, want fewer"),
        ("nn", (2**31, 64, 64), "an axis has 2147483648 elements, want 2147418112 at most"),
        ("nn", (-64, 64, 64), "an axis has -64 elements, want 0 or more"),
        ("nt", (64, 63, 64), None),
        ("tn", (64, 64, 63), None),
        ("nn", (63, 64, 64), None),
        ("nn", (64, 64, 0), None),
    ],
)
def test_refused_sizes(role, sizes, reason):
    assert refuses(product(*sizes, role=role), cuda_pieces) == reason


def test_what_is_taken_has_a_pick():
    for role, precision, m, k in itertools.product(("nn", "nt", "tn"), cuda_pieces.PIECES, (4, 1000), (4, 1024)):
        problem = product(m, 264, k, role=role, precision=precision)
        assert refuses(problem, cuda_pieces) is None
        assert pick(problem, TABLE) in candidates(problem, TABLE)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_other_precisions_of_float32_are_refused(precision):
    """HIGHEST too: numbers below 2**-110 have no last piece, and what operands hold is not known when a kernel is chosen."""
    reason = CudaMatmul().refuses(product(64, 64, 64, precision=precision))
    assert reason == "float32 is multiplied in pieces alone, want precision BF16_BF16_F32_X3 or BF16_BF16_F32_X6"


def test_how_float32_is_multiplied_is_told():
    assert CudaMatmul().multiplied(product(64, 64, 64)) == "bf16x6"
    assert CudaMatmul().multiplied(product(64, 64, 64, dtypes=("bf16", "bf16", "fp32"))) == "ieee"
