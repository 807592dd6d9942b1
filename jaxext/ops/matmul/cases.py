"""The named calls of matrix products (`core/contact.py`)."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax import lax

from jaxext.core.contact import BF16, E4M3, E5M2, FP16, FP32, INT8, SQUARE, TILES, Contact, arrays, step, typed
from jaxext.ops.matmul import dot_general, matmul

Preset = lax.DotAlgorithmPreset


def contacts() -> Iterator[Contact]:
    for dtype in (BF16, FP16, FP32):
        yield step(f"matmul {dtype}", matmul, *arrays(*TILES, dtype=dtype))
    for preset in (Preset.BF16_BF16_F32_X3, Preset.BF16_BF16_F32_X6):
        yield step(f"matmul {preset.name}", _precise(preset), *arrays(*TILES, dtype=FP32))
    for layout in ("nn", "nt", "tn"):
        yield _product("matmul int8", INT8, INT8, "int32", layout)
        yield _product("matmul fp8 into bfloat16", E4M3, E4M3, BF16, layout)
        yield _product("matmul fp8 both into float32", E4M3, E5M2, FP32, layout)
        yield _product("matmul float32 by bfloat16", FP32, BF16, FP32, layout)
    yield _product("matmul fp8 both, turned", E5M2, E4M3, FP32, "nt")
    yield _product("matmul bfloat16 by float32", BF16, FP32, FP32, "nt")
    for name, precision in (("TF32_TF32_F32_X3", Preset.TF32_TF32_F32_X3), ("highest", "highest")):
        yield step(f"matmul {name}", _precise(precision), *arrays(*TILES, dtype=FP32))
    yield step("matmul bfloat16 into float32", _into(FP32), *arrays(*TILES))
    yield step("matmul float32 by bfloat16, and gradients", _into(FP32), *typed((TILES[0], FP32), (TILES[1], BF16)))
    yield Contact("matmul of a row", matmul, arrays((1, 4096), (4096, 1040)))
    yield Contact("matmul of 16 rows", matmul, arrays((16, 4096), (4096, 1040)))
    yield step("matmul batched", matmul, *arrays((3, 269, 272), (3, 272, 528)))
    yield step("matmul of odd sizes", matmul, *arrays((515, 777), (777, 387)))


def _into(dtype: str) -> Callable[..., Any]:
    return functools.partial(matmul, preferred_element_type=dtype)


def _precise(precision: Any) -> Callable[..., Any]:
    return functools.partial(matmul, precision=precision)


def _product(name: str, first: str, second: str, result: str, layout: str) -> Contact:
    """A product without gradients.  nt and tn have the contracted axis last, or first, in both factors."""
    a, b = TILES
    shapes = {"nn": (a, b), "nt": (a, b[::-1]), "tn": (a[::-1], b)}[layout]
    axes = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}[layout]
    function = functools.partial(dot_general, dimension_numbers=(axes, ((), ())), preferred_element_type=result)
    return Contact(f"{name}, {layout}", function, typed((shapes[0], first), (shapes[1], second)))


PAGES = {
    "matmul": [
        step("bfloat16", matmul, *arrays(*SQUARE)),
        step("float32", matmul, *arrays(*SQUARE, dtype=FP32)),
        step("float32 as six products of bfloat16", _precise(Preset.BF16_BF16_F32_X6), *arrays(*SQUARE, dtype=FP32)),
        step("bfloat16, 1001 columns", matmul, *arrays((4096, 4096), (4096, 1001))),
        Contact("int8 into int32", _into("int32"), arrays(*SQUARE, dtype=INT8)),
        Contact("float8_e4m3fn into bfloat16", _into(BF16), arrays(*SQUARE, dtype=E4M3)),
        Contact("complex64", matmul, arrays(*SQUARE, dtype="complex64")),
    ]
}
