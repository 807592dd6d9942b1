"""`implementation="triton"` from the public operation to the kernel and back, inside every transformation.

Operands are small integers, exact in every order of summation and in TF32: comparisons with lax are bit for bit.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import (
    CONV2D,
    DEPTHWISE,
    DOT,
    DOT_BATCHED,
    GROUPED,
    LAX,
    OURS,
    ROLES,
    TRANSPOSED,
    same,
    truth,
)
from cases import ConvCase, named
from cases import truth as truth_of_case
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1; test_gpu.py is for GPUs")
# Named cases of what the way from an operation to a kernel must get right.
WAYS = [
    "conv:1x1_stride2", "conv:depthwise_multiplier_stride2", "conv:nchw_depthwise", "conv:0d", "conv:crop_to_nothing", "dot:everything",
    "dot:inner", "dot:matrix_vector",
]  # fmt: skip


@pytest.fixture(autouse=True)
def triton():
    with jaxext.use_implementation("triton"):
        yield


def total(problem, ops, x, w):
    """Compute a sum of degree two, so that its derivatives are integers too."""
    return jnp.sum(problem.call(ops, x, w) ** 2)


def of_both(problem, transformed, *args):
    """`transformed(total)(*args)` is the same by kernels and by lax."""
    got, want = (jax.jit(transformed(functools.partial(total, problem, ops)))(*args) for ops in (OURS, LAX))
    same(got, want)


@pytest.mark.parametrize("problem", [CONV2D, GROUPED, DEPTHWISE, TRANSPOSED], ids=str)
def test_the_kernels_are_what_runs(problem):
    """Named, the kernels are all that is chosen, for derivatives too; otherwise no CPU program takes them, gain or not."""
    x, w = problem.operands("fprop")
    loss = functools.partial(total, problem, OURS)
    rows = jaxext.explain(jax.grad(loss, (0, 1)))(x, w).rows
    assert sorted((row.op, row.chosen) for row in rows) == [(f"conv2d_{role}", "triton") for role in ("dgrad", "fprop", "wgrad")]
    with jaxext.use_implementation(None):
        (row,) = jaxext.explain(loss)(x, w).rows
        assert row.chosen == "xla" and "triton" in row.refused
    assert "callback" in jax.jit(loss).lower(x, w).as_text()


@pytest.mark.parametrize(("problem", "role"), [(DOT, "fprop"), (CONV2D, "dgrad"), (DOT, "wgrad")], ids=str)
def test_jit_and_eager(problem, role):
    """Roles of other problems are those of the named cases' gradients."""
    a, b = problem.operands(role)
    want = truth(problem, role, a, b)
    same(jax.jit(problem.role(role))(a, b), want)
    same(problem.role(role)(a, b), want)


@pytest.mark.parametrize("name", WAYS)
def test_named_case_and_its_gradients(name):
    """Geometries and dimension numbers that the library is tested with, zero sizes included."""
    case = named(name)
    x, w = case.operands(np.float32, integers=True)
    op = jaxext.conv_general_dilated if isinstance(case, ConvCase) else jaxext.dot_general
    y, pullback = jax.vjp(lambda x, w: case.run(op, x, w), x, w)
    np.testing.assert_array_equal(y, truth_of_case(case, x, w))
    ct = np.random.default_rng(2).integers(-3, 4, y.shape).astype(np.float32)
    wide = jax.vjp(lambda x, w: case.run(case.op, x, w), x.astype(np.float64), w.astype(np.float64))[1](ct.astype(np.float64))
    for got, want in zip(pullback(ct), wide, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("problem", "dtype"), [(DOT_BATCHED, jnp.float16), (CONV2D, jnp.bfloat16), (DEPTHWISE, jnp.float16)], ids=str)
def test_half_precision(problem, dtype):
    """Sums are exact in float32, and rounded once: what lax gives in float64, rounded."""
    for role in ROLES:
        a, b = problem.operands(role, dtype=dtype)
        got = jax.jit(problem.role(role))(a, b)
        assert got.dtype == dtype
        same(got, truth(problem, role, a.astype(np.float64), b.astype(np.float64)).astype(dtype))


@pytest.mark.parametrize(("problem", "axes"), [(DOT_BATCHED, (0, None)), (DEPTHWISE, (0, 0))], ids=str)
def test_vmap(problem, axes):
    for role in ROLES:
        a, b = (problem.operands(role, 3)[i] if axis == 0 else problem.operands(role)[i] for i, axis in enumerate(axes))
        got = jax.jit(jax.vmap(problem.role(role), axes))(a, b)
        want = jax.jit(jax.vmap(problem.role(role, LAX), axes))(a, b)
        same(got, want)


def test_vmap_of_vmap_with_batched_filters():
    x, w = CONV2D.operands("fprop", 2, 2)
    nested = lambda ops: jax.jit(jax.vmap(jax.vmap(functools.partial(CONV2D.call, ops), (0, None)), (1, 0)))
    same(nested(OURS)(x, w[0]), nested(LAX)(x, w[0]))


def test_gradients():
    """Forward, and forward over reverse, which gives the gradients too."""
    x, w = DOT_BATCHED.operands("fprop")
    of_both(DOT_BATCHED, lambda f: lambda x, w: jax.jvp(f, (x, w), (w.sum() + x, x.sum() + w)), x, w)
    of_both(DOT_BATCHED, lambda f: lambda x, w: jax.jvp(jax.grad(f, (0, 1)), (x, w), (x, w)), x, w)


def test_gradients_of_a_transposed_convolution():
    of_both(TRANSPOSED, lambda f: jax.grad(f, (0, 1)), *TRANSPOSED.operands("fprop"))


@pytest.mark.parametrize(("problem", "check_vma"), [(DOT, True), (DOT, False), (CONV2D, False), (DEPTHWISE, True)], ids=str)
def test_shard_map(problem, check_vma):
    """A split batch and whole filters; the gradient of the filter is the sum over devices."""
    x, w = problem.operands("fprop")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def parts(x, w):
        dx, dw = jax.grad(functools.partial(total, problem, OURS), (0, 1))(x, w)
        return problem.call(OURS, x, w), dx, (dw if check_vma else lax.psum(dw, "data"))

    split = jax.shard_map(parts, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P("data"), P()), check_vma=check_vma)
    want = jax.grad(functools.partial(total, problem, LAX), (0, 1))(x, w)
    same(jax.jit(split)(x, w), (truth(problem, "fprop", x, w), *want))


@pytest.mark.parametrize("problem", [DOT, CONV2D], ids=str)
def test_explicit_mesh(problem):
    """Each device's kernel sees its part."""
    x, w = problem.operands("fprop")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    want = jax.jit(jax.value_and_grad(functools.partial(total, problem, LAX), (0, 1)))(x, w)
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(w, NamedSharding(mesh, P()))
        same(jax.jit(jax.value_and_grad(functools.partial(total, problem, OURS), (0, 1)))(*spread), want)


def test_a_program_that_xla_splits_is_refused():
    """Python callbacks inside custom_partitioning crashed the process: the compiled program does not know them."""
    x, w = DOT.operands("fprop")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(Exception, match="cannot stand in a program that XLA splits"):
        jax.jit(functools.partial(DOT.call, OURS))(jax.device_put(x, NamedSharding(mesh, P("data"))), w)


def test_pmap():
    x, w = CONV2D.operands("fprop", 2)
    same(jax.pmap(functools.partial(CONV2D.call, OURS))(x, w), jax.vmap(functools.partial(CONV2D.call, LAX))(x, w))


FLOAT8, RESULTS = (jnp.float8_e4m3fn, jnp.float8_e5m2), (np.int8, np.int32)
PRECISIONS = ("highest", "high", "TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "F32_F32_F32")


@pytest.mark.parametrize(
    ("name", "dtype", "more"),
    [
        *(("dot:batched", dtype, dict(preferred_element_type=np.float32)) for dtype in FLOAT8),
        ("conv:grouped", jnp.float8_e5m2, dict(preferred_element_type=np.float32)),
        ("dot:odd", np.int8, dict(preferred_element_type=np.int32)),
        *(("conv:3x3_same", np.int8, dict(preferred_element_type=result)) for result in RESULTS),
        *(("conv:grouped", np.int8, dict(preferred_element_type=result)) for result in RESULTS),
        *(("conv:depthwise_3x3", np.int8, dict(preferred_element_type=result)) for result in RESULTS),
        *(("dot:odd", np.float32, dict(precision=precision)) for precision in PRECISIONS),
    ],
    ids=str,
)
def test_dtypes_and_precisions(name, dtype, more):
    """Integers are of the whole range; their sums wrap in int8."""
    case = named(name)
    operands = case.operands(dtype, integers=True)
    if dtype == np.int8:
        operands = [np.random.default_rng(i).integers(-128, 128, a.shape).astype(np.int8) for i, a in enumerate(operands)]
    got = case.run(jaxext.conv_general_dilated if isinstance(case, ConvCase) else jaxext.dot_general, *operands, **more)
    want = truth_of_case(case, *operands)
    assert got.dtype == more.get("preferred_element_type", dtype)
    assert np.abs(want).max() > 127 or dtype != np.int8
    np.testing.assert_array_equal(got, want.astype(np.int64).astype(got.dtype) if dtype == np.int8 else want)


def test_mixed_dtypes_of_a_gradient():
    """A float32 cotangent meets bfloat16 operands."""
    x, w = CONV2D.operands("fprop", dtype=jnp.bfloat16)
    loss = lambda ops, wide, x, w: jnp.sum(CONV2D.call(ops, x, w, preferred_element_type=wide) ** 2)
    got = jax.jit(jax.grad(functools.partial(loss, OURS, np.float32), (0, 1)))(x, w)
    want = jax.jit(jax.grad(functools.partial(loss, LAX, np.float64), (0, 1)))(x.astype(np.float64), w.astype(np.float64))
    same(got, jax.tree.map(lambda g: g.astype(jnp.bfloat16), want))


def product(dtype, **more):
    return jaxext.matmul(np.ones((2, 2), dtype), np.ones((2, 2), dtype), **more)


REFUSED = {
    "a is float64, want one of": lambda: product(np.float64),
    "a is complex64": lambda: product(np.complex64),
    "a is bool": lambda: product(np.bool_),
    "precision is BF16_BF16_F32_X9, want one of": lambda: product(np.float32, precision="BF16_BF16_F32_X9"),
    "4 spatial axes, want 3 at most": lambda: jaxext.conv_general_dilated(
        jnp.ones((1, 1, 2, 2, 2, 2), np.float32), jnp.ones((1, 1, 1, 1, 1, 1), np.float32), (1,) * 4, "VALID"
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    with pytest.raises(NotImplementedError, match=f"^.*: implementation 'triton' does not support this call: {reason}"):
        REFUSED[reason]()
