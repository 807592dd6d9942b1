"""The memory of a training step: bytes of temporaries in the compiled program, for blocks by jaxext's fused operations and by plain jnp.

    python -m benchmarks.training_memory [--blocks N]

Each block is a layer of a scan, so what the forward pass saves of it is stacked over the layers: that is most of the temporaries.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxext

NHWC = ("NHWC", "HWIO", "NHWC")


def _bias(z, b):
    return z + jnp.broadcast_to(b, z.shape)


def mlp(fused: bool, x, weights):
    """x + W₂ gelu(W₁ x + b₁) + b₂."""
    w1, b1, w2, b2 = weights
    if fused:
        return jaxext.linear(jaxext.linear(x, w1, b1, activation="gelu"), w2, b2, residual=x)
    return x + _bias(jax.nn.gelu(_bias(x @ w1, b1), approximate=False) @ w2, b2)


def swiglu(fused: bool, x, weights):
    """x + W₂ (silu(W x) · V x)."""
    w, w2 = weights
    if fused:
        return jaxext.linear(jaxext.gated_linear_unit(x, w, activation="silu"), w2, residual=x)
    return x + (jax.nn.silu(x @ w[:, 0]) * (x @ w[:, 1])) @ w2


def convnext(fused: bool, x, weights):
    """A depthwise 7x7 convolution, then an MLP over the channels, without the normalisation between them."""
    filter, bias, *of_mlp = weights
    static: Any = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC, feature_group_count=x.shape[-1])
    if fused:
        y = jaxext.conv_bias_act(x, filter, **static, bias=bias)
    else:
        y = _bias(lax.conv_general_dilated(x, filter, **static), bias)
    w1, b1, w2, b2 = of_mlp
    if fused:
        return jaxext.linear(jaxext.linear(y, w1, b1, activation="gelu"), w2, b2, residual=x)
    return x + _bias(jax.nn.gelu(_bias(y @ w1, b1), approximate=False) @ w2, b2)


WIDTH = 256
_MLP = ((WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,))
BLOCKS = {
    "mlp": (mlp, (2048, WIDTH), _MLP),
    "swiglu": (swiglu, (2048, WIDTH), ((WIDTH, 2, 2 * WIDTH), (2 * WIDTH, WIDTH))),
    "convnext": (convnext, (4, 16, 16, WIDTH), ((7, 7, 1, WIDTH), (WIDTH,), *_MLP)),
}


def temporaries(block: str, fused: bool, layers: int, dtype) -> int:
    """Bytes of a step: the gradients of a sum of squares in all weights."""
    function, of_x, of_weights = BLOCKS[block]

    def loss(weights, x):
        y, _ = lax.scan(lambda x, w: (function(fused, x, w), None), x, weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    weights = [jax.ShapeDtypeStruct((layers, *shape), dtype) for shape in of_weights]
    compiled: Any = jax.jit(jax.grad(loss)).lower(weights, jax.ShapeDtypeStruct(of_x, dtype)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="layers (default: 8)")
    layers = parser.parse_args().blocks
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: MiB of temporaries, {layers} blocks")
    print(f"{'block':10} {'dtype':9} {'jnp':>8} {'fused':>8} {'ratio':>6}")
    for block in BLOCKS:
        for dtype in (jnp.float32, jnp.bfloat16):
            plain, ours = (temporaries(block, fused, layers, dtype) / 2**20 for fused in (False, True))
            print(f"{block:10} {jnp.dtype(dtype).name:9} {plain:8.1f} {ours:8.1f} {ours / plain:6.2f}")


if __name__ == "__main__":
    main()
