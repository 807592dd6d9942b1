"""`jaxext.scaled_dot` and `quantized_matmul` by `implementation="triton"`, from the operation to the kernel and back, interpreted.

Operands are small integers and scales powers of two, so sums and gradients are exact: comparisons are bit for bit.
"""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxext

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def triton():
    with jaxext.use_implementation("triton"):
        yield


def small(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.integers(-3, 4, shape)).astype(dtype)


def powers(*shape):
    return jnp.exp2(jnp.asarray(rng.integers(-1, 2, shape)).astype(jnp.float32))


X, W, S, T = small(5, 64, dtype=jnp.bfloat16), small(64, 6, dtype=jnp.int8), powers(5, 2), powers(2, 6)
COTANGENT = small(5, 6)
scaled = functools.partial(jaxext.scaled_dot, preferred_element_type=jnp.float32)


def ours(x, w, s, t):
    return scaled(x, w, lhs_scale=s, rhs_scale=t)


def plain(x, w, s, t):
    with jaxext.use_implementation("xla"):
        wide = [x.astype(jnp.float32) * jnp.repeat(s, 32, 1), w.astype(jnp.float32) * jnp.repeat(t, 32, 0)]
        return jnp.matmul(*wide, precision="highest")


def same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_layouts(layout):
    turn = lambda of, which: of.T if which == "t" else of
    numbers = (((int(layout[0] == "n"),), (int(layout[1] == "t"),)), ((), ()))
    y = scaled(
        turn(X, layout[0]),
        turn(W, layout[1]),
        lhs_scale=turn(S, layout[0]),
        rhs_scale=turn(T, layout[1]),
        dimension_numbers=numbers,
    )
    same(y, plain(X, W, S, T))


def test_gradients():
    """In x, whose product has a scaled result, and in both scales."""
    loss = lambda f: lambda x, s, t: jnp.sum(f(x, W, s, t) * COTANGENT)
    both = jax.jit(jax.grad(loss(ours), (0, 1, 2)))
    same(both(X, S, T), jax.grad(loss(plain), (0, 1, 2))(X, S, T))
    assert {row.chosen for row in jaxext.explain(both, X, S, T).rows} == {"triton"}


@pytest.mark.parametrize(
    "mapped", [axes for axes in itertools.product((0, None), repeat=4) if sum(axis == 0 for axis in axes) in (1, 4)], ids=str
)
def test_vmap(mapped):
    args = [jnp.stack([x, x[::-1]]) if axis == 0 else x for x, axis in zip((X, W, S, T), mapped, strict=True)]
    same(jax.jit(jax.vmap(ours, mapped))(*args), jax.vmap(plain, mapped)(*args))


def test_8_bit_gradients_are_rounded_by_xla():
    w, loss = W.astype(jnp.float8_e4m3fn), lambda f: lambda w: f(X, w, S, T).sum()
    same(jax.grad(loss(ours))(w), jax.grad(loss(plain))(w))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized(bits):
    """Forward, and the gradient of x, with int4 as they lie in memory."""
    q = jaxext.Quantized(small(64, 32, dtype={4: jnp.int4, 8: jnp.int8}[bits]), powers(2, 32))
    wide = q.qvalue.astype(jnp.float32) * jnp.repeat(q.scale, 32, 0)
    f = lambda x: jaxext.quantized_matmul(x, q, preferred_element_type=jnp.float32)
    same(jax.jit(f)(X), X.astype(jnp.float32) @ wide)
    y, pullback = jax.vjp(f, X)
    same(pullback(jnp.ones_like(y))[0], (jnp.ones_like(y) @ wide.T).astype(X.dtype))


def test_in_a_shard_map():
    """Two devices with half of the columns each."""
    mesh = jax.make_mesh((2,), ("n",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    specs = (P(), P(None, "n"), P(), P(None, "n"))
    same(jax.jit(jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P(None, "n")))(X, W, S, T), plain(X, W, S, T))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: scaled(X.astype(jnp.int4), W, lhs_scale=S), "x is int4"),
        (lambda: jaxext.quantized_matmul(X, jaxext.Quantized(small(64, 5, dtype=jnp.int4), powers(1, 5))), "packed rows of 5"),
    ],
    ids=["int4", "odd"],
)
def test_refusals(call, reason):
    with pytest.raises(NotImplementedError, match=reason):
        call()
