"""Causal convolutions: jaxext's against lax's and against the best form in plain jnp, interleaved, with errors against float64.

    python -m benchmarks.causal --json causal_cpu.json

The plain form is a sum of padded inputs times weights, which XLA computes in one pass; of the two ways to write it (`sum_of_padded`,
`padded_once`), and of lax's, each row shows all.  With bias and SiLU; times are medians in ms.  Errors are those of the norm.  On a CPU
numbers are float32.  On a GPU they are bfloat16; each implementation has a column, and `copy` moves the bytes that must be moved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.bench.own import causal_by_lax as by_lax
from jaxext.tuning import timing

from .race import outcome, race, run

SHAPES = (  # N, T, C, k
    *((4, 2048, 512, 4), (1, 4096, 256, 4), (8, 512, 256, 4), (2, 1024, 1024, 2), (2, 1024, 512, 3), (1, 128, 64, 4)),
    *((16, 64, 128, 4), (1, 8192, 128, 8), (4, 512, 768, 7), (1, 2048, 2048, 4), (32, 16, 256, 4), (2, 2048, 384, 31)),
)
ON_GPU = ((8, 2048, 5376, 4), (1, 16384, 12288, 4), (8, 2048, 5376, 2), (4, 2048, 4096, 8), (64, 16, 5376, 4), (4, 2048, 512, 4))
STEP = (64, 512, 4)  # N, C, k


def ours(x, w, b):
    return jaxext.causal_conv1d(x, w, b, activation="silu")


def sum_of_padded(x, w, b):
    z = jnp.broadcast_to(b, x.shape)
    for i, of_channels in enumerate(w):
        back = len(w) - 1 - i
        z = z + lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (back, -back, 0), (0, 0, 0))) * jnp.broadcast_to(of_channels, x.shape)
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


FORMS = {"jaxext": ours, "lax": by_lax, "sum_of_padded": sum_of_padded, "padded_once": padded_once}


def on_gpu() -> dict[str, Callable]:
    named = {name: functools.partial(jaxext.causal_conv1d, activation="silu", implementation=name) for name in ("triton", "cuda", "xla")}
    return FORMS | named


def rows(shapes, rounds: int) -> Iterator[dict]:
    gpu, (clock, _) = jax.default_backend() == "gpu", timing.timer()
    dtype = jnp.bfloat16 if gpu else jnp.float32

    def some(*shape):
        return jax.random.normal(jax.random.key(math.prod(shape)), shape, dtype)

    def derivative(f):
        return lambda x, w, b, ct: jax.vjp(f, x, w, b)[1](ct)

    for N, T, C, k in shapes:
        arguments, forms = (some(N, T, C), some(k, C), some(C)), on_gpu() if gpu else FORMS
        backward = {name: derivative(f) for name, f in forms.items()}
        if gpu:
            forms, backward = forms | {"copy": lambda x, *_: -x}, backward | {"copy": lambda x, w, b, ct: x - ct}
        yield {"row": "forward", "shape": [N, T, C, k]} | race(forms, arguments, clock, rounds, sum_of_padded)
        arguments += (some(N, T, C),)
        yield {"row": "backward", "shape": [N, T, C, k]} | race(backward, arguments, clock, rounds, derivative(sum_of_padded))
    N, C, k = STEP
    arguments = some(N, C), some(N, k - 1, C), some(k, C), some(C)
    yield {"row": "step", "shape": [N, C, k]} | race({"jaxext": our_step, "jnp": step}, arguments, clock, rounds, step)


def line(row: dict) -> str:
    return f"{row['row']:9} {'x'.join(map(str, row['shape'])):16} {outcome(row)}"


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, ON_GPU if jax.default_backend() == "gpu" else SHAPES), line, 7, arguments)


if __name__ == "__main__":
    main()
