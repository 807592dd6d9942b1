"""Causal convolution split along time and along space: on eight devices what one computes, with its gradients."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from cases import random
from collectives import collectives
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxext

TIME, WHOLE = P(None, "t"), P()


def some(*shapes):
    return [random(shape, np.float32, seed) for seed, shape in enumerate(shapes)]


def split(names, *, sizes=(8,), spec=TIME, states=WHOLE, **said):
    mesh = jax.make_mesh(sizes, ("t", "h")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    ours = functools.partial(jaxext.parallel.halo_causal_conv, axis_names=names, **said)
    return jax.jit(jax.shard_map(lambda x, w, state: ours(x, w, state=state), mesh=mesh, in_specs=(spec, WHOLE, states), out_specs=spec))


def check(ours, *operands, **said):
    whole = lambda x, w, state: jaxext.causal_conv(x, w, **said, state=state)
    np.testing.assert_allclose(ours(*operands), whole(*operands), rtol=1e-5, atol=1e-5)
    total = lambda f: jax.jit(jax.grad(lambda *args: jax.numpy.sum(jax.numpy.sin(f(*args))), (0, 1, 2)))
    for got, want in zip(total(ours)(*operands), total(whole)(*operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_sequences():
    """The state of a device is that of the one before, by one message."""
    said: dict[str, Any] = dict(strides=2, dilation=2, groups=2)
    operands = some((2, 32, 6), (3, 3, 4), (2, 4, 6))
    ours = split(("t",), **said)
    check(ours, *operands, **said)
    assert collectives(ours.lower(*operands).compile()) == {"collective-permute": 1}


def test_few_steps_a_device():
    """A state of five steps comes from three devices."""
    check(split(("t",)), *some((1, 16, 3), (6, 3, 2), (1, 5, 3)))


@pytest.mark.parametrize("transpose", [False, True])
def test_videos_split_along_time_and_height(transpose):
    """Halos have the rows of the state too."""
    said = dict(strides=(2, 2, 1), transpose=transpose)
    held = 1 if transpose else 2
    operands = some((1, 8, 8, 3, 2), (3, 3, 3, 2, 3), (1, held, 8, 3, 2))
    check(split(("t", "h", None), sizes=(4, 2), spec=P(None, "t", "h"), states=P(None, None, "h"), **said), *operands, **said)


def test_errors():
    x, w, state = some((2, 24, 6), (3, 6, 4), (2, 2, 6))
    with pytest.raises(ValueError, match="halo_causal_conv: x has 3 steps, want a multiple of 2"):
        split(("t",), strides=2)(x, w, state)
    with pytest.raises(ValueError, match=r"halo_causal_conv: axis_names is \('t', None\), want one entry for each of 1 axes, time first"):
        split(("t", None))(x, w, state)
