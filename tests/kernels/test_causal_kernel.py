"""kernels/causal in Triton's interpreter: forward and derivative against float64, with state, boundaries, and rows nobody may read."""

from __future__ import annotations

import dataclasses
import itertools

import harness
import ml_dtypes
import numpy as np
import pytest
from cases import random
from scipy import special

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import causal
from jaxext.kernels.causal import Config
from jaxext.kernels.epilogue import Epilogue

B, T, C = 2, 21, 12
CONFIG = Config(tile_c=8, strips=2, strip=4, num_warps=4)
ACTIVATIONS = {  # and their derivatives, in float64
    None: (lambda z: z, np.ones_like),
    "silu": (lambda z: z * special.expit(z), lambda z: special.expit(z) * (1 + z * special.expit(-z))),
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0) * 1.0),
    "relu6": (lambda z: np.clip(z, 0, 6), lambda z: ((z > 0) & (z < 6)) * 1.0),
    "squared_relu": (lambda z: np.maximum(z, 0) ** 2, lambda z: 2 * np.maximum(z, 0)),
    "leaky_relu": (lambda z: np.where(z < 0, 0.01 * z, z), lambda z: np.where(z < 0, 0.01, 1.0)),
    "sigmoid": (special.expit, lambda z: special.expit(z) * special.expit(-z)),
    "tanh": (np.tanh, lambda z: 1 / np.cosh(z) ** 2),
    "gelu": (lambda z: z * special.ndtr(z), lambda z: special.ndtr(z) + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)),
    "gelu_tanh": (
        lambda z: z * special.expit(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)),
        lambda z: (
            special.expit(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))
            * (1 + z * special.expit(-2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z * z))
        ),
    ),
}


def a_problem(role, taps=4, *, bias=True, state=False, idx=False, idx_of_states=False, activation="silu", dtype="fp32", B=B, T=T, C=C):
    epilogue = Epilogue(activation=activation, bias=dtype if bias else None)
    name = "causal_conv1d" + ("_backward" if role == "backward" else "")
    sizes = dict(B=B, T=T, C=C, J=taps)
    further = dict(state=dtype if state else None, idx=idx, idx_of_states=idx_of_states)
    return causal.Problem(name=name, role=role, **sizes, dtypes=(dtype,) * 3, epilogue=epilogue, **further, arch=90)


def operands_of(problem, integers=False):
    dtype, before = DTYPES[problem.dtypes[0]], problem.J - 1
    B, dtypes = problem.B, {"weight": DTYPES[problem.dtypes[1]], "bias": DTYPES[problem.epilogue.bias or problem.dtypes[1]]}
    shapes = dict(x=(B, problem.T, problem.C), weight=(problem.J, problem.C), d_y=(B, problem.T, problem.C), bias=(problem.C,))
    shapes["initial_states"] = (B, before, problem.C)
    operands = {name: random(shape, dtypes.get(name, dtype), i, integers) for i, (name, shape) in enumerate(shapes.items())}
    numbers = np.sort(np.random.default_rng(1).integers(0, 5, (B, before + problem.T)), -1).astype(np.int32)
    return operands | {"idx_of_states": numbers[:, :before].copy(), "seq_idx": numbers[:, before:].copy()}


def true(problem, operands) -> list[np.ndarray]:
    """The results in float64, step by step."""
    wide = {name: of.astype(np.float64) if name not in ("seq_idx", "idx_of_states") else of for name, of in operands.items()}
    w, before, steps = wide["weight"], problem.J - 1, problem.T
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


def near(problem, got, operands):
    eps = float(ml_dtypes.finfo(DTYPES[problem.dtypes[0]]).eps)
    for one, want in zip(got, true(problem, operands), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), want, rtol=8 * eps, atol=16 * eps * np.abs(want).max(initial=1))


def check(problem, config=CONFIG, operands=None):
    operands = operands or operands_of(problem)
    shapes = [of.shape for of in true(problem, operands)]
    near(problem, harness.run_all(causal.launch(problem, config), operands, shapes, problem.dtypes[0]), operands)


def with_splits(problem, config=CONFIG):
    return dataclasses.replace(config, splits=2) if problem.role == "backward" else config


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("taps", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "given",
    [{}, dict(state=True), dict(idx=True), dict(idx=True, state=True, idx_of_states=True), dict(bias=False, activation=None, state=True)],
    ids=str,
)
def test_values(role, taps, given):
    problem = a_problem(role, taps, **given)
    check(problem, with_splits(problem))


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(role, activation):
    problem = a_problem(role, activation=activation)
    operands = operands_of(problem)
    operands["x"] *= 4
    check(problem, operands=operands)


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtypes(role, dtype):
    check(a_problem(role, dtype=dtype, state=True))


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_short_sequences(role, steps):
    problem = a_problem(role, T=steps, state=True)
    check(problem, with_splits(problem))


@pytest.mark.parametrize(("role", "taps"), [("forward", 4), ("forward", 31), ("backward", 4), ("backward", 8)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_its_own_choice(role, taps, dtype):
    problem = a_problem(role, taps, dtype=dtype, state=True)
    check(problem, causal.candidates(problem)[0])


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
    shape = (B, T, C)
    shapes = [shape] if role == "forward" else [shape, (4, C), (C,)]
    spoiled, want = (harness.run_all(causal.launch(problem, CONFIG), of, shapes, "fp32")[0] for of in (operands, clean))
    keep = np.ones((B, T), bool)
    keep[1, 7:14] = False
    np.testing.assert_array_equal(spoiled[keep], want[keep])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(J=32), "32 taps, its forward takes 31 at most"),
        (dict(role="backward", J=9), "9 taps, its backward takes 8 at most"),
        (dict(dtypes=("fp8e5", "fp32", "fp32")), "x is fp8e5, it takes fp32, bf16, fp16"),
        (dict(state="i32"), "state is i32"),
        (dict(epilogue=Epilogue(activation="swoosh")), "activation 'swoosh', want one of"),
        (dict(B=2**21, T=2**10), "2097152 sequences of 1024 steps"),
        (dict(arch=70), "compute capability 7.0"),
    ],
)
def test_refusals(change, message):
    problem = dataclasses.replace(a_problem("forward"), **change)
    assert message in (causal.supports(problem) or "")
    with pytest.raises(ValueError, match="causal_conv1d: "):
        causal.launch(problem, CONFIG)


@pytest.mark.parametrize("change", [dict(tile_c=3), dict(strips=0), dict(strip=0), dict(splits=2)], ids=str)
def test_bad_configs(change):
    (field,) = change
    with pytest.raises(ValueError, match=f"causal_conv1d: {field} is"):
        causal.launch(a_problem("forward"), dataclasses.replace(CONFIG, **change))


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(1, 16384, 12288), (8, 2048, 5376), (1, 7, 3)], ids=str)
def test_candidates(role, shape):
    """Some, that launch; the first moves whole vectors of 8 channels forward."""
    batch, steps, channels = shape
    problem = dataclasses.replace(a_problem(role, dtype="bf16"), B=batch, T=steps, C=channels)
    configs = causal.candidates(problem)
    assert configs and all(causal.launch(problem, config).grid[0] > 0 for config in configs)
    if role == "forward" and channels > 100:
        assert configs[0].tile_c * configs[0].strips == 8 * 32 * configs[0].num_warps
