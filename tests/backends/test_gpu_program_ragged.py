"""What XLA's GPU compiler makes of ragged products by the Triton kernels and by itself, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import jax
import jax.numpy as jnp
from lowered import struct
from test_gpu_program import compiled, devices, work

import jaxext

X, W, Y, SIZES = struct(4096, 2048), struct(64, 2048, 1024), struct(4096, 1024), struct(64, dtype=jnp.int32)


def by(implementation):
    return lambda x, w, sizes: jaxext.ragged_dot(x, w, sizes, implementation=implementation)


def gradients(x, w, y, sizes):
    return jax.vjp(lambda x, w: by("triton")(x, w, sizes), x, w)[1](y)


def test_by_triton(compiled):
    """The ranges of rows are found by few small kernels, and no array of the factors' size is made or copied besides."""
    forward, backward = work(compiled(by("triton"), X, W, SIZES)), work(compiled(gradients, X, W, Y, SIZES))
    assert forward["kernel"] == 1 and forward.total() <= 6
    assert backward["kernel"] == 2 and backward.total() <= 8
