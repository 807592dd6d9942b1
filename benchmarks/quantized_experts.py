"""Ragged products with quantised experts on a CPU: jaxext's against dequantise-then-multiply and wide experts, interleaved.

    python -m benchmarks.quantized_experts --json quantized_experts_cpu.json

Times are medians in ms, and errors those of the norm, against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jaxext

from .quantized import FORMATS, line, made_wide, pair, race_of_pairs
from .race import run

EXPERTS, ROWS = (16, 1024, 2048), (1, 8, 64)  # rows of each expert that has some: every other one


def of_every_other(product: Callable) -> Callable:
    def function(x, w):
        groups = EXPERTS[0]
        return product(x, w, jnp.where(jnp.arange(groups) % 2 == 0, 2 * x.shape[0] // groups, 0))

    return function


FORMS = {
    "jaxext": of_every_other(lambda x, w, sizes: jaxext.ragged_scaled_dot(x, w[0].qvalue, sizes, rhs_scale=w[0].scale)),
    "dequantized": of_every_other(lambda x, w, sizes: jaxext.ragged_dot(x, made_wide(w, quantized=True), sizes)),
    "wide": of_every_other(lambda x, w, sizes: jaxext.ragged_dot(x, made_wide(w), sizes)),
}


def rows(rounds: int) -> Iterator[dict]:
    w = jax.random.normal(jax.random.key(0), EXPERTS, jnp.float32)
    for each in ROWS:
        x = jax.random.normal(jax.random.key(1), (each * EXPERTS[0] // 2, EXPERTS[1]), jnp.float32)
        for kind in [kind for kind, format in FORMATS.items() if format.activations is None]:
            row = {"row": f"{each} rows each", "shape": [x.shape[0], *EXPERTS[1:]], "format": kind}
            yield row | race_of_pairs(FORMS, [x, pair(w, FORMATS[kind].weights)], rounds)


def main(arguments=None) -> None:
    run(__doc__, rows, line, 7, arguments)


if __name__ == "__main__":
    main()
