"""Convolutions inside a loop, as in layers under `lax.scan`: jaxext's against lax's, interleaved, with errors against float64.

    python -m benchmarks.loops --json loops_cpu.json

Each row is a scan over four layers of equal size, forward, or with the gradients of all filters.  `unrolled` is the same by lax without a
loop.  Times are medians in ms, and errors those of the norm, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

import jaxext
from jaxext.tuning import timing

from .race import outcome, race, run

LAYERS = 4
PROBLEMS = {  # layout, image, filter
    "3x3": (("NHWC", "HWIO", "NHWC"), (8, 28, 28, 64), (3, 3, 64, 64)),
    "3x3, channels first": (("NCHW", "OIHW", "NCHW"), (8, 64, 28, 28), (64, 64, 3, 3)),
    "3x3, one image": (("NHWC", "HWIO", "NHWC"), (1, 28, 28, 64), (3, 3, 64, 64)),
    "k=5 along one axis": (("NWC", "WIO", "NWC"), (8, 512, 64), (5, 64, 64)),
    "3x3x3": (("NDHWC", "DHWIO", "NDHWC"), (2, 12, 12, 12, 16), (3, 3, 3, 16, 16)),
}


def network(conv: Callable, rolled: bool = True) -> Callable:
    def layer(x, w):
        return jnp.tanh(conv(x, w)), None

    def by_scan(x, filters):
        return lax.scan(layer, x, filters)[0]

    def one_by_one(x, filters):
        return functools.reduce(lambda x, w: layer(x, w)[0], filters, x)

    return by_scan if rolled else one_by_one


def gradient(f: Callable) -> Callable:
    return lambda x, filters: jax.grad(lambda filters: jnp.square(f(x, filters)).sum())(filters)


def rows(problems, rounds: int) -> Iterator[dict]:
    clock, _ = timing.timer()
    for name, (layout, x, w) in problems.items():
        one = (1,) * (len(x) - 2)
        static = dict(window_strides=one, padding="SAME", dimension_numbers=layout)
        by_lax, by_jaxext = (functools.partial(of.conv_general_dilated, **static) for of in (lax, jaxext))
        arrays = [jax.random.normal(jax.random.key(0), x), jax.random.normal(jax.random.key(1), (LAYERS, *w)) / 24]
        forms = {"jaxext": network(by_jaxext), "lax": network(by_lax), "unrolled": network(by_lax, rolled=False)}
        for row, of in (("forward", lambda f: f), ("gradients", gradient)):
            functions = {name: of(f) for name, f in forms.items()}
            yield {"row": row, "problem": name, "shapes": [x, w]} | race(functions, arrays, clock, rounds, functions["unrolled"])


def line(row: dict) -> str:
    return f"{row['row']:10} {row['problem']:22} {outcome(row)}"


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, PROBLEMS), line, 7, arguments)


if __name__ == "__main__":
    main()
