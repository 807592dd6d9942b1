"""Operations with an epilogue, by `implementation="triton"` from the public operation to the kernel and back, in Triton's interpreter.

Operands are small integers and the activation is piecewise linear, so sums and gradients are exact: comparisons with jnp are bit for bit.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxext

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
NHWC = ("NHWC", "HWIO", "NHWC")
CONVOLUTIONS = {"dense": (1, 4), "groups": (2, 4), "depthwise": (4, 8)}  # name -> groups, output channels


@pytest.fixture(autouse=True)
def triton():
    with jaxext.use_implementation("triton"):
        yield


def numbers(*shape, seed=0):
    return random(shape, np.float32, seed, integers=True)


def same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


def of_both(ours, plain, *args):
    """Values and all gradients are the same, and every product is a kernel."""
    everything = tuple(range(len(args)))
    total = lambda f: lambda *args: jnp.sum(f(*args) ** 2)
    same(jax.jit(ours)(*args), plain(*args))
    same(jax.jit(jax.grad(total(ours), everything))(*args), jax.grad(total(plain), everything)(*args))
    assert {row.chosen for row in jaxext.explain(jax.grad(total(ours), everything), *args).rows} == {"triton"}


LINEAR = [numbers(*shape, seed=seed) for seed, shape in enumerate([(5, 9), (9, 7), (7,), (5, 7)])]


def ours(x, w, b, r):
    return jaxext.linear(x, w, b, activation="relu", residual=r)


def plain(x, w, b, r):
    return jax.nn.relu(x @ w + jnp.broadcast_to(b, r.shape)) + r


def test_linear():
    of_both(ours, plain, *LINEAR)


def test_without_a_residual_the_result_tells_the_slope():
    x, w, b, r = LINEAR
    of_both(lambda x, w, b: jaxext.linear(x, w, b, activation="relu"), lambda x, w, b: plain(x, w, b, 0 * r), x, w, b)


def test_gated_linear_unit():
    args = numbers(5, 9), numbers(9, 2, 7, seed=1)
    ours = functools.partial(jaxext.gated_linear_unit, activation="relu")
    of_both(ours, lambda x, w: jax.nn.relu(x @ w[:, 0]) * (x @ w[:, 1]), *args)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_conv_bias_act(kind):
    groups, channels = CONVOLUTIONS[kind]
    shapes = (2, 5, 4, 4), (3, 3, 4 // groups, channels), (channels,), (2, 5, 4, channels)
    static: Any = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC, feature_group_count=groups)
    ours = lambda x, w, b, r: jaxext.conv_bias_act(x, w, b, **static, activation="relu", residual=r)
    plain = lambda x, w, b, r: jax.nn.relu(lax.conv_general_dilated(x, w, **static) + jnp.broadcast_to(b, r.shape)) + r
    of_both(ours, plain, *(numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)))


@pytest.mark.parametrize("groups", [1, 4])
def test_conv_bias_act_along_three_axes(groups):
    """It was taken for a gated product, and so refused: T is an axis of its filter."""
    shapes = (1, 3, 3, 4, 4), (2, 3, 3, 4 // groups, 4), (4,), (1, 3, 3, 4, 4)
    numbering = ("NDHWC", "DHWIO", "NDHWC")
    static: Any = dict(window_strides=(1, 1, 1), padding="SAME", dimension_numbers=numbering, feature_group_count=groups)
    ours = lambda x, w, b, r: jaxext.conv_bias_act(x, w, b, **static, activation="relu", residual=r)
    plain = lambda x, w, b, r: jax.nn.relu(lax.conv_general_dilated(x, w, **static) + jnp.broadcast_to(b, r.shape)) + r
    of_both(ours, plain, *(numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)))


@pytest.mark.parametrize("mapped", [(0, None, None, 0), (None, 1, 0, None), (1, 0, 0, 2)])
def test_vmap(mapped):
    args = [np.stack([a, -a], d) if d is not None else a for a, d in zip(LINEAR, mapped, strict=True)]
    same(jax.jit(jax.vmap(ours, mapped))(*args), jax.vmap(plain, mapped)(*args))


def test_a_sum_over_devices_comes_before_the_epilogue():
    mesh = jax.make_mesh((2,), ("k",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        specs = (P(None, "k"), P("k"), P(), P())
        shapes = (5, 8), (8, 7), (7,), (5, 7)
        args = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        placed = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        got = jax.jit(lambda x, w, b, r: jaxext.linear(x, w, b, activation="relu", residual=r, out_sharding=P()))(*placed)
    same(got, plain(*args))


def test_an_empty_sum_leaves_the_epilogue():
    x, w, b, r = LINEAR
    same(ours(x[:, :0], w[:0], b, r), plain(x[:, :0], w[:0], b, r))


def test_a_function_of_the_user_follows_the_kernel():
    x, w, b, r = LINEAR
    got = jaxext.linear(x, w, b, activation=jnp.sin, residual=r)
    np.testing.assert_allclose(got, jnp.sin(x @ w + b[None]) + r, rtol=1e-5, atol=1e-5)
