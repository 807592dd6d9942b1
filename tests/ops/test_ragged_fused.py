"""Ragged products with an epilogue: against plain jnp in float64, with rows of no group, which nobody reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations, random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_fused import ACTIVATIONS, close, name_of, with_gradients

import jaxext

M, K, N, G = 16, 6, 8, 4
SIZES = np.array([5, 0, 7, 2], np.int32)  # of 14 rows
X, W, BIAS, SCALE = (random(shape, np.float32, seed) for seed, shape in enumerate([(M, K), (G, K, N), (G, N), (M,)]))
GATES = random((G, K, 2, N), np.float32, 4)


def rows(x, w, sizes):
    """Return the membership of rows in groups, and the filter of each row's group."""
    end = jnp.cumsum(sizes, dtype=sizes.dtype)
    row = jnp.arange(x.shape[0], dtype=sizes.dtype)[:, None]
    inside = ((row < end[None]) & (row >= (end - sizes)[None])).astype(x.dtype)
    return inside, jnp.einsum("mk,mg,gk...->m...", x, inside, w)


def linear(activation, x, w, sizes, bias=None, scale=None):
    inside, z = rows(x, w, sizes)
    z = z if bias is None else z + inside @ bias
    y = ACTIVATIONS[activation](z) * inside.sum(1, keepdims=True)
    return y if scale is None else y * scale[:, None]


def gated(activation, x, w, sizes, scale):
    _, z = rows(x, w, sizes)
    return ACTIVATIONS[activation](z[:, 0]) * z[:, 1] * scale[:, None]


def poisoned(*arrays):
    """The same, with NaN in the rows of no group, of those that have rows."""
    return [x.at[SIZES.sum() :].set(jnp.nan) if len(x) == M else x for x in map(jnp.asarray, arrays)]


@pytest.mark.parametrize(("activation", "dtype"), [("silu", jnp.float32), (None, jnp.bfloat16)], ids=name_of)
def test_linear(activation, dtype):
    """The values and all gradients, with bias and scale; of one activation also with one of the two."""
    arrays = [x.astype(dtype) for x in (X, W, BIAS, SCALE)]
    for bias, scale in ((True, True), (True, False), (False, True))[: 3 if activation else 1]:
        args = [x for x, given in zip(arrays, (True, True, bias, scale), strict=True) if given]

        def named(x, w, *more, bias=bias, scale=scale):
            more = list(more)
            return x, w, SIZES, more.pop(0) if bias else None, more.pop(0) if scale else None

        def ours(*args, named=named):
            *arrays, scale = named(*poisoned(*args))
            return jaxext.ragged_linear(*arrays, activation=activation, row_scale=scale)

        def plain(*args, named=named):
            return linear(activation, *named(*args))

        close(with_gradients(ours), with_gradients(plain), *args, units=(2, 4))


@pytest.mark.parametrize(("activation", "dtype"), [("silu", jnp.float32), (None, jnp.bfloat16)], ids=name_of)
def test_gated_linear_unit(activation, dtype):
    args = [x.astype(dtype) for x in (X, GATES, SCALE)]

    def ours(*args):
        x, w, scale = poisoned(*args)
        return jaxext.ragged_gated_linear_unit(x, w, SIZES, activation=activation, row_scale=scale)

    def plain(x, w, scale):
        return gated(activation, x, w, SIZES, scale)

    close(with_gradients(ours), with_gradients(plain), *args, units=(2, 4))


def test_rows_of_no_group_are_zero_whatever_the_activation_makes_of_zero():
    """The function may have no value there, and no slope."""
    x = jnp.abs(X) + 1
    ours = lambda x: jaxext.ragged_linear(x, jnp.abs(W) + 1, SIZES, activation=jnp.log)
    np.testing.assert_array_equal(ours(x)[SIZES.sum() :], 0)
    gradient = jax.grad(lambda x: ours(x).sum())(x)
    assert bool(jnp.isfinite(gradient).all()) and not gradient[SIZES.sum() :].any() and gradient[: SIZES.sum()].all()


@pytest.mark.parametrize("mapped", [(0, None, None, None), (None, 0, 0, None), (0, 0, 0, 0), (None, None, 0, None)])
def test_vmap_repeats_no_filter(mapped):
    """One product, which meets each filter once."""
    args = [np.stack([a, -a, 2 * a], d) if d is not None else a for a, d in zip((X, W, BIAS, SCALE), mapped, strict=True)]
    ours = jax.vmap(lambda x, w, b, s: jaxext.ragged_linear(x, w, SIZES, b, activation="tanh", row_scale=s), mapped)
    close(ours, jax.vmap(lambda x, w, b, s: linear("tanh", x, w, SIZES, b, s), mapped), *args)
    products = [eqn for eqn in equations(ours, *args) if eqn.primitive.name in ("ragged_linear", "ragged_nn")]
    factors = [[atom.aval.size for atom in eqn.invars[:2]] for eqn in products]
    assert factors.count([a.size for a in args[:2]]) == 1
    assert len(products) == (2 if mapped == (None, None, 0, None) else 1)  # a bias alone is mapped by itself


def test_vmap_of_sizes():
    sizes = np.stack([SIZES, SIZES[::-1], np.roll(SIZES, 1)])
    ours = jax.vmap(lambda sizes: jaxext.ragged_linear(X, W, sizes, BIAS, activation="silu", row_scale=SCALE))
    np.testing.assert_allclose(ours(sizes), [linear("silu", X, W, s, BIAS, SCALE) for s in sizes], rtol=1e-5, atol=1e-5)


# Shardings of x, w, bias and scale, and the collectives of the product.
SPLITS = {
    "rows": ((P("x"), P(), P(), P("x")), {}),
    "columns": ((P(), P(None, None, "x"), P(None, "x"), P()), {}),
    "contraction and groups": ((P(None, "x"), P("y", "x"), P("y"), P()), {"all-reduce": None}),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("rows", AxisType.Explicit), ("columns", AxisType.Auto), ("contraction and groups", AxisType.Auto)],
    ids=str,
)
def test_devices(name, kind):
    """A split sum is added up before the epilogue, and a row's bias comes from the device of its group, once."""
    specs, wanted = SPLITS[name]
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    ours = lambda x, w, b, s: jaxext.ragged_linear(x, w, SIZES, b, activation="silu", row_scale=s)
    plain = lambda x, w, b, s: linear("silu", x, w, SIZES, b, s)
    total = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3))
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((X, W, BIAS, SCALE), specs, strict=True)]
        compiled = jax.jit(ours).lower(*args).compile()
        got, gradients = jax.jit(ours)(*args), jax.jit(total(ours))(*args)
        found = dict(collectives(compiled))
        assert found.keys() == wanted.keys() and all(count in (None, found[kind]) for kind, count in wanted.items()), found
    np.testing.assert_allclose(got, plain(X, W, BIAS, SCALE), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, total(plain)(X, W, BIAS, SCALE), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_gradient_of_a_bias_on_no_mesh_for_each_example():
    """The mapped axis is split there, and not the first one."""
    bias = BIAS[:3]
    gradient = jax.jit(jax.vmap(jax.grad(lambda b, x: jnp.sin(jaxext.ragged_linear(x, W[:3], SIZES[:3], b)).sum()), (None, 0)))
    x = jnp.stack([X, 2 * X, 3 * X, 4 * X])
    want = gradient(bias, x)
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)):
        got = gradient(bias, jax.device_put(x, P("x")))
        assert jax.typeof(got).sharding.spec == P("x", None, None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_gate_of_split_groups():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    w = jax.device_put(GATES, NamedSharding(mesh, P("x")))
    got = jax.jit(lambda x, w, s: jaxext.ragged_gated_linear_unit(x, w, SIZES, activation="silu", row_scale=s))(X, w, SCALE)
    np.testing.assert_allclose(got, gated("silu", X, GATES, SIZES, SCALE), rtol=1e-5, atol=1e-5)


def test_what_is_saved():
    """A scale wants the preactivation for its own gradient, an activation that tells its slope by its result does not."""
    computed = lambda f, *args: [e.params["wanted"] for e in equations(f, *args) if e.primitive.name == "ragged_linear"]
    with_scale = lambda x, s: jaxext.ragged_linear(x, W, SIZES, row_scale=s).sum()
    assert computed(jax.grad(with_scale), X, SCALE) == [("y",)]
    assert computed(jax.grad(with_scale, 1), X, SCALE) == [("y", "preactivation")]
    assert computed(jax.grad(lambda x: jaxext.ragged_linear(x, W, SIZES, BIAS, activation="relu").sum()), X) == [("y",)]
    names = [e.primitive.name for e in equations(lambda x: jaxext.ragged_linear(x, W, SIZES), X)]
    assert "ragged_nn" in names and "ragged_linear" not in names  # nothing to fuse


@pytest.mark.parametrize("shape", [(0, K, G, N), (M, K, 0, N)], ids=str)
def test_empty_axes(shape):
    m, k, g, n = shape
    sizes = np.array([m, *[0] * (g - 1)][:g], np.int32)
    args = [random(s, np.float32, i) for i, s in enumerate([(m, k), (g, k, n), (g, n), (m,)])]
    ours = lambda x, w, b, s: jaxext.ragged_linear(x, w, sizes, b, activation="silu", row_scale=s)
    plain = lambda x, w, b, s: linear("silu", x, w, sizes, b, s)
    close(with_gradients(ours), with_gradients(plain), *args)


def test_export():
    f = jax.jit(lambda x, w, sizes, b: jaxext.ragged_linear(x, w, sizes, b, activation="sigmoid"))
    (m,) = jax.export.symbolic_shape("m")
    types = [jax.ShapeDtypeStruct((m, K), np.float32), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, SIZES, BIAS))]
    exported = jax.export.export(f, platforms=("cpu", "cuda"))(*types)
    np.testing.assert_allclose(exported.call(X, W, SIZES, BIAS), linear("sigmoid", X, W, SIZES, BIAS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=[[1.0]]), TypeError, "ragged_linear: x is .*, want an array"),
        (dict(x=X[None]), TypeError, r"x has the shape \(1, 16, 6\), want \(M, K\)"),
        (dict(w=W[:, :2]), TypeError, r"w has the shape \(4, 2, 8\), want \(G, 6, N\), since x has the shape \(16, 6\)"),
        (dict(group_sizes=SIZES[:2]), TypeError, r"group_sizes is int32\[2\], want an integer for each of the 4 groups"),
        (dict(group_sizes=SIZES.astype(np.float32)), TypeError, r"group_sizes is float32\[4\], want an integer for each of the 4 groups"),
        (dict(bias=BIAS[0]), TypeError, r"bias has the shape \(8,\), want \(4, 8\): an element for each group and column of w"),
        (dict(row_scale=SCALE[:3]), TypeError, r"row_scale has the shape \(3,\), want \(16,\): an element for each row of x"),
        (dict(row_scale=SCALE.astype(np.complex64)), TypeError, "row_scale is complex64, want a dtype that converts to float32"),
        (dict(activation="swoosh"), ValueError, "ragged_linear: activation is 'swoosh', want one of"),
        (dict(implementation="none"), ValueError, "ragged_linear: implementation is 'none', want one of"),
        (dict(implementation="cuda"), NotImplementedError, "implementation 'cuda' does not support this call"),
    ],
)
def test_errors(change, error, message):
    given: dict = dict(x=X, w=W, group_sizes=SIZES, bias=BIAS, activation="silu", row_scale=SCALE) | change
    with pytest.raises(error, match=message):
        jaxext.ragged_linear(**given)


def test_errors_of_a_gate():
    with pytest.raises(TypeError, match=r"w has the shape \(4, 6, 8\), want \(G, 6, 2, N\): gate and up"):
        jaxext.ragged_gated_linear_unit(X, W, SIZES)
