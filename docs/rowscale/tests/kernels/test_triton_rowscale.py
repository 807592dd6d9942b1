"""Rows times numbers: the Triton kernel against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxext.ops.rowscale import rowscale


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_the_reference(dtype, rows):
    rng = np.random.default_rng(0)
    x, scale = (
        rng.standard_normal((2, rows, 1100)).astype(jnp.dtype(dtype)),
        rng.standard_normal(rows).astype(np.float32),
    )
    y = rowscale(jnp.asarray(x), jnp.asarray(scale), implementation="triton")
    np.testing.assert_array_equal(
        np.asarray(y), (x.astype(np.float32) * scale[:, None]).astype(x.dtype)
    )
