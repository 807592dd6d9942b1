"""`jaxext.causal_conv1d` by `implementation="triton"`, from the public operation to the kernels and back, in Triton's interpreter."""

import functools
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
X, WEIGHT, BIAS, STATE, CT = (
    random(shape, np.float32, seed) for seed, shape in enumerate(((2, 13, 6), (4, 6), (6,), (2, 3, 6), (2, 13, 6)))
)
NUMBERS = np.array([[0] * 5 + [1] * 8, [3] * 2 + [4] * 10 + [9]], np.int32)
KINDS = {
    "plain": ((X, WEIGHT), {}),
    "bias": ((X, WEIGHT, BIAS), {}),
    "state": ((X, WEIGHT, BIAS), {"initial_states": STATE}),
    "packed": ((X, WEIGHT, BIAS), {"seq_idx": NUMBERS}),
    "packed with a state": ((X, WEIGHT, BIAS), {"seq_idx": NUMBERS, "initial_states": STATE}),
}


def by(implementation, *args, **more):
    return jaxext.causal_conv1d(*args, **more, activation="silu", implementation=implementation)


by_triton = functools.partial(by, "triton")


def near(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def both(implementation, args, more):
    """Result and all cotangents: with a state its own, too."""
    state = {name: of for name, of in more.items() if name == "initial_states"}
    fixed = {name: of for name, of in more.items() if name != "initial_states"}
    y, pullback = jax.vjp(lambda args, state: by(implementation, *args, **state, **fixed), args, state)
    return y, pullback(CT)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind):
    """By one kernel forward and one backward."""
    run = jax.jit(functools.partial(both, "triton", more=KINDS[kind][1]))
    near(run(KINDS[kind][0]), both("xla", *KINDS[kind]))
    rows = jaxext.explain(run, KINDS[kind][0]).rows
    assert [(row.op, row.chosen) for row in rows] == [("causal_conv1d", "triton"), ("causal_conv1d_backward", "triton")]


def test_partial_sums():
    """Those of weight and bias, by several programs, are added; of other results there are none."""
    x, ct = (random((2, 200, 6), np.float32, seed) for seed in (5, 6))
    rows = jaxext.explain(lambda x: jax.vjp(by_triton, x, WEIGHT, BIAS)[1](ct), x).rows
    assert [row.how for row in rows] == ["causal", "causal in 4 parts"]
    near(*(jax.vjp(functools.partial(by, name), x, WEIGHT, BIAS)[1](ct) for name in ("triton", "xla")))


def test_pieces_and_packed_sequences_are_the_whole_bit_for_bit():
    convolve = by_triton
    whole, last = convolve(X, WEIGHT, BIAS, return_final_states=True)
    first, state = convolve(X[:, :5], WEIGHT, BIAS, return_final_states=True)
    second, end = convolve(X[:, 5:], WEIGHT, BIAS, initial_states=state, return_final_states=True)
    np.testing.assert_array_equal(np.concatenate([first, second], 1), whole)
    np.testing.assert_array_equal(end, last)
    packed = convolve(X, WEIGHT, BIAS, seq_idx=np.broadcast_to(np.repeat([0, 1], (5, 8)), (2, 13)).astype(np.int32))
    separate = [convolve(part, WEIGHT, BIAS) for part in (X[:, :5], X[:, 5:])]
    np.testing.assert_array_equal(packed, np.concatenate(separate, 1))


def test_some_of_the_gradients():
    """What nobody asked for is dropped."""
    for wanted in range(3):
        loss = lambda name, *args: jnp.sum(by(name, *args) * CT)
        got, want = (jax.jit(jax.grad(functools.partial(loss, name), wanted))(X, WEIGHT, BIAS) for name in ("triton", "xla"))
        near(got, want)


def test_a_derivative_of_a_derivative():
    second = lambda name: jax.jvp(jax.grad(lambda x: jnp.sum(by(name, x, WEIGHT, BIAS) ** 2)), (X,), (CT,))
    near(second("triton"), second("xla"))


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (None, 0, None)], ids=str)
def test_vmap(axes):
    args = [np.stack([of, of[::-1]]) if axis == 0 else of for of, axis in zip((X, WEIGHT, BIAS), axes, strict=True)]
    gradients = lambda name: jax.vmap(jax.grad(lambda *args: jnp.sum(by(name, *args) * CT), (0, 1, 2)), axes)
    near(jax.jit(gradients("triton"))(*args), gradients("xla")(*args))


def test_devices():
    """Each has the kernels of its part; the sums over sequences are added over devices."""
    mesh = jax.make_mesh((2,), ("n",), axis_types=(AxisType.Auto,))
    gradients = lambda name: jax.grad(lambda x, w: jnp.sum(by(name, x, w) ** 2), (0, 1))
    specs = P("n"), P()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs)
    def split(x, w):
        return gradients("triton")(x, w)

    near(jax.jit(split)(X, WEIGHT), gradients("xla")(X, WEIGHT))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_weights_in_float32(dtype):
    x, ct = (jnp.asarray(of, dtype) for of in (X, CT))
    for name in ("triton", "xla"):
        with jax.numpy_dtype_promotion("standard"):
            y, pullback = jax.vjp(functools.partial(by, name), x, WEIGHT, BIAS)
        assert [of.dtype for of in (y, *pullback(ct))] == [dtype, dtype, np.float32, np.float32]


def test_refusals():
    with pytest.raises(NotImplementedError, match="32 taps, its forward takes 31 at most"):
        by("triton", X, np.ones((32, 6), np.float32))
    with pytest.raises(NotImplementedError, match="9 taps, its backward takes 8 at most"):
        jax.grad(lambda x: by("triton", x, np.ones((9, 6), np.float32)).sum())(X)
