"""Models: layers that take our operations as arguments, and under `in_place_of_lax` the stock layers, which take none.

Truth is the stock layer on lax.  The results may differ by rounding only, and the jaxpr says who computed them.
"""

import functools
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations, random
from flax import linen, nnx
from jax import lax

import jaxext
from jaxext.core.form import owner

IMAGES, VECTORS = (2, 6, 5, 4), (3, 4)
CONV: dict[str, Any] = dict(features=6, kernel_size=(3, 3), strides=(2, 1), feature_group_count=2)
STOCK = {"dot_general", "conv_general_dilated"}


def primitives(fun, *args):
    """Names of the products in `fun`: lax's and ours."""
    return {eqn.primitive.name for eqn in equations(fun, *args)} & (STOCK | {primitive.name for primitive in owner})


def loss_and_gradients(apply):
    return jax.value_and_grad(lambda params, x: (apply(params, x) ** 2).sum(), argnums=(0, 1))


def check_same(got, want):
    """Equal trees of float32, but for rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max(initial=0)))


# Layers that take an operation


OURS = dict(conv=jaxext.conv_general_dilated, dot=jaxext.dot_general)


def test_linen():
    ours, stock = linen.Conv(**CONV, conv_general_dilated=jaxext.conv_general_dilated), linen.Conv(**CONV)
    x = random(IMAGES, np.float32)
    params = stock.init(jax.random.key(0), x)
    check_same(ours.init(jax.random.key(0), x), params)
    check_same(*(jax.jit(loss_and_gradients(layer.apply))(params, x) for layer in (ours, stock)))
    found = primitives(loss_and_gradients(ours.apply), params, x)
    assert len(found) == 3
    assert not found & STOCK


@pytest.mark.parametrize("name", ["conv", "linear"])
def test_nnx(name):
    """nnx passes `out_sharding` to whatever it is given, always."""
    conv = functools.partial(nnx.Conv, 4, 6, (3, 3), strides=(2, 1), feature_group_count=2)
    linear = functools.partial(nnx.Linear, 4, 5)
    make, ops, shape = {
        "conv": (conv, dict(conv_general_dilated=jaxext.conv_general_dilated), IMAGES),
        "linear": (linear, dict(dot_general=jaxext.dot_general), VECTORS),
    }[name]
    ours, stock = (make(rngs=nnx.Rngs(1), **how) for how in (ops, {}))
    x = random(shape, np.float32)

    def pure(layer):
        definition, params = nnx.split(layer)
        return (lambda params, x: nnx.merge(definition, params)(x)), params

    (f, params), (g, same_params) = pure(ours), pure(stock)
    check_same(jax.tree.leaves(params), jax.tree.leaves(same_params))
    got, want = jax.jit(loss_and_gradients(f))(params, x), jax.jit(loss_and_gradients(g))(same_params, x)
    check_same(jax.tree.leaves(got), jax.tree.leaves(want))
    assert not primitives(loss_and_gradients(f), params, x) & STOCK


class Net(eqx.Module):
    """A model that calls the operations itself."""

    w: jax.Array
    head: eqx.nn.Linear
    ops: dict = eqx.field(static=True)

    def __call__(self, x):
        x = self.ops["conv"](x[None], self.w, (1, 1), "SAME")[0]
        return self.ops["dot"](self.head.weight, jax.nn.relu(x).mean((1, 2)), (((1,), (0,)), ((), ()))) + self.head.bias


def test_equinox_model_that_calls_the_operations():
    """The calls go through vmap, by which equinox makes batches, and filter_jit."""
    head = eqx.nn.Linear(6, 3, key=jax.random.key(0), dtype=np.float32)
    w, x = jnp.asarray(random((6, 4, 3, 3), np.float32)), random((5, 4, 6, 5), np.float32, 1)
    ours, stock = (Net(w, head, ops) for ops in (OURS, dict(conv=lax.conv_general_dilated, dot=lax.dot_general)))

    def apply(model, x):
        return jax.vmap(model)(x)

    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda model, x: (apply(model, x) ** 2).sum()))
    got, want = step(ours, x), step(stock, x)
    check_same(jax.tree.leaves(got), jax.tree.leaves(want))
    assert not primitives(apply, ours, x) & STOCK


# Layers that take none


def flax_apply(layer, x):
    return layer.init(jax.random.key(0), x), layer.apply


def eqx_apply(layer):
    params, static = eqx.partition(layer, eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def whole(f):
    return None, lambda _, x: f(x)


def stock_models():
    """(parameters, apply), input, and the primitives of ours that must turn up."""
    images, vectors, channels_first = random(IMAGES, np.float32), random(VECTORS, np.float32), random((2, 4, 6, 5), np.float32)
    transposed = eqx.nn.ConvTranspose2d(4, 3, 3, stride=2, key=jax.random.key(1), dtype=np.float32)
    return {
        "linen.Conv": lambda: (flax_apply(linen.Conv(**CONV), images), images, {"conv2d_fprop"}),
        "eqx.ConvTranspose2d": lambda: (eqx_apply(transposed), channels_first, {"conv2d_fprop"}),
        "jnp.matmul": lambda: (whole(lambda x: jnp.matmul(x, x.T)), vectors, {"matmul_nn", "matmul_nt"}),
        "scan": lambda: (whole(lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ c.T @ c), None), x, length=3)[0]), vectors, {"matmul_nn"}),
    }


@pytest.mark.parametrize("name", stock_models())
def test_stock_layers_in_place_of_lax(name):
    (params, apply), x, expected = stock_models()[name]()
    f = jax.jit(loss_and_gradients(apply)) if params is not None else jax.jit(jax.value_and_grad(lambda p, x: (apply(p, x) ** 2).sum(), 1))
    want = f(params, x)
    outside = primitives(apply, params, x)
    with jaxext.in_place_of_lax():
        inside = primitives(apply, params, x)
        got = f(params, x)
    assert outside <= STOCK
    assert outside
    assert inside
    assert not inside & STOCK
    assert inside & expected
    check_same(got, want)
    assert primitives(apply, params, x) == outside


def test_eager_calls_are_ours_too(monkeypatch):
    """An eager call has no jaxpr to read: the implementation itself is watched."""
    from jaxext.ops.matmul.xla import XlaMatmul

    ran = []
    run = XlaMatmul.run
    monkeypatch.setattr(XlaMatmul, "run", lambda self, call, *given: ran.append(call.op) or run(self, call, *given))
    x = np.ones((2, 13), np.float32)  # a shape of this test's own, which no cache holds
    lax.dot(x, x.T)
    assert ran == []
    with jaxext.in_place_of_lax():
        y = lax.dot(x, x.T)
    assert len(ran) == 1
    np.testing.assert_array_equal(y, np.full((2, 2), 13))


def f_of_lax(x):
    return jnp.dot(x, x)


X: Any = np.eye(3, dtype=np.float32)


def test_jit_keeps_inside_and_outside_apart():
    """The context is part of the cache key: traced once each, whichever came first."""
    traced = []

    @jax.jit
    def f(x):
        traced.append(None)
        return f_of_lax(x)

    for _ in range(2):
        assert primitives(f, X) == {"dot_general"}
        with jaxext.in_place_of_lax():
            assert primitives(f, X) == {"matmul_nn"}
            f(X)
        f(X)
    assert len(traced) == 2


def test_other_threads_see_lax():
    found = {}

    def look(name):
        found[name] = primitives(lambda x: f_of_lax(x), X)

    with jaxext.in_place_of_lax():
        thread = threading.Thread(target=look, args=("other",))
        thread.start()
        thread.join()
        look("this")
    assert found == {"other": {"dot_general"}, "this": {"matmul_nn"}}


def test_nesting_and_exceptions():
    """Every way out restores what was before; twice is the same as once."""

    def names():
        return primitives(lambda x: f_of_lax(x), X)

    with pytest.raises(KeyError), jaxext.in_place_of_lax():
        raise KeyError
    assert names() == {"dot_general"}
    with pytest.raises(TypeError), jaxext.in_place_of_lax():
        jnp.matmul(X, X[:2])
    assert names() == {"dot_general"}
    with jaxext.in_place_of_lax():
        with jaxext.in_place_of_lax():
            assert names() == {"matmul_nn"}
        assert names() == {"matmul_nn"}
    assert names() == {"dot_general"}


def test_named_implementation_reaches_stock_code():
    """`use_implementation` inside or outside, also for the backward pass."""

    def named():
        eqns = equations(jax.grad(lambda x: jnp.dot(x, x).sum()), X)
        return {eqn.params["static"].implementation for eqn in eqns if eqn.primitive in owner}

    with jaxext.in_place_of_lax():
        assert named() == {None}
        with jaxext.use_implementation("xla"):
            assert named() == {"xla"}
        assert named() == {None}
    with jaxext.use_implementation("xla"), jaxext.in_place_of_lax():
        assert named() == {"xla"}


def test_our_own_operations_inside():
    """They are ours already, and their implementation, which is written in lax, is not taken for a model."""
    f = jax.jit(jax.grad(lambda x: (jaxext.matmul(x, x) @ x).sum()))
    want = f(X)
    with jaxext.in_place_of_lax():
        assert not primitives(f, X) & STOCK
        np.testing.assert_array_equal(f(X), want)


def test_what_lax_refuses_is_refused_inside():
    for bad in (lambda: lax.dot(X, X[:2]), lambda: lax.conv(X, X, (1,), "SAME"), lambda: jnp.matmul(X, X[0, 0])):
        outcomes = []
        for context in (jaxext.use_implementation(None), jaxext.in_place_of_lax()):
            with pytest.raises(Exception) as caught, context:  # noqa: B017
                bad()
            outcomes.append((caught.type, str(caught.value)))
        assert outcomes[0] == outcomes[1]


def test_scalars_in_place_of_lax():
    """lax's products take Python's numbers, which have no shape of their own."""
    dims = (((), ()), ((), ()))
    with jaxext.in_place_of_lax():
        got = lax.dot_general(2.0, 3.0, dims)
    assert got == 6.0 and got.dtype == lax.dot_general(2.0, 3.0, dims).dtype


def test_policies_see_products_in_place_of_laxs():
    """jax's own policy knows lax's primitives by identity, so it has ours computed again; ours does not."""
    w = jnp.ones((4, 4), jnp.float32)

    def products(policy):
        with jaxext.in_place_of_lax():
            net = jax.checkpoint(lambda w: jnp.sum(jnp.sin(jnp.sin(w @ w) @ w)), policy=policy)
            return sum(row.times for row in jaxext.explain(jax.grad(net))(w).rows)

    assert products(jaxext.checkpoint_policies.dots_saveable) == 6
    assert products(jax.checkpoint_policies.nothing_saveable) > 6
