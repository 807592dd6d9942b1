"""The named calls of convolutions, dense and depthwise (`core/contact.py`)."""

from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from jaxext.core.contact import BF16, E4M3, FP16, FP32, INT8, Contact, arrays, step
from jaxext.ops.conv import conv_general_dilated, conv_transpose, convolve

LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC"), 4: None}


def _conv(stride: int = 1, padding: Any = "SAME", dilation: int = 1, filter_dilation: int = 1, groups: int = 1, **more: Any):
    def convolve(x, w):
        axes = x.ndim - 2
        dilations = axes * (dilation,), axes * (filter_dilation,)
        return conv_general_dilated(x, w, axes * (stride,), padding, *dilations, LAYOUTS[axes], groups, **more)

    return convolve


def contacts() -> Iterator[Contact]:
    images, filters, small = (3, 29, 28, 136), (3, 3, 136, 264), ((2, 15, 14, 80), (3, 3, 80, 144))
    yield step("conv 3x3 bfloat16 in parts", _conv(), *arrays((30, 15, 14, 64), (3, 3, 64, 136)), splits=(30, 1))
    for dtype in (BF16, FP16, FP32):
        yield step(f"conv 3x3 {dtype}", _conv(), *arrays(images, filters, dtype=dtype))
    yield step("conv 3 by stride 1 along one axis", _conv(), *arrays((3, 700, 136), (3, 136, 264)))
    yield step("conv 3x3x3", _conv(), *arrays((2, 7, 13, 14, 72), (3, 3, 3, 72, 136)))
    yield step("conv 1x1", _conv(), *arrays(images, (1, 1, 136, 264)))
    yield step("conv 3x3 by 2", _conv(stride=2), *arrays(images, filters))
    yield step("conv 3x3 in 4 groups", _conv(groups=4), *arrays(images[:3] + (160,), (3, 3, 40, 160)))
    yield step("conv 3x3 dilated", _conv(filter_dilation=2), *arrays(images, filters))
    yield step("conv 4x4 transposed by 2", _conv(padding=[(2, 2)] * 2, dilation=2), *arrays((3, 15, 14, 136), (4, 4, 136, 72)))
    yield step("conv of 3 channels", _conv(stride=2), *arrays((2, 67, 64, 3), (7, 7, 3, 72)))
    for dtype in (FP16, FP32):
        yield step(f"conv 3 along one axis {dtype}", _conv(), *arrays((3, 700, 136), (3, 136, 264), dtype=dtype))
        yield step(f"conv 3x3x3 {dtype}", _conv(), *arrays((2, 7, 13, 14, 72), (3, 3, 3, 72, 136), dtype=dtype))
    for preset in (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, lax.DotAlgorithmPreset.BF16_BF16_F32_X6):
        yield Contact(f"conv 3x3 {preset.name}", _conv(precision=preset), arrays(*small, dtype=FP32))
    yield step("conv 3x3 highest", _conv(precision="highest"), *arrays(*small, dtype=FP32))
    yield Contact("conv 3x3 int8", _conv(), arrays(*small, dtype=INT8))
    yield Contact("conv 3x3 fp8 into bfloat16", _conv(preferred_element_type=BF16), arrays(*small, dtype=E4M3))
    yield Contact("conv 3x3 mapped", jax.vmap(_conv()), arrays((3, 2, 15, 14, 72), (3, 3, 3, 72, 136)))
    yield step("depthwise 3x3", _conv(groups=264), *arrays((3, 29, 28, 264), (3, 3, 1, 264)))
    for dtype in (BF16, FP16, FP32):
        yield step(f"depthwise 4 causal {dtype}", _conv(padding=[(3, 0)], groups=264), *arrays((3, 1037, 264), (4, 1, 264), dtype=dtype))
    for dtype in (BF16, FP16, FP32):
        yield step(f"depthwise 7x7 {dtype}", _conv(groups=264), *arrays((3, 29, 28, 264), (7, 7, 1, 264), dtype=dtype))
    yield step("depthwise 3x3x3", _conv(groups=72), *arrays((2, 7, 13, 14, 72), (3, 3, 3, 1, 72)))
    yield step("depthwise 3x3 by 2", _conv(stride=2, groups=264), *arrays((3, 29, 28, 264), (3, 3, 1, 264)))
    yield step("depthwise 3x3, 2 outputs", _conv(groups=136), *arrays((3, 29, 28, 136), (3, 3, 1, 272)))
    yield step("depthwise 4x4 transposed by 2", _conv(1, [(2, 2)] * 2, 2, groups=136), *arrays((3, 15, 14, 136), (4, 4, 1, 136)))


IMAGES, FILTERS = (128, 56, 56, 64), (3, 3, 64, 64)
UP = (64, 64, 64, 64)

PAGES = {
    "conv": [
        step("3x3, bfloat16", _conv(), *arrays(IMAGES, FILTERS)),
        step("3x3, float32", _conv(), *arrays(IMAGES, FILTERS, dtype=FP32)),
        step("3x3 with stride 2, bfloat16", _conv(stride=2), *arrays(IMAGES, FILTERS)),
        step("3x3, 3 input channels, bfloat16", _conv(), *arrays((128, 56, 56, 3), (3, 3, 3, 64))),
        step("3x3x3, bfloat16", _conv(), *arrays((8, 16, 56, 56, 64), (3, 3, 3, 64, 64))),
        step("3x3, 32 groups, bfloat16", _conv(groups=32), *arrays(IMAGES, (3, 3, 2, 64))),
        step("depthwise 3x3, bfloat16", _conv(groups=64), *arrays(IMAGES, (3, 3, 1, 64))),
        step("depthwise 3x3x3, 2 outputs per group, bfloat16", _conv(groups=64), *arrays((8, 16, 56, 56, 64), (3, 3, 3, 1, 128))),
        step("depthwise 33 taps, bfloat16", _conv(groups=64), *arrays((64, 8192, 64), (33, 1, 64))),
        step("depthwise 7x7, float32", _conv(groups=64), *arrays(IMAGES, (7, 7, 1, 64), dtype=FP32)),
        Contact("four spatial axes", _conv(padding="VALID"), arrays((2, 4, 6, 6, 6, 6), (4, 4, 3, 3, 3, 3))),
        Contact("int8 into int8", _conv(), arrays(IMAGES, FILTERS, dtype=INT8)),
        Contact("complex64", _conv(), arrays(IMAGES, FILTERS, dtype="complex64")),
    ],
    "conv_transpose": [
        step("4x4 by 2, bfloat16", lambda x, w: conv_transpose(x, w, (2, 2), "SAME"), *arrays(UP, (4, 4, 64, 64))),
        step("depthwise 4x4 by 2, bfloat16", _conv(padding=[(2, 2)] * 2, dilation=2, groups=64), *arrays(UP, (4, 4, 1, 64))),
    ],
    "convolve": [
        step("float32", convolve, *arrays((1 << 24,), (31,), dtype=FP32)),
        step("64 signals with a window each, float32", jax.vmap(convolve), *arrays((64, 1 << 18), (64, 31), dtype=FP32)),
    ],
}
