"""The rows of `benchmarks/gpu.py`: which problems, in which dtype, and what is expected of the implementations made of kernels.

Targets are ratios: the time of lax, of `xla`, or of the better of the two ("best") over that of the implementation; "copy" is the share of
the bandwidth of a large copy, and "tflops" counts 10^12 operations per second.  Rows without targets show where others are faster, and
what XLA is slow at.  It must not know clocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from problems import Case, all_roles, conv, matmul, operation

# What is expected on a row: implementation -> kind -> least value.
Targets = Mapping[str, Mapping[str, float]]

NONE: Targets = {}
FASTER: Targets = {"triton": {"best": 2.0}}
LARGE: Targets = {"triton": {"best": 0.85}, "cuda": {"best": 0.97, "tflops": 700}}
WAVES: Targets = {"cuda": {"best": 1.03}}  # the last round of tiles leaves multiprocessors idle, or the depth is short
THIN: Targets = {"cuda": {"copy": 0.8}}
ONE_AXIS: Targets = {"cuda": {"best": 1.5}}
THREE_AXES: Targets = {"cuda": {"best": 1.3}}
FEW_IMAGES: Targets = {"cuda": {"best": 1.2}}
MANY_IMAGES: Targets = {"cuda": {"best": 0.9}}
DEPTHWISE: Mapping[str, Targets] = {
    "fprop": {"triton": {"best": 1.3, "copy": 0.75}, "cuda": {"copy": 0.85}},
    "dgrad": {"triton": {"best": 2.0, "copy": 0.75}, "cuda": {"copy": 0.75}},
    "wgrad": {"triton": {"best": 2.0, "copy": 0.75}, "cuda": {"copy": 0.75}},
}
CAUSAL: Mapping[str, Targets] = {
    "fprop": {"triton": {"lax": 3.0, "xla": 1.0}, "cuda": {"copy": 0.85}},
    "dgrad": {"triton": {"lax": 5.0, "xla": 1.0}, "cuda": {"copy": 0.75}},
    "wgrad": {"triton": {"lax": 5.0, "xla": 1.0}, "cuda": {"copy": 0.75}},
}
# Relative, in the norm; TF32's is near 3e-4.  Hopper adds up products of 8-bit numbers with fewer bits than float32 has.
ERRORS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3, "float8_e4m3fn": 1e-2}


@dataclasses.dataclass(frozen=True)
class Row:
    case: Case
    tag: str
    targets: Targets
    dtype: str = "bfloat16"
    reference: Case | None = None  # what is right, where the case itself does not take float64

    @property
    def name(self) -> str:
        return f"{self.tag}: {self.case.name} {self.dtype}"


def rows(quick: bool) -> list[Row]:
    """Targets first, for a run may end early; with `quick`, small twins of the same problems, which show that all runs."""

    def convs(tag, name, x, w, targets, dtype="bfloat16", **static):
        """`targets`: by role."""
        if quick:
            x, w, static = small(x, w, **static)
        return [Row(conv(name, x, w, role, **static), tag, target, dtype) for role, target in targets.items()]

    def square(n, *, dtype="bfloat16", target=NONE, **static):
        return skinny(n, n, n, name=f"{n}^3", dtype=dtype, target=target, **static)

    def skinny(m, k, n, *, name=None, dtype="bfloat16", target=NONE, **static):
        name = " ".join([name or f"{m}x{k}x{n}", *static.values()])
        m, k, n = twin_of(m, k, n)
        return Row(matmul(name, m, k, n, **static), "matmul", target, dtype, matmul(name, m, k, n))

    def role(name, n, target=NONE):
        """Of the gradients of a square product."""
        (n,) = twin_of(n)
        return Row(product(name, n, n, n), "matmul", target)

    def eight_bits(m, k, n):
        name = f"{m}x{k}x{n} nt"
        m, k, n = twin_of(m, k, n)
        return Row(product(name, m, k, n, preferred=jnp.bfloat16), "matmul", NONE, "float8_e4m3fn", product(name, m, k, n))

    def twin_of(*sizes):
        return [min(size, 64) for size in sizes] if quick else sizes

    none = all_roles(NONE)
    forward, both = {"fprop": NONE}, {"fprop": NONE, "wgrad": NONE}
    before: Any = dict(padding=((3, 0),))  # causal: an output sees no later input
    doubled: Any = dict(input_dilation=2, padding=((2, 2),) * 2)  # of 4x4; each axis twice as long
    doubled_3: Any = dict(input_dilation=2, padding=((1, 2),) * 3)  # of 3x3x3
    vocoder: Any = dict(input_dilation=8, padding=((11, 12),))
    return [
        square(4096, target=LARGE),
        square(8192, target=LARGE),
        *(skinny(4096, 4096, n, target=WAVES) for n in (3072, 5376, 7168, 11008, 14336)),
        *(skinny(8192, k, 8192, target=WAVES) for k in (1024, 512, 256)),
        *(skinny(m, 8192, 8192, target=THIN) for m in (16, 8, 1)),
        role("4096^3 nt", 4096, LARGE),
        role("4096^3 tn", 4096, LARGE),
        *convs("batched filters", "16 x 8x28x28x128", (8, 28, 28, 128), (3, 3, 128, 128), all_roles(FASTER), vmap=16),
        *convs("per-example", "256 x 32x32x64", (1, 32, 32, 64), (3, 3, 64, 64), {"wgrad": FASTER}, vmap=256),
        *convs("per-example", "64 x 14x14x256", (1, 14, 14, 256), (3, 3, 256, 256), {"wgrad": FASTER}, vmap=64),
        *convs("depthwise", "7x7, 64x56x56x96", (64, 56, 56, 96), (7, 7, 1, 96), DEPTHWISE, groups=96),
        *convs("depthwise", "7x7, 64x14x14x384", (64, 14, 14, 384), (7, 7, 1, 384), DEPTHWISE, groups=384),
        *convs("depthwise", "3x3, 64x56x56x144", (64, 56, 56, 144), (3, 3, 1, 144), DEPTHWISE, groups=144),
        *convs("causal", "k=4, 8x2048x5376", (8, 2048, 5376), (4, 1, 5376), CAUSAL, groups=5376, **before),
        *convs("causal", "k=4, 1x16384x12288", (1, 16384, 12288), (4, 1, 12288), CAUSAL, groups=12288, **before),
        *convs("one axis", "k=5 dilated by 4, 8x8192x256", (8, 8192, 256), (5, 256, 256), all_roles(ONE_AXIS), dilation=4),
        *convs("one axis", "k=3, 16x1500x768", (16, 1500, 768), (3, 768, 768), all_roles(ONE_AXIS)),
        *convs("three axes", "3x3x3, 2x16x56x56x64", (2, 16, 56, 56, 64), (3, 3, 3, 64, 64), all_roles(THREE_AXES)),
        *convs("three axes", "3x3x3, 1x9x60x104x128", (1, 9, 60, 104, 128), (3, 3, 3, 128, 128), all_roles(THREE_AXES)),
        *convs("few images", "3x3, 1x64x64x320", (1, 64, 64, 320), (3, 3, 320, 320), all_roles(FEW_IMAGES)),
        *convs("few images", "3x3, 4x28x28x256", (4, 28, 28, 256), (3, 3, 256, 256), all_roles(FEW_IMAGES)),
        *convs("dense", "3x3, 64x56x56x64", (64, 56, 56, 64), (3, 3, 64, 64), all_roles(MANY_IMAGES)),
        *convs("dense", "3x3, 64x14x14x256", (64, 14, 14, 256), (3, 3, 256, 256), all_roles(MANY_IMAGES)),
        *convs("dense", "3x3, 64x28x28x128", (64, 28, 28, 128), (3, 3, 128, 128), all_roles(MANY_IMAGES)),
        *convs("transposed", "4x4 stride 2, 16x32x32x256", (16, 32, 32, 256), (4, 4, 256, 128), none | {"fprop": FASTER}, **doubled),
        *convs("strided grouped", "32 of 4, 64x56x56x128", (64, 56, 56, 128), (3, 3, 4, 128), {"dgrad": FASTER}, groups=32, stride=2),
        *convs("strided grouped", "32 of 16, 64x28x28x512", (64, 28, 28, 512), (3, 3, 16, 512), {"dgrad": FASTER}, groups=32, stride=2),
        *convs("dense", "1x1, 64x28x28x512 to 128", (64, 28, 28, 512), (1, 1, 512, 128), forward),
        *convs("stem", "7x7 by 2, 64x224x224x3", (64, 224, 224, 3), (7, 7, 3, 64), both, stride=2),
        *convs("grouped", "32 of 4, 64x56x56x128", (64, 56, 56, 128), (3, 3, 4, 128), none, groups=32),
        *convs("depthwise", "5x5 by 2, 64x56x56x144", (64, 56, 56, 144), (5, 5, 1, 144), none, groups=144, stride=2),
        *convs("transposed", "k=16 stride 8, 8x1024x512", (8, 1024, 512), (16, 512, 256), none, **vocoder),
        *convs("transposed", "3x3x3 stride 2, 2x16x32x32x64", (2, 16, 32, 32, 64), (3, 3, 3, 64, 64), none, **doubled_3),
        eight_bits(4096, 4096, 4096),
        eight_bits(8192, 8192, 8192),
        skinny(8192, 64, 8192),
        skinny(4095, 4097, 4093),
        square(4096, dtype="float32"),
        *(square(4096, dtype="float32", precision=p) for p in ("highest", "TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6")),
        *convs("depthwise", "7x7, 64x56x56x96", (64, 56, 56, 96), (7, 7, 1, 96), none, "float32", groups=96),
        *ragged(quick),
    ]


def product(name, m, k, n, preferred=None) -> Case:
    """A product of two matrices one of which is transposed, as its name says last: a bᵀ ("nt") or aᵀ b ("tn").

    XLA gives 8-bit operands to cuBLASLt where the program widens them first; that is what stands for lax.
    """
    role = name.rpartition(" ")[2]
    shapes, contracted = {"nt": (((m, k), (n, k)), (1, 1)), "tn": (((k, m), (k, n)), (0, 0))}[role]
    dimensions = (tuple((axis,) for axis in contracted), ((), ()))

    def build(library):
        dot = operation(library, "dot_general")

        def f(a, b):
            if preferred is None:
                return dot(a, b, dimensions)
            if library == "lax":
                return dot(a.astype(preferred), b.astype(preferred), dimensions)
            return dot(a, b, dimensions, preferred_element_type=preferred)

        return f

    return Case(name, build, shapes, flops=2 * m * k * n)


def small(x, w, *, groups=1, vmap=None, **static):
    """The shapes and keywords of a twin, with the same filter, stride, padding and dilations."""
    n, *space, _ = x
    *taps, channels, features = w
    few, channels, features = min(groups, 4), min(channels, 8), min(features // groups, 8)
    x, w = (min(n, 2), *(min(size, 12) for size in space), few * channels), (*taps, channels, few * features)
    return x, w, static | {"groups": few, "vmap": vmap and min(vmap, 2)}


def ragged(quick: bool) -> list[Row]:
    """`lax.ragged_dot` with groups of one size, and in the place of `xla` what that allows: a batched product.  jaxext has none yet."""
    groups, rows, inner, columns = (8, 64, 16, 16) if quick else (8, 16384, 4096, 4096)

    def build(library, role):
        def dot(a, b):
            if library == "lax":
                return lax.ragged_dot(a, b, jnp.full(groups, rows // groups, jnp.int32))
            if library == "xla":
                return jnp.einsum("gmk,gkn->gmn", a.reshape(groups, -1, inner), b).reshape(rows, columns)
            raise NotImplementedError("jaxext has no ragged product")

        def zeros(shape, like):
            return jnp.zeros(shape, like.dtype)

        return {
            "forward": dot,
            "dlhs": lambda b, y: jax.vjp(lambda a: dot(a, b), zeros((rows, inner), b))[1](y)[0],
            "drhs": lambda a, y: jax.vjp(lambda b: dot(a, b), zeros((groups, inner, columns), a))[1](y)[0],
        }[role]

    a, b, y = (rows, inner), (groups, inner, columns), (rows, columns)
    shapes = {"forward": (a, b), "dlhs": (b, y), "drhs": (a, y)}
    flops = 2 * rows * inner * columns
    return [
        Row(Case(f"{groups} even groups {role}", lambda library, role=role: build(library, role), operands, flops=flops), "ragged", NONE)
        for role, operands in shapes.items()
    ]
