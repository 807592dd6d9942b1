"""`implementation="triton"` on a GPU, from the public operation to the kernel and back, against float64 on the CPU.

Every comparison is made twice: with small integers, exact in every precision and every order of summation, bit for bit; and with normal
numbers, within what rounding explains.  The kernels alone are tested in tests/kernels, the transformations that need several devices
only in Triton's interpreter.
"""

import functools
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, ConvCase, DotCase, named, random, wide
from jax import lax

import jaxext
from jaxext.tuning import timing
from jaxext.verify import laws
from jaxext.verify.laws import STRAY, SUMS, TF32

pytestmark = pytest.mark.gpu

HALF = (jnp.bfloat16, jnp.float16)
NN = (((1,), (0,)), ((), ()))


def conv(name, x, w, stride=1, padding: Any = "SAME", **more):
    rank = len(x) - 2
    space = "DHW"[-rank:]
    layout = (f"N{space}C", f"{space}IO", f"N{space}C")
    return ConvCase(name, x, w, MappingProxyType(dict(window_strides=(stride,) * rank, padding=padding, dimension_numbers=layout, **more)))


# Of many tiles each, and of several parts of the sum where the kernel splits it.
LARGE = (
    DotCase("skinny", (16, 8192), (8192, 48), NN),
    DotCase("odd_tiles", (515, 777), (777, 387), NN),
    DotCase("batched_tiles", (5, 130, 65), (5, 65, 259), (((2,), (1,)), ((0,), (0,)))),
    conv("dense", (2, 57, 56, 64), (3, 3, 64, 96)),
    conv("dense_strided", (2, 57, 56, 64), (3, 3, 64, 96), 2),
    conv("stem", (2, 112, 112, 3), (7, 7, 3, 64), 2),
    conv("depthwise_7x7", (2, 56, 56, 96), (7, 7, 1, 96), feature_group_count=96),
    conv("causal", (2, 2048, 512), (4, 1, 512), 1, ((3, 0),), feature_group_count=512),
    conv("groups_of_4", (2, 28, 28, 128), (3, 3, 4, 128), feature_group_count=32),
    conv("groups_of_4_strided", (2, 28, 28, 128), (3, 3, 4, 128), 2, feature_group_count=32),
    conv("transposed", (2, 16, 16, 128), (4, 4, 128, 64), 1, ((2, 2), (2, 2)), lhs_dilation=(2, 2)),
    conv("three_axes", (1, 8, 28, 28, 32), (3, 3, 3, 32, 32)),
)


@pytest.fixture(autouse=True)
def triton():
    with jaxext.use_implementation("triton"):
        yield


def label(case):
    return f"{'conv' if isinstance(case, ConvCase) else 'dot'}:{case.name}"


def ours(case):
    return jaxext.conv_general_dilated if isinstance(case, ConvCase) else jaxext.dot_general


def value_and_gradients(case, op, **more):
    """A function of x, w and a cotangent of the result."""

    def f(x, w, ct):
        y, pullback = jax.vjp(lambda x, w: case.run(op, x, w, **more), x, w)
        return y, *pullback(ct)

    return f


def on_cpu(jitted, *args):
    """Return the result in float64 (int64) on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, jitted(*map(wide, args)))


def operands(case, dtype, integers):
    x, w = case.operands(dtype, integers=integers)
    y = jax.eval_shape(lambda x, w: case.run(case.op, x, w), x, w)
    return x, w, random(y.shape, dtype, 2, integers)


def exact(got, want):
    for g, t in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g), t.astype(g.dtype))


def near(got, want, scale, stray):
    """Assert that errors are within `stray` of the sum of magnitudes, and one rounding of the result."""
    for g, t, s in zip(got, want, scale, strict=True):
        wrong = laws.near(np.asarray(g), t, s, stray)
        assert wrong is None, wrong


def verify(case, dtype, stray, **more):
    """Value and gradients are right, and of the same bits when computed again."""
    # lax's own gradients of large grouped convolutions take minutes on a CPU; those of `xla` are tested against them
    op = case.op if case in CASES else functools.partial(ours(case), implementation="xla")
    program, truth = jax.jit(value_and_gradients(case, ours(case), **more)), jax.jit(value_and_gradients(case, op))
    args = operands(case, dtype, integers=True)
    exact(program(*args), on_cpu(truth, *args))
    args = operands(case, dtype, integers=False)
    got = program(*args)
    near(got, on_cpu(truth, *args), on_cpu(truth, *map(np.abs, args)), stray)
    for once, again in zip(got, program(*args), strict=True):
        assert np.asarray(once).tobytes() == np.asarray(again).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, *HALF], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=label)
def test_case(case, dtype):
    verify(case, dtype, TF32 if dtype == np.float32 else SUMS)


PRECISIONS = {"highest": "ieee", "TF32_TF32_F32_X3": "tf32x3", "BF16_BF16_F32_X3": "bf16x3", "BF16_BF16_F32_X6": "bf16x6"}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", [named("dot:odd"), LARGE[1]], ids=label)
def test_precision_of_float32(case, precision):
    verify(case, np.float32, STRAY[PRECISIONS[precision]], precision=precision)


@pytest.mark.parametrize("case", [named("conv:3x3_same"), named("conv:depthwise_3x3"), named("dot:batched")], ids=label)
def test_transformed(case):
    """Eager; mapped over both operands; per-example gradients; forward over reverse."""
    x, w, _ = operands(case, np.float32, integers=True)
    xs, ws = (np.stack([a, 1 - a, a + 1]) for a in (x, w))
    apply = {op: functools.partial(case.run, op) for op in (ours(case), case.op)}
    loss = {op: lambda x, w, f=f: jnp.sum(f(x, w) ** 2) for op, f in apply.items()}
    for transformed, args in (
        (lambda op: jax.vmap(apply[op]), (xs, ws)),
        (lambda op: jax.vmap(jax.grad(loss[op], (0, 1)), (0, None)), (xs, w)),
        (lambda op: lambda x, w: jax.jvp(jax.grad(loss[op], (0, 1)), (x, w), (x, w)), (x, w)),
    ):
        exact(jax.jit(transformed(ours(case)))(*args), on_cpu(jax.jit(transformed(case.op)), *args))
    exact(apply[ours(case)](x, w), on_cpu(apply[case.op], x, w))


@pytest.mark.parametrize("case", LARGE, ids=label)
def test_xla_agrees(case):
    """Bits may differ, of integers too: cuDNN may compute in Winograd's or Fourier's basis."""
    args = operands(case, np.float32, integers=False)
    with jaxext.use_implementation("xla"):
        theirs = jax.jit(value_and_gradients(case, ours(case)))(*args)
    error, _ = timing.relative_error(jax.jit(value_and_gradients(case, ours(case)))(*args), jax.tree.map(wide, theirs))
    assert error <= timing.law([np.float32], None, "cuda")


EIGHT_BITS = [(np.int8, np.int32), (jnp.float8_e4m3fn, np.float32), (jnp.float8_e5m2, np.float32), (jnp.float8_e4m3fn, jnp.bfloat16)]


@pytest.mark.parametrize("case", [named("dot:odd"), LARGE[0], LARGE[1]], ids=label)
@pytest.mark.parametrize(("dtype", "result"), EIGHT_BITS, ids=lambda d: np.dtype(d).name)
def test_eight_bits(case, dtype, result):
    a, b = case.operands(dtype, integers=True)
    got = jax.jit(lambda a, b: case.run(jaxext.dot_general, a, b, preferred_element_type=result))(a, b)
    assert got.dtype == result
    exact(got, on_cpu(functools.partial(case.run, lax.dot_general), a, b))


def test_the_program_names_its_kernels():
    case = named("conv:3x3_same")
    args = operands(case, jnp.bfloat16, integers=True)
    text = str(jax.jit(value_and_gradients(case, ours(case))).lower(*args).compile().as_text())
    assert text.count('custom_call_target="triton_kernel_call') >= 3
    for role in ("fprop", "dgrad", "wgrad"):
        assert f"conv2d_{role}" in text
