"""Operations with an epilogue on a GPU: each implementation by name, its values and gradients against float64.

The kernels themselves, with every epilogue, run in Triton's interpreter (tests/kernels/test_epilogues.py) and in that of PTX (tests/ptx).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.kernels.epilogue import ACTIVATIONS

pytestmark = pytest.mark.gpu


def convolution(x, w, bias=None, **how):
    """Not strided, since no CUDA kernel computes the input gradient of a strided one."""
    return jaxext.conv_bias_act(x, w, bias, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **how)


# name -> the operation, and the shapes of its operands, bias and residual last
OPERATIONS: dict[str, Any] = {
    "linear": (jaxext.linear, ((3, 200, 136), (136, 264), (264,), (3, 200, 264))),
    "large": (jaxext.linear, ((1024, 512), (512, 2048), (2048,), (1024, 2048))),
    "conv": (functools.partial(convolution, feature_group_count=2), ((2, 29, 28, 64), (3, 3, 32, 96), (96,), (2, 29, 28, 96))),
    "depthwise": (functools.partial(convolution, feature_group_count=40), ((2, 13, 12, 40), (5, 5, 1, 40), (40,), (2, 13, 12, 40))),
}
BY = ["triton", pytest.param("cuda", marks=pytest.mark.skipif(bool(cuda_binding.missing()), reason="no CUDA kernels"))]


def checked(function, arrays, by):
    """Values and gradients by an implementation are as near to float64 as bfloat16 allows, and nothing else computed them."""

    def both(run, *args):
        y, pull = jax.vjp(run, *args)
        return (y, *pull(jnp.ones_like(y)))

    run = functools.partial(function, implementation=by)
    with jax.enable_x64(True):
        truths = both(functools.partial(function, implementation="xla"), *(jnp.asarray(np.asarray(a, np.float64)) for a in arrays))
    for got, truth in zip(jax.jit(functools.partial(both, run))(*arrays), truths, strict=True):
        scale = np.abs(truth).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), truth, rtol=2e-2, atol=1e-2 * scale)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, by):
    function, shapes = OPERATIONS[name]
    x, w, bias, residual = (random(shape, jnp.bfloat16, seed) for seed, shape in enumerate(shapes))
    checked(lambda x, w, b, r, **how: function(x, w, b, activation="relu", residual=r, **how), (x, w, bias, residual), by)
    checked(lambda x, w, b, **how: function(x, w, b, activation="relu", **how), (x, w, bias), by)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, by):
    function, shapes = OPERATIONS["linear"]
    arrays = [random(shape, jnp.bfloat16, seed) for seed, shape in enumerate(shapes)]
    y = jax.jit(lambda x, w, b, r: function(x, w, b, activation=activation, residual=r, implementation=by))(*arrays)
    with jax.enable_x64(True):
        truth = function(*(jnp.asarray(np.asarray(a, np.float64)) for a in arrays[:3]), activation=activation, implementation="xla")
    truth = np.asarray(truth) + np.asarray(arrays[3], np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), truth, rtol=1e-2, atol=1e-2 * np.abs(truth).max())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(activation):
    arrays = [random(shape, jnp.bfloat16, seed) for seed, shape in enumerate([(300, 136), (136, 2, 264)])]
    checked(functools.partial(jaxext.gated_linear_unit, activation=activation), arrays, "triton")
