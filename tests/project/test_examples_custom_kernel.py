"""The example of a user's kernels: its claims hold, and in C++ and in Triton they give the right numbers in every role."""

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
from cases import random
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import testing

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    """Imported late: what is registered while tests are collected stays."""
    return importlib.import_module("custom_kernel")


def test_the_example_runs(example, capsys, monkeypatch):
    """Its C++ kernel where there is a compiler; lowered for a GPU where there is jax-triton; each of ten transformations is exact."""
    few, check_op = dict.fromkeys(testing.CHECKS[3:], "test_conformance.py makes it"), testing.check_op
    monkeypatch.setattr(testing, "check_op", lambda *args, skip, **kwargs: check_op(*args, skip=few | skip, **kwargs))
    with jax.enable_x64(False):
        assert example.main(["--check"]) == 0
    out = capsys.readouterr().out
    assert out.count("  passed") == 6
    assert "fused_cross_entropy_backward" in out and ("xla reference" if example.compiled() else "custom_ffi custom_ffi") in out
    assert ("\nxla " if example.compiled() else "\ncustom_ffi ") in out
    assert out.count(" 0.0e+00   ") == 10
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


@pytest.mark.slow
def test_the_cross_entropy_in_every_transformation(example):
    """The conformance kit with the kernels of the loss and of its gradient, which are the ones that run."""
    if reason := example.compiled():
        pytest.skip(reason)
    logits, labels = random((4, 3), np.float32), np.array([2, 0, 1, 2], np.int32)
    gradient = jax.grad(lambda x: example.CROSS_ENTROPY(x, labels).sum())
    assert [row.chosen for row in jaxext.explain(gradient)(logits).rows] == ["custom_ffi"] * 2
    splits = [testing.Split((P("x"), P("x")), P("x"))]
    testing.check_op(example.CROSS_ENTROPY, example.likelihood, (logits, labels), splits=splits, show=False).raise_if_failed()


def test_the_cross_entropy_of_other_arrays(example):
    """Large logits, no rows, rows of two axes; a label outside is an error, and so is another dtype where the kernel was named."""
    if reason := example.compiled():
        pytest.skip(reason)
    loss = functools.partial(example.CROSS_ENTROPY, implementation="custom_ffi")
    logits, labels = 1e4 * random((6, 70), np.float32), np.array([0, 69, 3, 4, 5, 6], np.int32)
    for x, n, ranks in ((logits, labels, 1), (logits[:0], labels[:0], 1), (logits.reshape(2, 3, 70), labels.reshape(2, 3), 2)):
        ours = jax.value_and_grad(lambda x, n=n, ranks=ranks: loss(x, n, ranks=dict(N=ranks)).sum())(x)
        plain = jax.value_and_grad(lambda x, n=n: example.likelihood(x.reshape(-1, 70), n.reshape(-1)).sum())(x)
        for one, true in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, true, rtol=1e-6, atol=1e-6)
    with pytest.raises(Exception, match="cross entropy: a label is not the number of a logit"):
        jax.block_until_ready(loss(logits, labels + 1))
    for wrong in ((logits, labels.astype(np.int64)), (logits.astype(np.float64), labels)):
        with pytest.raises(NotImplementedError, match="'custom_ffi' does not support this call: it has .*64, want .*32"):
            loss(*wrong)


def test_the_cross_entropy_for_a_gpu(example):
    """Its gradient calls two Triton kernels; without rows there is nothing to launch."""
    if reason := example.without_triton():
        pytest.skip(reason)
    gradient = jax.grad(lambda x, n: example.CROSS_ENTROPY(x, n).sum())
    logits, labels = random((4, 3), np.float32), np.zeros(4, np.int32)
    for rows, wanted in ((4, 2), (0, 0)):
        program = jaxext.export.lower_for(gradient, arch="sm_90a")(logits[:rows], labels[:rows]).as_text()
        assert sum("custom_call" in line and "triton_kernel_call" in line for line in program.splitlines()) == wanted


def test_a_machine_without_a_compiler(example, capsys, monkeypatch):
    """It is told in a sentence, and the definition computes all."""
    monkeypatch.setattr(example, "compiled", lambda: "there is no C++ compiler (c++ or $CXX)")
    monkeypatch.setattr(example, "without_triton", lambda: "jax-triton cannot be imported: none")
    monkeypatch.setattr(example, "transformations", lambda f, mesh: {"jit": jax.jit(f)})
    with jax.enable_x64(False):
        assert example.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("xla reference") == 2
    assert "The C++ kernel does not run: there is no C++ compiler" in out
    assert "The Triton kernel is not compiled: jax-triton cannot be imported" in out
    assert "\nxla " in out and "\ncustom_ffi " not in out


def test_a_name_holds_for_all_that_is_shown(example, capsys, monkeypatch):
    checked, few, check_op = [], dict.fromkeys(testing.CHECKS[1:], "test_conformance.py makes it"), testing.check_op

    def check(layer, reference, arrays, skip, **kwargs):
        checked.extend(row.why for row in jaxext.explain(layer)(*arrays).rows)
        return check_op(layer, reference, arrays, skip=few, **kwargs)

    monkeypatch.setattr(testing, "check_op", check)
    monkeypatch.setattr(example, "transformations", lambda f, mesh: {"jit": jax.jit(f)})
    with jax.enable_x64(False):
        assert example.main(["--implementation", "xla", "--check"]) == 0
    out = capsys.readouterr().out
    assert checked == ["named"] * 2
    assert out.count("xla dot_general") == 3 and out.count("xla reference") == 2 and out.count("; named") == 5
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

logits, labels = 100 * rng.normal(size=(3, 70)).astype(np.float32), np.array([0, 69, 5], np.int32)
d_loss = rng.normal(size=3).astype(np.float32)

def run(name, arrays, *results):
    kernel = getattr(custom_kernel_triton, name)
    constants = dict(V=70, BLOCK_V=32)
    interpret(Launch(name=name, kernel=kernel, operands=(), grid=(3,), constants=constants, num_warps=4, num_stages=2), *arrays, *results)

loss, lse, d_logits = (np.full(shape, np.nan, np.float32) for shape in (3, 3, (3, 70)))
run("cross_entropy", (logits, labels), loss, lse)
run("cross_entropy_backward", (logits, labels, lse, d_loss), d_logits)
wanted, of_reference = jax.vjp(lambda x: example.log_likelihood(x, labels)[0], logits)
np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(d_logits, of_reference(d_loss)[0], rtol=1e-5, atol=1e-5)
print("right loss and gradient")
"""


@pytest.mark.slow
def test_the_triton_kernel_in_every_role():
    """The kernel runs in Triton's interpreter, in a process of its own: more tiles than one along every axis, none of them full."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(EXAMPLES), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.stdout == "right in 3 roles\nright loss and gradient\n", done.stderr
