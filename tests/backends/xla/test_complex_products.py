"""Large products of complex numbers on CPUs, by products of their real and imaginary parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random, wide
from jax import lax

import jaxext

X, W = random((130, 140), np.complex64), random((140, 150), np.complex64, 1)
LAYOUTS = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}


def how(f, *operands):
    return [row.how for row in jaxext.explain(f, platform="cpu")(*operands).rows]


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(layout, dtype):
    x, w = random((130, 140), dtype), random((140, 150), dtype, 1)
    dot = functools.partial(jaxext.dot_general, dimension_numbers=(LAYOUTS[layout], ((), ())))
    given = x.T if layout == "tn" else x, w.T if layout == "nt" else w
    x, w, y = map(wide, (x, w, jax.jit(dot)(*given)))
    exact, size = x @ w, np.abs(x) @ np.abs(w)
    for part in (np.real, np.imag):
        assert (np.abs(part(y) - part(exact)) <= 8 * np.finfo(dtype).eps * size).all()
    assert how(dot, *given) == ["real_products"]


@pytest.mark.parametrize("dtype", [np.complex64, np.float32])
def test_gradients_are_those_of_lax(dtype):
    """The gradient of a real operand computes the real part of its product alone."""
    x, w = X.real.astype(dtype), W

    def gradients(dot):
        matmul = functools.partial(dot, dimension_numbers=(((1,), (0,)), ((), ())), preferred_element_type=np.complex64)
        return jax.grad(lambda x, w: jnp.abs(matmul(x, w)).sum(), (0, 1))

    assert "real_products" in how(gradients(jaxext.dot_general), x, w)
    for ours, theirs in zip(*(jax.jit(gradients(dot))(x, w) for dot in (jaxext.dot_general, lax.dot_general)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_only_large_matrices_are():
    def taken(x, w, dtype="complex64"):
        return how(jaxext.matmul, *(jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w)))

    assert taken((128, 8), (8, 128)) == ["real_products"]
    assert taken((127, 8), (8, 128)) == taken((128, 8), (8, 127)) == ["dot_general"]
    assert taken((2, 128, 8), (2, 8, 128)) == taken((128, 8), (8, 128), "float32") == ["dot_general"]


def test_numbers_that_are_not_finite():
    x, w = X.copy(), W.copy()
    x[3, 5], w[7, 11] = complex(np.inf, 1), complex(np.nan, 0)
    ours, theirs = (jax.jit(f)(x, w) for f in (jaxext.matmul, lax.dot))
    for part in (jnp.real, jnp.imag):
        np.testing.assert_array_equal(jnp.isfinite(part(ours)), jnp.isfinite(part(theirs)))
