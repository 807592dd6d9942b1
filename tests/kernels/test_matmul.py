"""kernels/matmul in Triton's interpreter: every role, dtype and edge of a tile against float64, and what it refuses.

Operands are small integers wherever they can be, whose sums are exact in float32 in any order: the result is then right bit for bit or
it is wrong.  The tiles are the smallest, so that small problems have many.
"""

from __future__ import annotations

import dataclasses

import accuracy
import numpy as np
import pytest
from cases import random
from harness import GUARD, check, interpreting, run, skip_what_is_overwritten

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import matmul
from jaxext.kernels.launch import SHARED_MEMORY, cdiv
from jaxext.kernels.matmul import Config, Problem

LABELS = {"a": "bmk", "b": "bkn", "c": "bmn"}
OPEN = {"nn": "c", "nt": "a", "tn": "b"}
ROLES = tuple(OPEN)

# name -> B, M, N, K
SIZES = {
    "odd": (1, 17, 33, 19),
    "whole_tiles": (2, 16, 32, 48),
    "batch": (3, 5, 18, 20),
    "ones": (1, 1, 1, 1),
    "one_row": (1, 1, 40, 33),
    "one_column": (1, 33, 1, 40),
    "outer": (2, 19, 18, 1),
    "bands": (1, 150, 17, 16),  # more rows of tiles than a band has
    "bands_tn": (1, 16, 17, 150),
    "no_m": (2, 0, 5, 6),
    "no_n": (2, 5, 0, 6),
    "no_k": (2, 5, 6, 0),
    "no_batch": (0, 5, 6, 7),
}
DEEP = {"nn": (2, 18, 20, 70), "nt": (2, 18, 70, 20), "tn": (2, 70, 20, 18)}  # five steps of 16 in depth

FLOATS = ("fp32", "bf16", "fp16")
DTYPES_OF_A_CALL = (
    *((x, x, y) for x in FLOATS for y in FLOATS),
    *((x, y, "fp32") for x in FLOATS for y in FLOATS if x != y),
    *((x, y, "fp32") for x in ("fp8e4nv", "fp8e5") for y in ("fp8e4nv", "fp8e5")),
    *(("fp8e4nv", "fp8e5", y) for y in ("bf16", "fp16")),
    *(("fp8e4nv", x, x) for x in FLOATS),
    ("i8", "i8", "i32"),
)


def a_problem(role, sizes, dtypes=("fp32", "fp32", "fp32"), precision="ieee", arch=90) -> Problem:
    return Problem(name=f"matmul_{role}", role=role, **dict(zip("BMNK", sizes, strict=True)), dtypes=dtypes, precision=precision, arch=arch)


def small_tiles(problem: Problem, splits: int = 1) -> Config:
    return Config(tile_m=16, tile_n=16, tile_k=16 if problem.bits > 8 else 32, splits=splits)


def shape(problem: Problem, slot: str) -> tuple[int, ...]:
    return tuple(getattr(problem, label.upper()) for label in LABELS[slot])


def some_operands(problem: Problem, integers: bool = True) -> dict[str, np.ndarray]:
    slots = [slot for slot in LABELS if slot != OPEN[problem.role]]
    return {
        slot: random(shape(problem, slot), DTYPES[dtype], seed, integers)
        for seed, (slot, dtype) in enumerate(zip(slots, problem.dtypes, strict=False))
    }


def true(problem: Problem, operands) -> np.ndarray:
    equation = f"{','.join(LABELS[slot] for slot in operands)}->{LABELS[OPEN[problem.role]]}"
    return np.einsum(equation, *(x.astype(np.float64) for x in operands.values()))


def compute(problem: Problem, config: Config, operands) -> np.ndarray:
    skip_what_is_overwritten(matmul, problem)
    return run(matmul.launch(problem, config), operands, shape(problem, OPEN[problem.role]), problem.dtypes[2])


def check_exactly(problem: Problem, splits: int = 1) -> None:
    operands = some_operands(problem)
    check(compute(problem, small_tiles(problem, splits), operands), true(problem, operands))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("role", ROLES)
def test_sizes(role, sizes):
    check_exactly(a_problem(role, sizes, ("bf16", "bf16", "fp32")))


@pytest.mark.parametrize("dtypes", DTYPES_OF_A_CALL, ids="_".join)
@pytest.mark.parametrize("role", ROLES)
def test_dtypes(role, dtypes):
    check_exactly(a_problem(role, SIZES["odd"], dtypes))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
@pytest.mark.parametrize("role", ROLES)
def test_precisions(role, precision):
    check_exactly(a_problem(role, SIZES["odd"], precision=precision))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("role", ROLES)
def test_rounding(role, dtype):
    problem = a_problem(role, DEEP[role], (dtype, dtype, dtype))
    operands = some_operands(problem, integers=False)
    magnitudes = {slot: np.abs(x) for slot, x in operands.items()}
    check(compute(problem, small_tiles(problem, 2), operands), true(problem, operands), true(problem, magnitudes))


def multiplied(precision, pair):
    """The operands, and what the kernel makes of them."""
    problem = a_problem("nn", (1, 20, 18, 70), precision=precision)
    a, b = pair(np.random.default_rng(0), 20, 70, 18)
    with np.errstate(all="ignore"):
        return a, b, compute(problem, small_tiles(problem), {"a": a[None], "b": b[None]})[0]


@pytest.mark.parametrize("precision", accuracy.EXACT)
def test_how_exact_a_precision_is(precision):
    """As of what the compiler makes (tests/ptx/test_float32_accuracy.py).  Tensor cores cut sums off: 3.0 times the error for "mixed"."""
    factor = 2 if interpreting() or precision == "ieee" else 4
    for name, pair in accuracy.FINITE.items():
        a, b, got = multiplied(precision, pair)
        error, own = accuracy.error(got, a, b), accuracy.error(accuracy.fma(a, b), a, b)
        assert (error <= factor * own) == (name in accuracy.EXACT[precision]), (name, error, own)


@pytest.mark.parametrize("precision", accuracy.EXACT)
def test_infinities_stay(precision):
    for name, pair in accuracy.SPECIAL.items():
        a, b, got = multiplied(precision, pair)
        assert accuracy.same_special(got, accuracy.fma(a, b)) == (precision == "ieee" or "subnormal" not in name), name


@pytest.mark.parametrize("role", ["nn", "tn"])
def test_tf32_keeps_ten_bits(role):
    """Where a tile goes through registers the bits that TF32 lacks are dropped by hand: those and no others."""
    problem = a_problem(role, (1, 16, 16, 16), precision="tf32")
    launch = matmul.launch(problem, small_tiles(problem))
    operands = {slot: (1 + np.abs(x) * 2.0**-10).astype(np.float32) for slot, x in some_operands(problem).items()}
    turned = [slot for slot, it_is in zip(launch.operands, problem.turned, strict=True) if it_is]
    more = {slot: x + np.float32(2.0**-11) if slot in turned else x for slot, x in operands.items()}
    want = true(problem, operands)
    assert turned
    check(compute(problem, small_tiles(problem), more), want, want)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32", "bf16"), ("i8", "i8", "i32")], ids="_".join)
@pytest.mark.parametrize("role", ROLES)
def test_split_depth(role, dtypes, splits):
    """7: more splits than steps, so some have nothing to add."""
    check_exactly(a_problem(role, DEEP[role], dtypes), splits)


def test_long_sums_of_integers_are_split():
    """Tensor cores saturate (mma's satfinite) where a sum leaves int32; sums of shorter parts are added up by XLA, and wrap."""
    problem = a_problem("nn", (1, 4096, 4096, 1 << 18), ("i8", "i8", "i32"))
    assert all(cdiv(problem.K, config.splits) < 2**17 for config in matmul.candidates(problem))
    with pytest.raises(ValueError, match="adds up 262144 products of int8, tensor cores may saturate"):
        matmul.launch(problem, dataclasses.replace(matmul.candidates(problem)[0], splits=1))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("role", ROLES)
def test_same_bits_twice(role, splits):
    problem = a_problem(role, DEEP[role])
    operands = some_operands(problem, integers=False)
    first, second = (compute(problem, small_tiles(problem, splits), operands) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("role", ROLES)
def test_wide_offsets(role):
    """Offsets of 64 bits, as for an array too large to test here."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wide(Problem):
        index = "int64"  # pyright: ignore[reportAssignmentType]

    assert a_problem(role, (9, 2**16, 2**15 - 1, 2)).index == "int32"
    assert a_problem(role, (1, 2, 2**15, 2**16)).index == "int64"
    problem = a_problem(role, SIZES["odd"])
    check_exactly(Wide(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}))


@pytest.mark.parametrize("role", ROLES)
def test_the_config_that_is_picked(role):
    problem = a_problem(role, (1, 40, 40, 40), ("bf16", "bf16", "bf16"))
    operands = some_operands(problem)
    check(compute(problem, matmul.candidates(problem)[0], operands), true(problem, operands))


# What is checked would be found.


def test_a_tile_that_is_not_written_is_found():
    problem = a_problem("nn", SIZES["odd"])
    launch, operands = matmul.launch(problem, small_tiles(problem)), some_operands(problem)
    got = run(dataclasses.replace(launch, grid=(launch.grid[0] - 1,)), operands, (1, 17, 33), "fp32")
    with pytest.raises(AssertionError, match="never written"):
        check(got, true(problem, operands))


@pytest.mark.skipif(GUARD == 0, reason="nothing guards the result")
def test_a_tile_too_many_is_found():
    problem = a_problem("nn", SIZES["odd"])
    two = dataclasses.replace(problem, B=2)
    with pytest.raises(AssertionError, match="written beside the result"):
        run(matmul.launch(two, small_tiles(two)), some_operands(problem), (1, 17, 33), "fp32")


def test_a_step_too_few_is_found():
    problem = a_problem("nn", SIZES["odd"])
    launch, operands = matmul.launch(problem, small_tiles(problem)), some_operands(problem)
    short = dataclasses.replace(
        launch, constants={**launch.constants, "TILES": (*launch.constants["TILES"][:2], launch.constants["TILES"][2] - 1)}
    )
    with pytest.raises(AssertionError, match="are wrong, the first at"):
        check(run(short, operands, (1, 17, 33), "fp32"), true(problem, operands))


# What the problem and the device cannot have.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": 75}, "compute capability 7.5, want one of 8.0, "),
        ({"dtypes": ("i8", "i8", "fp32")}, r"i8 and i8 into fp32 \(integers: i8 and i8 into i32\)"),
        ({"dtypes": ("i8", "bf16", "fp32")}, "i8 and bf16 into fp32"),
        ({"dtypes": ("fp64", "fp32", "fp32")}, "fp64 and fp32 into fp32"),
        ({"dtypes": ("bf16", "bf16", "fp8e5")}, "bf16 and bf16 into fp8e5"),
        ({"dtypes": ("fp8e4nv", "fp8e5", "fp32"), "arch": 86}, "8-bit floats need compute capability 8.9, got 8.6"),
        ({"precision": "bf16x9"}, "precision 'bf16x9' of float32"),
        ({"B": 2**31}, "2147483648 results of 17 by 33 have more tiles than a grid has programs, 2147483647"),
        ({"B": 2**31, "dtypes": ("i8", "i8", "i32")}, "have more tiles than a grid has programs"),
    ],
)
def test_problems_that_are_refused(change, reason):
    problem = dataclasses.replace(a_problem("nn", SIZES["odd"]), **change)
    with pytest.raises(ValueError, match=reason) as caught:
        matmul.launch(problem, small_tiles(problem))
    assert str(caught.value) == f"matmul_nn: {matmul.supports(problem)}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_m": 48}, "matmul_nn: tile_m is 48, want a power of two, at least 16"),
        ({"tile_n": 8}, "matmul_nn: tile_n is 8, want a power of two, at least 16"),
        ({"tile_k": 8}, "matmul_nn: tile_k is 8, want a power of two, at least 16"),
        ({"splits": 0}, "matmul_nn: splits is 0"),
        ({"tile_n": 1024, "tile_k": 64}, "matmul_nn: .* needs 532480 bytes of shared memory, compute capability 9.0 has 232448"),
        ({"splits": 2**31}, "programs, a grid has at most 2147483647"),
    ],
)
def test_configs_that_are_refused(change, reason):
    problem = a_problem("nn", SIZES["odd"])
    with pytest.raises(ValueError, match=reason):
        matmul.launch(problem, dataclasses.replace(small_tiles(problem), **change))


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
def test_sums_of_parts_that_exceed_tensor_memory_are_refused(precision):
    """Triton would make an empty kernel of them."""
    problem = a_problem("nn", SIZES["odd"], ("fp32",) * 3, precision=precision, arch=100)
    config = matmul.Config(tile_m=128, tile_n=256, tile_k=16, num_warps=8)
    with pytest.raises(ValueError, match="matmul_nn: .* needs (784|1552) columns of tensor memory, compute capability 10.0 has 512"):
        matmul.launch(problem, config)
    matmul.launch(dataclasses.replace(problem, precision="tf32"), config)


@pytest.mark.parametrize("dtypes", DTYPES_OF_A_CALL, ids="_".join)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_candidates_can_be_launched(arch, dtypes):
    for sizes in ((1, 4096, 4096, 4096), (8, 1, 4096, 4096), (1, 100, 100, 100_000), (5, 3, 3, 0)):
        problem = a_problem("nt", sizes, dtypes, precision="tf32", arch=arch)
        if reason := matmul.supports(problem):
            assert arch < 89 or "overwrites factors" in reason
            continue
        configs = matmul.candidates(problem)
        assert matmul.candidates(problem)[0] in configs and 5 <= len(configs) == len(set(configs)) <= 20
        for config in configs:
            assert matmul.launch(problem, config).splits <= max(1, cdiv(problem.depth, config.tile_k))


def test_no_candidate_has_more_programs_than_a_grid():
    """Where small tiles are too many, large ones are not."""
    problem = a_problem("nn", (2**28, 64, 64, 64), ("bf16",) * 3)
    assert {config.tile_m * config.tile_n for config in matmul.candidates(problem)} >= {64 * 64, 128 * 256}
    for config in matmul.candidates(problem):
        matmul.launch(problem, config)


def test_pick():
    """The heuristic where it must be plain what is best; a measured table may change the rest."""

    def tile(*sizes, dtype="bf16", **more):
        config = matmul.candidates(a_problem("nn", sizes, (dtype,) * 3, **more))[0]
        return config.tile_m, config.tile_n, config.tile_k, config.splits

    assert tile(1, 8192, 8192, 8192) == (128, 256, 64, 1)
    assert tile(1, 8192, 8192, 8192, dtype="fp32", precision="tf32") == (128, 128, 32, 1)
    assert tile(1, 1, 4096, 4096) == (16, 128, 64, 4)  # 32 tiles would leave three of four multiprocessors idle
    assert tile(1, 4096, 1, 4096) == (128, 16, 64, 4)
    assert tile(1, 64, 64, 100_000)[3] > 100
    assert tile(4096, 4, 4, 4) == (16, 16, 64, 1)
    assert tile(1, 8191, 8191, 8191) == (128, 128, 32, 1)  # copies of single numbers: 16 of each operand per thread
