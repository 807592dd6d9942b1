"""The launcher of the CUDA kernels of causal convolutions on a CPU: which problems it takes, with which configs, and the defects that their
simulation finds."""

import dataclasses
import math

import harness
import host_code
import numpy as np
import pytest
import simt
from simt_causal import run
from test_causal_kernel import a_problem, operands_of, true

from jaxext.backends.cuda import cuda_causal
from jaxext.backends.cuda.cuda_causal import CausalConfig
from jaxext.kernels.epilogue import Epilogue

INVALID = 1  # jaxext::Status
ROLES = ("forward", "backward")
CONFIG = CausalConfig(lanes=2, strip=8)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return simt.build(tmp_path_factory, family="causal")


REFUSED = [  # by every config
    ({"B": -1}, "a size is -1, it takes 0 or more"),
    ({"J": 0}, "0 taps, it takes 1 or more"),
    ({"J": 32}, "32 taps, its forward takes 31 at most"),
    ({"role": "backward", "J": 9}, "9 taps, its backward takes 8 at most"),
    ({"dtypes": ("fp8e4nv", "fp32", "fp8e4nv")}, "x is fp8e4nv, it takes fp32, bf16, fp16"),
    ({"dtypes": ("fp32", "fp8e4nv", "fp32")}, "weight is fp8e4nv, it takes fp32, bf16, fp16"),
    ({"epilogue": Epilogue(bias="fp8e4nv")}, "bias is fp8e4nv, it takes fp32, bf16, fp16"),
    ({"C": 1 << 30}, "1073741824 channels, it takes fewer than 1073741824"),
    ({"T": 1 << 30, "B": 1}, "1073741824 steps, it takes fewer than 1073741824"),
    ({"B": 1 << 21, "T": 1 << 10}, "2097152 sequences of 1024 steps, it numbers fewer than 2147418112 steps"),
]


@pytest.mark.parametrize("changes, reason", REFUSED)
def test_refusals(driver, tmp_path, monkeypatch, changes, reason):
    """The launcher says the same as the module says before a program is made."""
    case = dataclasses.replace(a_problem("forward"), **changes)
    assert host_code.refuses(case, cuda_causal) == reason
    if "fp8" in reason:
        monkeypatch.setattr("simt_causal.CODES", [*simt.CODES, "fp8e4nv"])
        monkeypatch.setattr("simt_causal.DTYPES", simt.DTYPES | {"fp8e4nv": np.int8})
    (reply,) = run(driver, tmp_path, [(case, CONFIG, {})], dry=True)
    assert (reply.code, reply.message) == (INVALID, f"causal: {reason}")


LIMITS = {  # of each: the last problem within and the first beyond it
    "taps forward": ({"J": 31}, {"J": 32}),
    "taps backward": ({"role": "backward", "J": 8}, {"role": "backward", "J": 9}),
    "channels": ({"C": (1 << 30) - 1}, {"C": 1 << 30}),
    "steps of a sequence": ({"B": 1, "T": (1 << 30) - 1}, {"B": 1, "T": 1 << 30}),
    "steps": ({"B": 32767, "T": 65535}, {"B": 32767, "T": 65536}),
    "sequences without steps": ({"B": (1 << 31) - (1 << 16) - 1, "T": 0}, {"B": (1 << 31) - (1 << 16), "T": 0}),
    "capability": ({"arch": 80}, {"arch": 79}),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_are_where_they_are(limit):
    within, beyond = (host_code.refuses(dataclasses.replace(a_problem("forward"), **changes), cuda_causal) for changes in LIMITS[limit])
    assert within is None and beyond is not None


REFUSED_CONFIGS = [
    ("forward", {"lanes": 3}, "causal forward: lanes is 3, want a power of two up to 32"),
    ("backward", {"lanes": 64}, "causal backward: lanes is 64, want a power of two up to 32"),
    ("forward", {"strip": 0}, "causal forward: strip is 0, want 1 to 2^30 - 1"),
    ("forward", {"splits": 2}, "causal forward: splits is 2, want 1 to 1"),
    ("backward", {"splits": 65536}, "causal backward: splits is 65536, want 1 to 65535"),
]


@pytest.mark.parametrize("role, changes, message", REFUSED_CONFIGS)
def test_refused_configs(driver, tmp_path, role, changes, message):
    (reply,) = run(driver, tmp_path, [(a_problem(role), dataclasses.replace(CONFIG, **changes), {})], dry=True)
    assert (reply.code, reply.message) == (INVALID, message)


def test_more_blocks_than_a_grid_has(driver, tmp_path):
    case = a_problem("forward", B=1, T=(1 << 30) - 1, C=1 << 12)
    (reply,) = run(driver, tmp_path, [(case, CausalConfig(lanes=1, strip=1), {})], dry=True)
    assert (reply.code, reply.message) == (INVALID, "causal: 8589934592 blocks, a grid has 2147483647 at most")


def random_problem(rng, role):
    """Of sizes from 1 to the limits, and sometimes at one or one beyond it."""

    def size(limit):
        return limit + int(rng.integers(-1, 2)) if rng.random() < 0.1 else int(2 ** rng.uniform(0, rng.uniform(0, math.log2(limit))))

    given = {name: bool(rng.random() < 0.5) for name in ("bias", "state", "idx")}
    dtype, taps = str(rng.choice(list(simt.DTYPES))), int(rng.integers(1, 33 if role == "forward" else 10))
    return a_problem(role, taps, dtype=dtype, B=size(1 << 31), T=size(1 << 30), C=size(1 << 30), **given)


def test_what_is_taken_can_be_launched(driver, tmp_path):
    """In every configuration, wherever the arrays start, if they fit into memory."""
    rng = np.random.default_rng(0)
    cases = [random_problem(rng, role) for _ in range(1500) for role in ROLES]
    cases = [case for case in cases if case.B * case.T * case.C < 1 << 38]
    taken = [case for case in cases if host_code.refuses(case, cuda_causal) is None]
    assert min(len(taken), len(cases) - len(taken)) > 100
    asked = [(case, config, {}) for case in taken for config in cuda_causal.candidates(case)]
    for shifts in ({}, {"x": 8}):
        for (case, config, _), reply in zip(asked, run(driver, tmp_path, asked, dry=True, shifts=shifts), strict=True):
            assert reply.code == 0, f"{reply.message}: {case}, {config}"
            assert reply.shared_bytes <= 48 << 10
            assert shifts or (reply.vector, reply.grid) == (cuda_causal.vector(case), cuda_causal.grid(case, config))


ROWS = {"8x2048x5376": (8, 2048, 5376), "1x16384x12288": (1, 16384, 12288)}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("row", ROWS)
def test_what_is_picked_fills_a_gpu(row, role, arch):
    """And partial sums are few beside the arrays."""
    B, T, C = ROWS[row]
    problem = dataclasses.replace(a_problem(role, dtype="bf16", B=B, T=T, C=C), arch=arch)
    config = cuda_causal.pick(problem)
    assert cuda_causal.grid(problem, config) >= 3 * 108
    assert cuda_causal.partial_bytes(problem, config) < 0.02 * 6 * B * T * C


PACKED = a_problem("backward", activation=None, C=8, state=True, idx=True, idx_of_states=True)
PLAIN = a_problem("backward", activation=None, C=8, state=True)
MANY = a_problem("forward", 7, activation=None, C=8, state=True, idx=True, idx_of_states=True)
FEW = a_problem("forward", 3, activation=None, C=8, idx=True)
SHORT = a_problem("backward", 7, activation=None, C=8, state=True)
ALIGNED = a_problem("forward", activation=None, C=8)
NUMBER = "if (t >= 0) return t < p.T ? of.idx[static_cast<int64_t>(sequence) * p.T + t] : 0;"
BROKEN = {  # the fault -> a case that shows it, a piece of causal.cuh or causal.cc, and what takes its place
    "no barrier after staging": (PLAIN, "__syncthreads();  // the taps are there", ""),
    "no barrier before a sum": (PLAIN, "__syncthreads();  // the parts are there", ""),
    "no barrier after a sum": (PLAIN, "__syncthreads();  // all have read the parts of the row before", ""),
    "threads that leave early": (PLAIN, "if (!strip.real) continue;", "if (!strip.real) return;"),
    "a channel too many": (FEW, "channel < p.C", "true"),
    "a sequence too many": (PACKED, "sequence < p.B", "sequence <= p.B"),
    "taps of channels that are not there": (FEW, "c < p.C && row >= 0 && row < p.J", "row >= 0 && row < p.J"),
    "an input too far": (MANY, "Load<T, kVector>(of.x + Place(t), t < p.T)", "Load<T, kVector>(of.x + Place(t), true)"),
    "a state too far": (MANY, "t < 0 && t + p.J - 1 >= 0", "t < 0"),
    "a number too far": (PACKED, NUMBER, NUMBER.replace("t < p.T", "t <= p.T")),
    "a step too many": (FEW, "if (u >= count) return;", "if (u > count) return;"),
    "a window that stands still": (ALIGNED, "inputs[j] = inputs[kWidth + j], numbers[j] = numbers[kWidth + j];", ""),
    "numbers that stand still": (
        PACKED,
        "inputs[j] = inputs[kChunk + j], numbers[j] = numbers[kChunk + j];",
        "inputs[j] = inputs[kChunk + j];",
    ),
    "cotangents behind the strip are summed": (PLAIN, "strip.Owns(t + u)", "true"),
    "cotangents behind the strip are missing": (PLAIN, "strip.end + kBefore", "strip.end"),
    "every strip writes the state's": (SHORT, "strip.begin == 0 && d_state != nullptr", "d_state != nullptr"),
    "a tile too many": (PLAIN, "min((split + 1) * p.share, p.tiles)", "(split + 1) * p.share + 1"),
    "vectors wherever x starts": (ALIGNED, "vectors = vectors && Aligned(array, causal::kVectorBytes);", ";"),
}
SHIFTED = {"vectors wherever x starts": {"x": 4}}
ODD = {"a channel too many": 5, "taps of channels that are not there": 9}  # the channels with which it shows


@pytest.fixture(scope="session")
def broken_driver(tmp_path_factory):
    pieces = [(old, new) for _, old, new in BROKEN.values()]
    return simt.build(tmp_path_factory, simt.either(("causal.cuh", "causal.cc"), pieces), family="causal")


def check(driver, folder, names, number, shifts=None):
    asked = []
    for what in names:
        case = dataclasses.replace(BROKEN[what][0], **({"C": ODD[what]} if what in ODD else {}))
        config = CausalConfig(lanes=32, strip=2 if case == SHORT else 10, splits=3 if case.role == "backward" else 1)
        asked.append((case, config, operands_of(case, integers=True)))
    for (case, _, operands), reply in zip(
        asked, run(driver, folder, asked, shifts=shifts, environment={"BROKEN": str(number)}), strict=True
    ):
        for got, want in zip(reply.results, true(case, operands), strict=True):
            harness.check(got, want)


def test_kernels_of_which_no_piece_is_taken_are_right(broken_driver, tmp_path):
    check(broken_driver, tmp_path, BROKEN, -1)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(broken_driver, tmp_path, what):
    with pytest.raises(AssertionError, match=simt.FOUND):
        check(broken_driver, tmp_path, [what], list(BROKEN).index(what), SHIFTED.get(what))
