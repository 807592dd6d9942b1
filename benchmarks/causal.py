"""Causal convolutions on a CPU: jaxext's against lax's and against the best forms in plain jnp, interleaved, with errors against float64.

    python -m benchmarks.causal --json causal_cpu.json

The plain form is a sum of padded inputs times weights, which XLA computes in one pass, in two ways to write it (`sum_of_padded`,
`padded_once`).  With bias and SiLU, in float32; times are medians in ms, and errors those of the norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.bench.own import causal_by_lax

from .race import outcome, race, run

SHAPES = (  # N, T, C, k
    *((4, 2048, 512, 4), (1, 4096, 256, 4), (8, 512, 256, 4), (2, 1024, 1024, 2), (2, 1024, 512, 3), (1, 128, 64, 4)),
    *((16, 64, 128, 4), (1, 8192, 128, 8), (4, 512, 768, 7), (1, 2048, 2048, 4), (32, 16, 256, 4), (2, 2048, 384, 31)),
)
STEP = (64, 512, 4)  # N, C, k


def ours(x, w, b):
    return jaxext.causal_conv1d(x, w, b, activation="silu")


def sum_of_padded(x, w, b):
    z = jnp.broadcast_to(b, x.shape)
    for i, tap in enumerate(w):
        back = len(w) - 1 - i
        z = z + lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (back, -back, 0), (0, 0, 0))) * jnp.broadcast_to(tap, x.shape)
    return jax.nn.silu(z)


def padded_once(x, w, b):
    padded = jnp.pad(x, ((0, 0), (len(w) - 1, 0), (0, 0)))
    terms = [padded[:, i : i + x.shape[1]] * jnp.broadcast_to(w[i], x.shape) for i in range(len(w))]
    return jax.nn.silu(sum(terms, jnp.broadcast_to(b, x.shape)))


def our_step(x, state, w, b):
    return jaxext.causal_conv1d_update(x, state, w, b, activation="silu")


def step(x, state, w, b):
    """Compute a decoding step as users of jnp write it."""
    read = jnp.concatenate([state, x[:, None]], 1)
    z = (read * jnp.broadcast_to(w, read.shape)).sum(1)
    return jax.nn.silu(z + jnp.broadcast_to(b, z.shape)), read[:, 1:]


FORMS = {"jaxext": ours, "lax": causal_by_lax, "sum_of_padded": sum_of_padded, "padded_once": padded_once}


def derivative(form):
    return lambda x, w, b, ct: jax.vjp(form, x, w, b)[1](ct)


def normal(*shape):
    return jax.random.normal(jax.random.key(math.prod(shape)), shape, jnp.float32)


def rows(shapes, rounds: int) -> Iterator[dict]:
    backward = {name: derivative(form) for name, form in FORMS.items()}
    for N, T, C, k in shapes:
        arguments = normal(N, T, C), normal(k, C), normal(C)
        shape = {"shape": [N, T, C, k]}
        yield {"row": "forward"} | shape | race(FORMS, arguments, rounds, sum_of_padded)
        yield {"row": "backward"} | shape | race(backward, (*arguments, normal(N, T, C)), rounds, backward["sum_of_padded"])
    N, C, k = STEP
    arguments = normal(N, C), normal(N, k - 1, C), normal(k, C), normal(C)
    yield {"row": "step", "shape": [N, C, k]} | race({"jaxext": our_step, "jnp": step}, arguments, rounds, step)


def line(row: dict) -> str:
    return f"{row['row']:9} {'x'.join(map(str, row['shape'])):16} {outcome(row)}"


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, SHAPES), line, 7, arguments)


if __name__ == "__main__":
    main()
