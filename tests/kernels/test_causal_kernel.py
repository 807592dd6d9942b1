"""kernels/causal in Triton's interpreter: forward and derivative against float64, with state, boundaries, and rows nobody may read."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from calls import Call, Suite, changed, each
from cases import random
from epilogues import FUNCTIONS
from scipy import special

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import causal
from jaxext.kernels.causal import Config
from jaxext.kernels.epilogue import Epilogue

B, T, C = 2, 21, 12
CONFIG = Config(tile_c=8, strips=2, strip=4, num_warps=4)


def slope_of_gelu_tanh(z):
    u, inner = np.sqrt(8 / np.pi) * (z + 0.044715 * z**3), np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * z * z)
    return special.expit(u) * (1 + z * special.expit(-u) * inner)


SLOPES = {
    None: np.ones_like,
    "silu": lambda z: special.expit(z) * (1 + z * special.expit(-z)),
    "relu": lambda z: (z > 0) * 1.0,
    "relu6": lambda z: ((z > 0) & (z < 6)) * 1.0,
    "squared_relu": lambda z: 2 * np.maximum(z, 0),
    "leaky_relu": lambda z: np.where(z < 0, 0.01, 1.0),
    "sigmoid": lambda z: special.expit(z) * special.expit(-z),
    "tanh": lambda z: 1 / np.cosh(z) ** 2,
    "gelu": lambda z: special.ndtr(z) + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi),
    "gelu_tanh": slope_of_gelu_tanh,
}
ACTIVATIONS = {name: (FUNCTIONS[name], slope) for name, slope in SLOPES.items()}  # and their derivatives, in float64


def a_problem(role, taps=4, *, bias=True, state=False, idx=False, idx_of_states=False, activation="silu", dtype="fp32", B=B, T=T, C=C):
    epilogue = Epilogue(activation=activation, bias=dtype if bias else None)
    name = "causal_conv1d" + ("_backward" if role == "backward" else "")
    sizes = dict(B=B, T=T, C=C, J=taps)
    further = dict(state=dtype if state else None, idx=idx, idx_of_states=idx_of_states)
    return causal.Problem(name=name, role=role, **sizes, dtypes=(dtype,) * 3, epilogue=epilogue, **further, arch=90)


def operands_of(problem, integers=False):
    dtype, before = DTYPES[problem.dtypes[0]], problem.J - 1
    B, dtypes = problem.B, {"w": DTYPES[problem.dtypes[1]], "bias": DTYPES[problem.epilogue.bias or problem.dtypes[1]]}
    shapes = dict(x=(B, problem.T, problem.C), w=(problem.J, problem.C), d_y=(B, problem.T, problem.C), bias=(problem.C,))
    shapes["initial_states"] = (B, before, problem.C)
    operands = {name: random(shape, dtypes.get(name, dtype), i, integers) for i, (name, shape) in enumerate(shapes.items())}
    numbers = np.sort(np.random.default_rng(1).integers(0, 5, (B, before + problem.T)), -1).astype(np.int32)
    return operands | {"idx_of_states": numbers[:, :before].copy(), "seq_idx": numbers[:, before:].copy()}


def true(problem, operands) -> list[np.ndarray]:
    """The results in float64, step by step."""
    wide = {name: of.astype(np.float64) if name not in ("seq_idx", "idx_of_states") else of for name, of in operands.items()}
    w, before, steps = wide["w"], problem.J - 1, problem.T
    state = wide["initial_states"] if problem.state else np.zeros_like(wide["initial_states"])
    x = np.concatenate([state, wide["x"]], 1)
    numbers = np.concatenate(
        [operands["idx_of_states"] if problem.idx_of_states else 0 * operands["idx_of_states"], operands["seq_idx"]], 1
    )
    same = lambda s, t: ((numbers[:, s] == numbers[:, t + before]) if problem.idx else np.ones(problem.B, bool))[:, None]
    z = np.zeros_like(wide["x"]) + (wide["bias"] if problem.epilogue.bias else 0)
    for t, i in itertools.product(range(steps), range(problem.J)):
        z[:, t] += np.where(same(t + i, t), x[:, t + i], 0) * w[i]
    activation, slope = ACTIVATIONS[problem.epilogue.activation]
    if problem.role == "forward":
        return [activation(z)]
    dz = wide["d_y"] * slope(z)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for t, i in itertools.product(range(steps), range(problem.J)):
        d = np.where(same(t + i, t), dz[:, t], 0)
        dx[:, t + i] += d * w[i]
        dw[i] += (np.where(same(t + i, t), x[:, t + i], 0) * dz[:, t]).sum(0)
    results = [dx[:, before:], dw]
    if problem.epilogue.bias:
        results.append(dz.sum((0, 1)))
    return [*results, dx[:, :before]] if problem.state else results


def in_order(problem, results) -> list[np.ndarray]:
    """The results of a CUDA kernel by name as `true` has them, with partial sums added up."""
    if "sums" not in results:
        return [results["first"]]
    total = results["sums"].sum(0, dtype=np.float32)
    found = [results["first"], total[: problem.J], *([total[problem.J]] if problem.epilogue.bias else [])]
    return [*found, *([results["d_initial_states"]] if problem.state else [])]


def near(problem, got, operands):
    eps = float(ml_dtypes.finfo(DTYPES[problem.dtypes[0]]).eps)
    for one, want in zip(got, true(problem, operands), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), want, rtol=8 * eps, atol=16 * eps * np.abs(want).max(initial=1))


class CausalCall(Call):
    kernel, kinds = "causal", (False,)

    def small(self) -> Config:
        return CONFIG

    def operands(self, integers=True):
        return operands_of(self.problem)

    @property
    def shapes(self):
        return tuple(result.shape for result in self.results(self.operands()))

    def results(self, operands):
        return true(self.problem, operands)

    def judge(self, got, operands, exact, product_error=1):
        near(self.problem, got, operands)


class SteepCall(CausalCall):
    """Inputs are larger, so that an activation's ends are met."""

    def operands(self, integers=True):
        operands = super().operands(integers)
        return operands | {"x": 4 * operands["x"]}


def a_call(role, taps=4, splits=1, **given) -> CausalCall:
    """`splits`: of the derivative."""
    return CausalCall.smallest(a_problem(role, taps, **given), splits=splits if role == "backward" else 1)


ROLES = ("forward", "backward")
GIVEN = {
    "plain": {},
    "state": dict(state=True),
    "packed": dict(idx=True),
    "packed, state": dict(idx=True, state=True, idx_of_states=True),
    "bare": dict(bias=False, activation=None, state=True),
}
TAPS = {"forward": (4, 31), "backward": (4, 8)}
LARGE = [(1, 16384, 12288), (8, 2048, 5376), (1, 7, 3)]  # batch, steps, channels


class TestCausal(Suite):
    """Results are near float64's: no activation is exact."""

    call, most = CausalCall, 40
    geometry = [
        *each(lambda role, taps, given: a_call(role, taps, 2, **GIVEN[given]), ROLES, [4], GIVEN),
        *each(lambda role, taps: a_call(role, taps, 2, **GIVEN["packed, state"]), ROLES, [1, 2]),
        *each(lambda role: a_call(role, 8, 2), ROLES),
    ]
    dtypes = each(lambda role, dtype: a_call(role, dtype=dtype, state=True), ROLES, ["bf16", "fp16"])
    configs = [
        *each(lambda role, steps: a_call(role, splits=2, T=steps, state=True), ROLES, [1, 2, 3, 4, 5, 8]),
        *each(
            lambda role, long, dtype: CausalCall.picked(a_problem(role, TAPS[role][long], dtype=dtype, state=True)),
            ROLES, [0, 1], ["fp32", "bf16"],
        ),
    ]  # fmt: skip
    activations = each(lambda role, activation: SteepCall(a_problem(role, activation=activation)), ROLES, ACTIVATIONS)
    same_bits = each(lambda role: a_call(role, splits=2, state=True), ROLES)
    refused_problems = changed(
        CausalCall(a_problem("forward")),
        (dict(J=32), "32 taps, its forward takes 31 at most"),
        (dict(role="backward", J=9), "9 taps, its backward takes 8 at most"),
        (dict(dtypes=("fp8e5", "fp32", "fp32")), "x is fp8e5, it takes fp32, bf16, fp16"),
        (dict(state="i32"), "state is i32"),
        (dict(epilogue=Epilogue(activation="swoosh")), "activation 'swoosh', want one of"),
        (dict(B=2**21, T=2**10), "2097152 sequences of 1024 steps"),
        (dict(arch=70), "compute capability 7.0"),
    )
    refused_configs = [
        (CausalCall.smallest(a_problem("forward"), **{field: value}), f"{field} is")
        for field, value in [("tile_c", 3), ("strips", 0), ("strip", 0), ("splits", 2)]
    ]
    candidates = each(
        lambda role, shape: [dataclasses.replace(a_problem(role, dtype="bf16"), **dict(zip("BTC", shape, strict=True)))], ROLES, LARGE
    )

    def check_candidate(self, problem, config, launch):
        """The first moves whole vectors of 8 channels forward."""
        if problem.role == "forward" and problem.C > 100 and config == causal.candidates(problem)[0]:
            assert config.tile_c * config.strips == 8 * 32 * config.num_warps


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("role", ["forward", "backward"])
def test_what_is_infinite_stays_in_its_sequence(role):
    """Infinite inputs and cotangents of one sequence spoil none of the others, of the batch or behind it."""
    problem = a_problem(role, idx=True)
    operands = operands_of(problem)
    numbers = np.repeat(np.arange(3, dtype=np.int32), 7)
    operands["seq_idx"] = np.stack([numbers, numbers])
    clean = dict(operands)
    for name in ("x", "d_y"):
        operands[name] = operands[name].copy()
        operands[name][1, 7:14] = np.inf
    spoiled, want = (CausalCall(problem).compute(of)[0] for of in (operands, clean))
    keep = np.ones((B, T), bool)
    keep[1, 7:14] = False
    np.testing.assert_array_equal(spoiled[keep], want[keep])
