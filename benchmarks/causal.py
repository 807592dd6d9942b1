"""Causal convolutions on a CPU: jaxext's against lax's and against the best form in plain jnp, interleaved.

    python -m jaxext.benchmarks.causal --json causal_cpu.json

The plain form is a sum of padded inputs times weights, which XLA computes in one pass; of the two ways to write it (`sum_of_padded`,
`padded_once`), and of lax's, each row shows all.  float32, with bias and SiLU; times are medians in ms.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.tables.environment import report
from jaxext.tuning.timing import Wall, compile

SHAPES = (  # N, T, C, k
    *((4, 2048, 512, 4), (1, 4096, 256, 4), (8, 512, 256, 4), (2, 1024, 1024, 2), (2, 1024, 512, 3), (1, 128, 64, 4)),
    *((16, 64, 128, 4), (1, 8192, 128, 8), (4, 512, 768, 7), (1, 2048, 2048, 4), (32, 16, 256, 4), (2, 2048, 384, 31)),
)
STEP = (64, 512, 4)  # N, C, k


def ours(x, w, b):
    return jaxext.causal_conv1d(x, w, b, activation="silu")


def by_lax(x, w, b):
    layout = ("NWC", "WIO", "NWC")
    pads = ((len(w) - 1, 0),)
    z = lax.conv_general_dilated(x, w[:, None], (1,), pads, dimension_numbers=layout, feature_group_count=x.shape[-1])
    return jax.nn.silu(z + jnp.broadcast_to(b, z.shape))


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
    """As one writes it."""
    read = jnp.concatenate([state, x[:, None]], 1)
    z = (read * jnp.broadcast_to(w, read.shape)).sum(1)
    return jax.nn.silu(z + jnp.broadcast_to(b, z.shape)), read[:, 1:]


FORMS = {"jaxext": ours, "lax": by_lax, "sum_of_padded": sum_of_padded, "padded_once": padded_once}


def race(functions: dict[str, Callable], arguments, rounds: int) -> dict[str, float]:
    samplers = {name: Wall().sampler(compile(function, arguments)) for name, function in functions.items()}
    samples = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return {name: statistics.median(took) for name, took in samples.items()}


def rows(shapes, rounds: int) -> Iterator[dict]:
    def some(*shape):
        return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    for N, T, C, k in shapes:
        arguments = some(N, T, C), some(k, C), some(C)
        backward = {name: lambda x, w, b, ct, f=f: jax.vjp(f, x, w, b)[1](ct) for name, f in FORMS.items()}
        yield {"row": "forward", "shape": [N, T, C, k], "ms": race(FORMS, arguments, rounds)}
        yield {"row": "backward", "shape": [N, T, C, k], "ms": race(backward, (*arguments, some(N, T, C)), rounds)}
    N, C, k = STEP
    arguments = some(N, C), some(N, k - 1, C), some(k, C), some(C)
    yield {"row": "step", "shape": [N, C, k], "ms": race({"jaxext": our_step, "jnp": step}, arguments, rounds)}


def line(row: dict) -> str:
    ms = row["ms"]
    others = {name: took / ms["jaxext"] for name, took in ms.items() if name != "jaxext"}
    shape = "x".join(map(str, row["shape"]))
    return f"{row['row']:9} {shape:16} {ms['jaxext']:8.3f} ms " + "".join(f" {name} {ratio:6.2f}" for name, ratio in others.items())


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: 7)")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes (default: all)")
    options = parser.parse_args(arguments)
    told = []
    for row in rows(SHAPES[: options.shapes], options.rounds):
        print(line(row), flush=True)
        told.append(row)
    if options.json:
        options.json.write_text(json.dumps({"environment": report(), "rows": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
