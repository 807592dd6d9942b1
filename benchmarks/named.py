"""Geometries by name: layers that people train, and those that `xla` once computed more slowly than lax, or in more memory."""

from __future__ import annotations

from .geometry import Geometry, parse

_PRODUCTS = ("fprop", "dgrad", "wgrad")

# Name -> roles and the rest of the line.
_NAMED: dict[str, tuple[tuple[str, ...], str]] = {
    "2 batch groups dilated": (_PRODUCTS, "x=128,4,4,4,64 w=2,2,2,64,2 padding=SAME filter_dilation=2 batch_groups=2"),
    "2 batch groups transposed": (_PRODUCTS, "x=128,4,4,4,64 w=2,2,2,64,2 padding=SAME input_dilation=2 batch_groups=2"),
    "4 batch groups dilated": (_PRODUCTS, "x=16,16,16,16,64 w=2,2,2,64,4 padding=SAME filter_dilation=2 batch_groups=4"),
    "128 taps of 2 channels": (_PRODUCTS, "x=1,100000,2 w=128,1,2 padding=SAME groups=2"),
    "16 taps of 4 channels": (_PRODUCTS, "x=1,100000,4 w=16,1,4 padding=SAME groups=4"),
    "RGB 3x3": (_PRODUCTS, "x=1000,8,8,3 w=3,3,1,3 padding=SAME groups=3"),
    "RGB 3x3 large": (_PRODUCTS, "x=8,224,224,3 w=3,3,1,3 padding=SAME groups=3"),
    "4096 of 4x4 depthwise": (_PRODUCTS, "x=4096,4,4,8 w=3,3,1,8 padding=SAME groups=8"),
    "4096 of 4x4 of 2 groups": (_PRODUCTS, "x=4096,4,4,16 w=3,3,8,16 padding=SAME groups=2"),
    "wav2vec2 k=10 by 5": (_PRODUCTS, "x=4,16000,1 w=10,1,512 stride=5"),
    "patches 4x4 of 3": (_PRODUCTS, "x=8,112,112,3 w=4,4,3,96 stride=4"),
    "patches 16x16 of 3": (_PRODUCTS, "x=4,224,224,3 w=16,16,3,192 stride=16"),
    "patches 4x4 of 64": (_PRODUCTS, "x=2,112,112,64 w=4,4,64,64 stride=4"),
    "patches 2x2 of 96": (_PRODUCTS, "x=4,28,28,96 w=2,2,96,192 stride=2"),
    "16 outputs by 3": (_PRODUCTS, "x=4,56,56,16 w=3,3,1,256 stride=3 padding=SAME groups=16"),
    "16 outputs": (_PRODUCTS, "x=4,28,28,16 w=3,3,1,256 padding=SAME groups=16"),
    "transposed by 16": (_PRODUCTS, "x=4,500,64 w=32,64,64 padding=23:24 input_dilation=16"),
    "transposed by 16 of few": (_PRODUCTS, "x=4,2000,16 w=32,16,8 padding=23:24 input_dilation=16"),
    "transposed by 4": (_PRODUCTS, "x=4,16,16,32 w=8,8,32,16 padding=5:6,5:6 input_dilation=4"),
    "transposed 4x4 by 2": (_PRODUCTS, "x=4,32,32,64 w=4,4,64,64 padding=2:2,2:2 input_dilation=2"),
    "both mapped, 3-D, 2 outputs": (_PRODUCTS, "x=2,8,8,8,16 w=3,3,3,16,2 padding=SAME batch=8 mapped=xw"),
    "depthwise 31x31": (_PRODUCTS, "x=1,28,28,64 w=31,31,1,64 padding=SAME groups=64"),
    "depthwise 13x13 of 16": (_PRODUCTS, "x=4,28,28,16 w=13,13,1,16 padding=SAME groups=16"),
    "depthwise 13x13 of 96": (_PRODUCTS, "x=2,28,28,96 w=13,13,1,96 padding=SAME groups=96"),
    "depthwise 7x7": (_PRODUCTS, "x=8,28,28,96 w=7,7,1,96 padding=SAME groups=96"),
    "depthwise 3x3": (_PRODUCTS, "x=8,56,56,64 w=3,3,1,64 padding=SAME groups=64"),
    "depthwise 3x3 by 2": (_PRODUCTS, "x=8,56,56,96 w=3,3,1,96 stride=2 padding=SAME groups=96"),
    "depthwise 5x5 by 2": (_PRODUCTS, "x=4,56,56,144 w=5,5,1,144 stride=2 padding=SAME groups=144"),
    "causal k=4": (_PRODUCTS, "x=4,2048,512 w=4,1,512 padding=3:0 groups=512"),
    "3x3 by 2": (_PRODUCTS, "x=8,56,56,64 w=3,3,64,64 stride=2 padding=SAME"),
    "4x4 by 2": (_PRODUCTS, "x=2,64,64,64 w=4,4,64,64 stride=2 padding=SAME"),
    "1x1 by 2": (_PRODUCTS, "x=4,56,56,64 w=1,1,64,128 stride=2"),
    "per-example": (("wgrad",), "x=1,28,28,32 w=3,3,32,32 padding=SAME batch=16 mapped=x"),
    "per-example by 2": (("wgrad",), "x=1,32,32,32 w=3,3,32,64 stride=2 padding=SAME batch=16 mapped=x"),
    "per-example 1x1 by 2": (("wgrad",), "x=1,32,32,64 w=1,1,64,64 stride=2 batch=32 mapped=x"),
    "ensemble": (_PRODUCTS, "x=2,28,28,32 w=3,3,32,32 padding=SAME batch=16 mapped=xw"),
    "17 groups of 32 7x7": (_PRODUCTS, "x=4,28,28,544 w=7,7,32,544 padding=SAME groups=17"),
    "64 groups of 32 3x3": (_PRODUCTS, "x=4,14,14,2048 w=3,3,32,2048 padding=SAME groups=64"),
    "32 groups of 4 3x3": (_PRODUCTS, "x=8,28,28,128 w=3,3,4,128 padding=SAME groups=32"),
    "32 groups of 4 3x3 by 2": (_PRODUCTS, "x=8,28,28,128 w=3,3,4,128 stride=2 padding=SAME groups=32"),
    "32 groups of 16 3x3": (_PRODUCTS, "x=4,14,14,512 w=3,3,16,512 padding=SAME groups=32"),
    "32 groups of 16 3x3 by 2": (_PRODUCTS, "x=4,28,28,512 w=3,3,16,512 stride=2 padding=SAME groups=32"),
    "16 groups of 48 64 taps": (_PRODUCTS, "x=1,499,768 w=64,48,768 padding=SAME groups=16"),
    "4 groups of 16 1024 taps": (_PRODUCTS, "x=1,4000,64 w=1024,16,64 padding=SAME groups=4"),
    "30 depthwise layers": (("step",), "x=1,14,14,32 w=3,3,1,32 padding=SAME groups=32 layers=30"),
    "12 depthwise 7x7 layers": (("step",), "x=1,14,14,96 w=7,7,1,96 padding=SAME groups=96 layers=12"),
    "8 grouped layers": (("step",), "x=1,14,14,128 w=3,3,4,128 padding=SAME groups=32 layers=8"),
    "128 taps of 64 channels": (("wgrad",), "x=2,4096,64 w=128,1,64 padding=SAME groups=64"),
}


def named() -> list[tuple[str, Geometry]]:
    """Each name and geometry, for each role."""
    return [(name, parse(f"{role} {text}")) for name, (roles, text) in _NAMED.items() for role in roles]
