"""The CUDA kernels of products with quantised weights on a CPU, as test_simt.py runs those of depthwise convolutions, with a stand-in for
the products of tensor cores."""

import dataclasses

import harness
import numpy as np
import pytest
from cuda_cases import INVALID
from simt_families import WEIGHT_ONLY
from simt_weight_only import a_problem, operands_of, shapes, true

from jaxext.ops.scaled import cuda_weight_only
from jaxext.ops.scaled.cuda_weight_only import TILES, WeightOnlyConfig

pytestmark = pytest.mark.cuda

EVERY_TILE = [pytest.param(bits, *tile, id=f"int{bits}-{tile[0]}x{tile[1]}") for bits in TILES for tile in TILES[bits]]
CONFIG = WeightOnlyConfig(tile_m=8, tile_n=64)


@pytest.mark.parametrize("bits, tile_m, tile_n", EVERY_TILE)
def test_values(simulator, bits, tile_m, tile_n):
    """Columns and rows have two blocks, the second not full; warps share the sum unevenly, in one part and in three, of which one is short;
    results have 16 and 32 bits."""
    config = WeightOnlyConfig(tile_m=tile_m, tile_n=tile_n)
    steps = 64 // tile_m + 3  # one for each warp, and three more
    sizes = dict(K=32 * steps, S=1, bits=bits)
    cases = [(a_problem(M=tile_m + 3, N=tile_n + 32, **sizes, dtype="bf16"), config)]
    in_parts = dataclasses.replace(config, splits=3)
    cases += [(a_problem(M=tile_m - 1, N=tile_n - 32, **sizes, dtype="fp16", result="fp32"), in_parts)]
    simulator.check(WEIGHT_ONLY, cases)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_scales_and_batches(simulator, bits, dtype):
    """Blocks have 32 numbers and more, a part of a split sum has some of them, and each batch has its own weight."""
    _, (m, n), *_ = TILES[bits]
    cases = []
    for group, splits in ((32, 1), (64, 2), (96, 1), (192, 4)):
        problem = a_problem(M=2, N=64, K=192, S=192 // group, bits=bits, dtype=dtype, B=2)
        cases.append((problem, WeightOnlyConfig(tile_m=m, tile_n=n, splits=splits)))
    simulator.check(WEIGHT_ONLY, cases)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_byte(simulator, bits, dtype):
    """A row of x picks a row of the weight; these have all bytes, in all columns that a thread has, and so all pairs of int4."""
    problem = a_problem(M=8, N=256 if bits == 8 else 512, K=64, S=1, bits=bits, dtype=dtype, result="fp32")
    every = np.arange(256).astype(np.uint8).view(np.int8)
    q = np.stack([np.roll(every, 37 * k) for k in range(64)])[None]
    for first in range(0, 64, 32):
        x = np.zeros(shapes(problem)["x"], operands_of(problem)["x"].dtype)
        x[0, np.arange(8), first + 4 * np.arange(8) + np.arange(8) % 4] = 1
        operands = {"x": x, "q": q, "scale": np.ones(shapes(problem)["scale"], np.float32)}
        (got,) = simulator.launch(WEIGHT_ONLY, problem, cuda_weight_only.candidates(problem)[0], operands).results
        harness.check(got, true(problem, operands))


@pytest.mark.parametrize("dtype, result", [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")])
def test_rounding(simulator, dtype, result):
    """Sums are in float32 and rounded once."""
    problems = [a_problem(M=9, N=64, K=256, S=8, bits=bits, dtype=dtype, result=result) for bits in (4, 8)]
    simulator.check(WEIGHT_ONLY, [(problem, cuda_weight_only.candidates(problem)[0]) for problem in problems], integers=False)


@pytest.mark.parametrize("sizes", [dict(K=0, S=1), dict(M=0), dict(N=0), dict(B=0)], ids=str)
def test_sizes_of_zero(simulator, sizes):
    """A sum of nothing is zero, and a result of nothing is nothing."""
    problem = a_problem(**sizes)
    operands = {name: np.zeros(shape, dtype) for name, (dtype, shape) in WEIGHT_ONLY.case(problem, CONFIG).operands.items()}
    reply = simulator.launch(WEIGHT_ONLY, problem, CONFIG, operands)
    assert reply.code == 0 and not reply.results[0].any(), reply.message


def test_what_is_infinite_stays_in_its_row(simulator):
    """An infinite scale stays in its column."""
    problem = a_problem(M=9, N=64, K=64, S=2, bits=4)
    operands = operands_of(problem, integers=False)
    spoiled = operands | {"x": operands["x"].copy(), "scale": operands["scale"].copy()}
    spoiled["x"][0, 3, 5] = np.inf
    spoiled["scale"][0, 1, 7] = np.inf
    got, want = (simulator.launch(WEIGHT_ONLY, problem, CONFIG, each).results[0][0] for each in (spoiled, operands))
    keep = np.ones(got.shape, bool)
    keep[3], keep[:, 7] = False, False
    np.testing.assert_array_equal(got[keep], want[keep])
    assert not np.isfinite(got[3].astype(np.float32)).all() and not np.isfinite(got[:, 7].astype(np.float32)).any()


def test_rows_do_not_depend_on_each_other(simulator):
    """Bit for bit: one row alone, and as one of many."""
    problem = a_problem(M=8, N=64, K=256, S=2, bits=4)
    operands = operands_of(problem, integers=False)
    (many,) = simulator.launch(WEIGHT_ONLY, problem, CONFIG, operands).results
    (one,) = simulator.launch(WEIGHT_ONLY, dataclasses.replace(problem, M=1), CONFIG, operands | {"x": operands["x"][:, 5:6]}).results
    np.testing.assert_array_equal(many[:, 5:6].view(np.uint8), one.view(np.uint8))


@pytest.mark.parametrize("name", ["x", "w", "the scale", "y"])
def test_misaligned_arrays_are_refused(simulator, name):
    problem = a_problem()
    reply = simulator.launch(WEIGHT_ONLY, problem, CONFIG, shifts={{"w": "q", "the scale": "scale"}.get(name, name): 8})
    assert (reply.code, reply.message) == (INVALID, f"weight_only: {name} does not start at a multiple of 16 bytes")


def test_division_by_the_steps_of_a_scale_is_exact():
    """The kernel does so too: the high half of a product with 2^32 over the divisor, rounded up."""
    steps = np.arange(1 << 16, dtype=np.uint64)
    for of_scale in (2, 3, 4, 5, 7, 12, 100, 255, 1023, 4097, 32768, 65535):
        np.testing.assert_array_equal(steps * np.uint64(-(-(1 << 32) // of_scale)) >> np.uint64(32), steps // np.uint64(of_scale))
