"""`use_invariant`: the bits of a row are those that it has among others, wherever it lies, and however many devices share them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

NHWC = ("NHWC", "HWIO", "NHWC")
ROWS = 70  # more than two parts
PLACES = ((0, 1), (69, 70), (3, 34), (0, 33), (5, 70))  # first row, end


def invariant(f):
    return jax.jit(jaxext.use_invariant()(f))


def assert_same_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def assert_rows_alone(f, x, *rest, places=PLACES):
    """`f` of some rows of x gives the same rows as `f` of all."""
    want = f(x, *rest)
    for first, end in places:
        assert_same_bits(f(x[first:end], *rest), want[first:end])


def pullback(f):
    """The gradient in x for a cotangent that depends on each row alone."""
    return lambda x, w: jax.vjp(lambda x: f(x, w), x)[1](jnp.sin(f(x, w)))[0]


@pytest.mark.parametrize(("dtype", "of"), [(np.float32, lambda f: f), (ml_dtypes.bfloat16, pullback)], ids=["value", "gradient"])
def test_matrix_products(dtype, of):
    x, w = random((ROWS, 300), dtype), random((300, 33), dtype, 1)
    assert_rows_alone(invariant(of(jaxext.matmul)), x, w)


@pytest.mark.parametrize("N", [1, 3])
def test_few_columns(N):
    """XLA took a single part out of the loop in jax 0.12, and compiled it to other code there."""
    x, w = random((ROWS, 64), np.float32), random((64, N), np.float32, 1)
    assert_rows_alone(invariant(jaxext.matmul), x, w)


def test_products_of_xla_depend_on_the_others():
    """The other tests would have nothing to find if these did not."""
    x, w = random((ROWS, 300), np.float32), random((300, 33), np.float32, 1)
    with pytest.raises(AssertionError):
        assert_rows_alone(jax.jit(jaxext.matmul), x, w)


@pytest.mark.parametrize("of_x, of_w", [(0, None), (0, 0), (1, 2)])
def test_under_vmap(of_x, of_w):
    """A vmap over vectors, and one over matrices with their weights, give the rows of a product."""
    x, w = random((ROWS, 5, 300), np.float32), random((5, 300, 33), np.float32, 1)
    f = jaxext.use_invariant()(jaxext.matmul)
    if of_w is None:
        want = f(x[:, 0], w[0])
        assert_same_bits(jax.jit(jax.vmap(f, (0, None)))(x[:, 0], w[0]), want)
        return
    moved_x, moved_w = jnp.moveaxis(x, 1, of_x), jnp.moveaxis(w, 0, of_w)
    got = jax.jit(jax.vmap(f, (of_x, of_w)))(moved_x, moved_w)
    for i in range(5):
        assert_same_bits(got[i], f(x[:, i], w[i]))


@pytest.mark.parametrize(
    ("kind", "f"), [(AxisType.Auto, jaxext.matmul), (AxisType.Explicit, pullback(jaxext.matmul))], ids=["value", "gradient"]
)
def test_over_devices(kind, f):
    x, w = random((72, 300), np.float32), random((300, 33), np.float32, 1)
    want = invariant(f)(x, w)
    mesh = jax.make_mesh((8,), ("n",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        got = invariant(f)(jax.device_put(x, NamedSharding(mesh, P("n"))), jax.device_put(w, NamedSharding(mesh, P())))
    assert_same_bits(jax.device_get(got), want)


def test_in_a_shard_map():
    x, w = random((72, 300), np.float32), random((300, 33), np.float32, 1)
    mesh = jax.make_mesh((8,), ("n",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(jaxext.use_invariant()(jaxext.matmul), mesh=mesh, in_specs=(P("n"), P()), out_specs=P("n"))
    assert_same_bits(jax.jit(f)(x, w), invariant(jaxext.matmul)(x, w))


CONVS = {
    "dense": ((5, 9, 9, 24), (3, 3, 24, 16), dict(padding="SAME")),
    "transposed": ((5, 6, 6, 24), (4, 4, 24, 16), dict(padding=((2, 2), (2, 2)), lhs_dilation=(2, 2))),
    "depthwise": ((5, 9, 9, 24), (3, 3, 1, 24), dict(padding="SAME", feature_group_count=24)),
}


@pytest.mark.parametrize(("case", "derivative"), [("dense", lambda f: f), ("transposed", lambda f: f), ("depthwise", pullback)])
def test_convolutions(case, derivative):
    x, w, static = CONVS[case]
    conv = functools.partial(jaxext.conv_general_dilated, dimension_numbers=NHWC, **{"window_strides": (1, 1), **static})
    x, w = random(x, np.float32), random(w, np.float32, 1)
    f = invariant(derivative(conv))
    assert_rows_alone(f, x, w, places=[(4, 5), (1, 4)])
    np.testing.assert_allclose(f(x, w), jax.jit(derivative(conv))(x, w), rtol=1e-4, atol=1e-4)


def linear(x, w):
    return jaxext.linear(x, w, jnp.cos(w[0]), activation="gelu", residual=jnp.broadcast_to(x[:, :1], (x.shape[0], w.shape[1])))


def gated(x, w):
    return jaxext.gated_linear_unit(x, jnp.stack([w, w[::-1]], 1), activation="silu")


@pytest.mark.parametrize(("f", "derivative"), [(linear, lambda f: f), (gated, pullback)])
def test_epilogues(f, derivative):
    x, w = random((ROWS, 300), np.float32), random((300, 33), np.float32, 1) / np.float32(16)
    f = derivative(f)
    assert_rows_alone(invariant(f), x, w, places=PLACES[1:4])
    np.testing.assert_allclose(invariant(f)(x, w), jax.jit(f)(x, w), rtol=1e-4, atol=1e-4)


def test_of_a_library_that_calls_lax():
    x, w = random((ROWS, 300), np.float32), random((300, 33), np.float32, 1)
    assert_rows_alone(invariant(jaxext.in_place_of_lax()(lambda x, w: jnp.einsum("mk,kn->mn", x, w))), x, w, places=PLACES[1:4])


def test_the_gradient_of_weights_is_as_ever():
    x, w = random((ROWS, 300), np.float32), random((300, 33), np.float32, 1)
    gradient = lambda x, w: jax.grad(lambda w: jaxext.matmul(x, w).sum())(w)
    np.testing.assert_allclose(invariant(gradient)(x, w), jnp.broadcast_to(x.sum(0)[:, None], w.shape), rtol=1e-5, atol=1e-5)


def test_derivatives_outside_of_the_context():
    """Products that were called inside keep their form."""
    x, w = random((ROWS, 300), np.float32), random((300, 33), np.float32, 1)
    f = jaxext.use_invariant()(jaxext.matmul)
    assert_rows_alone(jax.jit(pullback(f)), x, w)


def test_empty_and_integers():
    f = invariant(jaxext.matmul)
    assert f(jnp.zeros((0, 4)), jnp.zeros((4, 2))).shape == (0, 2)
    np.testing.assert_array_equal(f(jnp.ones((3, 0)), jnp.zeros((0, 2))), np.zeros((3, 2)))
    x = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(f(x, x.T), x @ x.T)


def test_kernels_take_the_same_config_for_every_number_of_rows():
    """The target is a GPU.  Without the context the config depends on the number of rows."""
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton", exc_type=ImportError)

    def how(f, rows):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 4096), (4096, 4096)))
        return jaxext.explain(f, platform="cuda")(x, w).rows[0].how

    named = functools.partial(jaxext.matmul, implementation="triton")
    with jaxext.use_target("sm_90a"):
        assert len({how(jaxext.use_invariant()(named), rows) for rows in (1, 16, 512, 8192)}) == 1
        assert len({how(named, rows) for rows in (1, 16, 512, 8192)}) > 1


def test_explain_says_which_products_are():
    types = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 8), (8, 4)))
    explanation = jaxext.explain(jaxext.use_invariant()(jax.grad(lambda x, w: jaxext.matmul(x, w).sum(), (0, 1))), platform="cpu")(*types)
    kept = {row.op: "bitwise identical in every batch, as for 32 rows" in row.why for row in explanation.rows}
    assert kept == {"matmul_nn": True, "matmul_nt": True, "matmul_tn": False}
    assert "not bitwise identical in other batches, since it has no rows" in str(explanation)


def test_what_it_refuses():
    x, sizes = jnp.ones((4, 8)), jnp.array([1, 3])
    for f in (
        lambda: jaxext.ragged_dot(x, jnp.ones((2, 8, 2)), sizes),
        lambda: jaxext.ragged_scaled_dot(x, jnp.ones((2, 8, 2)), sizes, lhs_scale=jnp.ones(())),
        lambda: jaxext.causal_conv1d(np.ones((1, 4, 8), np.float32), np.ones((2, 8), np.float32)),
        lambda: jaxext.fp8_matmul(x, x.T),
    ):
        with (
            jaxext.use_invariant(),
            pytest.raises(NotImplementedError, match="not supported inside use_invariant, want matmul, .* or a call outside"),
        ):
            f()
    (rows,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(jaxext.use_invariant()(jaxext.matmul)))
    with pytest.raises(NotImplementedError, match="inside use_invariant, the size of M is symbolic"):
        exported(jax.ShapeDtypeStruct((rows, 8), np.float32), jax.ShapeDtypeStruct((8, 2), np.float32))
