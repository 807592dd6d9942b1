"""Convolutions along time on a CPU: jaxext's, lax's and the best forms in plain jnp, interleaved, with errors against float64.

    python -m benchmarks.sequences causal --json causal_cpu.json
    python -m benchmarks.sequences causal_conv --json causal_conv_cpu.json
    python -m benchmarks.sequences long_conv --json long_conv_cpu.json

`causal`: short filters with bias and SiLU.  The plain form is a sum of padded inputs times weights, which XLA computes in one pass, in two
ways to write it (`sum_of_padded`, `padded_once`).

`causal_conv`: the whole and a stream, which is a scan over chunks of so many steps, with a state.

`long_conv`: of (1, T, C), beside an FFT as users of jnp write it.  lax's direct sum is in the rows of few steps alone: of 65536 steps and
512 taps it takes ten seconds.

In float32.  Times are medians in ms, errors those of the norm, and memory is that of temporaries, in MiB.
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

CAUSAL = (  # N, T, C, k
    *((4, 2048, 512, 4), (1, 4096, 256, 4), (8, 512, 256, 4), (2, 1024, 1024, 2), (2, 1024, 512, 3), (1, 128, 64, 4)),
    *((16, 64, 128, 4), (1, 8192, 128, 8), (4, 512, 768, 7), (1, 2048, 2048, 4), (32, 16, 256, 4), (2, 2048, 384, 31)),
)
STEP = (64, 512, 4)  # N, C, k
CHUNKED = {  # x, w, steps of a chunk
    "video, a frame at a time": ((1, 64, 32, 32, 32), (3, 3, 3, 32, 32), 1),
    "sheet, 4 steps at a time": ((1, 256, 64, 32), (3, 3, 32, 32), 4),
    "audio, 1024 steps at a time": ((1, 16384, 64), (7, 64, 64), 1024),
    "audio, 16 steps at a time": ((1, 16384, 64), (7, 64, 64), 16),
}
LONG = (  # T, C, K
    *((65536, 64, 64), (65536, 64, 512), (65536, 64, 4096), (65536, 64, 65536)),
    *((8192, 64, 512), (4096, 64, 4096), (1024, 768, 1024), (2048, 64, 128)),
)
MOST_OF_LAX = 2**31  # products


def normal(*shape):
    return jax.random.normal(jax.random.key(math.prod(shape)), shape, jnp.float32)


def backward(form):
    return lambda *arguments: jax.vjp(form, *arguments[:-1])[1](arguments[-1])


# --- short filters


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


def of_causal(rounds: int) -> Iterator[dict]:
    forms = {"jaxext": ours, "lax": causal_by_lax, "sum_of_padded": sum_of_padded, "padded_once": padded_once}
    gradients = {name: backward(form) for name, form in forms.items()}
    for N, T, C, k in CAUSAL:
        arguments = normal(N, T, C), normal(k, C), normal(C)
        shape = {"shape": [N, T, C, k]}
        yield {"row": "forward"} | shape | race(forms, arguments, rounds, sum_of_padded)
        yield {"row": "backward"} | shape | race(gradients, (*arguments, normal(N, T, C)), rounds, gradients["sum_of_padded"])
    N, C, k = STEP
    arguments = normal(N, C), normal(N, k - 1, C), normal(k, C), normal(C)
    yield {"row": "step", "shape": [N, C, k]} | race({"jaxext": our_step, "jnp": step}, arguments, rounds, step)


# --- in chunks


def chunked_by_lax(x, w):
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


def of_chunked(rounds: int) -> Iterator[dict]:
    for name, (x, w, steps) in CHUNKED.items():
        forms = {"jaxext": jaxext.causal_conv, "stream": functools.partial(stream, steps), "lax": chunked_by_lax}
        yield {"row": name, "shape": [*x, *w]} | race(forms, (normal(*x), normal(*w)), rounds, chunked_by_lax)


# --- long filters


def long_by_hand(x, w):
    n = x.shape[1] + w.shape[0]
    return jnp.fft.irfft(jnp.fft.rfft(x, n, 1) * jnp.fft.rfft(w[None], n, 1), n, 1)[:, : x.shape[1]]


def long_by_lax(x, w):
    padding, numbers = [(w.shape[0] - 1, 0)], ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w[::-1, None], (1,), padding, dimension_numbers=numbers, feature_group_count=x.shape[2])


def both(form):
    def result_and_gradients(x, w, ct):
        y, pullback = jax.vjp(form, x, w)
        return y, pullback(ct)

    return result_and_gradients


def of_long(rounds: int) -> Iterator[dict]:
    for steps, channels, taps in LONG:
        forms = {"jaxext": jaxext.long_conv, "jnp.fft": long_by_hand}
        forms |= {"lax": long_by_lax} if steps * channels * taps < MOST_OF_LAX else {}
        arguments, shape = (normal(1, steps, channels), normal(taps, channels)), {"shape": [steps, channels, taps]}
        gradients = *arguments, normal(1, steps, channels) / 2
        yield {"row": "forward"} | shape | race(forms, arguments, rounds, long_by_hand, memory=True)
        for name, of in (("backward", backward), ("both", both)):
            by_fft = {form: of(forms[form]) for form in ("jaxext", "jnp.fft")}
            yield {"row": name} | shape | race(by_fft, gradients, rounds, by_fft["jnp.fft"], memory=True)


def line(row: dict) -> str:
    text = f"{row['row']:28} {'x'.join(map(str, row['shape'])):16} {outcome(row)}"
    if "MiB" in row:
        text += f"  {row['MiB']['jaxext'] * 2**20 / 4 / math.prod(row['shape'][:2]):.1f} signals of memory"
    return text


KINDS = {"causal": of_causal, "causal_conv": of_chunked, "long_conv": of_long}


def main(arguments=None) -> None:
    run(__doc__, KINDS, line, arguments)


if __name__ == "__main__":
    main()
