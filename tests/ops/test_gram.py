"""Products of a matrix with its own transpose: values, bits, every transformation, devices, and wrong calls."""

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import check_second_derivatives, other_checks, random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import _compat, testing
from jaxext.ops import gram as symmetric_products
from jaxext.ops.gram import form as family
from jaxext.ops.gram import xla as xla_gram

SHAPES = [(1, 1), (7, 5), (65, 100), (2, 3, 9, 4), (33, 1), (128, 257)]


def assert_symmetric(y):
    y = np.asarray(y)
    if not np.iscomplexobj(y):
        np.testing.assert_array_equal(y, y.swapaxes(-1, -2))


def halved(monkeypatch):
    """Compute by blocks at any size."""
    monkeypatch.setattr(xla_gram, "_gains", lambda call: True)


@pytest.mark.parametrize(("dtype", "blocks"), [(np.float32, True), (ml_dtypes.bfloat16, False), (np.complex64, True)], ids=str)
def test_values_and_bits(dtype, blocks, monkeypatch):
    if blocks:
        halved(monkeypatch)
    for seed, shape in enumerate(SHAPES):
        x = random(shape, dtype, seed)
        y = jax.jit(lambda x: jaxext.gram(x, precision="highest"))(x)
        exact = np.asarray(x, np.clongdouble if np.iscomplexobj(x) else np.longdouble)  # a product in float64 has the error that is allowed
        want = exact @ exact.swapaxes(-1, -2)
        assert y.dtype == dtype
        assert_symmetric(y)
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.asarray(y, exact.dtype), want, atol=(32 if np.iscomplexobj(x) else 8) * eps * np.abs(want).max(), rtol=0
        )


@pytest.mark.parametrize("rows", [2, 5, 13, 31])
def test_blocks_of_any_number_of_rows(rows, monkeypatch):
    """The result is exact."""
    halved(monkeypatch)
    x = np.random.default_rng(rows).integers(-4, 5, (2, rows, 6)).astype(np.float32)
    np.testing.assert_array_equal(jaxext.gram(x), x @ x.swapaxes(1, 2))


def test_many_rows_are_multiplied_by_blocks():
    """Ten blocks of 16 are computed."""
    how = lambda *shape: [row.how for row in jaxext.explain(jaxext.gram)(jax.ShapeDtypeStruct(shape, jnp.float32)).rows]
    assert (how(768, 512), how(1024, 64), how(512, 1024)) == (["halves"], ["dot_general"], ["dot_general"])
    compiled = jax.jit(jaxext.gram).lower(jax.ShapeDtypeStruct((768, 512), jnp.float32)).compile()
    assert (compiled.cost_analysis() or {})["flops"] < 0.65 * 2 * 768**2 * 512


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 2, 3), (2, 0, 0)], ids=str)
def test_empty_ones(shape):
    y = jaxext.gram(jnp.ones(shape))
    np.testing.assert_array_equal(y, np.zeros((*shape[:-1], shape[-2])))


@pytest.mark.parametrize(("dtype", "preferred"), [(np.int8, None), (np.int8, np.int32), (np.int32, None), (np.uint8, None), (bool, None)])
def test_integers_as_of_matmul(dtype, preferred):
    x = np.random.default_rng(0).integers(0, 2, (5, 7)).astype(dtype)
    y, want = jaxext.gram(x, preferred_element_type=preferred), jnp.matmul(x, x.T, preferred_element_type=preferred)
    assert y.dtype == want.dtype
    np.testing.assert_array_equal(y, want)


def test_the_result_can_be_wider():
    x = random((3, 40), ml_dtypes.bfloat16, 0)
    y = jaxext.gram(x, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(x, np.float64).T, rtol=1e-5, atol=1e-5)


def test_a_tangent_is_one_product_and_symmetric():
    tangent = lambda x, dot: jax.jvp(jaxext.gram, (x,), (dot,))[1]
    for shape in [(6, 1), (2, 5, 2), (40, 30), (6, 5)]:
        x, dot = random(shape, np.float32, 0), random(shape, np.float32, 1)
        assert_symmetric(jax.jit(tangent)(x, dot))
    for f in (tangent, lambda x, dot: jax.linear_transpose(lambda d: tangent(x, d), x)(x @ x.T)):
        assert str(jax.make_jaxpr(f)(x, dot)).count("= matmul_") == 1


def test_x_is_kept_once_for_the_derivative():
    x = random((6, 5), np.float32, 0)
    pullback = jax.vjp(jaxext.gram, x)[1]
    assert sum(of.nbytes for of in jax.tree.leaves(pullback)) == x.nbytes


def test_second_derivatives(monkeypatch):
    halved(monkeypatch)
    check_second_derivatives(jaxext.gram, lambda x: x @ x.T, jnp.asarray(random((3, 2), np.float64, 0)))


def plain(x):
    return jnp.matmul(x, x.swapaxes(-1, -2), precision="highest")


def ours(x):
    sharding = jax.typeof(x).sharding
    explicit = not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    return jaxext.gram(x, precision="highest", out_sharding=P() if explicit and sharding.spec[-1] is not None else None)


SPLITS = {
    "columns": ((3, 16), testing.Split((P(None, "x"),), P(), ("all-reduce",))),
    "rows": ((8, 3), testing.Split((P("x"),), P("x"), ("all-gather",))),
}


@pytest.mark.parametrize("case", SPLITS)
def test_every_split(case):
    """Gradients of rows send the transpose of the cotangent: `test_on_devices`."""
    shape, split = SPLITS[case]
    wanted = {name for name in testing.CHECKS if "splits" in name} - ({"gradient, splits, automatic mesh"} if case == "rows" else set())
    skip = other_checks("eager", "jit", "vjp", *wanted)
    testing.check_op(ours, plain, [random(shape, np.float32, 0)], splits=[split], skip=skip, show=False).raise_if_failed()


SPECS = {
    "columns": P(None, "b"),
    "all columns": P(None, ("a", "b")),
    "rows": P("b"),
    "both": P("a", "b"),
    "all rows": P(("a", "b")),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_on_devices(spec):
    """The bits are symmetric where rows are whole, and value and gradient take no more collectives than lax's."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(random((16, 32), np.float32, 0), NamedSharding(mesh, spec))
    out = NamedSharding(mesh, P(spec[0]))
    for of in (lambda f: f, lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())):
        f, g = (jax.jit(of(f), out_shardings=out if f is of(f) else x.sharding) for f in (jaxext.gram, lambda x: x @ x.T))
        mine, theirs = (collectives(each.lower(x).compile()) for each in (f, g))
        np.testing.assert_allclose(f(x), g(x), rtol=1e-4, atol=1e-4)
        assert mine.total() <= theirs.total(), (mine, theirs)
    if spec[0] is None:
        assert_symmetric(jax.jit(jaxext.gram)(x))


def test_half_of_a_sum_over_devices(monkeypatch):
    """Each computes blocks of its part."""
    halved(monkeypatch)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(random((64, 128), np.float32, 0), NamedSharding(mesh, P(None, "a")))
    compiled = jax.jit(jaxext.gram).lower(x).compile()
    assert (compiled.cost_analysis() or {})["flops"] < 0.8 * 2 * 64 * 64 * 16
    assert collectives(compiled) == {"all-reduce": 1}
    assert_symmetric(compiled(x))


def test_parts_of_both_operands_that_have_one_shape():
    """Rows of the one over one axis of the mesh, and of the other over another, are not the same rows."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x = random((8, 6), np.float32, 0)
    y = jax.jit(jaxext.gram, out_shardings=NamedSharding(mesh, P("a", "b")))(jax.device_put(x, NamedSharding(mesh, P())))
    np.testing.assert_allclose(y, x @ x.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5, 4), np.float32), ((5, 4), ml_dtypes.bfloat16)], ids=str)
def test_with_an_addend(shape, dtype):
    """The operation that `newton_schulz` uses: rounded once, with derivatives, and mapped over the addend alone."""
    x, square = jnp.asarray(random(shape, dtype, 0)), jnp.asarray(random((*shape[:-1], shape[-2]), dtype, 1))
    addend = square + square.swapaxes(-1, -2)
    options = family.Options(sum=True, scale=-2.5, of_addend=0.75)
    bound = lambda x, addend: family.bound(x, addend, options, dtypes=(jnp.dtype(dtype),))
    wide = lambda x, addend: -2.5 * (x @ x.swapaxes(-1, -2)) + 0.75 * addend
    exact = wide(*(np.asarray(of, np.float64) for of in (x, addend)))
    y = jax.jit(bound)(x, addend)
    assert_symmetric(y)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-5)
    if dtype == np.float32:
        loss = lambda f: lambda *args: jnp.sin(f(*args)).sum()
        for got, want in zip(*(jax.jit(jax.grad(loss(f), (0, 1)))(x, addend) for f in (bound, wide)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        several = jnp.stack([addend, 2 * addend])
        np.testing.assert_allclose(jax.vmap(bound, (None, 0))(x, several)[1], wide(x, 2 * addend), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [P(None, "b"), P("b"), P("a", "b")], ids=str)
def test_with_an_addend_on_devices(spec):
    """It is added once, not on each device."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, addend = random((8, 16), np.float32, 0), np.full((8, 8), 3, np.float32)
    options = family.Options(sum=True, scale=2.0, of_addend=1.0)
    f = functools.partial(family.bound, options=options, dtypes=(x.dtype,))
    y = jax.jit(f)(jax.device_put(x, NamedSharding(mesh, spec)), addend)
    np.testing.assert_allclose(y, 2 * x @ x.T + 3, rtol=1e-5, atol=1e-5)


def test_explicit_meshes():
    """Rows of the result are sharded as those of x; a sum over devices wants `out_sharding`."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    x = random((8, 16), np.float32, 0)
    with jax.set_mesh(mesh):
        y = jax.jit(jaxext.gram)(jax.device_put(x, P("a")))
        assert jax.typeof(y).sharding.spec == P("a", None)
        np.testing.assert_allclose(np.asarray(y), x @ x.T, rtol=1e-5, atol=1e-5)
        split = jax.device_put(x, P(None, "a"))
        with pytest.raises(_compat.ShardingTypeError, match="out_sharding"):
            jaxext.gram(split)
        assert_symmetric(np.asarray(jaxext.gram(split, out_sharding=P())))


LIST: Any = [1.0]
WRONG = {
    "a vector": (TypeError, r"gram: x has the shape \(3,\), want \(..., M, K\)", lambda: jaxext.gram(np.ones(3))),
    "a list": (TypeError, r"gram: x is \[1.0\], want an array", lambda: jaxext.gram(LIST)),
    "implementation": (ValueError, "gram: implementation is 'cudnn'", lambda: jaxext.gram(np.ones((2, 2)), implementation="cudnn")),
    "out_sharding": (TypeError, "gram: out_sharding is 3", lambda: jaxext.gram(np.ones((2, 2)), out_sharding=3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_examples_of_the_docstrings():
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        found = doctest.testmod(symmetric_products, extraglobs=dict(jax=jax, jnp=jnp))
    assert found.attempted >= 3 and found.failed == 0
