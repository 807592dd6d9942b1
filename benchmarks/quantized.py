"""Products with quantised weights, and of scaled numbers: jaxext's against dequantise-then-dot, interleaved, with errors against float64.

    python -m jaxext.benchmarks.quantized --json quantized_cpu.json

`dequantized` makes the weights wide and multiplies, in one jitted program; `wide` multiplies weights that are wide already.  Times are
medians in ms, and errors those of the norm.  Activations are float32 on a CPU and bfloat16 on a GPU, where implementations have columns.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jaxext
from jaxext.tuning import timing

from .race import race, tell

LAYERS = {"llama-3 8B, attention": (4096, 4096), "llama-3 8B, up": (4096, 14336), "llama-3 8B, down": (14336, 4096)}  # K, N
ROWS = (1, 4, 16, 64, 128)
FORMATS = {"int8": (8, None), "int8, groups of 128": (8, 128), "int4, groups of 128": (4, 128)}
TARGETS = {"int8": 1.5, "int4, groups of 128": 2.2}  # over `wide`, with at most 16 rows, on a GPU
ON_CPU = ("llama-3 8B, attention",)  # the others say the same


def dequantized(x, q, w):
    return jnp.matmul(x, q.dequantize().astype(x.dtype))


def wide(x, q, w):
    return jnp.matmul(x, w)


def named(implementation: str | None) -> Callable:
    return lambda x, q, w: jaxext.quantized_matmul(x, q, implementation=implementation)


def gradient(f: Callable) -> Callable:
    """In x."""
    return lambda x, q, w, ct: jax.vjp(lambda x: f(x, q, w), x)[1](ct)[0]


def rows(layers, all_rows, rounds: int) -> Iterator[dict]:
    gpu, (clock, _) = jax.default_backend() == "gpu", timing.timer()
    dtype = jnp.bfloat16 if gpu else jnp.float32
    forms = {"jaxext": named(None), "dequantized": dequantized, "wide": wide}
    forms |= {name: named(name) for name in ("triton", "xla")} if gpu else {}
    for layer in layers:
        K, N = LAYERS[layer]
        w = jax.random.normal(jax.random.key(0), (K, N), dtype)
        for kind, (bits, group) in FORMATS.items():
            q = jaxext.quantize(w, bits, group)
            exact = q.dequantize().astype(dtype)
            for M in all_rows:
                x, ct = (jax.random.normal(jax.random.key(n), (M, n), dtype) for n in (K, N))
                row = {"layer": layer, "shape": [M, K, N], "format": kind}
                row |= {"target": TARGETS[kind]} if gpu and kind in TARGETS and M <= 16 else {}
                yield {"row": "forward"} | row | _race(forms, (x,), q, exact, clock, rounds)
                if M in (16, 128):
                    backward = {name: gradient(f) for name, f in forms.items()}
                    yield {"row": "gradient in x"} | row | _race(backward, (x, ct), q, exact, clock, rounds)


def _race(forms, arrays, q, w, clock, rounds) -> dict:
    """The quantised array is an argument, not a constant that XLA would fold."""
    x, *rest = arrays

    def of(f):
        return lambda x, qvalue, scale, w, *rest: f(x, jaxext.Quantized(qvalue, scale), w, *rest)

    definition = of(forms["wide"])
    return race({name: of(f) for name, f in forms.items()}, (x, q.qvalue, q.scale, w, *rest), clock, rounds, definition)


def line(row: dict) -> str:
    ms = row["ms"]
    told = f"{row['row']:14} {'x'.join(map(str, row['shape'])):16} {row['format']:20}"
    told += f" {ms['jaxext']:8.3f} ms  error {row['error']['jaxext']:.1e} "
    told += "".join(f" {name} {took / ms['jaxext']:6.2f}" for name, took in ms.items() if name != "jaxext")
    return told + (f"  target wide {row['target']}" if "target" in row else "")


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: 7)")
    parser.add_argument("--layers", type=int, help="how many of the layers (default: all; on a CPU one)")
    options = parser.parse_args(arguments)
    layers = [*LAYERS][: options.layers] if jax.default_backend() == "gpu" else ON_CPU
    tell(rows(layers, ROWS, options.rounds), line, options.json)


if __name__ == "__main__":
    main()
