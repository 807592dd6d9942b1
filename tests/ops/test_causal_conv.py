"""Causal convolutions of sequences, sheets and videos: values against a sum in float64, and chunks that have the bits of the whole."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from causal_frames import causal_frames, held
from jax import lax

import jaxext


def true(x, w, state=None, **said):
    """Compute the result and the state after x in float64."""
    return causal_frames(*(None if of is None else np.asarray(of, np.float64) for of in (x, w, state)), **said)


CASES = {
    "strided": ((1, 80, 6), (3, 3, 4), dict(strides=(2,), dilation=(2,), groups=2)),
    "depthwise": ((2, 40, 8), (4, 1, 8), dict(strides=(1,), dilation=(1,), groups=8)),
    "sheet": ((1, 8, 9, 4), (2, 3, 2, 6), dict(strides=(2, 2), dilation=(3, 1), groups=2)),
    "video": ((1, 6, 7, 6, 4), (3, 3, 3, 4, 5), dict(strides=(1, 2, 1), dilation=(1, 1, 2))),
    "upsampled audio": ((2, 10, 6), (5, 3, 4), dict(strides=(3,), dilation=(2,), groups=2, transpose=True)),
    "upsampled video": ((1, 5, 4, 3, 4), (4, 3, 3, 2, 6), dict(strides=(2, 2, 1), dilation=(1, 1, 1), groups=2, transpose=True)),
}


def some(case, dtype=np.float32):
    x, w, said = CASES[case]
    shapes = x, w, (x[0], held(w[0], said["strides"], said["dilation"], "transpose" in said), *x[2:])
    return [jnp.asarray(random(shape, np.float32, seed), dtype) for seed, shape in enumerate(shapes)], said


def near(got, want, dtype=np.float32, units=16):
    assert got.shape == want.shape and got.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=units * eps, atol=units * eps * np.abs(want).max())


DTYPES = [*zip(CASES, [np.float32] * 3 + [jnp.float16, jnp.bfloat16, np.float32], strict=True)]


@pytest.mark.parametrize(("case", "dtype"), DTYPES, ids=lambda of: of if isinstance(of, str) else of.__name__)
def test_chunks_have_the_bits_of_the_whole(case, dtype):
    (x, w, before), said = some(case, dtype)
    stream = functools.partial(jaxext.causal_conv, w=w, **said, return_state=True)
    whole, last = stream(x, state=before)
    want, want_last = true(x, w, **said, state=before)
    near(whole, want, dtype, 1 if dtype != np.float32 else 16)
    np.testing.assert_array_equal(np.asarray(last, np.float64), want_last)
    near(jaxext.causal_conv(x, w, **said), true(x, w, **said)[0], dtype, 1 if dtype != np.float32 else 16)
    unit = 1 if "transpose" in said else said["strides"][0]
    step = unit * max(1, x.shape[1] // (10 * unit))
    for cuts in (range(step, x.shape[1], step), (unit, 3 * unit)):
        state, frames = before, []
        for chunk in jnp.split(x, [*cuts], 1):
            y, state = stream(chunk, state=state)
            frames.append(y)
        np.testing.assert_array_equal(jnp.concatenate(frames, 1), whole)
        np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("case", ["strided", "upsampled video"])
def test_gradients_pass_through_the_state(case):
    """The gradient of chunks is that of the whole, and that of XLA's convolution in float64."""
    (x, w, before), said = some(case)
    stream = functools.partial(jaxext.causal_conv, **said)

    def whole(x, w, state):
        return jnp.sum(jnp.sin(stream(x, w, state=state)))

    def chunks(x, w, state):
        y, state = stream(x[:, :2], w, state=state, return_state=True)
        return jnp.sum(jnp.sin(y)) + whole(x[:, 2:], w, state)

    for ours, theirs in zip(*(jax.jit(jax.grad(f, (0, 1, 2)))(x, w, before) for f in (chunks, whole)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_decoding_in_a_scan_does_not_copy_the_cache():
    """The loop reads the cache once, with the frame behind it, and writes it once."""
    (x, w, before), _ = some("video")

    @jax.jit
    def decode(x, w, state):
        def step(state, frame):
            y, state = jaxext.causal_conv(frame[:, None], w, state=state, return_state=True)
            return state, y[:, 0]

        state, y = lax.scan(step, state, jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(y, 0, 1), state

    np.testing.assert_array_equal(decode(x, w, before)[0], jaxext.causal_conv(x, w, state=before))
    hlo: Any = decode.lower(x, w, before).compile().as_text()
    cache = rf"f32\[{','.join(map(str, before.shape))}\]"
    copies = re.findall(rf"= {cache}\S* copy\(", hlo.split("ENTRY")[0])
    assert re.search(cache, hlo) and copies == []


def test_vmap():
    (x, w, before), said = some("video")
    xs, ws, states = (jnp.stack([of, -2 * of]) for of in (x, w, before))
    convolve = lambda x, w, state: jaxext.causal_conv(x, w, **said, state=state, return_state=True)
    for mapped in ((0, None, 0), (0, 0, None)):
        got = jax.jit(jax.vmap(convolve, mapped))(xs, ws if mapped[1] == 0 else w, states if mapped[2] == 0 else before)
        want = [true(xs[i], ws[i] if mapped[1] == 0 else w, **said, state=states[i] if mapped[2] == 0 else before) for i in range(2)]
        near(got[0], np.stack([y for y, _ in want]))
        np.testing.assert_array_equal(got[1], np.stack([state for _, state in want]))


def test_invariant():
    (x, w, _), said = some("video")
    images = jnp.concatenate([x, -x, 2 * x])
    with jaxext.use_invariant():
        np.testing.assert_array_equal(jaxext.causal_conv(images, w, **said)[:1], jaxext.causal_conv(x, w, **said))


X, W = jnp.ones((2, 6, 5, 4)), jnp.ones((3, 3, 4, 8))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(x=3.0), TypeError, "x is 3.0, want an array"),
        (dict(x=X[0, 0]), TypeError, r"x has the shape \(5, 4\), want \(N, T, \*space, C\)"),
        (dict(x=X.astype(int)), TypeError, "x is int.., want floating-point numbers"),
        (dict(w=W[0]), TypeError, r"w has the shape \(3, 4, 8\), want \(k, k, 4, K\)"),
        (dict(w=W.astype(complex)), TypeError, "w is complex.*, want a dtype that converts to float"),
        (dict(groups=3), ValueError, "groups is 3, want a divisor of 4"),
        (dict(groups=2.0), TypeError, "groups is 2.0, want an int"),
        (dict(groups=4, w=W[..., :1, :6]), ValueError, "w has 6 output channels, want a multiple of 4"),
        (dict(strides=4), ValueError, "x has 6 steps, want a multiple of 4, the stride along time"),
        (dict(strides=(1, 2, 1)), ValueError, r"strides is \(1, 2, 1\), want a positive int, or one for each of 2 axes"),
        (dict(dilation=0), ValueError, "dilation is 0, want a positive int"),
        (dict(dilation=1.5), TypeError, "dilation is 1.5, want an int"),
        (dict(padding=1), ValueError, "padding is 1, want a str, or a pair for each of 1 spatial axes"),
        (dict(state=X[:, :1]), TypeError, r"state has the shape \(2, 1, 5, 4\), want \(2, 2, 5, 4\)"),
        (dict(return_state=1), TypeError, "return_state is 1, want a bool"),
        (dict(transpose=None), TypeError, "transpose is None, want a bool"),
        (dict(implementation="none"), ValueError, "implementation is 'none'"),
    ],
)
def test_a_wrong_argument_is_refused(given, error, message):
    with pytest.raises(error, match=f"^causal_conv: {message}"):
        jaxext.causal_conv(**dict(x=X, w=W) | given)
