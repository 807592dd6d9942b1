"""Causal convolutions on a GPU, by each implementation, against float64; `xla` on CPUs too."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

import jaxext

N, T, C = 2, 300, 136
BY_EACH = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def by_jnp(x, weight, bias, state, seq_idx, ct):
    """Result and cotangents, in float64."""
    taps = len(weight)

    def convolved(x, weight, bias, state):
        read = jnp.concatenate([state, x], 1)
        numbers = jnp.concatenate([jnp.zeros((N, taps - 1), jnp.int32), seq_idx], 1)
        same = lambda i: (numbers[:, i : i + T] == seq_idx)[..., None]
        terms = [jnp.where(same(i), read[:, i : i + T], 0.0) * jnp.broadcast_to(weight[i], x.shape) for i in range(taps)]
        return jax.nn.silu(sum(terms, jnp.broadcast_to(bias, x.shape)))

    y, pullback = jax.vjp(convolved, *(jnp.asarray(of, jnp.float64) for of in (x, weight, bias, state)))
    return y, *pullback(jnp.asarray(ct, jnp.float64))


@BY_EACH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", ["state", "packed"])
@pytest.mark.parametrize("taps", [2, 4, 8])
def test_values_and_gradients(implementation, dtype, kind, taps):
    shapes = (N, T, C), (taps, C), (C,), (N, taps - 1, C), (N, T, C)
    x, weight, bias, state, ct = (jnp.asarray(random(shape, np.float32, seed), dtype) for seed, shape in enumerate(shapes))
    numbers = np.zeros((N, T), np.int32)
    if kind == "packed":
        numbers = np.sort(np.random.default_rng(0).integers(1, 9, (N, T)), -1).astype(np.int32)
        state = jnp.zeros_like(state)

    @jax.jit
    def both(x, weight, bias, state, ct):
        def convolve(x, weight, bias, state):
            given: Any = {"seq_idx": numbers} if kind == "packed" else {"initial_states": state}
            return jaxext.causal_conv1d(x, weight, bias, **given, activation="silu", implementation=implementation)

        y, pullback = jax.vjp(convolve, x, weight, bias, state)
        return y, *pullback(ct)

    try:
        got = both(x, weight, bias, state, ct)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    want = by_jnp(x, weight, bias, state, numbers, ct)
    eps = float(jnp.finfo(dtype).eps)
    for one, other in zip(got[: 4 if kind == "packed" else 5], want, strict=False):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=16 * eps, atol=16 * eps * float(jnp.abs(other).max()))
    for one, other in zip(got, both(x, weight, bias, state, ct), strict=True):
        np.testing.assert_array_equal(one, other)


@BY_EACH
def test_pieces_are_the_whole(implementation):
    """Bit for bit: a step is computed in the same way wherever it stands."""
    x, weight, bias = (jnp.asarray(random(shape, np.float32, seed), jnp.bfloat16) for seed, shape in enumerate(((N, T, C), (4, C), (C,))))
    convolve = functools.partial(jaxext.causal_conv1d, activation="silu", return_final_states=True, implementation=implementation)
    try:
        whole, _ = convolve(x, weight, bias)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    first, state = convolve(x[:, :133], weight, bias)
    second, _ = convolve(x[:, 133:], weight, bias, initial_states=state)
    if implementation in ("triton", "cuda"):
        np.testing.assert_array_equal(jnp.concatenate([first, second], 1), whole)
    else:
        pieces, whole = (np.asarray(of, np.float64) for of in (jnp.concatenate([first, second], 1), whole))
        np.testing.assert_allclose(pieces, whole, rtol=1e-2, atol=1e-2)
