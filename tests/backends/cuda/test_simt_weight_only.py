"""The CUDA kernels of products with quantised weights on a CPU: compiled by a C++ compiler, with AddressSanitizer and UBSan, and run
through tests/csrc/simt.h.

Results are compared with float64, bit for bit where all is exact.  Every case runs with three orders of threads, on arrays of exactly their
size.  Needs g++; no GPU and no CUDA.
"""

import dataclasses
import itertools
from typing import Any

import harness
import numpy as np
import pytest
import simt
from simt_weight_only import a_problem, check_parts, operands_of, run, shapes, true

from jaxext.backends.cuda import cuda_weight_only
from jaxext.backends.cuda.cuda_weight_only import TILES, WeightOnlyConfig

INVALID, INTERNAL = 1, 2  # jaxext::Status
UNKNOWN = 999  # cudaErrorUnknown
EVERY_TILE = [pytest.param(bits, *tile, id=f"int{bits}-{tile[0]}x{tile[1]}") for bits in TILES for tile in TILES[bits]]


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return simt.build(tmp_path_factory, family="weight_only")


def check(driver, folder, cases, integers=True, **options):
    """`cases`: problems with configs."""
    asked = [(problem, config, operands_of(problem, integers)) for problem, config in cases]
    for (problem, config, operands), reply in zip(asked, run(driver, folder, asked, **options), strict=True):
        try:
            assert reply.code == 0, reply.message
            check_parts(problem, reply.parts, operands, integers)
        except AssertionError as error:
            raise AssertionError(f"{problem}, {config}: {error}") from None


@pytest.mark.parametrize("bits, tile_m, tile_n", EVERY_TILE)
def test_values(driver, tmp_path, bits, tile_m, tile_n):
    """Exactly: columns and rows of two blocks, of which the second are not full, a sum that warps share unevenly, in one part and in three,
    of which one is short; results of 16 and 32 bits."""
    config = WeightOnlyConfig(tile_m=tile_m, tile_n=tile_n)
    steps = 64 // tile_m + 3  # one for each warp, and three more
    sizes = dict(K=32 * steps, S=1, bits=bits)
    cases = [(a_problem(M=tile_m + 3, N=tile_n + 32, **sizes, dtype="bf16"), config)]
    in_parts = dataclasses.replace(config, splits=3)
    cases += [(a_problem(M=tile_m - 1, N=tile_n - 32, **sizes, dtype="fp16", result="fp32"), in_parts)]
    check(driver, tmp_path, cases)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_scales_and_batches(driver, tmp_path, bits, dtype):
    """Of 32 numbers and more, of which a part has some; each batch has its own weight."""
    _, (m, n), *_ = TILES[bits]
    cases = []
    for group, splits in ((32, 1), (64, 2), (96, 1), (192, 4)):
        problem = a_problem(M=2, N=64, K=192, S=192 // group, bits=bits, dtype=dtype, B=2)
        cases.append((problem, WeightOnlyConfig(tile_m=m, tile_n=n, splits=splits)))
    check(driver, tmp_path, cases)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_byte(driver, tmp_path, bits, dtype):
    """A row of x picks a row of the weight; these have all bytes, in all columns that a thread has, and so all pairs of int4."""
    problem = a_problem(M=8, N=256 if bits == 8 else 512, K=64, S=1, bits=bits, dtype=dtype, result="fp32")
    every = np.arange(256).astype(np.uint8).view(np.int8)
    q = np.stack([np.roll(every, 37 * k) for k in range(64)])[None]
    for first in range(0, 64, 32):
        x = np.zeros(shapes(problem)["x"], operands_of(problem)["x"].dtype)
        x[0, np.arange(8), first + 4 * np.arange(8) + np.arange(8) % 4] = 1
        operands = {"x": x, "q": q, "scale": np.ones(shapes(problem)["scale"], np.float32)}
        (reply,) = run(driver, tmp_path, [(problem, cuda_weight_only.pick(problem), operands)])
        harness.check(reply.parts[0], true(problem, operands))


@pytest.mark.parametrize("dtype, result", [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")])
def test_rounding(driver, tmp_path, dtype, result):
    """Sums are in float32 and rounded once."""
    problems = [a_problem(M=9, N=64, K=256, S=8, bits=bits, dtype=dtype, result=result) for bits in (4, 8)]
    check(driver, tmp_path, [(problem, cuda_weight_only.pick(problem)) for problem in problems], integers=False)


def test_sizes_of_zero(driver, tmp_path):
    """A sum of nothing is zero, and a result of nothing is nothing."""
    empty: Any = dict(K=0, S=1), dict(M=0), dict(N=0), dict(B=0)
    for sizes in empty:
        problem = a_problem(**sizes)
        operands = {name: np.zeros(shape, np.int8 if name == "q" else np.float32) for name, shape in shapes(problem).items()}
        operands["x"] = operands["x"].astype(operands_of(a_problem())["x"].dtype)
        (reply,) = run(driver, tmp_path, [(problem, WeightOnlyConfig(tile_m=8, tile_n=64, splits=1), operands)])
        assert reply.code == 0 and not reply.parts.any(), reply.message


def test_what_is_infinite_stays_in_its_row(driver, tmp_path):
    """And a scale that is infinite in its column."""
    problem = a_problem(M=9, N=64, K=64, S=2, bits=4)
    operands = operands_of(problem, integers=False)
    spoiled = operands | {"x": operands["x"].copy(), "scale": operands["scale"].copy()}
    spoiled["x"][0, 3, 5] = np.inf
    spoiled["scale"][0, 1, 7] = np.inf
    config = WeightOnlyConfig(tile_m=8, tile_n=64)
    got, want = (reply.parts[0, 0] for reply in run(driver, tmp_path, [(problem, config, of) for of in (spoiled, operands)]))
    keep = np.ones(got.shape, bool)
    keep[3], keep[:, 7] = False, False
    np.testing.assert_array_equal(got[keep], want[keep])
    assert not np.isfinite(got[3].astype(np.float32)).all() and not np.isfinite(got[:, 7].astype(np.float32)).any()


def test_rows_do_not_depend_on_each_other(driver, tmp_path):
    """Bit for bit: one row alone, and as one of many."""
    problem = a_problem(M=8, N=64, K=256, S=2, bits=4)
    operands = operands_of(problem, integers=False)
    config = WeightOnlyConfig(tile_m=8, tile_n=64)
    alone = a_problem(M=1, N=64, K=256, S=2, bits=4), config, operands | {"x": operands["x"][:, 5:6]}
    many, one = (reply.parts[0, 0] for reply in run(driver, tmp_path, [(problem, config, operands), alone]))
    np.testing.assert_array_equal(many[5:6].view(np.uint8), one.view(np.uint8))


LARGE: dict[str, Any] = {  # what there are more than 2^31 of -> the ends of the arrays, and what the arrays are besides
    "bytes of the weight": (dict(K=64, N=1 << 17, S=1), dict(K=1 << 15)),
    "numbers of batches": (dict(K=64, N=64, S=1, B=1), dict(B=1 << 20)),
}


@pytest.mark.parametrize("what", LARGE)
def test_more_than_2_to_the_31(driver, tmp_path, what):
    """The last block of arrays that are zero before their ends gives what the ends alone give."""
    sizes, changes = LARGE[what]
    case, whole = a_problem(M=1, **sizes), a_problem(M=1, **(sizes | changes))
    assert whole.B * whole.K * whole.N > 2**31
    operands = operands_of(case)
    config = WeightOnlyConfig(tile_m=8, tile_n=64, splits=64 if what == "bytes of the weight" else 1)
    if config.splits > 1:  # of which the last block has the end of the sum and of the columns
        (reply,) = run(driver, tmp_path, [(case, config, operands)], whole=whole, blocks=1)
        got = reply.parts[-1, 0, :, -64:]
        want = true(case, operands)[0, :, -64:]
    else:
        (reply,) = run(driver, tmp_path, [(case, config, operands)], whole=whole, blocks=1)
        got, want = reply.parts[0], true(case, operands)
    assert reply.code == 0, reply.message
    harness.check(got, want)


def test_what_cuda_remembers(driver, tmp_path):
    """An error of another's call is not taken for one of the launch; and one of a launch is told once."""
    problem = a_problem()
    asked = [(problem, cuda_weight_only.pick(problem), operands_of(problem))]
    (reply,) = run(driver, tmp_path, asked, pending=UNKNOWN)
    assert (reply.code, reply.message, reply.remembered) == (0, "", UNKNOWN)
    check_parts(problem, reply.parts, asked[0][2])
    (reply,) = run(driver, tmp_path, asked, refusal=UNKNOWN)
    assert reply.code == INTERNAL and reply.message.startswith("weight_only: the launch failed: ") and reply.remembered == 0


@pytest.mark.parametrize("name", ["x", "w", "the scale", "y"])
def test_misaligned_arrays_are_refused(driver, tmp_path, name):
    problem = a_problem()
    shifts = {{"w": "q", "the scale": "scale"}.get(name, name): 8}
    (reply,) = run(driver, tmp_path, [(problem, cuda_weight_only.pick(problem), operands_of(problem))], shifts=shifts)
    assert (reply.code, reply.message) == (INVALID, f"weight_only: {name} does not start at a multiple of 16 bytes")


@pytest.mark.parametrize("bits, M", [*itertools.product((4, 8), (1, 8, 9, 16, 17, 33, 64))])
def test_what_is_picked_is_what_is_launched(driver, tmp_path, bits, M):
    """In every configuration: the blocks that the model counts."""
    problem = a_problem(M=M, N=4096, K=4096, S=32, bits=bits)
    asked = [(problem, config, {}) for config in cuda_weight_only.candidates(problem)]
    for (_, config, _), reply in zip(asked, run(driver, tmp_path, asked, dry=True), strict=True):
        assert reply.code == 0, reply.message
        assert (reply.grid, reply.tiles * 8) == (cuda_weight_only.grid(problem, config), config.tile_m)
        assert reply.shared_bytes <= 48 << 10
