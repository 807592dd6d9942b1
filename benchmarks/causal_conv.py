"""Causal convolutions in chunks on a CPU: the whole and a stream by jaxext, and the whole by lax, interleaved, with errors against float64.

    python -m benchmarks.causal_conv --json causal_conv_cpu.json

In float32.  A stream is a scan over chunks of so many steps, with a state.  Times are medians in ms, and errors those of the norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

import jaxext

from .race import outcome, race, run

PROBLEMS = {  # x, w, steps of a chunk
    "video, a frame at a time": ((1, 64, 32, 32, 32), (3, 3, 3, 32, 32), 1),
    "sheet, 4 steps at a time": ((1, 256, 64, 32), (3, 3, 32, 32), 4),
    "audio, 1024 steps at a time": ((1, 16384, 64), (7, 64, 64), 1024),
    "audio, 16 steps at a time": ((1, 16384, 64), (7, 64, 64), 16),
}


def by_lax(x, w):
    rank, ones = x.ndim - 2, [(n - 1) // 2 for n in w.shape[1:-2]]
    numbers = lax.ConvDimensionNumbers(
        (0, rank + 1, *range(1, rank + 1)), (rank + 1, rank, *range(rank)), (0, rank + 1, *range(1, rank + 1))
    )
    padding = [(w.shape[0] - 1, 0), *zip(ones, ones, strict=True)]
    return lax.conv_general_dilated(x, w, (1,) * rank, padding, dimension_numbers=numbers)


def stream(steps, x, w):
    chunks = jnp.moveaxis(x.reshape((x.shape[0], -1, steps, *x.shape[2:])), 1, 0)

    def step(state, chunk):
        y, state = jaxext.causal_conv(chunk, w, state=state, return_state=True)
        return state, y

    _, y = lax.scan(step, jnp.zeros_like(x[:, : w.shape[0] - 1]), chunks)
    return jnp.moveaxis(y, 0, 1).reshape((*x.shape[:-1], -1))


def normal(*shape):
    return jax.random.normal(jax.random.key(math.prod(shape)), shape, jnp.float32)


def rows(problems, rounds: int) -> Iterator[dict]:
    for name, (x, w, steps) in problems.items():
        forms = {"jaxext": jaxext.causal_conv, "stream": functools.partial(stream, steps), "lax": by_lax}
        yield {"row": name, "shape": [*x, *w]} | race(forms, (normal(*x), normal(*w)), rounds, by_lax)


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, PROBLEMS), lambda row: f"{row['row']:28} {outcome(row)}", 7, arguments)


if __name__ == "__main__":
    main()
