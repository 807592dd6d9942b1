"""The fuzz test (fuzz.py): some of its seeds, and planted defects that it must report with their seeds."""

import dataclasses
import itertools
import os
import pathlib
import re
import subprocess
import sys

import fuzz_calls
import fuzz_worker
import jax
import numpy as np
import pytest
from direct_sum import Product
from jax import lax

import jaxext
from jaxext.backends.xla import conv_plan

TESTS = pathlib.Path(__file__).parents[1]

PLANTED = """
import os
import time

from jax import lax
import jaxext
from jaxext import conv_general_dilated

def dot_general(lhs, rhs, *args, **kwargs):
    return jaxext.dot_general(lhs, lax.stop_gradient(rhs), *args, **kwargs)

def matmul(lhs, rhs, **kwargs):
    os.abort()

def conv_transpose(lhs, rhs, *args, **kwargs):
    raise KeyError("planted")

def convolve(a, v, **kwargs):
    time.sleep(10_000)
"""


def fuzz(*arguments, path=()):
    """Exit status and output of the tool."""
    search = os.pathsep.join([*map(str, path), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": search}
    command = [sys.executable, str(TESTS / "fuzz.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_60_seeds():
    """Of these 537 found float8 sums rounded to float8, and 560 and 561 windows that read beyond an input of which nothing is left."""
    code, output = fuzz("--start", 520, "--seeds", 60, "--chunk", 30, "--jobs", 2)
    assert code == 0 and "60 seeds from 520, none failed" in output, output


@pytest.mark.slow
def test_200_seeds():
    """They reach every algorithm that the plan's documentation lists, though some only because the tool takes others than the plan's.

    The suite's flags make XLA compile faster; these programs are those of users.
    """
    code, output = fuzz("--start", 400, "--seeds", 200, "--chunk", 100, "--jobs", 2, "--optimised")
    assert code == 0 and "200 seeds from 400, none failed" in output, output
    algorithms = set(re.findall(r"^ {4}(\w+)\S* {2,}", str(conv_plan.plan.__doc__), re.MULTILINE))
    assert {"zeros", "lax", "phases"} <= algorithms
    reached = re.findall(r"^seeds with .*", output, re.MULTILINE)
    assert algorithms <= set(re.findall(r"\w+(?= \d)", " ".join(reached))), output


def call_like(op) -> int:
    """A seed whose call is of this operation, is taken by lax, and has gradients that are not empty."""
    for seed in itertools.count():
        call = fuzz_calls.call(seed)
        plain = call.op == op and set(call.dtypes) == {"float32"} and call.mapped == (None,) * 3
        if plain and "preferred_element_type" not in call.kwargs and np.prod([*call.truth.x, *call.truth.w, *call.truth.output]):
            return seed
    raise AssertionError


@pytest.mark.parametrize(
    "op, seeds, wrong",
    [
        ("dot_general", 1, r"gradient of w\[.*\] is 0.0, want "),
        ("matmul", 2, "the process died of SIGABRT"),
        ("conv_transpose", 1, "lax: works; here: KeyError: 'planted'"),
        ("convolve", 1, "hangs: nothing for 5 s"),
    ],
)
def test_a_planted_defect_is_reported_with_its_seed(tmp_path, op, seeds, wrong):
    """And the seeds after it are run."""
    (tmp_path / "planted.py").write_text(PLANTED)
    seed = call_like(op)
    limit = 5 if op == "convolve" else 600
    code, output = fuzz("--start", seed, "--seeds", seeds, "--operations", "planted", "--limit", limit, "--verbose", path=[tmp_path])
    assert code == 1 and f"{seeds} seeds from {seed}, 1 failed: [{seed}]" in output, output
    assert re.search(rf"^seed {seed} FAILED: {wrong}", output, re.MULTILINE), output
    assert f"  {fuzz_calls.call(seed)}" in output, output
    for after in range(seed + 1, seed + seeds):
        assert re.search(rf"^seed {after} (right|refused)", output, re.MULTILINE), output


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
    kinds = {"conv_general_dilated": 6, "conv_transpose": 4, "convolve": 3, "dot_general": 2, "matmul": 2}
    for seed in itertools.count():
        call = fuzz_calls.call(seed)
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
