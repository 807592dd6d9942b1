"""kernels/matmul in Triton's interpreter: every role, dtype and edge of a tile against float64, and what it refuses.

Operands are small integers wherever they can be, whose sums are exact in float32 in any order: the result is then right bit for bit or
it is wrong.  The tiles are the smallest, so that small problems have many.
"""

from __future__ import annotations

import dataclasses

import accuracy
import numpy as np
import pytest
from calls import Call, Suite, changed, each
from harness import GUARD

from jaxext.backends.triton.interpreter import interpreting
from jaxext.kernels import matmul
from jaxext.kernels.launch import PRODUCTS_OF_PARTS, SHARED_MEMORY, cdiv
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


class MatmulCall(Call):
    kernel, open = "matmul", OPEN

    def small(self) -> Config:
        return Config(tile_m=16, tile_n=16, tile_k=16 if self.problem.bits > 8 else 32)

    def sums(self, operands) -> np.ndarray:
        """Return those of both halves of the columns, if these are gated: [B,M,2,N]."""
        labels = LABELS | ({"b": "bkgn", "c": "bmgn"} if self.problem.gated else {})
        slots = [slot for slot in LABELS if slot != OPEN[self.problem.role]]
        equation = f"{','.join(labels[slot] for slot in slots)}->{labels[OPEN[self.problem.role]]}"
        return np.einsum(equation, *(operands[slot].astype(np.float64) for slot in slots))


def a_call(role, sizes=SIZES["odd"], dtypes=("fp32", "fp32", "fp32"), precision="ieee", arch=90, **changes) -> MatmulCall:
    return MatmulCall.smallest(a_problem(role, sizes, dtypes, precision, arch), **changes)


def short_depth(launch):
    *tiles, steps = launch.constants["TILES"]
    return dataclasses.replace(launch, constants={**launch.constants, "TILES": (*tiles, steps - 1)})


INTEGERS = ("i8", "i8", "i32")
MODELS = (1, 4096, 4096, 4096), (8, 1, 4096, 4096), (1, 100, 100, 100_000), (5, 3, 3, 0)


class TestMatmul(Suite):
    call, least, most = MatmulCall, 5, 20
    geometry = each(lambda role, name: a_call(role, SIZES[name], ("bf16", "bf16", "fp32")), ROLES, SIZES)
    dtypes = each(lambda role, dtypes: a_call(role, dtypes=dtypes), ROLES, DTYPES_OF_A_CALL)
    configs = [
        *each(lambda role, precision: a_call(role, precision=precision), ROLES, ["tf32", "tf32x3", "ieee"]),
        # seven splits are more than there are steps, so some have nothing to add
        *each(lambda role, dtypes, n: a_call(role, DEEP[role], dtypes, splits=n), ROLES, [("fp32", "fp32", "bf16"), INTEGERS], [2, 3, 7]),
        *each(lambda role: MatmulCall.picked(a_problem(role, (1, 40, 40, 40), ("bf16",) * 3)), ROLES),
    ]
    rounding = each(lambda role, dtype: a_call(role, DEEP[role], (dtype,) * 3, splits=2), ROLES, FLOATS)
    same_bits = each(lambda role, splits: a_call(role, DEEP[role], splits=splits), ROLES, [1, 3])
    refused_problems = changed(
        a_call("nn"),
        ({"arch": 75}, "compute capability 7.5, want one of 8.0, "),
        ({"dtypes": ("i8", "i8", "fp32")}, r"i8 and i8 into fp32 \(integers: i8 and i8 into i32\)"),
        ({"dtypes": ("i8", "bf16", "fp32")}, "i8 and bf16 into fp32"),
        ({"dtypes": ("fp64", "fp32", "fp32")}, "fp64 and fp32 into fp32"),
        ({"dtypes": ("bf16", "bf16", "fp8e5")}, "bf16 and bf16 into fp8e5"),
        ({"dtypes": ("fp8e4nv", "fp8e5", "fp32"), "arch": 86}, "8-bit floats need compute capability 8.9, got 8.6"),
        ({"precision": "bf16x9"}, "precision 'bf16x9' of float32"),
        ({"B": 2**31}, "2147483648 results of 17 by 33 have more tiles than a grid has programs, 2147483647"),
        ({"B": 2**31, "dtypes": INTEGERS}, "have more tiles than a grid has programs"),
    )
    refused_configs = [
        (a_call("nn", tile_m=48), "tile_m is 48, want a power of two, at least 16"),
        (a_call("nn", tile_n=8), "tile_n is 8, want a power of two, at least 16"),
        (a_call("nn", tile_k=8), "tile_k is 8, want a power of two, at least 16"),
        (a_call("nn", splits=0), "splits is 0"),
        (a_call("nn", tile_n=1024, tile_k=64), "needs 532480 bytes of shared memory, compute capability 9.0 has 232448"),
        (MatmulCall.picked(a_problem("nn", MODELS[0], ("bf16",) * 3), num_stages=20), r"needs \d+ bytes of shared memory, .* 232448"),
        (a_call("nn", splits=2**31), "programs, a grid has at most 2147483647"),
    ]
    tensor_memory = each(
        lambda precision: a_call("nn", precision=precision, arch=100, tile_m=128, tile_n=256, num_warps=8), PRODUCTS_OF_PARTS
    )
    long_sums_of_integers = [(a_problem("nn", (1, 4096, 4096, 1 << 18), INTEGERS), 1 << 18)]
    wrong_launches = [
        pytest.param(a_call("nn"), lambda launch: dataclasses.replace(launch, grid=(launch.grid[0] - 1,)), "never written", id="a tile"),
        pytest.param(
            a_call("nn"), dict(B=2), "written beside the result", id="another batch",
            marks=pytest.mark.skipif(GUARD == 0, reason="nothing guards the result"),
        ),
        pytest.param(a_call("nn"), short_depth, "are wrong, the first at", id="a step"),
    ]  # fmt: skip
    candidates = each(
        lambda arch, dtypes: [a_problem("nt", sizes, dtypes, "tf32", arch) for sizes in MODELS], SHARED_MEMORY, DTYPES_OF_A_CALL
    )

    def check_candidate(self, problem, config, launch):
        assert launch.splits <= max(1, cdiv(problem.depth, config.tile_k))


def multiplied(precision, pair):
    """The operands, and what the kernel makes of them."""
    problem = a_problem("nn", (1, 20, 18, 70), precision=precision)
    a, b = pair(np.random.default_rng(0), 20, 70, 18)
    with np.errstate(all="ignore"):
        return a, b, MatmulCall(problem).compute({"a": a[None], "b": b[None]})[0][0]


@pytest.mark.parametrize("precision", accuracy.EXACT)
def test_how_exact_a_precision_is(precision):
    """Limits are for compiled code (tests/ptx/test_float32_accuracy.py).  Tensor cores cut sums off: 3.0 times the error for "mixed"."""
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
    """A tile that goes through registers loses the bits that TF32 lacks by hand: those and no others."""
    problem = a_problem(role, (1, 16, 16, 16), precision="tf32")
    call = MatmulCall(problem)
    operands = {slot: (1 + np.abs(x) * 2.0**-10).astype(np.float32) for slot, x in call.operands().items()}
    turned = [slot for slot, it_is in zip(call.launch.operands, problem.turned, strict=True) if it_is]
    more = {slot: x + np.float32(2.0**-11) if slot in turned else x for slot, x in operands.items()}
    assert turned
    call.judge(call.compute(more), operands, exact=False)


@pytest.mark.parametrize("role", ROLES)
def test_wide_offsets(role):
    """Offsets of 64 bits, as for an array too large to test here."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wide(Problem):
        index = "int64"  # pyright: ignore[reportAssignmentType]

    assert a_problem(role, (9, 2**16, 2**15 - 1, 2)).index == "int32"
    assert a_problem(role, (1, 2, 2**15, 2**16)).index == "int64"
    problem = a_problem(role, SIZES["odd"])
    MatmulCall(Wide(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)})).check()


def test_no_candidate_has_more_programs_than_a_grid():
    """Large tiles remain where small ones are too many."""
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
