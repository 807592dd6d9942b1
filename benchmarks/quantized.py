"""Products with quantised weights, and of scaled numbers, on a CPU: jaxext's against dequantise-then-dot, interleaved.

    python -m benchmarks.quantized layers --json quantized_cpu.json
    python -m benchmarks.quantized experts --json quantized_experts_cpu.json     # ragged products

`dequantized` makes small numbers float32 and multiplies, in one jitted program; `wide` multiplies numbers that are float32 already.  Times
are medians in ms, and errors those of the norm, against float64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jaxext

from .race import outcome, race, run

LAYER, K, N = "llama-3 8B, attention", 4096, 4096
ROWS = (1, 4, 16, 64, 128)
EXPERTS, ROWS_OF_EACH = (16, 1024, 2048), (1, 8, 64)  # rows of each expert that has some: every other one
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
    return jnp.matmul(made_wide(x, quantized=True), made_wide(w, quantized=True))


def wide(x, w):
    return jnp.matmul(made_wide(x), made_wide(w))


def ours(x, w):
    if not isinstance(x, tuple):
        return jaxext.quantized_matmul(x, w[0])
    (x, of), (w, _) = x, w
    return jaxext.scaled_dot(x.qvalue, w.qvalue, lhs_scale=x.scale, rhs_scale=w.scale, preferred_element_type=of.dtype)


def made_wide(x, quantized: bool = False) -> jax.Array:
    return x if not isinstance(x, tuple) else x[0].dequantize().astype(x[1].dtype) if quantized else x[1]


FORMS = {"jaxext": ours, "dequantized": dequantized, "wide": wide}


def gradient(f: Callable) -> Callable:
    """Return the function of x, w and ct that computes the gradient of `f` in x."""
    return lambda x, w, ct: jax.vjp(lambda x: f(x, w), x)[1](ct)[0]


def of_layers(rounds: int) -> Iterator[dict]:
    w = jax.random.normal(jax.random.key(0), (K, N), jnp.float32)
    for M in ROWS:
        x, ct = (jax.random.normal(jax.random.key(n), (M, n), jnp.float32) for n in (K, N))
        for kind, format in FORMATS.items():
            row = {"layer": LAYER, "shape": [M, K, N], "format": kind}
            arrays = [pair(x, format.activations), pair(w, format.weights)]
            yield {"row": "forward"} | row | race_of_pairs(FORMS, arrays, rounds)
            if format.activations is None and M in (16, 128):
                backward = {name: gradient(f) for name, f in FORMS.items()}
                yield {"row": "gradient in x"} | row | race_of_pairs(backward, [*arrays, ct], rounds)


def of_every_other(product: Callable) -> Callable:
    def function(x, w):
        groups = EXPERTS[0]
        return product(x, w, jnp.where(jnp.arange(groups) % 2 == 0, 2 * x.shape[0] // groups, 0))

    return function


BY_EXPERTS = {
    "jaxext": of_every_other(lambda x, w, sizes: jaxext.ragged_scaled_dot(x, w[0].qvalue, sizes, rhs_scale=w[0].scale)),
    "dequantized": of_every_other(lambda x, w, sizes: jaxext.ragged_dot(x, made_wide(w, quantized=True), sizes)),
    "wide": of_every_other(lambda x, w, sizes: jaxext.ragged_dot(x, made_wide(w), sizes)),
}


def of_experts(rounds: int) -> Iterator[dict]:
    w = jax.random.normal(jax.random.key(0), EXPERTS, jnp.float32)
    for each in ROWS_OF_EACH:
        x = jax.random.normal(jax.random.key(1), (each * EXPERTS[0] // 2, EXPERTS[1]), jnp.float32)
        for kind in [kind for kind, format in FORMATS.items() if format.activations is None]:
            row = {"row": f"{each} rows each", "shape": [x.shape[0], *EXPERTS[1:]], "format": kind}
            yield row | race_of_pairs(BY_EXPERTS, [x, pair(w, FORMATS[kind].weights)], rounds)


def pair(x: jax.Array, quantize: Callable | None):
    """The quantised array and its values."""
    return x if quantize is None else ((q := quantize(x)), q.dequantize().astype(jnp.float32))


def race_of_pairs(forms, arrays, rounds) -> dict:
    """Quantised arrays are arguments, not constants that XLA would fold."""
    leaves, tree = jax.tree.flatten(arrays)

    def unflattened(form):
        return lambda *leaves: form(*jax.tree.unflatten(tree, leaves))

    return race({name: unflattened(form) for name, form in forms.items()}, leaves, rounds, unflattened(forms["wide"]))


def line(row: dict) -> str:
    return f"{row['row']:14} {'x'.join(map(str, row['shape'])):16} {row['format']:30} {outcome(row)}"


def main(arguments=None) -> None:
    run(__doc__, {"layers": of_layers, "experts": of_experts}, line, arguments)


if __name__ == "__main__":
    main()
