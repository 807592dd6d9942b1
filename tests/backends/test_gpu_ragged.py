"""Ragged products on a GPU, by each implementation, against one product for each group in float64; `xla` on CPUs too.

Groups end beside tiles, are empty, or leave rows to nobody, which are NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

import jaxext

BY_EACH = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu), pytest.param("cuda", marks=pytest.mark.gpu)]
)
M, K, N = 520, 136, 264
SIZES = {
    "edges beside tiles": (129, 0, 130, 127, 64, 1, 69, 0),
    "nobody's rows": (100, 33, 0, 250, 0, 0, 7, 0),
    "all in one": (0, 0, 0, 520, 0, 0, 0, 0),
    "none": (0,) * 8,
    "few rows each": (3, 1, 0, 2, 5, 1, 1, 4),
}


def refused(implementation, *operands):
    """Skips, with the reason, what the implementation does not take here."""
    try:
        jax.jit(lambda *args: jaxext.ragged_dot(*args, implementation=implementation)).lower(*operands)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def some(sizes, dtype):
    """Small integers: x, w and a cotangent of which nobody's rows are NaN, and the true result and gradients."""
    x, w, ct = (random(shape, np.float64, seed, True) for seed, shape in enumerate(((M, K), (len(sizes), K, N), (M, N))))
    y, dx, dw = np.zeros((M, N)), np.zeros((M, K)), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for g, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(begin, end)
        y[rows], dx[rows], dw[g] = x[rows] @ w[g], ct[rows] @ w[g].T, x[rows].T @ ct[rows]
    x[ends[-1] :], ct[ends[-1] :] = np.nan, np.nan
    return (*(jnp.asarray(of, dtype) for of in (x, w, ct)), np.array(sizes, np.int32)), (y, dx, dw)


@functools.partial(jax.jit, static_argnums=0)
def both(implementation, x, w, ct, sizes):
    y, pullback = jax.vjp(functools.partial(jaxext.ragged_dot, group_sizes=sizes, implementation=implementation), x, w)
    return y, *pullback(ct)


def exact(got, want, dtype):
    """Sums of small integers are exact in float32 and rounded once."""
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(jnp.asarray(other, jnp.float32).astype(dtype), np.float64))


@BY_EACH
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(implementation, dtype, sizes):
    args, want = some(sizes, dtype)
    refused(implementation, *args[:2], args[3])
    exact(both(implementation, *args), want, dtype)
    exact(both(implementation, *args), want, dtype)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_epilogues(implementation, sizes):
    """A rectifier, a bias for each group and a scale for each row keep small integers exact; "nobody's" bias and scale are not read."""
    (x, w, _, given), (sums, _, _) = some(sizes, jnp.bfloat16)
    bias, scale = random((len(sizes), N), np.float64, 3, True), random((M,), np.float64, 4, True)
    group = np.searchsorted(np.cumsum(sizes), np.arange(M), side="right")
    present = group < len(sizes)
    z = np.where(present[:, None], sums + bias[np.minimum(group, len(sizes) - 1)], 0)
    scales = jnp.asarray(np.where(present, scale, np.nan), jnp.float32)

    def fused(x, w, sizes, bias, scale):
        return jaxext.ragged_linear(
            x, w, sizes, bias, activation="relu", row_scale=scale, preferred_element_type=jnp.float32, implementation=implementation
        )

    got = jax.jit(fused)(x, w, given, jnp.asarray(bias, jnp.float32), scales)
    exact((got,), (np.where(present[:, None], np.maximum(z, 0) * scale[:, None], 0),), jnp.float32)


@BY_EACH
def test_sizes_that_change(implementation):
    """One program for all sizes, also as a step of a scan."""
    args, _ = some(SIZES["none"], jnp.bfloat16)
    refused(implementation, *args[:2], args[3])
    program = jax.jit(lambda x, w, ct, sizes: jax.lax.map(lambda each: both(implementation, x, w, ct, each), sizes))
    x, w, ct, _ = (jnp.nan_to_num(of) for of in args)
    wanted = []
    for sizes in SIZES.values():
        (_, _, _, each), _ = some(sizes, jnp.bfloat16)
        wanted.append([np.asarray(of, np.float64) for of in both("xla", x, w, ct, each)])
    got = program(x, w, ct, np.array([*SIZES.values()], np.int32))
    for i, want in enumerate(wanted):
        exact([of[i] for of in got], want, jnp.bfloat16)


@BY_EACH
def test_mapped_over_everything(implementation):
    """In one launch for each role: rows of other groups, and matrices of others."""
    dtype = jnp.bfloat16
    made = [some(sizes, dtype) for sizes in (SIZES["edges beside tiles"], SIZES["nobody's rows"])]
    refused(implementation, *made[0][0][:2], made[0][0][3])
    args = [jnp.stack(each) for each in zip(*(args for args, _ in made), strict=True)]
    want = [np.stack(each) for each in zip(*(want for _, want in made), strict=True)]
    exact(jax.jit(jax.vmap(functools.partial(both, implementation)))(*args), want, dtype)
