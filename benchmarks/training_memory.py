"""The memory of a training step: bytes of temporaries in the compiled program, for blocks by jaxext's fused operations and by plain jnp.

    python -m benchmarks.training_memory

Each of the 8 blocks is a layer of a scan, so what the forward pass saves of it is stacked over the layers: that is most of the temporaries.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxext

LAYERS = 8
WIDTH = 256


def linear(x, w, bias=0, *, activation=None, residual=0):
    z = x @ w + bias
    return (jax.nn.gelu(z, approximate=False) if activation else z) + residual


def gated_linear_unit(x, w, *, activation):
    return jax.nn.silu(x @ w[:, 0]) * (x @ w[:, 1])


def conv_bias_act(x, w, *how, bias, **static):
    return lax.conv_general_dilated(x, w, *how, **static) + bias


PLAIN: Any = types.SimpleNamespace(linear=linear, gated_linear_unit=gated_linear_unit, conv_bias_act=conv_bias_act)


def mlp(ops, x, w1, b1, w2, b2):
    return ops.linear(ops.linear(x, w1, b1, activation="gelu"), w2, b2, residual=x)


def swiglu(ops, x, w1, w2):
    return ops.linear(ops.gated_linear_unit(x, w1, activation="silu"), w2, residual=x)


def convnext(ops, x, filter, bias, w1, b1, w2, b2):
    """A depthwise 7x7 convolution, then an MLP over the channels, without the normalisation between them."""
    layout = ("NHWC", "HWIO", "NHWC")
    y = ops.conv_bias_act(x, filter, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=WIDTH, bias=bias)
    return ops.linear(ops.linear(y, w1, b1, activation="gelu"), w2, b2, residual=x)


_MLP = ((WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,))
BLOCKS = {  # the function, and the shapes of x and of the weights
    "mlp": (mlp, (2048, WIDTH), _MLP),
    "swiglu": (swiglu, (2048, WIDTH), ((WIDTH, 2, 2 * WIDTH), (2 * WIDTH, WIDTH))),
    "convnext": (convnext, (4, 16, 16, WIDTH), ((7, 7, 1, WIDTH), (WIDTH,), *_MLP)),
}


def temporaries(block: str, ops, layers: int, dtype) -> int:
    """Bytes of a step: the gradients of a sum of squares in all weights."""
    function, x_shape, weight_shapes = BLOCKS[block]

    def loss(weights, x):
        y, _ = lax.scan(lambda x, w: (function(ops, x, *w), None), x, weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    weights = [jax.ShapeDtypeStruct((layers, *shape), dtype) for shape in weight_shapes]
    compiled: Any = jax.jit(jax.grad(loss)).lower(weights, jax.ShapeDtypeStruct(x_shape, dtype)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: MiB of temporaries, {LAYERS} blocks")
    print(f"{'block':10} {'dtype':9} {'jnp':>8} {'fused':>8} {'ratio':>6}")
    for block in BLOCKS:
        for dtype in (jnp.float32, jnp.bfloat16):
            plain, ours = (temporaries(block, ops, LAYERS, dtype) / 2**20 for ops in (PLAIN, jaxext))
            print(f"{block:10} {jnp.dtype(dtype).name:9} {plain:8.1f} {ours:8.1f} {ours / plain:6.2f}")


if __name__ == "__main__":
    main()
