"""Products with quantised weights, and of scaled numbers: jaxext's against dequantise-then-dot, interleaved, with errors against float64.

    python -m benchmarks.quantized --json quantized_cpu.json

`dequantized` makes small numbers wide and multiplies, in one jitted program; `wide` multiplies numbers that are wide already.  Times are
medians in ms, and errors those of the norm.  Wide numbers are float32 on a CPU and bfloat16 on a GPU, where implementations have columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jaxext
from jaxext.tuning import timing

from .race import outcome, race, run

LAYERS = {  # K, N
    "llama-3 8B, attention": (4096, 4096),
    "deepseek-v3, expert up": (7168, 4096),
    "llama-3 8B, up": (4096, 14336),
    "llama-3 8B, down": (14336, 4096),
    "deepseek-v3, expert down": (2048, 7168),
    "deepseek-v3, attention out": (16384, 7168),
}
ROWS = (1, 4, 16, 64, 128)
LARGE = {"8192 cubed": (8192, 8192)}  # with as many rows, on a GPU
ON_CPU = ("llama-3 8B, attention",)  # the others say the same
EIGHT = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of the weights, and of the activations if they are quantised."""

    weights: Callable[[jax.Array], jaxext.quantization.Quantized]
    activations: Callable[[jax.Array], jaxext.quantization.Quantized] | None = None


def squares(w: jax.Array, size: int = 128) -> jaxext.quantization.Quantized:
    """w in 8-bit floats with a scale for each square."""
    cut = [(n // size, size) if n % size == 0 else (1, n) for n in w.shape]
    (rows, height), (columns, width) = cut
    q = jaxext.quantization.quantize(
        jnp.swapaxes(w.reshape(rows, height, columns, width), 1, 2).reshape(rows * columns, -1), axis=1, dtype=EIGHT
    )
    back = jnp.swapaxes(q.qvalue.reshape(rows, columns, height, width), 1, 2)
    return jaxext.quantization.Quantized(back.reshape(w.shape), q.scale.reshape(rows, columns))


def eighths(axis: int | None, group: int | None = None) -> Callable[[jax.Array], jaxext.quantization.Quantized]:
    return functools.partial(jaxext.quantization.quantize, dtype=EIGHT, axis=axis, group=group)


FORMATS = {
    "int8": Format(lambda w: jaxext.quantization.quantize(w, bits=8)),
    "int8, groups of 128": Format(lambda w: jaxext.quantization.quantize(w, bits=8, group=128)),
    "int4, groups of 128": Format(lambda w: jaxext.quantization.quantize(w, bits=4, group=128)),
    "fp8, of tensors": Format(eighths(None), eighths(None)),
    "fp8, of rows and columns": Format(eighths(0), eighths(1)),
    "fp8, blocks and squares of 128": Format(squares, eighths(1, 128)),
}


def dequantized(x, w):
    """The product of small numbers made wide: w is a pair of the quantised and the wide array, and so is x if it is quantised."""
    return jnp.matmul(_wide(x, quantized=True), _wide(w, quantized=True))


def wide(x, w):
    return jnp.matmul(_wide(x), _wide(w))


def named(implementation: str | None) -> Callable:
    def product(x, w):
        if not isinstance(x, tuple):
            return jaxext.quantized_matmul(x, w[0], implementation=implementation)
        (x, of), (w, _) = x, w
        scales = dict(lhs_scale=x.scale, rhs_scale=w.scale, preferred_element_type=of.dtype)
        return jaxext.scaled_dot(x.qvalue, w.qvalue, **scales, implementation=implementation)

    return product


def _wide(x, quantized: bool = False) -> jax.Array:
    return x if not isinstance(x, tuple) else x[0].dequantize().astype(x[1].dtype) if quantized else x[1]


def gradient(f: Callable) -> Callable:
    """Return the function of x, w and ct that computes the gradient of `f` in x."""
    return lambda x, w, ct: jax.vjp(lambda x: f(x, w), x)[1](ct)[0]


def rows(layers, all_rows, rounds: int) -> Iterator[dict]:
    gpu, (clock, _) = jax.default_backend() == "gpu", timing.timer()
    dtype = jnp.bfloat16 if gpu else jnp.float32
    forms = {"jaxext": named(None), "dequantized": dequantized, "wide": wide}
    forms |= {name: named(name) for name in ("cuda", "triton", "xla")} if gpu else {}
    sizes = [(name, M, *LAYERS[name]) for name in layers for M in all_rows]
    sizes += [(name, K, K, N) for name, (K, N) in LARGE.items() if gpu]
    for layer, M, K, N in sizes:
        w = jax.random.normal(jax.random.key(0), (K, N), dtype)
        x, ct = (jax.random.normal(jax.random.key(n), (M, n), dtype) for n in (K, N))
        for kind, format in FORMATS.items():
            row = {"layer": layer, "shape": [M, K, N], "format": kind}
            arrays = [_pair(x, format.activations, dtype), _pair(w, format.weights, dtype)]
            yield {"row": "forward"} | row | _race(forms, arrays, clock, rounds)
            if format.activations is None and M in (16, 128):
                backward = {name: gradient(f) for name, f in forms.items()}
                yield {"row": "gradient in x"} | row | _race(backward, [*arrays, ct], clock, rounds)


def _pair(x: jax.Array, quantize: Callable | None, dtype):
    """The quantised array and its values."""
    return x if quantize is None else ((q := quantize(x)), q.dequantize().astype(dtype))


def _race(forms, arrays, clock, rounds) -> dict:
    """Quantised arrays are arguments, not constants that XLA would fold."""
    leaves, tree = jax.tree.flatten(arrays)

    def of(f):
        return lambda *leaves: f(*jax.tree.unflatten(tree, leaves))

    return race({name: of(f) for name, f in forms.items()}, leaves, clock, rounds, of(forms["wide"]))


def line(row: dict) -> str:
    return f"{row['row']:14} {'x'.join(map(str, row['shape'])):16} {row['format']:30} {outcome(row)}"


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, LAYERS if jax.default_backend() == "gpu" else ON_CPU, ROWS), line, 7, arguments)


if __name__ == "__main__":
    main()
