"""Cost of `use_invariant`: products with it against the same without, interleaved, with errors against float64.

    python -m benchmarks.invariant --json invariant_cpu.json

Times are medians in ms, and errors those of the norm.  Numbers are float32 on a CPU and bfloat16 on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jaxext
from jaxext.tuning import timing

from .race import race, run

MATRICES = [(m, k, n) for k, n in ((1024, 1024), (4096, 4096), (512, 2048)) for m in (1, 16, 128, 1024)]  # M, K, N
IMAGES = {  # the shapes of images and filter, and whether it is strided or transposed
    "3x3": ((8, 28, 28, 64), (3, 3, 64, 64), {}),
    "3x3, one image": ((1, 28, 28, 64), (3, 3, 64, 64), {}),
    "3x3, small images": ((64, 7, 7, 256), (3, 3, 256, 256), {}),
    "3x3 by 2": ((8, 28, 28, 64), (3, 3, 64, 64), {"window_strides": (2, 2)}),
    "depthwise 7x7": ((8, 28, 28, 96), (7, 7, 1, 96), {"feature_group_count": 96}),
    "transposed 4x4 by 2": ((4, 16, 16, 64), (4, 4, 64, 64), {"lhs_dilation": (2, 2), "padding": ((2, 2), (2, 2))}),
}


def products(matrices, images) -> Iterator[tuple[str, Callable, tuple[int, ...], tuple[int, ...]]]:
    for M, K, N in matrices:
        yield f"matmul {M}x{K}x{N}", jaxext.matmul, (M, K), (K, N)
    for name, (x, w, more) in images.items():
        static = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **more}
        yield f"conv {name} {'x'.join(map(str, x))}", functools.partial(jaxext.conv_general_dilated, **static), x, w


def gradient(f: Callable) -> Callable:
    return lambda x, w: jax.grad(lambda x: f(x, w).astype(jnp.float32).sum())(x)


def rows(matrices, images, rounds: int) -> Iterator[dict]:
    clock, _ = timing.timer()
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    for name, f, x, w in products(matrices, images):
        arrays = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate((x, w))]
        for row, of in (("forward", f), ("gradient in x", gradient(f))):
            forms = {"invariant": jaxext.use_invariant()(of), "jaxext": of}
            yield {"row": row, "product": name} | race(forms, arrays, clock, rounds, of)


def line(row: dict) -> str:
    ms = row["ms"]
    price = ms["invariant"] / ms["jaxext"]
    return f"{row['row']:14} {row['product']:40} {ms['invariant']:8.3f} ms  error {row['error']['invariant']:.1e}  price {price:5.2f}"


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, MATRICES, IMAGES), line, 9, arguments)


if __name__ == "__main__":
    main()
