"""`jaxext.ragged_dot` by `implementation="triton"`, from the public operation to the kernel and back, in Triton's interpreter.

Operands are small integers, so sums and gradients are exact: comparisons with one product for each group are bit for bit.
"""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxext

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
X, W, SIZES = random((40, 9), np.float32, 0, True), random((4, 9, 7), np.float32, 1, True), jnp.array([13, 0, 20, 3])


@pytest.fixture(autouse=True)
def triton():
    with jaxext.use_implementation("triton"):
        yield


def plain(x, w, sizes):
    """Rows of no group are zero."""
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")
    of_each = jnp.einsum("mk,gkn->gmn", x, w)
    return sum((jnp.where((group == g)[:, None], of_each[g], 0) for g in range(len(w))), jnp.zeros(of_each.shape[1:], x.dtype))


def squares(f, sizes=SIZES):
    return lambda x, w: jnp.sum(f(x, w, sizes) ** 2)


def same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


def test_values_and_gradients():
    same(jax.jit(jaxext.ragged_dot)(X, W, SIZES), plain(X, W, SIZES))
    both = jax.jit(jax.grad(squares(jaxext.ragged_dot), (0, 1)))
    same(both(X, W), jax.grad(squares(plain), (0, 1))(X, W))
    assert {row.chosen for row in jaxext.explain(both, X, W).rows} == {"triton"}


def test_a_derivative_of_a_derivative():
    along = lambda f: jax.jvp(jax.grad(squares(f), (0, 1)), (X, W), (X[::-1], W[::-1]))
    same(along(jaxext.ragged_dot), along(plain))


@pytest.mark.parametrize("mapped", [axes for axes in itertools.product((0, None), repeat=3) if any(axis == 0 for axis in axes)], ids=str)
def test_vmap(mapped):
    """In one launch, also of the gradients."""
    stacks = (np.stack([X, X[::-1]]), np.stack([W, W[::-1]]), jnp.stack([SIZES, jnp.array([0, 11, 11, 11])]))
    args = [stack if axis == 0 else one for stack, one, axis in zip(stacks, (X, W, SIZES), mapped, strict=True)]

    def gradients(f, x, w, sizes):
        return jax.grad(squares(f, sizes), (0, 1))(x, w)

    for of in (lambda f: f, lambda f: functools.partial(gradients, f)):
        same(jax.jit(jax.vmap(of(jaxext.ragged_dot), mapped))(*args), jax.vmap(of(plain), mapped)(*args))


def test_a_layer_with_epilogues():
    """Two launches forward: a gate, and what the router's weight of each row scales."""
    gates, down, scale = random((4, 9, 2, 6), np.float32, 2), random((4, 6, 7), np.float32, 3), random((40,), np.float32, 4)
    bias = random((4, 7), np.float32, 5)

    def layer(x, gates, down, bias, scale):
        hidden = jaxext.ragged_gated_linear_unit(x, gates, SIZES, activation="silu", precision="highest")
        return jaxext.ragged_linear(hidden, down, SIZES, bias, row_scale=scale, precision="highest")

    def by_jnp(x, gates, down, bias, scale):
        gate, up = (plain(x, gates[:, :, i], SIZES) for i in range(2))
        ones = np.ones((40, 1), np.float32)
        return (plain(jax.nn.silu(gate) * up, down, SIZES) + plain(ones, bias[:, None], SIZES)) * scale[:, None]

    args = X, gates, down, bias, scale
    assert [row.op for row in jaxext.explain(layer, *args).rows] == ["ragged_gated_linear_unit", "ragged_linear"]
    assert {row.chosen for row in jaxext.explain(layer, *args).rows} == {"triton"}
    np.testing.assert_allclose(jax.jit(layer)(*args), by_jnp(*args), rtol=1e-4, atol=1e-4)
    loss = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3, 4))
    for one, other in zip(jax.jit(loss(layer))(*args), loss(by_jnp)(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


def test_shard_map_over_columns():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    columns = jax.shard_map(
        lambda x, w, s: jaxext.ragged_dot(x, w, s), mesh=mesh, in_specs=(P(), P(None, None, "d"), P()), out_specs=P(None, "d")
    )
    w = np.concatenate([W, W[..., :1]], -1)
    same(jax.jit(columns)(X, w, SIZES), plain(X, w, SIZES))
    gradients = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w, SIZES) ** 2), (0, 1)))(X, w)
    same(gradients(columns), jax.grad(squares(plain), (0, 1))(X, w))
