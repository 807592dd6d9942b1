"""The fuzz test (fuzz.py): some of its seeds, and planted defects that it must report with their seeds."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import types
from typing import Any

import fuzz
import fuzz_calls
import fuzz_functions
import fuzz_operations
import fuzz_worker
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from direct_sum import Product
from jax import lax
from public_operations import OPERATIONS

import jaxext


def test_seeds():
    """Seeds 1120 and 1122 found windows that read beyond an input of which nothing is left, 1074 float8 sums rounded to float8."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, fuzz.__file__, "--start", "1120", "--seeds", "3", "--verbose"]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    assert "3 seeds from 1120, none failed" in output and re.search("^seed 1121 (right|refused)", output, re.MULTILINE), output
    assert fuzz_worker.judge(fuzz_calls.call(1074), 1074 // 2, jaxext) == ("right", None)


SOME = {
    "the first": [seed for seed in range(0, 32, 2) if seed not in (2, 24)],  # which lax refuses
    "three axes": [162, 222, 274, 310, 364],
    "groups of the batch": [126, 138, 182, 184, 192, 194, 228, 264],
    "contracted axes in any order": [208, 238, 918, 1130, 3366, 5032, 6432, 6466, 7986],
}


@pytest.mark.parametrize("seeds", SOME.values(), ids=SOME)
def test_random_calls(seeds):
    for seed in seeds:
        outcome, wrong = fuzz_worker.judge(fuzz_calls.call(seed), seed // 2, jaxext)
        assert (outcome, wrong) == ("right", None), (seed, fuzz_calls.call(seed))


WORKER = """
import argparse, json, os, time

parser = argparse.ArgumentParser()
parser.add_argument("--start", type=int)
parser.add_argument("--seeds", type=int)
options, _ = parser.parse_known_args()
for seed in range(options.start, options.start + options.seeds):
    print(json.dumps(dict(seed=seed, call=f"call {seed}")), flush=True)
    if seed == 5:
        os.abort()
    if seed == 7:
        time.sleep(10_000)
    outcome = "wrong" if seed == 8 else "right"
    print(json.dumps(dict(seed=seed, call=f"call {seed}", outcome=outcome, wrong="3, want 4", reached=[])), flush=True)
"""


def test_a_seed_that_dies_hangs_or_is_wrong_is_reported(tmp_path, monkeypatch, capsys):
    """The seeds after it are run."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(fuzz, "__file__", str(worker))
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--start", "4", "--seeds", "6", "--chunk", "5", "--limit", "3", "--verbose"])
    assert fuzz.main() == 1
    output = capsys.readouterr().out
    for line in (
        "seed 4 right: call 4", "seed 5 FAILED: the process died of SIGABRT", "seed 6 right: call 6",
        "seed 7 FAILED: hangs: nothing for 3 s",
        "seed 8 FAILED: 3, want 4", "seed 9 right: call 9", "6 seeds from 4, 3 failed: [5, 7, 8]",
    ):  # fmt: skip
        assert line in output, output


def call_like(op) -> int:
    """A seed whose call is of this operation, is taken by lax, and has gradients that are not empty."""
    for seed in itertools.count():
        call = fuzz_calls.call(seed)
        if call.op != op:
            continue
        if isinstance(call, fuzz_functions.Use):
            sizes = [size for of in call.call.operands.values() for size in of.shape]
            if min(sizes) > 2 and (call.order, call.mapped, call.mesh, call.how) == ("first", False, "", ()):
                return seed
            continue
        plain = set(call.dtypes) == {"float32"} and call.mapped == (None,) * 3
        if plain and "preferred_element_type" not in call.kwargs and np.prod([*call.truth.x, *call.truth.w, *call.truth.output]):
            return seed
    raise AssertionError


def stop_gradient_of_w(name):
    return lambda x, w, *args, **kwargs: getattr(jaxext, name)(x, lax.stop_gradient(w), *args, **kwargs)


def raise_key_error(*args, **kwargs):
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("op", "planted", "wrong"),
    [
        ("dot_general", stop_gradient_of_w("dot_general"), r"gradient of w\[.*\] is 0(.0|j), want "),
        ("linear", stop_gradient_of_w("linear"), r"gradient of w\[.*\] is 0(.0|j), want "),
        ("conv_transpose", raise_key_error, "lax: works; here: KeyError: 'planted'"),
    ],
)
def test_a_planted_defect_is_found(op, planted, wrong):
    seed = call_like(op)
    names = {name: getattr(jaxext, name) for name in OPERATIONS} | {op: planted}
    outcome, found = fuzz_worker.judge(fuzz_calls.call(seed), seed // 2, types.SimpleNamespace(**names))
    assert outcome == "wrong" and re.search(wrong, found or "")


def product(dtype="float32", **more):
    truth = Product((3, 4), (4, 2), ("mk", "kn", "mn"))
    return fuzz_calls.Call(op="matmul", truth=truth, dtypes=(dtype, dtype), kwargs={}, **more)


def results(call, module=jaxext):
    result = jax.ShapeDtypeStruct((3, 2), call.dtypes[0])
    arrays = fuzz_worker.operands(call, 0, result)
    return arrays, [np.array(value) for value in jax.jit(fuzz_worker.program(call, module))(*arrays)]


@pytest.mark.parametrize("mapped", [(None, None, None), (1, None, None), (0, 2, None), (None, 1, 0), (2, None, 1)])
def test_every_result_is_looked_at(mapped):
    """One element that is off by one, or not finite, in any of the four."""
    call = product(mapped=mapped, size=3, derivatives_inside=mapped[2] is not None)
    arrays, right = results(call)
    assert fuzz_worker.compare(call, arrays, right, np.dtype("float32")) is None
    for i, name in enumerate(fuzz_worker.NAMES):
        for planted in (right[i].flat[-1] + 1, np.inf, np.nan):
            wrong = [value.copy() for value in right]
            wrong[i].flat[-1] = planted
            assert f"{name}[" in str(fuzz_worker.compare(call, arrays, wrong, np.dtype("float32")))


def test_normal_numbers_and_halves_may_be_rounded():
    for call, factor in (
        (product("bfloat16"), 1 + 2**-6),
        (product("float16", integers=False), 1.01),
        (product("float32", integers=False), 1.0001),
    ):
        arrays, right = results(call)
        assert fuzz_worker.compare(call, arrays, right, np.dtype(call.dtypes[0])) is None
        wrong = [np.asarray(value * factor, value.dtype) for value in right[:1]] + right[1:]
        assert "value[" in str(fuzz_worker.compare(call, arrays, wrong, np.dtype(call.dtypes[0])))


def test_what_lax_refuses_must_be_refused():
    call = dataclasses.replace(product(), truth=Product((3, 4), (3, 2), ("mk", "ln", "mn")))
    assert fuzz_worker.judge(call, 0, jaxext) == ("refused", None)

    class Lenient:
        @staticmethod
        def matmul(x, w):
            return x

    assert fuzz_worker.judge(call, 0, Lenient)[0] == "wrong"


def test_the_truth_is_lax_and_numpy():
    """Every kind of call against its namesake, in what both get right."""
    kinds = {"conv_general_dilated": 3, "conv_transpose": 2, "convolve": 2, "dot_general": 1, "matmul": 1}
    for seed in itertools.count(step=2):
        call: Any = fuzz_calls.call(seed)
        crops = any(low < 0 or high < 0 for low, high in getattr(call.truth, "padding", ()))
        if set(call.dtypes) != {"float64"} and kinds.get(call.op) and not crops:
            call = dataclasses.replace(
                call, dtypes=("float64",) * 2, mapped=(None,) * 3, kwargs={**call.kwargs, "preferred_element_type": None}
            )
            outcome, wrong = fuzz_worker.judge(call, seed, lax)
            assert wrong is None, (seed, str(call), wrong)
            kinds[call.op] -= outcome == "right"
        if not any(kinds.values()):
            break


def toy(module, of):
    """Two results that are nonlinear in x, and linear in w and in n, which does not move."""
    return module.sin(of["x"]) * of["w"][0] * of["n"], module.exp(of["x"]) + of["w"][1] * module.ones((2, 3))


def use(dtype="float64", **more) -> fuzz_functions.Use:
    operands = {
        "x": fuzz_operations.Operand(shape=(2, 3), dtype=dtype),
        "n": fuzz_operations.Operand(shape=(), dtype=dtype, moves=False),
        "w": fuzz_operations.Operand(shape=(2,), dtype=dtype),
    }
    call = fuzz_operations.Call(op="toy", operands=operands, results=(dtype,) * 2, said={}, run=toy, truth=lambda of: toy(np, of))
    plain: dict[str, Any] = dict(order="first", integers=False, axes=(None,) * 3, out=(0, 0))
    return fuzz_functions.Use(call=call, **plain | more)


@pytest.mark.parametrize(
    "more",
    [
        dict(order="jvp of vjp", axes=(1, None, None), out=(-1, 0), size=3),
        dict(order="vjp of jvp", axes=(0, None, 1), inside=True, size=2),
        dict(order="vjp of vjp", how=("checkpoint", "x64")),
        dict(order="jvp of vjp", how=("eager",), mesh="auto", specs=(("a", None), (), ("b",))),
        dict(mesh="explicit", specs=(("a", None), (), (None,))),
    ],
    ids=str,
)
def test_every_result_of_a_function_is_looked_at(more, monkeypatch):
    """A function is right as it is, and wrong where one element of any result is off by little, or not finite."""
    seen = []
    monkeypatch.setattr(fuzz_functions, "compare", lambda *args: seen.append(args) or compare(*args))
    assert fuzz_functions.judge(use(**more), 0, jnp) == ("right", None)
    (made, arrays, right), *_ = seen
    for i, name in enumerate(fuzz_functions.names(made)):
        for planted in (right[i].flat[-1] + 1e-5, np.inf, np.nan):
            wrong = [value.copy() for value in right]
            wrong[i].flat[-1] = planted
            assert f"{name}[" in str(compare(made, arrays, wrong))


compare = fuzz_functions.compare


def test_a_scalar_may_move():
    """numpy makes a number of an array without axes that is added to another."""
    scalar = use(axes=(None, 0, None), size=2, order="vjp of vjp")
    operands = {**scalar.call.operands, "n": dataclasses.replace(scalar.call.operands["n"], moves=True)}
    scalar = dataclasses.replace(scalar, call=dataclasses.replace(scalar.call, operands=operands))
    assert fuzz_functions.judge(scalar, 0, jnp) == ("right", None)


def test_every_operation_is_drawn():
    drawn = {fuzz_calls.call(seed).op for seed in range(1, 1000, 2)}
    plain = "jaxext.ops.matmul", "jaxext.ops.conv"
    others = {name for name, f in OPERATIONS.items() if f.__module__ not in plain}
    assert drawn >= others | {"extend.define", "extend.operation", "clipped_grad"}
