"""The calls by which kernels meet a GPU for the first time, the most important of each kind first.

Each is a function of public operations with the shapes of its arguments.  Its products and those of its gradients become cases, by each
implementation that takes them (`cases`).  Sizes are chosen so that large tiles run and no dimension is a multiple of one, and that the
truth takes a CPU less than a second.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxext
from jaxext.core.family import families
from jaxext.tuning.tune import with_gradient

PLATFORM, IMPLEMENTATIONS = "cuda", ("triton", "cuda")  # where and by which kernels they are checked
BF16, FP16, FP32, INT8 = "bfloat16", "float16", "float32", "int8"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
Preset = lax.DotAlgorithmPreset
_LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
TILES = (1037, 528), (528, 784)  # several tiles along each axis, with an edge; rows are multiples of 16 bytes, which TMA wants


@dataclasses.dataclass(frozen=True)
class Contact:
    """A function of arrays with these shapes and dtypes."""

    name: str
    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    splits: tuple[int, ...] = ()  # if given, the cases have configs with so many parts of the sum, in place of two tiles


def contacts() -> list[Contact]:
    """All of them, by name once each: those of this file, and the `samples` of families."""
    own = [*_matmuls(), *_convolutions(), *_depthwise(), *_fused(), *_ragged(), *_causal(), *_scaled(), *_grams()]
    return [*own, *samples()]


def samples() -> list[Contact]:
    return [Contact(name, function, tuple(shapes)) for family in families.values() for name, function, shapes in family.samples()]


def arrays(*shapes: tuple[int, ...], dtype: str = BF16) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def step(name: str, function: Callable[..., Any], *operands: jax.ShapeDtypeStruct, splits: tuple[int, ...] = ()) -> Contact:
    """The function with its gradients in all floating-point operands."""
    real = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def both(*args):
        def of_real(*some):
            return function(*[some[real.index(i)] if i in real else x for i, x in enumerate(args)])

        return with_gradient(of_real)(*[args[i] for i in real])

    return Contact(name, both, operands, splits)


def both(name: str, function: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> Iterator[Contact]:
    """The function with its gradients, for which it saves more, and by itself."""
    yield step(name, function, *operands)
    yield Contact(f"{name}, inference", function, operands)


def _matmuls() -> Iterator[Contact]:
    for dtype in (BF16, FP16, FP32):
        yield step(f"matmul {dtype}", jaxext.matmul, *arrays(*TILES, dtype=dtype))
    for preset in (Preset.BF16_BF16_F32_X3, Preset.BF16_BF16_F32_X6):
        product = functools.partial(jaxext.matmul, precision=preset)
        yield step(f"matmul {preset.name}", product, *arrays(*TILES, dtype=FP32))
    for layout in ("nn", "nt", "tn"):
        yield _product("matmul int8", INT8, INT8, "int32", layout)
        yield _product("matmul fp8 into bfloat16", E4M3, E4M3, BF16, layout)
        yield _product("matmul fp8 both into float32", E4M3, E5M2, FP32, layout)
        yield _product("matmul float32 by bfloat16", FP32, BF16, FP32, layout)
    yield _product("matmul fp8 both, turned", E5M2, E4M3, FP32, "nt")
    yield _product("matmul bfloat16 by float32", BF16, FP32, FP32, "nt")
    for name, precision in (("TF32_TF32_F32_X3", Preset.TF32_TF32_F32_X3), ("highest", "highest")):
        yield step(f"matmul {name}", functools.partial(jaxext.matmul, precision=precision), *arrays(*TILES, dtype=FP32))
    yield step("matmul bfloat16 into float32", _into(FP32), *arrays(*TILES))
    mixed = (*arrays(TILES[0], dtype=FP32), *arrays(TILES[1]))
    yield step("matmul float32 by bfloat16, and gradients", _into(FP32), *mixed)
    yield Contact("matmul of a row", jaxext.matmul, arrays((1, 4096), (4096, 1040)))
    yield Contact("matmul of 16 rows", jaxext.matmul, arrays((16, 4096), (4096, 1040)))
    yield step("matmul batched", jaxext.matmul, *arrays((3, 269, 272), (3, 272, 528)))
    yield step("matmul of odd sizes", jaxext.matmul, *arrays((515, 777), (777, 387)))


def _into(dtype: str) -> Callable[..., Any]:
    return functools.partial(jaxext.matmul, preferred_element_type=dtype)


def _product(name: str, first: str, second: str, result: str, layout: str) -> Contact:
    """A product without gradients.  nt and tn have the contracted axis last, or first, in both factors."""
    a, b = TILES
    shapes = {"nn": (a, b), "nt": (a, b[::-1]), "tn": (a[::-1], b)}[layout]
    axes = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}[layout]
    operands = tuple(jax.ShapeDtypeStruct(*of) for of in zip(shapes, (first, second), strict=True))
    return Contact(f"{name}, {layout}", lambda x, y: jaxext.dot_general(x, y, (axes, ((), ())), preferred_element_type=result), operands)


def _conv(stride: int = 1, padding: Any = "SAME", dilation: int = 1, filter_dilation: int = 1, groups: int = 1, **more: Any):
    def convolve(x, w):
        axes = x.ndim - 2
        how: dict[str, Any] = dict(
            lhs_dilation=axes * (dilation,),
            rhs_dilation=axes * (filter_dilation,),
            dimension_numbers=_LAYOUTS[axes],
            feature_group_count=groups,
        )
        return jaxext.conv_general_dilated(x, w, axes * (stride,), padding, **how, **more)

    return convolve


IMAGES, FILTERS = (3, 29, 28, 136), (3, 3, 136, 264)


def _convolutions() -> Iterator[Contact]:
    many = arrays((30, 15, 14, 64), (3, 3, 64, 136))
    yield step("conv 3x3 bfloat16 in parts", _conv(), *many, splits=(30, 1))
    for dtype in (BF16, FP16, FP32):
        yield step(f"conv 3x3 {dtype}", _conv(), *arrays(IMAGES, FILTERS, dtype=dtype))
    yield step("conv 3 by stride 1 along one axis", _conv(), *arrays((3, 700, 136), (3, 136, 264)))
    yield step("conv 3x3x3", _conv(), *arrays((2, 7, 13, 14, 72), (3, 3, 3, 72, 136)))
    yield step("conv 1x1", _conv(), *arrays(IMAGES, (1, 1, 136, 264)))
    yield step("conv 3x3 by 2", _conv(stride=2), *arrays(IMAGES, FILTERS))
    yield step("conv 3x3 in 4 groups", _conv(groups=4), *arrays(IMAGES[:3] + (160,), (3, 3, 40, 160)))
    yield step("conv 3x3 dilated", _conv(filter_dilation=2), *arrays(IMAGES, FILTERS))
    yield step("conv 4x4 transposed by 2", _conv(padding=[(2, 2)] * 2, dilation=2), *arrays((3, 15, 14, 136), (4, 4, 136, 72)))
    yield step("conv of 3 channels", _conv(stride=2), *arrays((2, 67, 64, 3), (7, 7, 3, 72)))
    for dtype in (FP16, FP32):
        yield step(f"conv 3 along one axis {dtype}", _conv(), *arrays((3, 700, 136), (3, 136, 264), dtype=dtype))
        yield step(f"conv 3x3x3 {dtype}", _conv(), *arrays((2, 7, 13, 14, 72), (3, 3, 3, 72, 136), dtype=dtype))
    small = (2, 15, 14, 80), (3, 3, 80, 144)
    for preset in (Preset.BF16_BF16_F32_X3, Preset.BF16_BF16_F32_X6):
        yield Contact(f"conv 3x3 {preset.name}", _conv(precision=preset), arrays(*small, dtype=FP32))
    yield step("conv 3x3 highest", _conv(precision="highest"), *arrays(*small, dtype=FP32))
    yield Contact("conv 3x3 int8", _conv(), arrays(*small, dtype=INT8))
    yield Contact("conv 3x3 fp8 into bfloat16", _conv(preferred_element_type=BF16), arrays(*small, dtype=E4M3))
    yield Contact("conv 3x3 mapped", jax.vmap(_conv()), arrays((3, 2, 15, 14, 72), (3, 3, 3, 72, 136)))


def _depthwise() -> Iterator[Contact]:
    yield step("depthwise 3x3", _conv(groups=264), *arrays((3, 29, 28, 264), (3, 3, 1, 264)))
    for dtype in (BF16, FP16, FP32):
        before = _conv(padding=[(3, 0)], groups=264)
        yield step(f"depthwise 4 causal {dtype}", before, *arrays((3, 1037, 264), (4, 1, 264), dtype=dtype))
    for dtype in (BF16, FP16, FP32):
        yield step(f"depthwise 7x7 {dtype}", _conv(groups=264), *arrays((3, 29, 28, 264), (7, 7, 1, 264), dtype=dtype))
    yield step("depthwise 3x3x3", _conv(groups=72), *arrays((2, 7, 13, 14, 72), (3, 3, 3, 1, 72)))
    yield step("depthwise 3x3 by 2", _conv(stride=2, groups=264), *arrays((3, 29, 28, 264), (3, 3, 1, 264)))
    yield step("depthwise 3x3, 2 outputs", _conv(groups=136), *arrays((3, 29, 28, 136), (3, 3, 1, 272)))
    transposed = _conv(padding=[(2, 2)] * 2, dilation=2, groups=136)
    yield step("depthwise 4x4 transposed by 2", transposed, *arrays((3, 15, 14, 136), (4, 4, 1, 136)))


def _linear(activation: str | None, residual: bool = False):
    if residual:
        return lambda x, w, b, r: jaxext.linear(x, w, b, activation=activation, residual=r)
    return lambda x, w, b: jaxext.linear(x, w, b, activation=activation)


def _biased(groups: int, activation: str | None):
    how = dict(dimension_numbers=_LAYOUTS[2], feature_group_count=groups, activation=activation)
    return lambda x, w, b: jaxext.conv_bias_act(x, w, b, (1, 1), "SAME", **how)  # type: ignore[arg-type]


def _gated(activation: str):
    return lambda x, w: jaxext.gated_linear_unit(x, w, activation=activation)


def _fused() -> Iterator[Contact]:
    bias, result = (TILES[1][1],), (TILES[0][0], TILES[1][1])
    images, dense, deep = (2, 29, 28, 72), (3, 3, 72, 136), (7, 7, 1, 72)
    for dtype in (BF16, FP16, FP32):
        yield from both(f"linear gelu {dtype}", _linear("gelu"), *arrays(*TILES, bias, dtype=dtype))
        yield from both(f"gated silu {dtype}", _gated("silu"), *arrays((1037, 264), (264, 2, 528), dtype=dtype))
        yield from both(f"conv_bias_act 3x3 relu {dtype}", _biased(1, "relu"), *arrays(images, dense, (136,), dtype=dtype))
    yield from both("conv_bias_act depthwise 7x7 silu", _biased(72, "silu"), *arrays(images, deep, (72,)))
    yield from both("linear relu and residual", _linear("relu", True), *arrays(*TILES, bias, result))
    for activation in (None, "gelu_tanh", "silu", "squared_relu"):
        yield Contact(f"linear {activation} bfloat16, inference", _linear(activation), arrays(*TILES, bias))
    yield Contact("gated gelu_tanh bfloat16, inference", _gated("gelu_tanh"), arrays((1037, 264), (264, 2, 528)))
    yield Contact("conv_bias_act 3x3 gelu, inference", _biased(1, "gelu"), arrays(images, dense, (136,)))


def _groups(*shapes: tuple[int, ...], dtype: str = BF16) -> tuple[jax.ShapeDtypeStruct, ...]:
    first, second, *more = arrays(*shapes, dtype=dtype)
    return first, second, jax.ShapeDtypeStruct((shapes[1][0],), "int32"), *more


def _ragged() -> Iterator[Contact]:
    rows, weights = (645, 264), (8, 264, 272)
    for dtype in (BF16, FP16, FP32):
        yield step(f"ragged {dtype}", jaxext.ragged_dot, *_groups(rows, weights, dtype=dtype))
    for dtype in (BF16, FP16, FP32):
        linear = functools.partial(jaxext.ragged_linear, activation="gelu")
        yield from both(f"ragged_linear gelu {dtype}", linear, *_groups(rows, weights, (8, 272), dtype=dtype))
        unit = functools.partial(jaxext.ragged_gated_linear_unit, activation="silu")
        yield from both(f"ragged_gated silu {dtype}", unit, *_groups(rows, (8, 264, 2, 136), dtype=dtype))

    def scaled(x, w, sizes, bias, scale):
        return jaxext.ragged_linear(x, w, sizes, bias, activation="relu", row_scale=scale)

    yield step("ragged_linear relu and scale", scaled, *_groups(rows, weights, (8, 272)), jax.ShapeDtypeStruct(rows[:1], FP32))
    yield step("ragged, 40 groups", jaxext.ragged_dot, *_groups((269, 264), (40, 264, 272)))


def _causal() -> Iterator[Contact]:
    """Forward and backward: plain, packed, and with a state before the first step."""
    shapes = (3, 1037, 264), (4, 264), (264,)

    def packed(x, w, b, numbers):
        return jaxext.causal_conv1d(x, w, b, seq_idx=numbers, activation="silu")

    def after(x, w, b, state):
        return jaxext.causal_conv1d(x, w, b, initial_states=state, activation="silu")

    operands = arrays(*shapes)
    yield step("causal", jaxext.causal_conv1d, *operands)
    for dtype in (BF16, FP16, FP32):
        silu = functools.partial(jaxext.causal_conv1d, activation="silu")
        yield step(f"causal silu {dtype}", silu, *arrays(*shapes, dtype=dtype))
    yield step("causal packed silu", packed, *operands, jax.ShapeDtypeStruct(shapes[0][:2], "int32"))
    yield step("causal silu after a state", after, *operands, *arrays((3, 3, 264)))


def _scaled() -> Iterator[Contact]:
    M, K, N = 269, 768, 528

    def product(first: str, second: str, of_left: tuple[int, int], of_right: tuple[int, int], result: str = BF16, turned: bool = False):
        dims = (((1,), (1 if turned else 0,)), ((), ()))

        def function(x, w, s, t):
            return jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, dimension_numbers=dims, preferred_element_type=result)  # type: ignore

        right = [(K, of_right[1] * 128 if of_right[1] in (4,) else N), of_right]
        w, t = ((of[1], of[0]) if turned else of for of in right)
        shapes = [((M, K), first), (w, second), (of_left, FP32), (t, FP32)]
        return function, tuple(jax.ShapeDtypeStruct(*of) for of in shapes)

    scales = {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, 6), (6, 4)), "32": ((M, 24), (24, N))}
    for name, (left, right) in scales.items():
        for turned in (False, True):
            yield Contact(f"scaled fp8, {name}{' turned' * turned}", *product(E4M3, E4M3, left, right, turned=turned))
    for turned in (False, True):
        yield Contact(f"scaled fp8 both, rows{' turned' * turned}", *product(E5M2, E4M3, *scales["rows"], turned=turned))
    yield Contact("scaled fp8 into float32", *product(E4M3, E4M3, *scales["rows"], result=FP32))
    yield Contact("scaled fp8 into float16", *product(E4M3, E4M3, *scales["rows"], result=FP16))
    yield Contact("scaled int8", *product(INT8, INT8, *scales["rows"]))
    yield Contact("scaled e5m2 by e5m2", *product(E5M2, E5M2, *scales["rows"]))
    yield step("fp8_matmul", jaxext.fp8_matmul, *arrays((272, 768), (768, 528)))
    for kept in ("int8", "int4"):
        for rows in (16, 200, 1):
            for group in (128, 32, K) if rows > 1 else (128,):
                yield _weight_only(rows, kept, group, BF16)
        yield _weight_only(16, kept, 128, FP16)
        yield _weight_only(200, kept, 128, FP16)
        yield _weight_only(16, kept, 128, FP32)


def _weight_only(rows: int, kept: str, group: int, dtype: str) -> Contact:
    K, N = 768, 544
    shapes = [((rows, K), dtype), ((K, N), kept), ((K // group, N), FP32)]
    operands = tuple(jax.ShapeDtypeStruct(*of) for of in shapes)
    name = f"{kept} weights in groups of {group}, {rows} rows of {dtype}"
    return Contact(name, lambda x, q, s: jaxext.quantized_matmul(x, jaxext.quantization.Quantized(q, s)), operands)


def _grams() -> Iterator[Contact]:
    for dtype in (BF16, FP16, FP32):
        yield step(f"gram {dtype}", jaxext.gram, *arrays((1040, 528), dtype=dtype))
    yield Contact("gram into float32", functools.partial(jaxext.gram, preferred_element_type=FP32), arrays((1040, 528)))
    for dtype in (BF16, FP16, FP32):
        iterate = functools.partial(jaxext.newton_schulz, steps=1, coefficients=(2.0, 1.0, 1.0))
        yield Contact(f"gram with addend {dtype}", iterate, arrays((528, 784), dtype=dtype))
