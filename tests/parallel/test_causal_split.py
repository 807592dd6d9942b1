"""Causal convolution split along time: on eight devices what one computes, with its gradients, by one message to the next device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from collectives import collectives
from jax.sharding import PartitionSpec as P

import jaxext

SPLIT = P(None, "t")


def some(taps=4, steps=32):
    shapes = (2, steps, 6), (taps, 6), (6,), (2, taps - 1, 6)
    return [random(shape, np.float32, seed) for seed, shape in enumerate(shapes)]


def mesh():
    return jax.make_mesh((8,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))


def split(*specs, **static):
    """Return the convolution split over time, of x, weight, bias and what `static` names, by position."""
    names = static.pop("names", ())

    def f(x, weight, bias, *more):
        given = dict(zip(names, more, strict=True))
        return jaxext.parallel.halo_causal_conv1d(x, weight, bias, axis_name="t", activation="silu", **given, **static)

    return jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=(SPLIT, P(), P(), *specs), out_specs=SPLIT))


def near(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def check(ours, whole, *args, which):
    near(ours(*args), whole(*args))
    total = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), which)
    near(jax.jit(total(ours))(*args), total(whole)(*args))


@pytest.mark.parametrize("taps", [1, 4])
def test_values_and_gradients(taps):
    x, weight, bias, state = some(taps)
    convolve = functools.partial(jaxext.causal_conv1d, activation="silu")
    check(split(), convolve, x, weight, bias, which=(0, 1, 2))
    with_state = lambda x, weight, bias, state: convolve(x, weight, bias, initial_states=state)
    check(split(P(), names=("initial_states",)), with_state, x, weight, bias, state, which=(0, 1, 2, 3))


def packed(taps, steps, lengths):
    x, weight, bias, state = some(taps, steps)
    numbers = np.stack([np.repeat(np.arange(len(of)) + 3, of) for of in lengths]).astype(np.int32)
    whole = lambda x, weight, bias, *state: jaxext.causal_conv1d(
        x, weight, bias, seq_idx=numbers, activation="silu", **dict(zip(["initial_states"], state, strict=False))
    )
    return numbers, whole, (x, weight, bias, state)


@pytest.mark.parametrize(
    ("taps", "steps", "lengths"),
    [(4, 32, ((4, 7, 1, 12, 8), (0, 30, 2))), (12, 8, ((8,), (5, 3)))],
    ids=["edges on edges of devices, beside them and far from them", "one step a device"],
)
def test_packed_sequences_with_states(taps, steps, lengths):
    """The state reaches as many devices as it is long."""
    numbers, whole, args = packed(taps, steps, lengths)
    ours = split(SPLIT, P(), names=("seq_idx", "initial_states"))
    check(lambda x, weight, bias, state: ours(x, weight, bias, numbers, state), whole, *args, which=(0, 1, 2, 3))
    near(split(SPLIT, names=("seq_idx",))(*args[:3], numbers), whole(*args[:3]))  # without a state


def test_fewer_steps_than_the_state():
    """They come from further devices, one message from each distance."""
    x, weight, bias, state = some(4, 16)
    whole = lambda x, weight, bias, state: jaxext.causal_conv1d(x, weight, bias, initial_states=state, activation="silu")
    ours = split(P(), names=("initial_states",))
    check(ours, whole, x, weight, bias, state, which=(0, 1, 2, 3))
    sent = collectives(ours.lower(x, weight, bias, state).compile())
    assert dict(sent) == {"collective-permute": 2}


def test_no_steps():
    """Values alone: jaxlib 0.11.2 crashes on gradients of a shard_map without elements, of lax's operations too."""
    x, weight, bias, state = some(3, 0)
    assert split(P(), names=("initial_states",))(x, weight, bias, state).shape == (2, 0, 6)


def test_one_message():
    x, weight, bias, _ = some()
    assert dict(collectives(split().lower(x, weight, bias).compile())) == {"collective-permute": 1}


def test_precision():
    """It reaches both convolutions of the gradient, with the part and with its state, and what it refuses is refused."""
    x, weight, bias, _ = some()
    for precision, times in ((None, 0), ("highest", 4)):
        ours = split(precision=precision, implementation="xla")
        gradient = jax.jit(jax.grad(lambda weight, ours=ours: ours(x, weight, bias).sum()))
        assert gradient.trace(weight).lower(lowering_platforms=("cuda",)).as_text().count("HIGHEST") == times
    with pytest.raises(ValueError, match="sharp"):
        split(precision="sharp")(x, weight, bias)


def test_errors():
    x, weight, bias, state = some()
    with pytest.raises(TypeError, match=r"halo_causal_conv1d: w has the shape \(6,\), want \(k, 6\)"):
        split()(x, weight[0], bias)
    with pytest.raises(TypeError, match=r"initial_states has the shape \(2, 2, 6\), want \(2, 3, 6\)"):
        split(P(), names=("initial_states",))(x, weight, bias, state[:, 1:])
    with pytest.raises(NameError, match="axis_name is 'nowhere', want an axis of a shard_map"):
        jaxext.parallel.halo_causal_conv1d(x, weight, bias, axis_name="nowhere")
