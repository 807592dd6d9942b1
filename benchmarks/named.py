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
    # random geometries that were slower than lax, larger, or slow to compile
    "3-D by 2 of small images": (("dgrad",), "x=48,5,7,7,4 w=5,5,5,4,26 stride=2 padding=2:2,2:2,0:0"),
    "groups without space": (("dgrad",), "x=1362,288 w=48,24 groups=6"),
    "groups without space, to more": (("fprop",), "x=2560,128 w=16,328 groups=8"),
    "groups without space, mostly weights": (("dgrad",), "x=4,1280 w=32,1280 groups=40"),
    "causal k=8 of 40 channels": (("wgrad",), "x=12,526,40 w=8,1,40 padding=7:0 groups=40"),
    "31 taps of 64 channels": (("wgrad",), "x=8,499,64 w=31,1,64 padding=SAME groups=64"),
    "causal k=7 of 50000": (("wgrad",), "x=4,50000,64 w=7,1,64 padding=6:0 groups=64"),
    "3-D groups": (("fprop",), "x=1,1,3,4,168 w=3,3,3,56,105 stride=1,2,3 padding=2:2,1:1,1:1 groups=3"),
    "3-D batch groups": (("dgrad",), "x=12,16,16,13,2 w=3,3,3,2,16 padding=2:2,2:2,2:2 filter_dilation=2 batch_groups=2"),
    "8 batch groups of few channels": (("dgrad",), "x=24,15,13,2 w=3,3,2,64 padding=1:1,3:3 batch_groups=8"),
    "8 outputs 9x9 of 3 channels": (("dgrad",), "x=94,71,72,3 w=9,9,1,24 padding=4:4,0:0 groups=3"),
    "93 taps of 2 outputs": (("dgrad",), "x=1,386,4 w=93,1,8 padding=92:0 groups=4"),
    "depthwise 5x5x5": (("fprop",), "x=2,4,14,14,64 w=5,5,5,1,64 padding=SAME groups=64"),
    "transposed by 16 of whole periods": (("wgrad",), "x=4,500,64 w=32,64,64 padding=23:23 input_dilation=16"),
    "transposed by 8": (("wgrad",), "x=7,561,4 w=15,4,6 padding=7:7 input_dilation=8"),
    "transposed by 9 of groups": (("wgrad",), "x=2,93,56 w=19,28,64 padding=9:9 input_dilation=9 groups=2"),
    "transposed by 6, depthwise": (("wgrad",), "x=26,458,26 w=12,1,26 padding=5:6 input_dilation=6 groups=26"),
    "transposed 4x4x4": (("wgrad",), "x=2,8,8,8,32 w=4,4,4,32,32 padding=2:2,2:2,2:2 input_dilation=2"),
}


def named() -> list[tuple[str, Geometry]]:
    """Each name and geometry, for each role."""
    return [(name, parse(f"{role} {text}")) for name, (roles, text) in _NAMED.items() for role in roles]
