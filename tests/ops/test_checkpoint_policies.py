"""A policy of jax's own under which products of ours are computed again, and lax's would not be, is warned of; no other is."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import partial_eval as pe

import jaxext
from jaxext.ops.ragged_gather import ragged_gather_linear
from jaxext.parallel import by_platform

JAX, OURS = jax.checkpoint_policies, jaxext.checkpoint_policies
X = jnp.ones((4, 4), "float32")


def net(w, x):
    return jnp.sum(jnp.sin(jaxext.matmul(jnp.sin(jaxext.matmul(x, w)), w)))


def warned(policy, function=net, *args):
    """The messages while a gradient is traced, and where they point."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.make_jaxpr(jax.grad(jax.checkpoint(function, policy=policy)))(*(args or (X, X)))
    assert all(each.category is UserWarning for each in caught)
    return {str(each.message) for each in caught}, {(each.filename, each.lineno) for each in caught}


WARNED = {
    "dots_saveable": (
        JAX.dots_saveable,
        "jax.checkpoint_policies.dots_saveable recognises",
        "use jaxext.checkpoint_policies.dots_saveable",
    ),
    "dots_with_no_batch_dims_saveable": (
        JAX.dots_with_no_batch_dims_saveable,
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable recognises",
        "use jaxext.checkpoint_policies.dots_with_no_batch_dims_saveable",
    ),
    "offload": (JAX.offload_dot_with_no_batch_dims("device", "pinned_host"), "its policy recognises", "seeing_products(policy)"),
    "combined": (
        JAX.save_from_both_policies(JAX.dots_saveable, JAX.save_only_these_names("a")),
        "its policy recognises",
        "seeing_products(policy)",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_policy_of_jax_that_knows_lax_alone(name):
    """One message, which names what to use and points to the user's line."""
    policy, knows, use = WARNED[name]
    (message,), (place,) = warned(policy)
    assert message.startswith(f"jax.checkpoint: {knows} lax's primitives only") and message.endswith(use)
    lines, first = inspect.getsourcelines(warned)
    (line,) = (first + i for i, text in enumerate(lines) if "jax.grad(" in text)
    assert place == (__file__, line)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        JAX.nothing_saveable,
        JAX.everything_saveable,
        JAX.save_only_these_names("a"),
        OURS.dots_saveable,
        OURS.seeing_products(JAX.dots_with_no_batch_dims_saveable),
        JAX.save_from_both_policies(OURS.dots_saveable, JAX.dots_saveable),
        lambda primitive, *_, **__: primitive is lax.dot_general_p,
        JAX.save_from_both_policies(JAX.save_only_these_names("a"), lambda prim, *_, **params: prim.name == "dot_general" and params["no"]),
    ],
)
def test_no_other_policy(policy):
    """A policy warns of nothing if it saves ours, would not save lax's, or is the user's."""
    assert warned(policy) == (set(), set())


def test_what_lax_would_compute_again_too():
    """A policy for products without batch axes saves no product with them, and no convolution."""
    batch, image = jnp.stack([X, X]), jnp.ones((1, 2, 5), "float32")
    policy = JAX.dots_with_no_batch_dims_saveable
    assert warned(policy, net, batch, batch) == (set(), set())
    convolve = lambda w, x: jnp.sum(jnp.sin(jaxext.conv(jnp.sin(jaxext.conv(x, w, (1,), "SAME")), w, (1,), "SAME")))
    filters = jnp.ones((2, 2, 3), "float32")
    assert warned(policy, convolve, filters, image) == (set(), set())
    assert warned(JAX.dots_saveable, convolve, filters, image)[0]


def test_products_that_nobody_wrote():
    """The product stands in a scan, once where a context put ours in the place of lax's."""

    def loop(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=2)[0])

    assert warned(JAX.dots_saveable, loop) == (set(), set())
    with jaxext.in_place_of_lax():
        assert warned(JAX.dots_saveable, loop)[0]


def test_without_a_gradient():
    """Nothing is saved, so nothing is computed again."""
    jax.make_jaxpr(jax.checkpoint(net, policy=JAX.dots_saveable))(X, X)  # a warning would be an error


def test_a_policy_that_cannot_be_called():
    with pytest.raises(
        TypeError, match=r"^seeing_products: policy is None, want a function, such as jax.checkpoint_policies.dots_saveable"
    ):
        OURS.seeing_products(None)  # type: ignore[arg-type]


# ---- jax_remat3, under which jax asks policies before it takes derivatives, if the primitive has a rule


@pytest.fixture
def remat3():
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


def count(jaxpr, name):
    """Count a primitive in a jaxpr, also inside of others."""
    inner = [sub for eqn in jaxpr.eqns for value in eqn.params.values() for sub in (value if isinstance(value, tuple | list) else [value])]
    inner = [getattr(sub, "jaxpr", sub) for sub in inner]
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(count(sub, name) for sub in inner if hasattr(sub, "eqns"))


def close(got, want):
    jax.tree.map(lambda y, z: np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6, equal_nan=False), got, want)


def gelu(w, x):
    """Its derivative needs the input of the activation."""
    return jnp.sum(jaxext.linear(jnp.sin(x), w, activation="gelu") * x)


def product(x, w):
    return (jaxext.matmul(x, w),)


IMAGE, FILTERS = jnp.linspace(0, 1, 60, dtype="float32").reshape(2, 2, 15), jnp.linspace(-1, 1, 12, dtype="float32").reshape(2, 2, 3)
OFFLOAD = OURS.offload_dot_with_no_batch_dims("device", "pinned_host")
AGAIN = {
    "matmul": (lambda w, x: jnp.sum(jnp.sin(jaxext.matmul(jnp.sin(x), w))), X, "matmul_nn", OURS.dots_saveable, 1),
    "recomputed": (lambda w, x: jnp.sum(jnp.sin(jaxext.matmul(jnp.sin(x), w))), X, "matmul_nn", JAX.nothing_saveable, 2),
    "offloaded": (lambda w, x: jnp.sum(jnp.sin(jaxext.matmul(jnp.sin(x), w))), X, "matmul_nn", OFFLOAD, 1),
    "conv": (lambda w, x: jnp.sum(jnp.sin(jaxext.conv(x, w, (1,), "SAME"))), IMAGE, "conv1d_fprop", OURS.dots_saveable, 1),
    "linear": (gelu, X, "linear", OURS.dots_saveable, 1),
    "by name": (gelu, X, "linear", JAX.save_only_these_names("preactivation"), 1),
    "by platform": (lambda w, x: jnp.sum(jnp.sin(by_platform.choose(product, product, x, w)[0])), X, "matmul_nn", OURS.dots_saveable, 1),
    "another name": (gelu, X, "linear", JAX.save_only_these_names("z"), 2),
}


@pytest.mark.parametrize("name", AGAIN)
def test_how_often_remat3_computes_a_product(name, remat3):
    """Every product that a policy saves once, also one whose derivative needs a further result.  Gradients of two orders stay the same."""
    loss, x, primitive, policy, times = AGAIN[name]
    w = FILTERS if x is IMAGE else X / 3
    gradient = jax.value_and_grad(jax.checkpoint(loss, policy=policy))
    alive, _ = pe.dce_jaxpr(jax.make_jaxpr(gradient)(w, x).jaxpr, [True] * 2)
    assert count(alive, primitive) == times
    close(jax.jit(gradient)(w, x), jax.value_and_grad(loss)(w, x))
    if name == "linear":
        second = lambda loss: jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, x) ** 2)))(w)
        close(second(jax.checkpoint(loss, policy=policy)), second(loss))


def test_remat3_warns_of_a_policy_that_knows_lax_alone(remat3):
    assert warned(JAX.dots_saveable)[0] and warned(OURS.dots_saveable) == (set(), set())


SIZES = np.array([2, 0, 1], np.int32)
ROWS, MATRICES, SCALE = (np.ones(shape, np.float32) for shape in ((4, 6), (3, 6, 8), (3, 2, 4)))
PLACES = np.array([2, 0, 1, 2, 4], np.int32), np.array([[1, 5], [2, 5], [0, 3], [5, 5]], np.int32)
RAGGED = {
    "ragged_linear": lambda x: jaxext.ragged_linear(x, MATRICES, SIZES, activation="silu", row_scale=x[:, 0]),
    "ragged_gated_linear_unit": lambda x: jaxext.ragged_gated_linear_unit(x, MATRICES.reshape(3, 6, 2, 4), SIZES, activation="silu"),
    "ragged_gather_linear": lambda x: ragged_gather_linear(x, MATRICES, SIZES, *PLACES, activation="silu"),
    "ragged_gather_gated": lambda x: ragged_gather_linear(x, MATRICES.reshape(3, 6, 2, 4), SIZES, *PLACES, activation="silu"),
    "ragged_scaled_dot": lambda x: jaxext.ragged_scaled_dot(x, MATRICES, SIZES, lhs_scale=x[:, :1], rhs_scale=SCALE),
    "transpose_rhs": lambda x: jaxext.ragged_scaled_dot(
        x, MATRICES.swapaxes(1, 2), SIZES, rhs_scale=SCALE.swapaxes(1, 2), transpose_rhs=True
    ),
}


@pytest.mark.parametrize("name", RAGGED)
def test_policies_see_a_ragged_product_that_lax_takes(name):
    """Operands in lax's order, with the dimension numbers of these: those of `ragged_linear` were of a plain product."""
    seen = []

    def policy(primitive, *avals, **params):
        if primitive.name == "ragged_dot_general":
            sizes = avals[2].update(shape=SIZES.shape)
            numbers = params["ragged_dot_dimension_numbers"]
            seen.append(jax.eval_shape(lambda lhs, rhs, sizes: lax.ragged_dot_general(lhs, rhs, sizes, numbers), *avals[:2], sizes).size)
        return False

    f = jax.checkpoint(lambda x: jnp.sin(RAGGED[name](jnp.sin(x))).sum(), policy=OURS.seeing_products(policy))
    jax.make_jaxpr(jax.grad(f))(ROWS)
    assert seen and seen[0] == 4 * 8
