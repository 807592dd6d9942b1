"""Long causal convolutions on a CPU: jaxext's against an FFT as users of jnp write it, and lax's, interleaved, with errors against float64.

    python -m benchmarks.long_conv --json long_conv_cpu.json

In float32, of (1, T, C).  lax's direct sum is in the rows of few steps alone: of 65536 steps and 512 taps it takes ten seconds.  Times are
medians in ms, errors those of the norm, and memory is that of temporaries, in MiB.
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

SHAPES = (  # T, C, K
    *((65536, 64, 64), (65536, 64, 512), (65536, 64, 4096), (65536, 64, 65536)),
    *((8192, 64, 512), (4096, 64, 4096), (1024, 768, 1024), (2048, 64, 128)),
)
MOST_OF_LAX = 2**31  # products


def by_hand(x, w):
    n = x.shape[1] + w.shape[0]
    return jnp.fft.irfft(jnp.fft.rfft(x, n, 1) * jnp.fft.rfft(w[None], n, 1), n, 1)[:, : x.shape[1]]


def by_lax(x, w):
    padding, numbers = [(w.shape[0] - 1, 0)], ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w[::-1, None], (1,), padding, dimension_numbers=numbers, feature_group_count=x.shape[2])


def backward(form):
    return lambda x, w, ct: jax.vjp(form, x, w)[1](ct)


def both(form):
    def result_and_gradients(x, w, ct):
        y, pullback = jax.vjp(form, x, w)
        return y, pullback(ct)

    return result_and_gradients


def normal(*shape):
    return jax.random.normal(jax.random.key(math.prod(shape)), shape, jnp.float32)


def rows(shapes, rounds: int) -> Iterator[dict]:
    for steps, channels, taps in shapes:
        forms = {"jaxext": jaxext.long_conv, "jnp.fft": by_hand}
        forms |= {"lax": by_lax} if steps * channels * taps < MOST_OF_LAX else {}
        arguments, shape = (normal(1, steps, channels), normal(taps, channels)), {"shape": [steps, channels, taps]}
        gradients = *arguments, normal(1, steps, channels) / 2
        yield {"row": "forward"} | shape | race(forms, arguments, rounds, by_hand, memory=True)
        for name, of in (("backward", backward), ("both", both)):
            by_fft = {form: of(forms[form]) for form in ("jaxext", "jnp.fft")}
            yield {"row": name} | shape | race(by_fft, gradients, rounds, by_fft["jnp.fft"], memory=True)


def line(row: dict) -> str:
    signals = row["MiB"]["jaxext"] * 2**20 / 4 / math.prod(row["shape"][:2])
    return f"{row['row']:9} {'x'.join(map(str, row['shape'])):16} {outcome(row)}  {signals:.1f} signals of memory"


def main(arguments=None) -> None:
    run(__doc__, functools.partial(rows, SHAPES), line, 7, arguments)


if __name__ == "__main__":
    main()
