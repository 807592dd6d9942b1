"""kernels/ragged in Triton's interpreter: every role against float64, with ranges of every kind, and rows that nobody may read."""

from __future__ import annotations

import dataclasses
import itertools

import epilogues
import harness
import numpy as np
import pytest
import triton
import triton.language as tl
from calls import Call, Suite, absolute, each
from cases import random

from jaxext.backends.triton.interpreter import DTYPES, interpret
from jaxext.kernels import ragged
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.launch import MOST_PROGRAMS, Launch
from jaxext.kernels.ragged import Config
from jaxext.kernels.ragged.kernel import found_visit
from jaxext.kernels.ragged.problem import most_visits, visits
from jaxext.verify.laws import is_integer

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
CHUNKS = dataclasses.replace(CONFIG, tile_m=32, tile_n=32, chunk=16)


def a_problem(role, ranges, rows=48, B=1, P=1, R=1, K=21, N=19, S=None, dtypes=("fp32",) * 3, precision="ieee", arch=90) -> ragged.Problem:
    sizes = dict(B=B, P=P, R=R, M=rows, K=K, N=N, S=S, G=ranges[0].shape[-1])
    return ragged.Problem(name=f"ragged_{role}", role=role, **sizes, dtypes=dtypes, precision=precision, arch=arch)


def ranges_of(sizes, B=1, P=1, offset=0) -> tuple[np.ndarray, np.ndarray]:
    """Return the begin and the end of each group; the sizes are rotated by one from each p to the next."""
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


def some_operands(problem, begin, end, integers=True) -> dict[str, np.ndarray]:
    """Rows of no group are NaN, or large integers, which must not reach the result."""
    row = np.arange(problem.M)
    nobodys = ~((begin[..., None] <= row) & (row < end[..., None])).any(2)  # [B,P,M]
    operands = {}
    for seed, (slot, dtype) in enumerate(zip(OPERANDS[problem.role], problem.dtypes, strict=False)):
        operands[slot] = random(problem.shapes[slot], DTYPES[dtype], seed, integers)
        if slot != "w":
            operands[slot][np.broadcast_to(nobodys[:, :, None], operands[slot].shape[:-1])] = 99 if is_integer(DTYPES[dtype]) else np.nan
    return operands


def some_rows(problem, begin, end, x) -> tuple[np.ndarray, np.ndarray]:
    """The number of the row of each place, some twice, some of no row, any for a place of nobody; and x with NaN in other rows."""
    rng = np.random.default_rng(0)
    row = rng.integers(-1, problem.S + 1, (problem.B, problem.P, problem.M)).astype(np.int32)
    present, _ = rows_of(problem, begin, end)
    nobodys = ~present[:, :, 0]
    read = np.stack([[np.isin(np.arange(problem.S), row[b, p][~nobodys[b, p]]) for p in range(problem.P)] for b in range(problem.B)])
    x[~np.broadcast_to(read[:, :, None], x.shape[:-1])] = 99 if is_integer(x.dtype) else np.nan
    row[nobodys] = rng.choice([-(2**31), -1, 0, problem.S, 2**31 - 1], nobodys.sum())
    return row, x


def at_places(x, row) -> np.ndarray:
    """x with the row of each place, or zeros."""
    exists = (row >= 0) & (row < x.shape[3])
    found = np.stack([np.stack([x[b, p][:, np.where(each, of, 0)] for p, (of, each) in enumerate(zip(*both, strict=True))]) for b, both in
                      enumerate(zip(row, exists, strict=True))])  # fmt: skip
    return np.where(exists[:, :, None, :, None], found, 0)


def rows_of(problem, begin, end) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows have a group, and which group (any, for those that have none): [B,P,1,M]."""
    row = np.arange(problem.M)
    inside = (begin[..., None] <= row) & (row < end[..., None])  # [B,P,G,M]
    return inside.any(2)[:, :, None], inside.argmax(2)[:, :, None]


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedCall(Call):
    ranges: tuple[np.ndarray, np.ndarray] = ranges_of((13, 0, 22, 5))

    kernel, open = "ragged", ROLES

    def small(self) -> Config:
        return CONFIG

    @property
    def plain(self) -> ragged.Problem:
        return dataclasses.replace(self.problem, epilogue=None, S=None, N=self.problem.N * (2 if self.problem.gated else 1))

    def operands(self, integers=True):
        """The scales of rows of no group are NaN, as these rows are."""
        problem, epilogue = self.problem, self.problem.epilogue
        (begin, end), tile = self.ranges, (self.config or self.small()).tile_m
        operands = some_operands(self.plain, begin, end, integers)
        if "w" in operands:
            operands["w"] = operands["w"].reshape(problem.shapes["w"])
        if problem.gathered:
            x = random(problem.shapes["x"], DTYPES[problem.dtypes[0]], 0, integers)
            operands["row"], operands["x"] = some_rows(problem, begin, end, x)
        if epilogue and epilogue.bias:
            operands["bias"] = random((problem.B, problem.G, problem.N), DTYPES[epilogue.bias], 2, integers)
        if epilogue and epilogue.scale:
            operands["scale"] = random(problem.shapes["y"][:-1], DTYPES[epilogue.scale], 3, integers)
            present, _ = rows_of(problem, begin, end)
            operands["scale"][~np.broadcast_to(present, operands["scale"].shape)] = np.nan
        return operands | dict(begin=begin, end=end, visits=visits(np, begin, end, problem.M, tile))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        shape = self.problem.shapes[ROLES[self.problem.role]]
        if not (epilogue := self.problem.epilogue) or not epilogue.saves:
            return (shape,)
        return shape, (*shape[:-1], *((2,) if epilogue.gated else ()), shape[-1])

    def _results(self, operands, function, slope) -> list[np.ndarray]:
        epilogue, (present, group) = self.problem.epilogue, rows_of(self.problem, *self.ranges)
        factors = {slot: operands[slot] for slot in OPERANDS[self.problem.role]}
        if self.problem.gathered:
            factors["x"] = at_places(factors["x"], operands["row"])
        if not epilogue:
            return [true(self.problem, factors, *self.ranges)]
        z = true(self.plain, factors | {"w": factors["w"].reshape(*factors["w"].shape[:3], -1)}, *self.ranges)
        if epilogue.bias:
            bias = np.stack([np.stack([operands["bias"][b][each] for each in group[b]]) for b in range(self.problem.B)])
            z = np.where(present[..., None], z + bias.astype(np.float64), 0)
        gate, up = np.split(z, 2, -1) if epilogue.gated else (z, None)
        y = function(gate) if up is None else function(gate) * (up + slope)
        y = y * operands["scale"].astype(np.float64)[..., None] if epilogue.scale else y
        return [values.reshape(shape) for values, shape in zip((np.where(present[..., None], y, 0), z), self.shapes, strict=False)]

    def results(self, operands):
        return self._results(operands, epilogues.FUNCTIONS[self.problem.epilogue and self.problem.epilogue.activation], 0)

    def scales(self, operands, product_error=1):
        magnitudes = absolute(operands) | {name: operands[name] for name in ("row",) if name in operands}
        return [product_error * scale for scale in self._results(magnitudes, lambda z: 1.2 * z + 1, 1)]


def a_call(role, sizes, B=1, P=1, offset=0, config=None, epilogue=None, **given) -> RaggedCall:
    ranges = ranges_of(sizes, B, P, offset)
    problem = a_problem(role, ranges, B=B, P=P, **given)
    if config is None and problem.gathered and role == "nn":
        config = FINDS
    return RaggedCall(dataclasses.replace(problem, epilogue=epilogue and Epilogue(**epilogue)), config, ranges)


FEW = (13, 0, 22, 5)
FINDS = dataclasses.replace(CONFIG, finds_visit=True)
ALL = dict(activation="silu", bias="fp32", scale="fp32", saves=True)
WIDE = Config(tile_m=32, tile_n=128, tile_k=16, num_warps=2)
BATCHES = dict(B=2, P=3, R=2)  # every p has groups of its own, every r the same
BF16 = ("bf16", "bf16", "fp32")


class TestRagged(Suite):
    call = RaggedCall
    geometry = [
        *each(lambda role, sizes: a_call(role, SIZES[sizes]), ROLES, SIZES),
        *each(lambda role: a_call(role, (0, 0, 0), rows=0), ROLES),
        *each(lambda finds, role: a_call(role, FEW, config=FINDS), ["finds"], ("nn", "nt")),
        *each(lambda gathers, role, sizes: a_call(role, SIZES[sizes], S=37), ["gathers"], ("nn", "tn"), SIZES),
        *each(lambda gathers, role: a_call(role, FEW, S=1), ["gathers one row"], ("nn", "tn")),
    ]
    dtypes = each(
        lambda role, dtypes: a_call(role, (13, 22, 9), dtypes=dtypes, precision="tf32", config=dataclasses.replace(CONFIG, tile_k=32)),
        ROLES, [("bf16",) * 3, ("fp16", "fp16", "fp32"), ("fp8e4nv", "fp8e4nv", "fp32"), ("fp32", "bf16", "fp32")],
    )  # fmt: skip
    rounding = [
        *each(lambda role: a_call(role, (7, 0, 14), offset=19), ROLES),  # a device that has only some groups
        *each(lambda role, S: a_call(role, (5, 0, 21, 9), **BATCHES, S=S) if S is None or role != "nt" else None, ROLES, (None, 19)),
        *each(lambda sizes: a_call("nn", SIZES[sizes], epilogue=ALL), SIZES),
        # "sigmoid" is not zero at zero, a row of no group is
        *each(
            lambda gated, saves, scale, bias: None if gated and bias else a_call(
                "nn", FEW, dtypes=BF16, epilogue=dict(activation="sigmoid", bias=bias, scale=scale, saves=saves, gated=gated)
            ),
            [False, True], [False, True], [None, "bf16"], [None, "fp16"],
        ),
        *each(lambda gated: a_call("nn", FEW, S=30, dtypes=BF16, epilogue=dict(activation="silu", saves=True, gated=gated)), [False, True]),
        pytest.param(a_call("nn", FEW, N=150, config=WIDE, epilogue=ALL | {"activation": "relu"}), id="wide tiles"),
    ]  # fmt: skip
    same_bits = each(lambda role: a_call(role, (5, 0, 21, 9), **BATCHES), ROLES)
    refused_problems = [
        (a_call("nn", (16,), dtypes=("i8", "i8", "i32")), "^integers, want floats$"),
        (a_call("nn", (16,)).with_problem(P=2**20, R=2**12), f"more tiles than a grid has programs, {MOST_PROGRAMS}$"),
        (a_call("tn", FEW, S=9).with_problem(G=2049), "^2049 groups, want at most 2048, among which each program finds its own$"),
        (a_call("nt", FEW, S=9), "^the rows of x are the result, and are not gathered$"),
        (a_call("nn", FEW, epilogue=dict(residual="fp32")), "^an epilogue with a residual, want one of other products$"),
        *(
            (a_call("nn", FEW, epilogue=dict(activation="sigmoid", gated=True, bias="fp16", saves=saves, scale=scale)), "gated")
            for saves in (False, True)
            for scale in (None, "bf16")
        ),
    ]
    refused_configs = [
        (RaggedCall.smallest(a_call("nn", (16,)).problem, splits=2), "splits is 2, want 1"),
        (RaggedCall.smallest(a_call("tn", (16,)).problem, finds_visit=True), "finds_visit is True, want False"),
        (RaggedCall.smallest(a_call("nn", (16,), S=9).problem, finds_visit=False), "finds_visit is False, want True"),
        (RaggedCall.smallest(a_call("nn", (16,)).problem, chunk=64), "chunk is 64, want 0"),
        (RaggedCall.smallest(a_call("tn", (16,)).problem, chunk=48), "chunk is 48, want a power of two, at least 16"),
        (RaggedCall.smallest(a_call("tn", (16,)).problem, chunk=8), "chunk is 8, want a power of two, at least 16"),
    ]


@pytest.mark.parametrize("sizes", SIZES)
def test_chunks(sizes):
    a_call("tn", SIZES[sizes], config=CHUNKS).check()


STEPS = dataclasses.replace(CHUNKS, chunk=32)
IN_CHUNKS = {
    "offset": dict(sizes=(7, 0, 14), offset=19, config=CHUNKS),
    "several tiles": dict(sizes=FEW, config=dataclasses.replace(CONFIG, chunk=16)),
    "several steps, P": dict(sizes=(5, 0, 31, 4), P=2, config=STEPS),
    "gathered, R": dict(sizes=(5, 0, 31, 4), S=20, B=2, R=2, config=STEPS, dtypes=("bf16",) * 3),
    "gathered, P": dict(sizes=FEW, S=70, P=2, config=STEPS, dtypes=("bf16", "fp16", "fp32")),
    "fp8": dict(sizes=FEW, config=dataclasses.replace(STEPS, tile_k=32), dtypes=("fp8e4nv", "fp8e5", "bf16")),
    "no rows": dict(sizes=(0, 0), rows=0, config=CHUNKS),
}


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_sums_of_chunks_have_the_same_bits(name, monkeypatch):
    """The memory of partial sums may hold anything before."""
    call = a_call("tn", **IN_CHUNKS[name])
    operands = call.operands(integers=False)
    once = call.compute(operands)
    monkeypatch.setattr(harness, "NAN", 0x11)
    (again,) = call.compute(operands)
    call.judge(once, operands, exact=False)
    assert once[0].tobytes() == again.tobytes()


def some_ranges(seed) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The begin and the end of some groups, twice, the number of rows, and a tile."""
    rng = np.random.default_rng(seed)
    rows, tile, groups = int(rng.integers(1, 70)), int(rng.choice([4, 16])), int(rng.integers(1, 9))
    cuts = np.sort(rng.integers(0, rows + 1, (2, 1, groups + 1)), -1).astype(np.int32)
    first, last = sorted(rng.integers(0, groups + 1, 2)) if seed % 2 else (0, groups)  # other groups are not among the sizes
    cuts[..., : first + 1] *= first == 0  # rows before the first group are of groups that have no matrix
    among = (np.arange(groups) >= first) & (np.arange(groups) < last)
    return np.where(among, cuts[..., :-1], 0), np.where(among, cuts[..., 1:], 0), rows, tile


@pytest.mark.parametrize("seed", range(30))
def test_visits(seed):
    """Each row is written by one visit, and multiplied by that of its group."""
    begin, end, rows, tile = some_ranges(seed)
    groups = begin.shape[-1]
    found = visits(np, begin, end, rows, tile)
    assert found.shape == (2, 1, most_visits(rows, groups, tile), 5) and found.dtype == np.int32
    assert (0 <= found[..., 0]).all() and (found[..., 0] < groups).all()
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


@triton.jit
def found_visits(begin_ptr, end_ptr, visits_ptr, PROBLEM: tl.constexpr, TILE: tl.constexpr):
    visit = tl.program_id(0)
    group, first, last, low, high = found_visit(begin_ptr, end_ptr, visit, PROBLEM, TILE)
    tl.store(visits_ptr + 5 * visit, group)
    tl.store(visits_ptr + 5 * visit + 1, first)
    tl.store(visits_ptr + 5 * visit + 2, last)
    tl.store(visits_ptr + 5 * visit + 3, low)
    tl.store(visits_ptr + 5 * visit + 4, high)


@pytest.mark.parametrize("seed", range(30))
def test_a_program_finds_the_visit_that_is_listed(seed):
    begin, end, rows, tile = some_ranges(seed)
    problem = a_problem("nn", (begin, end), rows)
    for first, last in zip(begin[:, 0], end[:, 0], strict=True):
        listed = visits(np, first[None, None], last[None, None], rows, tile)[0, 0]
        found = np.full(listed.shape, 99, np.int32)
        constants = dict(PROBLEM=problem, TILE=tile)
        launch = Launch(
            name="visits",
            kernel=found_visits,
            operands=("begin", "end"),
            grid=(len(listed),),
            constants=constants,
            num_warps=1,
            num_stages=1,
        )
        interpret(launch, first, last, found)
        np.testing.assert_array_equal(found, listed)


def test_visits_of_as_many_rows_as_there_may_be():
    """No product of a surplus visit leaves 32 bits: it would write rows before the first."""
    rows, tile, groups = 2**31 - 2**16, 2**15, 6
    end = np.full((1, 1, groups), rows, np.int32)
    begin = np.where(np.arange(groups) == 0, 0, end).astype(np.int32)
    *_, low, high = np.moveaxis(visits(np, begin, end, rows, tile), -1, 0)
    assert low.min() == 0 and high.max() == rows and (high - low).clip(0).sum() == rows


def test_visits_of_many_groups_are_listed():
    """A program holds the ranges of all groups that it chooses from."""
    for groups, found in ((2048, True), (2049, False)):
        for role in ROLES:
            problem = dataclasses.replace(a_problem(role, ranges_of((16,))), M=2**16, K=256, N=256, G=groups)
            configs = ragged.candidates(problem)
            assert any(config.finds_visit or config.chunk for config in configs) == (found and role != "tn"), role
