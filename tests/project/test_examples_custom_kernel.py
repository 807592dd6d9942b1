"""The examples of a user's kernels: their claims hold, and in C++ and in Triton they give the right numbers in every role."""

import functools
import importlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import integers, same

import jaxext
from jaxext import testing
from jaxext.backends import nvrtc

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    """Imported late: what is registered while tests are collected stays."""
    return importlib.import_module("custom_kernel")


def test_the_example_runs(example, capsys, monkeypatch):
    """Its C++ kernel where there is a compiler; lowered for a GPU where there is jax-triton."""
    kept = ("eager", "jit", "vmap", "vjp", "gradient per example", "shard_map")
    few, check_op = {name: "test_conformance.py makes it of a product" for name in testing.CHECKS if name not in kept}, testing.check_op
    monkeypatch.setattr(testing, "check_op", lambda *args, skip, **kwargs: check_op(*args, skip=few | skip, **kwargs))
    with jax.enable_x64(False):
        assert example.main([] if example.compiled() else ["--implementation", "custom_ffi"]) == 0
    out = capsys.readouterr().out
    assert out.count("  passed") == len(kept)
    assert out.count("xla dot_general" if example.compiled() else " custom_ffi ") == 3
    if not example.without_triton():
        assert "calls 3 Triton kernels" in out


def test_the_ffi_kernel_in_every_role_and_shape(example):
    """Odd sizes, sizes 1 and 0, a label of no axes and one of two."""
    if reason := example.compiled():
        pytest.skip(reason)
    op = functools.partial(example.CHANNELWISE, implementation="custom_ffi")
    for b, n, k, m, c in ((2, 3, 4, 5, 33), (1, 1, 1, 1, 1), (2, 0, 3, 2, 4), (2, 3, 0, 2, 4)):
        x, w = integers((b, n, k, c)), integers((b, k, m, c), 1)
        y, pullback = jax.jit(functools.partial(jax.vjp, op))(x, w)
        want, of_einsum = jax.vjp(lambda x, w: jnp.einsum("bnkc,bkmc->bnmc", x, w), x, w)
        same((y, pullback(1 + y)), (want, of_einsum(1 + want)))
    with pytest.raises(NotImplementedError, match="channelwise_y: .*'custom_ffi' does not support this call: it has float64, want float32"):
        op(x.astype(np.float64), w.astype(np.float64))


def test_a_machine_without_a_compiler(example, capsys, monkeypatch):
    """It is told in a sentence, and the definition computes all."""
    monkeypatch.setattr(example, "compiled", lambda: "there is no C++ compiler (c++ or $CXX)")
    monkeypatch.setattr(example, "without_triton", lambda: "jax-triton is not installed")
    few, check_op = dict.fromkeys(testing.CHECKS[1:], "test_conformance.py makes it of a product"), testing.check_op
    monkeypatch.setattr(testing, "check_op", lambda *args, skip, **kwargs: check_op(*args, skip=few, **kwargs))
    with jax.enable_x64(False):
        assert example.main([]) == 0
    out = capsys.readouterr().out
    assert "The C++ kernel does not run: there is no C++ compiler" in out
    assert "The Triton kernel is not compiled: jax-triton is not installed" in out
    assert out.count("xla dot_general") == 3 and " custom_ffi " not in out


def test_a_name_holds_for_all_that_is_shown(example, capsys, monkeypatch):
    checked, few, check_op = [], dict.fromkeys(testing.CHECKS[1:], "test_conformance.py makes it of a product"), testing.check_op

    def check(layer, reference, arrays, skip, **kwargs):
        checked.extend(row.why for row in jaxext.explain(layer)(*arrays).rows)
        return check_op(layer, reference, arrays, skip=few, **kwargs)

    monkeypatch.setattr(testing, "check_op", check)
    with jax.enable_x64(False):
        assert example.main(["--implementation", "xla"]) == 0
    out = capsys.readouterr().out
    assert checked == ["named"]
    assert out.count("xla dot_general") == out.count("; named") == 3
    if not example.without_triton():
        assert "calls 3 Triton kernels" in out


INTERPRETED = """
import jax, jax.numpy as jnp, numpy as np
import custom_kernel as example
import custom_kernel_triton
from jaxext.backends.triton.interpreter import interpret
from jaxext.kernels.launch import Launch
from jaxext import extend

class Interpreted(example.Triton):
    name = "interpreted"

    def refuses(self, call):
        return None

    def run(self, call, config, operands):
        first, second, grid, constants = self.launch(call)
        launch = Launch(name=call.op, kernel=custom_kernel_triton.channelwise, operands=(first, second), grid=grid, constants=constants,
                        num_warps=4, num_stages=2)

        def callback(x, w):
            out = np.full(call.shape, np.nan, call.dtype)
            interpret(launch, np.ascontiguousarray(x), np.ascontiguousarray(w), out)
            return out

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(call.shape, call.dtype), operands[first], operands[second])

extend.register(example.CHANNELWISE, Interpreted())
rng = np.random.default_rng(0)
x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((2, 5, 3, 70), (2, 3, 6, 70)))
y, pullback = jax.vjp(lambda x, w: example.CHANNELWISE(x, w, implementation="interpreted"), x, w)
want, of_einsum = jax.vjp(lambda x, w: jnp.einsum("bnkc,bkmc->bnmc", x, w), x, w)
for got, true in zip((y, *pullback(1 + y)), (want, *of_einsum(1 + want)), strict=True):
    np.testing.assert_array_equal(got, true)
print("right in", 1 + len(pullback(y)), "roles")
"""


@pytest.mark.slow
def test_the_triton_kernel_in_every_role():
    """The kernel runs in Triton's interpreter, in a process of its own: more tiles than one along every axis, none of them full."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(EXAMPLES), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.stdout == "right in 3 roles\n", done.stderr


@pytest.fixture(scope="module")
def cuda_text():
    if reason := nvrtc.missing():
        pytest.skip(reason)
    return importlib.import_module("cuda_text")


def test_kernels_as_text(cuda_text, capsys):
    with jax.enable_x64(False):
        assert cuda_text.main(["--radius", "1"]) == 0
    out = capsys.readouterr().out
    assert "(sm_90a) launches 2 kernels" in out and out.count("   by xla\n") == 3 and out.count("   by cuda_simulated\n") == 1
