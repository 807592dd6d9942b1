"""Activations that are the user's functions: of traced values, of channels, of whole arrays; what is saved, compiled and refused."""

from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

X, W, B, R = (random(shape, np.float32, seed) for seed, shape in enumerate([(4, 5), (5, 6), (6,), (4, 6)]))
GATES, RAGGED, IMAGES, FILTERS = (random(s, np.float32, 1) for s in [(5, 2, 6), (2, 5, 6), (1, 3, 5, 5), (6, 3, 3, 3)])
SEQUENCE, TAPS, STATE = (random(s, np.float32, 2) for s in [(1, 7, 6), (3, 6), (1, 2, 6)])
SIZES, SCALE = np.array([1, 2]), random((4,), np.float32, 3)
NHWC = ("NHWC", "HWIO", "NHWC")


def per_group(x, w):
    return jnp.concatenate([x[:1] @ w[0], x[1:3] @ w[1]])


def rows(y):
    return jnp.concatenate([y * SCALE[:3, None], np.zeros((1, 6), np.float32)])


def causal(x):
    return sum(TAPS[i, None, None] * jnp.pad(x, ((0, 0), (2, 0), (0, 0)))[:, i : i + 7] for i in range(3))


def step(f):
    return jaxext.causal_conv1d_update(SEQUENCE[:, 0], STATE, TAPS, activation=f)[0]


# Each operation with an activation, and its composition.
OPERATIONS = {
    "linear": (lambda f: jaxext.linear(X, W, B, activation=f, residual=R), lambda f: f(X @ W + B) + R),
    "gated_linear_unit": (lambda f: jaxext.gated_linear_unit(X, GATES, activation=f), lambda f: f(X @ GATES[:, 0]) * (X @ GATES[:, 1])),
    "conv_bias_act": (
        lambda f: jaxext.conv_bias_act(IMAGES, FILTERS, (1, 1), "SAME", activation=f).swapaxes(1, 3),
        lambda f: f(jax.lax.conv(IMAGES, FILTERS, (1, 1), "SAME")).swapaxes(1, 3),
    ),
    "ragged_linear": (
        lambda f: jaxext.ragged_linear(X, RAGGED, SIZES, activation=f, row_scale=SCALE),
        lambda f: rows(f(per_group(X, RAGGED))),
    ),
    "ragged_gated_linear_unit": (
        lambda f: jaxext.ragged_gated_linear_unit(X, np.stack([RAGGED, RAGGED + 1], 2), SIZES, activation=f, row_scale=SCALE),
        lambda f: rows(f(per_group(X, RAGGED)) * per_group(X, RAGGED + 1)),
    ),
    "causal_conv1d": (lambda f: jaxext.causal_conv1d(SEQUENCE, TAPS, activation=f), lambda f: f(causal(SEQUENCE))),
    "causal_conv1d_update": (step, lambda f: f(STATE[:, 0] * TAPS[0] + STATE[:, 1] * TAPS[1] + SEQUENCE[:, 0] * TAPS[2])),
}


def prelu(slope):
    return lambda z: jnp.where(z > 0, z, slope * z)


def loss(op):
    return lambda slope: jnp.sin(op(prelu(slope))).sum()


SLOPE, SLOPES = np.float32(0.25), np.array([0.25, 0.5], np.float32)
TRANSFORMED = {
    "grad": lambda f: jax.grad(f)(SLOPE),
    "jit": lambda f: jax.jit(f)(SLOPE),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(SLOPE),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(SLOPE),
    "second derivative": lambda f: jax.jit(jax.grad(jax.grad(f)))(SLOPE),
    "jit of jvp": lambda f: jax.jit(lambda a: jax.jvp(f, (a,), (SLOPE,))[1])(SLOPE),
    "vmap": lambda f: jax.vmap(f)(SLOPES),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(SLOPES),
    "scan": lambda f: jax.lax.scan(lambda c, a: (c, f(a)), SLOPE, SLOPES)[1],
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f))(SLOPE),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_function_of_a_traced_number(name):
    """PReLU with a learned slope (jax #2912): no derivative is lost, and no tracer leaks into a cache."""
    ours, plain = map(loss, OPERATIONS[name])
    for how, of in TRANSFORMED.items():
        if name == "causal_conv1d" or how == "jit of vmap of grad":
            np.testing.assert_allclose(of(ours), of(plain), rtol=1e-4, atol=1e-5, err_msg=how)


@pytest.mark.parametrize(("dimensions", "shape"), [(NHWC, (1, 1, 1, 6)), (None, (1, 6, 1, 1))], ids=["NHWC", "NCHW"])
def test_a_slope_for_each_channel(dimensions, shape):
    """The function gets the array that the user sees, in any layout."""
    slope = prelu(np.linspace(0.1, 0.6, 6, dtype=np.float32).reshape(shape))
    x, w = (IMAGES, FILTERS) if dimensions is None else (IMAGES.transpose(0, 2, 3, 1), FILTERS.transpose(2, 3, 1, 0))
    static: Any = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=dimensions)
    got = jaxext.conv_bias_act(x, w, **static, activation=slope)
    np.testing.assert_allclose(got, slope(jax.lax.conv_general_dilated(x, w, **static)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_function_of_the_whole_array(kind):
    """A function that couples elements is right mapped and split, since it is applied to the result as the user sees it."""
    softmax = lambda z: jax.nn.softmax(z, 0)
    x = random((3, 4, 5), np.float32)
    ours = lambda x: jaxext.linear(x, W, B, activation=softmax, residual=R)
    want = np.stack([softmax(a @ W + B) + R for a in x])
    np.testing.assert_allclose(jax.vmap(ours)(x), want, rtol=1e-5, atol=1e-6)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    with jax.set_mesh(mesh):
        split = jax.device_put(x[0], NamedSharding(mesh, P("d")))
        np.testing.assert_allclose(jax.jit(ours)(split), want[0], rtol=1e-5, atol=1e-6)
        gates = jaxext.gated_linear_unit(split, GATES, activation=jnp.sin, out_sharding=P("d") if kind == "Explicit" else None)
    np.testing.assert_allclose(gates, jnp.sin(x[0] @ GATES[:, 0]) * (x[0] @ GATES[:, 1]), rtol=1e-5, atol=1e-6)


def test_an_update_of_no_state_is_zero():
    got, _ = jaxext.causal_conv1d_update(
        np.ones((2, 6), np.float32), STATE, TAPS, conv_state_indices=np.array([-1, 0]), activation=lambda z: jnp.cos(z) + 2
    )
    assert not got[0].any() and got[1].all()


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        (lambda z: z.sum(-1), r"float32\[4\]"),
        (lambda z: z.astype(jnp.int32), r"int32\[4,6\]"),
        (lambda z: (z, z), r"\(float32\[4,6\], float32\[4,6\]\)"),
        (lambda z: None, "None"),
    ],
    ids=["shape", "dtype", "tuple", "none"],
)
def test_a_result_of_another_type_is_refused(function, gives):
    for call in (jaxext.linear, jax.jit(jaxext.linear, static_argnames="activation")):
        with pytest.raises(TypeError, match=rf"linear: activation is .*, which returns .*{gives}.*, want float32\[4,6\]"):
            call(X, W, activation=function)


@pytest.mark.parametrize(("operation", "arrays"), [(jaxext.linear, (X, W, B)), (jaxext.gated_linear_unit, (X, GATES))])
def test_the_named_implementation_computes_the_product(operation, arrays):
    eqns = equations(lambda: operation(*arrays, activation=jnp.cos, implementation="xla"))
    assert [eqn.params["static"].implementation for eqn in eqns if "static" in eqn.params] == ["xla"]


def test_the_result_of_the_product_alone_is_saved():
    """The values inside the function are computed again."""
    swish = lambda z: z * jax.nn.sigmoid(1.7 * z) * jnp.tanh(z)
    _, pullback = jax.vjp(jax.jit(lambda x: jaxext.linear(x, W, B, activation=swish)), X)
    assert [leaf.shape for leaf in jax.tree.leaves(pullback)].count((4, 6)) == 1


def test_a_fresh_function_compiles_nothing():
    compiled = []
    listener = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    call = lambda: jaxext.linear(X, W, B, activation=lambda z: z * jnp.tanh(1.7 * z))
    call()
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        call()
        assert compiled == []
        jax.jit(lambda x: x + 1)(X)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
