"""What XLA's GPU compiler makes of ragged products by our kernels, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import jax
import jax.numpy as jnp
import pytest
from lowered import struct
from test_gpu_program import compiled, devices, work

import jaxext
from jaxext.backends.cuda import cuda_binding

X, W, Y, SIZES = struct(4096, 2048), struct(64, 2048, 1024), struct(4096, 1024), struct(64, dtype=jnp.int32)


def by(implementation):
    return lambda x, w, sizes: jaxext.ragged_dot(x, w, sizes, implementation=implementation)


def gradients(implementation):
    return lambda x, w, y, sizes: jax.vjp(lambda x, w: by(implementation)(x, w, sizes), x, w)[1](y)


@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_by_kernels(compiled, implementation):
    """The ranges of rows are found by few small kernels, and no array of the factors' size is made or copied besides."""
    if implementation == "cuda" and (reason := cuda_binding.missing()):
        pytest.skip(f"no CUDA kernels: {reason}")
    forward, backward = (work(compiled(of(implementation), *args)) for of, args in ((by, (X, W, SIZES)), (gradients, (X, W, Y, SIZES))))
    assert forward["kernel"] == 1 and forward.total() <= 6
    assert backward["kernel"] == 2 and backward.total() <= 8
