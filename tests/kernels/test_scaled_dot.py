"""kernels/scaled in Triton's interpreter: every role, with scales of every kind of block, against float64."""

from __future__ import annotations

import dataclasses

import harness
import numpy as np
import pytest
from cases import random

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import scaled
from jaxext.kernels.matmul import Config

ROLES = {"nn": "y", "nt": "x", "tn": "w"}
PAIRS = {"x": "MK", "w": "KN", "y": "MN"}
BLOCKS = dict(M="I", K="S", N="J")
CONFIG = Config(tile_m=16, tile_n=32, tile_k=32)
SIZES = (24, 64, 40)  # of rows, depth and columns
CUTS = {
    "tensor": (1, 1, 1),
    "rows and columns": (24, 1, 40),
    "along the sum": (24, 2, 40),
    "squares": (3, 2, 5),
    "fine": (24, 64, 5),
}  # blocks


def a_problem(role, slots, cuts=(24, 2, 40), sizes=SIZES, dtypes=("bf16", "i8", "fp32"), B=1, packed=False, arch=90):
    of = {"nn": "MKN", "nt": "MNK", "tn": "KMN"}[role]
    (M, K, N), (i, s, j) = ([each[of.index(letter)] for letter in "MKN"] for each in (sizes, cuts))
    name = f"scaled_dot_{''.join(slots)}_{role}"
    fields = dict(B=B, M=M, K=K, N=N, I=i, S=s, J=j, dtypes=dtypes, precision="ieee", arch=arch)
    return scaled.Problem(name=name, role=role, scaled=tuple(slots), packed=packed, **fields)


def shape(problem, slot) -> tuple[int, int, int]:
    return (problem.B, *(getattr(problem, letter) for letter in PAIRS[slot]))


def factors(problem) -> list[str]:
    return [slot for slot in "xwy" if slot != ROLES[problem.role]]


def some_operands(problem, integers=True) -> dict[str, np.ndarray]:
    operands = {}
    for seed, (slot, dtype) in enumerate(zip(factors(problem), problem.dtypes, strict=False)):
        numbers = random(shape(problem, slot), DTYPES[dtype], seed, integers)
        operands[slot] = pack(numbers) if problem.packed and slot == "w" else numbers
    for seed, slot in enumerate(problem.scaled):
        blocks = (problem.B, *(getattr(problem, BLOCKS[letter]) for letter in PAIRS[slot]))
        rng = np.random.default_rng(7 + seed)
        scale = np.exp2(rng.integers(-2, 3, blocks)) if integers else rng.random(blocks)
        operands[f"{slot}_scale"] = scale.astype(np.float32)
    return operands


def pack(numbers: np.ndarray) -> np.ndarray:
    low, high = numbers[..., ::2], numbers[..., 1::2]
    return ((low & 15) | (high << 4)).astype(np.int8)


def unpack(pairs: np.ndarray) -> np.ndarray:
    halves = np.stack([pairs & 15, (pairs >> 4) & 15], -1).reshape(*pairs.shape[:-1], -1)
    return np.where(halves > 7, halves - 16, halves)


def true(problem, operands) -> np.ndarray:
    def value(slot):
        x = unpack(operands[slot]) if problem.packed and slot == "w" else operands[slot]
        return x.astype(np.float64) * spread(slot)

    def spread(slot):
        if slot not in problem.scaled:
            return 1.0
        scale = operands[f"{slot}_scale"].astype(np.float64)
        for axis in (1, 2):
            scale = np.repeat(scale, shape(problem, slot)[axis] // scale.shape[axis], axis)
        return scale

    first, second = map(value, factors(problem))
    equation = {"nn": "bmk,bkn->bmn", "nt": "bkn,bmn->bmk", "tn": "bmk,bmn->bkn"}[problem.role]
    return np.einsum(equation, first, second) * spread(ROLES[problem.role])


def magnitude(problem, operands) -> np.ndarray:
    """Of the products that are added up."""
    numbers = operands | ({"w": unpack(operands["w"])} if problem.packed else {})
    return true(dataclasses.replace(problem, packed=False), {name: np.abs(x.astype(np.float64)) for name, x in numbers.items()})


def check(problem, config=CONFIG, integers=True) -> None:
    harness.skip_what_is_overwritten(scaled, problem)
    operands = some_operands(problem, integers)
    got = harness.run(scaled.launch(problem, config), operands, shape(problem, ROLES[problem.role]), problem.dtypes[2])
    harness.check(got, true(problem, operands), None if integers else magnitude(problem, operands))


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("role", ROLES)
def test_blocks(role, cuts):
    """With scales of both factors and of the result, where a scale that changes along the sum has blocks of a step or more."""
    check(a_problem(role, "xwy", cuts))


@pytest.mark.parametrize("slots", ["x", "w", "y", "xw", "wy"])
@pytest.mark.parametrize("role", ROLES)
def test_absent_scales(role, slots):
    check(a_problem(role, slots, (1, 1, 1)))


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bf16", "bf16", "bf16"),
        ("fp8e4nv", "fp8e4nv", "fp32"),
        ("fp8e4nv", "fp8e5", "bf16"),
        ("i8", "i8", "fp32"),
        ("fp16", "fp8e4nv", "fp16"),
        ("i8", "fp8e4nv", "fp32"),
        ("fp32", "i8", "fp32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ROLES)
def test_dtypes(role, dtypes):
    check(a_problem(role, "xw", (1, 3, 1), (20, 96, 24), dtypes))


@pytest.mark.parametrize("dtypes", [("bf16", "i8", "bf16"), ("fp8e4nv", "fp8e4nv", "fp32"), ("i8", "i8", "bf16"), ("fp32",) * 3], ids=str)
@pytest.mark.parametrize("role", ROLES)
def test_fine_scales(role, dtypes):
    """For each number of the sum, or for some, beside the end of a tile."""
    for cuts in [(1, 39, 1), (20, 13, 24)]:
        check(a_problem(role, "xwy", cuts, (20, 39, 24), dtypes))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("other", ["bf16", "i8"])
@pytest.mark.parametrize("role", ["nn", "nt"])
def test_packed(role, other, arch):
    """Two int4 in a byte, along the columns or along the depth."""
    dtypes = (other, "i8", "fp32") if role == "nn" else ("i8", other, "fp32")
    problem = a_problem(role, "w", (1, 2, 19), (20, 64, 38), dtypes, packed=True, arch=arch)
    check(problem)
    check(dataclasses.replace(problem, B=2), integers=other == "i8")


@pytest.mark.parametrize("role", ROLES)
def test_split_depth(role):
    """Partial results of scaled steps, the last beyond the end of the sum."""
    check(a_problem(role, "xwy", (1, 5, 1), (20, 160, 24)), dataclasses.replace(CONFIG, splits=3))


def test_what_is_refused():
    assert scaled.supports(a_problem("nn", "w", (1, 4, 1))) is None
    refused = {
        "want an even number": a_problem("nn", "w", (1, 1, 1), (24, 64, 41), packed=True),
        "8-bit floats need compute capability 8.9": a_problem("nn", "w", dtypes=("fp8e4nv", "i8", "fp32"), arch=80),
        "fp32 and i8 into fp8e5": a_problem("nn", "w", dtypes=("fp32", "i8", "fp8e5")),
    }
    for reason, problem in refused.items():
        assert reason in (scaled.supports(problem) or "")
        with pytest.raises(ValueError, match="scaled_dot_w_nn"):
            scaled.launch(problem, CONFIG)
    with pytest.raises(ValueError, match="a step lies within a block"):
        scaled.launch(a_problem("nn", "w"), dataclasses.replace(CONFIG, tile_k=64))


def test_steps_lie_within_blocks():
    for sizes, cuts in [((64, 4096, 4096), (1, 32, 4096)), ((16, 4096, 1024), (1, 128, 8)), ((1024, 1536, 512), (1024, 12, 4))]:
        for dtypes in [("bf16", "i8", "bf16"), ("fp8e4nv", "fp8e4nv", "bf16")]:
            problem = a_problem("nn", "xw", cuts, sizes, dtypes)
            configs = scaled.candidates(problem)
            assert configs and all(sizes[1] // cuts[1] % config.tile_k == 0 for config in configs)
            assert all(scaled.launch(problem, config) for config in configs)
