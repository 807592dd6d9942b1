"""What the GPU implementations take and refuse, in their own words, for calls of each operation: docs/operations/refusals.json.

    python docs/refusals.py     # where the CUDA kernels are compiled

Each call is explained for an H100: with each implementation named, and without a name where all kernels are verified, as they are there by
the compilers of the package's record.  `docs/tables.py` makes tables of it, and `tests/project/test_docs_pages.py` asks again.
"""

import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp

import jaxext
from jaxext.core.family import families
from jaxext.tables import record

PATH = pathlib.Path(__file__).parent / "operations" / "refusals.json"
NHWC, NHC = ("NHWC", "HWIO", "NHWC"), ("NHC", "HIO", "NHC")


def arrays(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def step(function, *operands):
    """The function with the gradients in all of its floating-point operands."""
    real = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def both(*args):
        def of_real(*some):
            return function(*[some[real.index(i)] if i in real else x for i, x in enumerate(args)])

        y, back = jax.vjp(of_real, *[args[i] for i in real])
        return back(jnp.ones_like(y))

    return both, operands


def conv(*, stride=1, padding="SAME", dilation=1, groups=1):
    def of(x, w):
        axes = x.ndim - 2
        numbers = {1: NHC, 2: NHWC, 3: ("NDHWC", "DHWIO", "NDHWC"), 4: None}[axes]
        how = dict(lhs_dilation=axes * (dilation,), dimension_numbers=numbers, feature_group_count=groups)
        return jaxext.conv_general_dilated(x, w, axes * (stride,), padding, **how)

    return of


def epilogue(activation, residual=False):
    return lambda x, w, b: jaxext.linear(x, w, b, activation=activation, residual=x if residual else None)


def scaled(lhs, rhs, of):
    return lambda x, w, s, t: jaxext.scaled_dot(x.astype(lhs), w.astype(rhs), lhs_scale=s, rhs_scale=t, preferred_element_type=of)


def weights(bits, group=None):
    """x times quantised weights, whose numbers and scales are arguments of the program."""
    k, n = 16384, 8192
    kept = {8: jnp.int8, 4: jnp.int4}[bits]
    shapes = [((k, n), kept), ((k // (group or k), n), "float32")]
    return lambda x, q, s: jaxext.quantized_matmul(x, jaxext.quantization.Quantized(q, s)), [jax.ShapeDtypeStruct(*of) for of in shapes]


def quantised(rows, bits, group=None, dtype="bfloat16"):
    function, weight = weights(bits, group)
    return function, [jax.ShapeDtypeStruct((rows, 16384), dtype), *weight]


def six_products(a, b):
    return jaxext.matmul(a, b, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)


def groups(x, w, sizes=(8,), dtype="bfloat16"):
    return [*arrays(x, w, dtype=dtype), jax.ShapeDtypeStruct(sizes, "int32")]


# Large enough that a launch matters little: small calls are XLA's.
IMAGES, FILTERS, SQUARE = (128, 56, 56, 64), (3, 3, 64, 64), ((4096, 4096), (4096, 4096))
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

# page -> what is called -> the function and its arguments
CALLS = {
    "conv": {
        "3x3, bfloat16": step(conv(), *arrays(IMAGES, FILTERS)),
        "3x3, float32": step(conv(), *arrays(IMAGES, FILTERS, dtype="float32")),
        "3x3 with stride 2, bfloat16": step(conv(stride=2), *arrays(IMAGES, FILTERS)),
        "3x3, 3 input channels, bfloat16": step(conv(), *arrays((128, 56, 56, 3), (3, 3, 3, 64))),
        "3x3x3, bfloat16": step(conv(), *arrays((8, 16, 56, 56, 64), (3, 3, 3, 64, 64))),
        "3x3, 32 groups, bfloat16": step(conv(groups=32), *arrays(IMAGES, (3, 3, 2, 64))),
        "depthwise 3x3, bfloat16": step(conv(groups=64), *arrays(IMAGES, (3, 3, 1, 64))),
        "depthwise 3x3x3, 2 outputs per group, bfloat16": step(conv(groups=64), *arrays((8, 16, 56, 56, 64), (3, 3, 3, 1, 128))),
        "depthwise 33 taps, bfloat16": step(conv(groups=64), *arrays((64, 8192, 64), (33, 1, 64))),
        "depthwise 7x7, float32": step(conv(groups=64), *arrays(IMAGES, (7, 7, 1, 64), dtype="float32")),
        "four spatial axes": (conv(padding="VALID"), arrays((2, 4, 6, 6, 6, 6), (4, 4, 3, 3, 3, 3))),
        "int8 into int8": (conv(), arrays(IMAGES, FILTERS, dtype="int8")),
        "complex64": (conv(), arrays(IMAGES, FILTERS, dtype="complex64")),
    },
    "conv_transpose": {
        "4x4 by 2, bfloat16": step(lambda x, w: jaxext.conv_transpose(x, w, (2, 2), "SAME"), *arrays((64, 64, 64, 64), (4, 4, 64, 64))),
        "depthwise 4x4 by 2, bfloat16": step(conv(padding=[(2, 2)] * 2, dilation=2, groups=64), *arrays((64, 64, 64, 64), (4, 4, 1, 64))),
    },
    "convolve": {
        "float32": step(jaxext.convolve, *arrays((1 << 24,), (31,), dtype="float32")),
        "64 signals with a window each, float32": step(jax.vmap(jaxext.convolve), *arrays((64, 1 << 18), (64, 31), dtype="float32")),
    },
    "matmul": {
        "bfloat16": step(jaxext.matmul, *arrays(*SQUARE)),
        "float32": step(jaxext.matmul, *arrays(*SQUARE, dtype="float32")),
        "float32 as six products of bfloat16": step(six_products, *arrays(*SQUARE, dtype="float32")),
        "bfloat16, 1001 columns": step(jaxext.matmul, *arrays((4096, 4096), (4096, 1001))),
        "int8 into int32": (
            lambda a, b: jaxext.matmul(a, b, preferred_element_type=jnp.int32),
            arrays(*SQUARE, dtype="int8"),
        ),
        "float8_e4m3fn into bfloat16": (
            lambda a, b: jaxext.matmul(a, b, preferred_element_type=jnp.bfloat16),
            arrays(*SQUARE, dtype="float8_e4m3fn"),
        ),
        "complex64": (jaxext.matmul, arrays(*SQUARE, dtype="complex64")),
    },
    "linear": {
        "linear, bias and gelu, bfloat16": (epilogue("gelu"), arrays(*SQUARE, (4096,))),
        "linear, bias and gelu, float32": (epilogue("gelu"), arrays(*SQUARE, (4096,), dtype="float32")),
        "linear, bias, gelu, residual, bfloat16": (epilogue("gelu", True), arrays(*SQUARE, (4096,))),
        "gated_linear_unit, silu, bfloat16": (
            lambda x, w: jaxext.gated_linear_unit(x, w, activation="silu"),
            arrays((4096, 4096), (4096, 2, 4096)),
        ),
        "conv_bias_act, 3x3, relu, bfloat16": (
            lambda x, w, b: jaxext.conv_bias_act(x, w, b, (1, 1), "SAME", dimension_numbers=NHWC, activation="relu"),
            arrays(IMAGES, FILTERS, (64,)),
        ),
        "conv_bias_act, depthwise 7x7, silu, bfloat16": (
            lambda x, w, b: jaxext.conv_bias_act(
                x, w, b, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=64, activation="silu"
            ),
            arrays(IMAGES, (7, 7, 1, 64), (64,)),
        ),
    },
    "ragged": {
        "ragged_dot, 8 groups, bfloat16": step(jaxext.ragged_dot, *groups((16384, 1024), (8, 1024, 2048))),
        "ragged_dot, 8 groups, float32": step(jaxext.ragged_dot, *groups((16384, 1024), (8, 1024, 2048), dtype="float32")),
        "ragged_linear, bias and gelu, bfloat16": (
            lambda x, w, s, b: jaxext.ragged_linear(x, w, s, b, activation="gelu"),
            [*groups((16384, 1024), (8, 1024, 2048)), *arrays((8, 2048))],
        ),
        "ragged_gated_linear_unit, silu, bfloat16": (
            lambda x, w, s: jaxext.ragged_gated_linear_unit(x, w, s, activation="silu"),
            groups((16384, 1024), (8, 1024, 2, 2048)),
        ),
    },
    "causal_conv1d": {
        "4 taps, silu, bfloat16": step(
            lambda x, w, b: jaxext.causal_conv1d(x, w, b, activation="silu"), *arrays((8, 4096, 2048), (4, 2048), (2048,))
        ),
        "16 taps, float32": step(jaxext.causal_conv1d, *arrays((8, 4096, 2048), (16, 2048), (2048,), dtype="float32")),
        "32 taps, bfloat16": step(jaxext.causal_conv1d, *arrays((8, 4096, 2048), (32, 2048), (2048,))),
        "float64": (jaxext.causal_conv1d, arrays((8, 4096, 2048), (4, 2048), dtype="float64")),
    },
    "scaled_dot": {
        "e4m3 by e4m3, scales of blocks of 128, into bfloat16": (
            scaled(E4M3, E4M3, jnp.bfloat16),
            arrays(*SQUARE, (4096, 32), (32, 32), dtype="float32"),
        ),
        "e4m3 by e4m3, scales of blocks of 32, into bfloat16": (
            scaled(E4M3, E4M3, jnp.bfloat16),
            arrays(*SQUARE, (4096, 128), (128, 4096), dtype="float32"),
        ),
        "e5m2 by e5m2": (scaled(E5M2, E5M2, jnp.bfloat16), arrays(*SQUARE, (4096, 1), (1, 4096), dtype="float32")),
        "int8 by int8": (scaled(jnp.int8, jnp.int8, jnp.bfloat16), arrays(*SQUARE, (4096, 1), (1, 4096), dtype="float32")),
        "into float16": (scaled(E4M3, E4M3, jnp.float16), arrays(*SQUARE, (4096, 1), (1, 4096), dtype="float32")),
    },
    "quantized_matmul": {
        "16 rows, int8, a scale for each column": quantised(16, 8),
        "16 rows, int4, groups of 128": quantised(16, 4, 128),
        "128 rows, int4, groups of 128": quantised(128, 4, 128),
        "16 rows of float32, int8": quantised(16, 8, dtype="float32"),
        "16 rows, int4, groups of 16": quantised(16, 4, 16),
    },
    "fp8_matmul": {
        "bfloat16 operands": step(jaxext.fp8_matmul, *arrays(*SQUARE)),
        "1001 columns": step(jaxext.fp8_matmul, *arrays((4096, 4096), (4096, 1001))),
    },
    "gram": {
        "gram of 4096x1024, bfloat16": step(jaxext.gram, *arrays((4096, 1024))),
        "gram of 512x512, float32": step(jaxext.gram, *arrays((512, 512), dtype="float32")),
        "gram, complex64": (jaxext.gram, arrays((512, 512), dtype="complex64")),
        "newton_schulz of 4096x4096, bfloat16": (jaxext.newton_schulz, arrays((4096, 4096))),
    },
}


def words(function, operands, named):
    """Of each product: the implementation that is taken, or why the named one refuses it.  Nothing if there is none of this name."""
    with jaxext.use_target("sm_90a"), jaxext.use_implementation(named):
        try:
            rows = jaxext.explain(function, platform="cuda")(*operands).rows
        except ValueError as error:
            assert "want one of" in str(error), error
            return {}
    return {row.op: row.chosen or row.refused[named] for row in rows}


def asked(names=("triton", "cuda")):
    """page -> rows: what is called, the product, what each implementation says, and which one runs unnamed."""
    all_verified = mock.patch.object(record, "unverified", lambda *_: None)
    samples = {family.name: {title: call for title, *call in family.samples()} for family in families.values()}
    pages = {}
    for page in dict.fromkeys([*CALLS, *(name for name, calls in samples.items() if calls)]):
        pages[page] = []
        for title, (function, operands) in {**CALLS.get(page, {}), **samples.get(page, {})}.items():
            said = {name: words(function, operands, name) for name in names}
            with all_verified:
                unnamed = words(function, operands, None)
            for op, taken in unnamed.items():
                row = {name: "yes" if said[name].get(op) == name else said[name].get(op, "no such kernel") for name in names}
                pages[page].append({"call": title, "product": op, **row, "unnamed": taken})
    return pages


if __name__ == "__main__":
    with jax.enable_x64(True):  # for the row of float64
        PATH.write_text(json.dumps(asked(), indent=1) + "\n")
