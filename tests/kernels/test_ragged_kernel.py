"""kernels/ragged in Triton's interpreter: every role against float64, with ranges of every kind, and rows that nobody may read."""

from __future__ import annotations

import dataclasses
import itertools

import epilogues
import harness
import numpy as np
import pytest
import test_matmul
from cases import random

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import matmul, ragged
from jaxext.kernels.launch import MOST_PROGRAMS
from jaxext.kernels.matmul import Config
from jaxext.kernels.ragged.problem import visits

ROLES = {"nn": "y", "nt": "x", "tn": "w"}
OPERANDS = {"nn": ("x", "w"), "nt": ("w", "y"), "tn": ("x", "y")}  # in the order of slots
TILE = 16
# The sizes of groups, of which the rows may be more: none, one, all in one, edges on and beside those of tiles, many in one tile.
SIZES = {
    "balanced": (16, 16, 16),
    "edges beside those of tiles": (13, 22, 9),
    "empty ones": (0, 5, 0, 0, 30, 0),
    "one": (40,),
    "all in one": (0, 48, 0),
    "many in a tile": (1, 2, 3, 1, 4, 1, 2),
    "none": (0, 0),
    "one row each": (1,) * 9,
    "a tile and a row": (17, 16, 15),
}
CONFIG = Config(tile_m=TILE, tile_n=16, tile_k=16)


def a_problem(role, ranges, rows=48, B=1, P=1, R=1, K=21, N=19, dtypes=("fp32",) * 3, precision="ieee", arch=90) -> ragged.Problem:
    sizes = dict(B=B, P=P, R=R, M=rows, K=K, N=N, G=ranges[0].shape[-1])
    return ragged.Problem(name=f"ragged_{role}", role=role, **sizes, dtypes=dtypes, precision=precision, arch=arch)


def ranges_of(sizes, B=1, P=1, offset=0) -> tuple[np.ndarray, np.ndarray]:
    """As companions, the groups of each p one further than those before."""
    each = np.stack([np.roll(sizes, i) for i in range(B * P)]).reshape(B, P, -1)
    end = offset + np.cumsum(each, -1)
    return (end - each).astype(np.int32), end.astype(np.int32)


def true(problem, operands, begin, end) -> np.ndarray:
    """Rows of no group are not looked at."""
    result = np.zeros(problem.shapes[ROLES[problem.role]])
    for b, p, g in itertools.product(range(problem.B), range(problem.P), range(problem.G)):
        rows = slice(int(begin[b, p, g]), int(end[b, p, g]))
        part = {slot: of[b, g] if slot == "w" else of[b, p, :, rows] for slot, of in operands.items()}
        part = {slot: of.astype(np.float64) for slot, of in part.items()}
        if problem.role == "nn":
            result[b, p, :, rows] = part["x"] @ part["w"]
        elif problem.role == "nt":
            result[b, p, :, rows] = part["y"] @ part["w"].T
        else:
            result[b, g] += np.einsum("rmk,rmn->kn", part["x"], part["y"])
    return result


def compute(problem, operands, begin, end, config=CONFIG) -> np.ndarray:
    harness.skip_what_is_overwritten(ragged, problem)
    given = operands | dict(begin=begin, end=end, visits=visits(np, begin, end, problem.M, config.tile_m))
    return harness.run(ragged.launch(problem, config), given, problem.shapes[ROLES[problem.role]], problem.dtypes[2])


def some_operands(problem, begin, end, integers=True) -> dict[str, np.ndarray]:
    """Rows of no group are NaN, which must not reach the result."""
    row = np.arange(problem.M)
    nobodys = ~((begin[..., None] <= row) & (row < end[..., None])).any(2)  # [B,P,M]
    operands = {}
    for seed, (slot, dtype) in enumerate(zip(OPERANDS[problem.role], problem.dtypes, strict=False)):
        operands[slot] = random(problem.shapes[slot], DTYPES[dtype], seed, integers)
        if slot != "w":
            operands[slot][np.broadcast_to(nobodys[:, :, None], operands[slot].shape[:-1])] = np.nan
    return operands


def check(problem, begin, end, integers=True, config=CONFIG) -> None:
    operands = some_operands(problem, begin, end, integers)
    absolute = {slot: np.abs(values.astype(np.float64)) for slot, values in operands.items()}
    truth, scale = (true(problem, each, begin, end) for each in (operands, absolute))
    harness.check(compute(problem, operands, begin, end, config), truth, None if integers else scale)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("role", ROLES)
def test_ranges(role, sizes):
    begin, end = ranges_of(sizes)
    check(a_problem(role, (begin, end)), begin, end)


@pytest.mark.parametrize("role", ROLES)
def test_rows_before_the_first_group(role):
    """A device that has only some groups."""
    begin, end = ranges_of((7, 0, 14), offset=19)
    check(a_problem(role, (begin, end)), begin, end, integers=False)


@pytest.mark.parametrize("role", ROLES)
def test_batches(role):
    """Every p has groups of its own, every r the same."""
    begin, end = ranges_of((5, 0, 21, 9), B=2, P=3)
    check(a_problem(role, (begin, end), B=2, P=3, R=2), begin, end, integers=False)


@pytest.mark.parametrize(
    "dtypes", [("bf16",) * 3, ("fp16", "fp16", "fp32"), ("fp8e4nv", "fp8e4nv", "fp32"), ("fp32", "bf16", "fp32")], ids=str
)
@pytest.mark.parametrize("role", ROLES)
def test_dtypes(role, dtypes):
    begin, end = ranges_of((13, 22, 9))
    config = dataclasses.replace(CONFIG, tile_k=32)
    check(a_problem(role, (begin, end), dtypes=dtypes, precision="tf32"), begin, end, config=config)


@pytest.mark.parametrize("role", ROLES)
def test_no_rows_or_groups(role):
    begin, end = (np.zeros((1, 1, 3), np.int32) for _ in range(2))
    check(a_problem(role, (begin, end), rows=0), begin, end)


@pytest.mark.parametrize("seed", range(30))
def test_visits(seed):
    """Each row is written by one visit, and multiplied by that of its group."""
    rng = np.random.default_rng(seed)
    rows, tile, groups = int(rng.integers(1, 70)), int(rng.choice([4, 16])), int(rng.integers(1, 9))
    cuts = np.sort(rng.integers(0, rows + 1, (2, 1, groups + 1)), -1).astype(np.int32)
    begin, end = cuts[..., :-1], cuts[..., 1:].copy()
    end -= np.where(rng.random(end.shape) < 0.3, (end - begin) // 2, 0).astype(np.int32)  # rows between groups
    found = visits(np, begin, end, rows, tile)
    assert found.shape == (2, 1, -(-rows // tile) + groups - 1, 5) and found.dtype == np.int32
    for b in range(2):
        written, multiplied = np.zeros(rows, int), np.full(rows, -1)
        for group, first, last, low, high in found[b, 0]:
            assert first >= last or low // tile == (high - 1) // tile == first // tile and low <= first and last <= high
            written[low:high] += 1
            assert (multiplied[first:last] == -1).all()
            multiplied[first:last] = group
        assert (written == 1).all()
        for row in range(rows):
            (mine,) = np.nonzero((begin[b, 0] <= row) & (row < end[b, 0]))[0].tolist() or (-1,)
            assert multiplied[row] == mine


def test_what_is_refused():
    begin, end = ranges_of((16,))
    integers = a_problem("nn", (begin, end), dtypes=("i8", "i8", "i32"))
    assert ragged.supports(integers) == "integers, want floats"
    huge = dataclasses.replace(a_problem("nn", (begin, end)), P=2**20, R=2**12)
    assert ragged.supports(huge).endswith(f"more tiles than a grid has programs, {MOST_PROGRAMS}")
    with pytest.raises(ValueError, match=r"ragged_nn: splits is 2, want 1"):
        ragged.launch(a_problem("nn", (begin, end)), dataclasses.replace(CONFIG, splits=2))


# Epilogues.


def plain(problem):
    return dataclasses.replace(problem, epilogue=None, N=problem.cols)


def rows_of(problem, begin, end) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have a group, and which group (any, for those that have none): [B,P,1,M]."""
    row = np.arange(problem.M)
    inside = (begin[..., None] <= row) & (row < end[..., None])  # [B,P,G,M]
    return inside.any(2)[:, :, None], inside.argmax(2)[:, :, None]


def some_fused_operands(problem, begin, end, integers=True) -> dict[str, np.ndarray]:
    """The scales of rows of no group are NaN."""
    operands, epilogue = some_operands(plain(problem), begin, end, integers), problem.epilogue
    operands["w"] = operands["w"].reshape(problem.shapes["w"])
    if epilogue.bias:
        operands["bias"] = random((problem.B, problem.G, problem.N), DTYPES[epilogue.bias], 2, integers)
    if epilogue.scale:
        operands["scale"] = random(problem.shapes["y"][:-1], DTYPES[epilogue.scale], 3, integers)
        present, _ = rows_of(problem, begin, end)
        operands["scale"][~np.broadcast_to(present, operands["scale"].shape)] = np.nan
    return operands


def fused_results(problem) -> tuple[tuple[int, ...], ...]:
    """Their shapes."""
    y, gates = problem.shapes["y"], (2,) if problem.epilogue.gated else ()
    return (y, (*y[:-1], *gates, y[-1])) if problem.epilogue.saves else (y,)


def fused(problem, operands, begin, end) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results, and what they may stray in proportion to."""
    epilogue, (present, group) = problem.epilogue, rows_of(problem, begin, end)

    def results(of, function, slope):
        factors = {"x": of["x"], "w": of["w"].reshape(*of["w"].shape[:3], -1)}
        z = true(plain(problem), factors, begin, end)
        if epilogue.bias:
            bias = np.stack([np.stack([of["bias"][b][each] for each in group[b]]) for b in range(problem.B)])
            z = np.where(present[..., None], z + bias.astype(np.float64), 0)
        gate, up = np.split(z, 2, -1) if epilogue.gated else (z, None)
        y = function(gate) if up is None else function(gate) * (up + slope)
        y = y * of["scale"].astype(np.float64)[..., None] if epilogue.scale else y
        return [np.where(present[..., None], y, 0), z.reshape(fused_results(problem)[-1]) if epilogue.saves else z]

    wanted = results(operands, epilogues.FUNCTIONS[epilogue.activation], 0)
    absolute = {slot: np.abs(of.astype(np.float64)) for slot, of in operands.items()}
    return wanted, results(absolute, lambda z: 1.2 * z + 1, 1)


def check_fused(problem, sizes, config=CONFIG) -> None:
    """y, and z if it is saved; neither a row of no group nor its scale is read."""
    begin, end = ranges_of(sizes)
    operands = some_fused_operands(problem, begin, end, integers=False)
    given = operands | {"visits": visits(np, begin, end, problem.M, config.tile_m)}
    got = harness.run_all(ragged.launch(problem, config), given, fused_results(problem), problem.dtypes[2])
    for values, want, scale in zip(got, *fused(problem, operands, begin, end), strict=False):
        harness.check(values, want, scale)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_epilogue_of_ranges(sizes):
    problem = a_problem("nn", ranges_of(sizes))
    check_fused(epilogues.with_epilogue(problem, activation="silu", bias="fp32", scale="fp32", saves=True), sizes)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("scale", [None, "bf16"], ids=str)
@pytest.mark.parametrize("bias", [None, "fp16"], ids=str)
def test_parts_of_an_epilogue(bias, scale, saves, gated):
    """What is absent is not read; "sigmoid" is not zero at zero, a row of no group is."""
    sizes = (13, 0, 22, 5)
    problem = a_problem("nn", ranges_of(sizes), dtypes=("bf16", "bf16", "fp32"))
    problem = epilogues.with_epilogue(problem, activation="sigmoid", bias=bias, scale=scale, saves=saves, gated=gated)
    if gated and bias:
        assert "gated" in (ragged.supports(problem) or "")
    else:
        check_fused(problem, sizes)


def test_epilogue_of_a_wide_tile():
    problem = a_problem("nn", ranges_of((13, 0, 22, 5)), N=150)
    config = Config(tile_m=32, tile_n=128, tile_k=16, num_warps=2)
    check_fused(epilogues.with_epilogue(problem, activation="relu", bias="fp32", scale="fp32", saves=True), (13, 0, 22, 5), config)


def test_epilogues_that_there_are_not():
    problem = a_problem("nn", ranges_of((13, 0, 22, 5)))
    assert ragged.supports(epilogues.with_epilogue(problem, residual="fp32")) == "an epilogue with a residual, want one of other products"
    assert "scale" in (matmul.supports(epilogues.with_epilogue(test_matmul.a_problem("nn", (1, 2, 3, 4)), scale="fp32")) or "")
