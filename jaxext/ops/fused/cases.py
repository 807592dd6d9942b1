"""The named calls of operations with an epilogue (`core/contact.py`)."""

import functools
from collections.abc import Iterator

from jaxext.core.contact import BF16, FP16, FP32, SQUARE, TILES, Contact, arrays, both
from jaxext.ops.fused import conv_bias_act, gated_linear_unit, linear

GATED, IMAGES = functools.partial(gated_linear_unit, activation="silu"), (128, 56, 56, 64)


def _linear(activation: str | None):
    return lambda x, w, b, r=None: linear(x, w, b, activation=activation, residual=r)


def _biased(groups: int, activation: str | None):
    how = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups, activation=activation)
    return lambda x, w, b: conv_bias_act(x, w, (1, 1), "SAME", bias=b, **how)  # type: ignore[arg-type]


def contacts() -> Iterator[Contact]:
    bias, result = (TILES[1][1],), (TILES[0][0], TILES[1][1])
    images, dense, deep = (2, 29, 28, 72), (3, 3, 72, 136), (7, 7, 1, 72)
    for dtype in (BF16, FP16, FP32):
        yield from both(f"linear gelu {dtype}", _linear("gelu"), *arrays(*TILES, bias, dtype=dtype))
        yield from both(f"gated silu {dtype}", GATED, *arrays((1037, 264), (264, 2, 528), dtype=dtype))
        yield from both(f"conv_bias_act 3x3 relu {dtype}", _biased(1, "relu"), *arrays(images, dense, (136,), dtype=dtype))
    yield from both("conv_bias_act depthwise 7x7 silu", _biased(72, "silu"), *arrays(images, deep, (72,)))
    yield from both("linear relu and residual", _linear("relu"), *arrays(*TILES, bias, result))
    for activation in (None, "gelu_tanh", "silu", "squared_relu"):
        yield Contact(f"linear {activation} bfloat16, inference", _linear(activation), arrays(*TILES, bias))
    tanh = functools.partial(gated_linear_unit, activation="gelu_tanh")
    yield Contact("gated gelu_tanh bfloat16, inference", tanh, arrays((1037, 264), (264, 2, 528)))
    yield Contact("conv_bias_act 3x3 gelu, inference", _biased(1, "gelu"), arrays(images, dense, (136,)))


PAGES = {
    "linear": [
        Contact("linear, bias and gelu, bfloat16", _linear("gelu"), arrays(*SQUARE, (4096,))),
        Contact("linear, bias and gelu, float32", _linear("gelu"), arrays(*SQUARE, (4096,), dtype=FP32)),
        Contact("linear, bias, gelu, residual, bfloat16", _linear("gelu"), arrays(*SQUARE, (4096,), SQUARE[0])),
        Contact("gated_linear_unit, silu, bfloat16", GATED, arrays((4096, 4096), (4096, 2, 4096))),
        Contact("conv_bias_act, 3x3, relu, bfloat16", _biased(1, "relu"), arrays(IMAGES, (3, 3, 64, 64), (64,))),
        Contact("conv_bias_act, depthwise 7x7, silu, bfloat16", _biased(64, "silu"), arrays(IMAGES, (7, 7, 1, 64), (64,))),
    ]
}
