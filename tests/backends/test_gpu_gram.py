"""Products with their own transposes on a GPU, by each implementation, against float64; `xla` on CPUs too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

import jaxext

BY_EACH = pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])


@BY_EACH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(17, 40), (300, 264), (3, 128, 513), (1500, 2048)], ids=str)
def test_gram(implementation, dtype, shape):
    """Values, bits, and the gradient."""
    x, ct = (jnp.asarray(random(of, np.float32, seed), dtype) for seed, of in enumerate([shape, (*shape[:-1], shape[-2])]))

    @jax.jit
    def both(x, ct):
        y, pullback = jax.vjp(lambda x: jaxext.gram(x, implementation=implementation), x)
        return y, pullback(ct)[0]

    y, dx = (np.asarray(of, np.float64) for of in both(x, ct))
    np.testing.assert_array_equal(y, y.swapaxes(-1, -2))
    x, ct = (np.asarray(of, np.float64) for of in (x, ct))
    for got, want in ((y, x @ x.swapaxes(-1, -2)), (dx, (ct + ct.swapaxes(-1, -2)) @ x)):
        np.testing.assert_allclose(got, want, atol=2.0**-7 * np.abs(want).max())  # roundings to bfloat16, or TF32 and their sums


@BY_EACH
@pytest.mark.parametrize("shape", [(2, 200, 333), (2, 333, 200)], ids=str)
def test_newton_schulz(implementation, shape):
    x = random(shape, np.float32, 0)
    y = jaxext.newton_schulz(x, implementation=implementation, precision="highest")
    want = jaxext.newton_schulz(x.astype(np.float64), implementation="xla")
    np.testing.assert_allclose(np.asarray(y), np.asarray(want), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("result", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8, 8), (520, 264), (3, 1096, 512), (256, 8192), (2304, 1024)], ids=str)
def test_gram_by_cuda(shape, dtype, result):
    """Every tile and width, batches and parts; bit for bit symmetric."""
    x = jnp.asarray(random(shape, np.float32, 0), dtype)
    exact = np.asarray(x, np.float64)
    want = exact @ exact.swapaxes(-1, -2)
    y = jax.jit(lambda x: jaxext.gram(x, preferred_element_type=result, implementation="cuda"))(x)
    np.testing.assert_array_equal(y, y.swapaxes(-1, -2))
    np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=(2.0**-8 if result is None else 2.0**-18) * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 256, 336), (2, 336, 256)], ids=str)
def test_newton_schulz_by_cuda(shape):
    x = jnp.asarray(random(shape, np.float32, 0), jnp.bfloat16)
    y = jax.jit(lambda x: jaxext.newton_schulz(x, implementation="cuda"))(x)
    want = jaxext.newton_schulz(np.asarray(x, np.float64), implementation="xla")
    np.testing.assert_allclose(np.asarray(y, np.float64), np.asarray(want), atol=2.0**-4)
