"""Operands are random, and the same each time; nothing right is left in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxext.tuning import random_operands


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "complex64", "int8", "uint8", "bool"])
def test_operands(dtype):
    x, y, z = random_operands.normal([(40, 50), (3,), (2,)], (dtype, dtype, jnp.bfloat16))
    assert z.dtype == jnp.bfloat16
    assert (x.shape, y.shape) == ((40, 50), (3,)) and x.dtype == y.dtype == dtype
    np.testing.assert_array_equal(x, random_operands.normal([(40, 50), (3,), (2,)], dtype)[0])
    values = np.asarray(x).astype(complex if "complex" in dtype else float)
    if "int" in dtype or dtype == "bool":
        assert set(values.ravel()) == set({"uint8": range(4), "bool": range(2)}.get(dtype, range(-3, 4)))
    else:
        assert abs(values.mean()) < 0.1 and abs(values.std() - 1) < 0.1


def test_scales_without_a_sign_are_numbers():
    (x,) = random_operands.normal([(40, 50)], "float8_e8m0fnu")
    values = np.asarray(x).astype(float)
    assert (values > 0).all() and len({*values.ravel()}) > 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "complex64", "int8", "bool"])
def test_soil_is_no_result(dtype, monkeypatch):
    made = []
    monkeypatch.setattr(random_operands.jax, "block_until_ready", made.extend)
    random_operands.poison((jax.ShapeDtypeStruct((2, 3), dtype), jax.ShapeDtypeStruct((4,), dtype)))
    assert [(x.shape, x.dtype) for x in made] == [((2, 3), dtype), ((4,), dtype)]
    assert all(np.real(np.asarray(x).astype(complex)).min() >= (1 if dtype == "bool" else 100) for x in made)
