"""A Hyena block that recalls inputs from hundreds of steps before, by a convolution with filters as long as the sequence.

    q, k, v = causal_conv1d(x I)                         each channel sees the last TAPS steps
    y[t] = q[t] (Σ_s w[s] (k v)[t - s] + skip (k v)[t])  `jaxext.long_conv` with its gate and skip, by the FFT
    w[s] = exp(-decay s / T) (1 + mlp(s / T))            the filter is a network: no parameter belongs to one tap

    python examples/long_convolution.py
    python examples/long_convolution.py --length 1024

What to see: a sequence has PAIRS pairs of a key and its value, somewhere in its first quarter.  It ends with the keys in another order, and
the block must name their values.  Filters of SHORT taps do not reach the pairs, so the block guesses one of VALUES values.
"""

import argparse
import functools
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext

WIDTH, TAPS, SHORT = 64, 3, 64
KEYS, VALUES, PAIRS = 8, 8, 4
WAVES, HIDDEN = 6, 32  # the filters' network reads so many cosines of the position, and has so many neurons in a layer
BATCH, TEST, RATE, GOAL = 32, 256, 0.01, 0.95

# --- the task


def sequences(rng, count, length):
    """Tokens (count, length), which are keys, then values, and -1 for silence; and the values (count, PAIRS) of the last keys."""

    def chosen(size, pairs=PAIRS):
        return np.argsort(rng.random((count, size)), axis=1)[:, :pairs]

    keys, values, at, order = chosen(KEYS), rng.integers(VALUES, size=(count, PAIRS)), 2 * chosen(length // 8), chosen(PAIRS)
    tokens, rows = np.full((count, length), -1), np.arange(count)[:, None]
    tokens[rows, at], tokens[rows, at + 1], tokens[:, -PAIRS:] = keys, KEYS + values, keys[rows, order]
    return tokens.astype(np.int32), values[rows, order].astype(np.int32)


# --- the network


def init(seed=0):
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return (rng.normal(size=(rows, columns)) / math.sqrt(rows)).astype(np.float32)

    return {
        **{"embedding": matrix(KEYS + VALUES, WIDTH), "I": matrix(WIDTH, 3 * WIDTH), "taps": matrix(TAPS, 3 * WIDTH)},
        **{"first": matrix(WAVES, HIDDEN), "second": matrix(HIDDEN, HIDDEN), "third": matrix(HIDDEN, WIDTH)},
        **{"decay": np.linspace(0, 1, WIDTH, dtype=np.float32), "skip": np.ones(WIDTH, np.float32), "O": matrix(WIDTH, VALUES)},
    }


def norm(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def filters(params, length):
    """The filters of all channels, (length, WIDTH)."""
    s = np.arange(length, dtype=np.float32)[:, None] / length
    hidden = jnp.cos(math.pi * s * np.arange(WAVES, dtype=np.float32))
    for name in ("first", "second"):
        hidden = jnp.sin(jaxext.matmul(hidden, params[name]))
    return (1 + jaxext.matmul(hidden, params["third"])) * jnp.exp(-params["decay"] * s)


def scores(params, tokens, taps=None):
    """The scores (N, PAIRS, VALUES) of the values of the last keys, by filters with so many taps, or one for each token."""
    x = norm(jaxext.matmul(jax.nn.one_hot(tokens, KEYS + VALUES), params["embedding"]))  # silence is zero
    q, k, v = jnp.split(jaxext.causal_conv1d(jaxext.matmul(x, params["I"]), params["taps"]), 3, axis=-1)
    y = jaxext.long_conv(k * v, filters(params, tokens.shape[-1])[:taps], skip=params["skip"], gate=q)
    return jaxext.matmul(norm((x + y)[:, -PAIRS:]), params["O"])


def loss_of(params, tokens, labels, taps=None):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, tokens, taps)), labels[..., None], axis=-1).mean()


@functools.partial(jax.jit, static_argnums=0)
def update(taps, params, moments, tokens, labels, count):
    """A step of Adam: (parameters, moments), loss."""
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, labels, taps)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)
    rate, unbias = RATE / (1 - 0.9**count), 1 / (1 - 0.99**count)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(unbias * s) + 1e-6), params, first, second)
    return (params, (first, second)), loss


def train(steps, length, choices):
    """Train with filters of each of some lengths on the same sequences: the part of the values that each network names in others."""
    zeros, rng = jax.tree.map(np.zeros_like, init()), np.random.default_rng(1)
    runs = {taps: (init(), (zeros, zeros)) for taps in choices}
    print("step" + "".join(f"   loss by {taps:5} taps" for taps in choices))
    for step in range(1, steps + 1):
        batch, losses = sequences(rng, BATCH, length), {}
        for taps, run in runs.items():
            runs[taps], losses[taps] = update(taps, *run, *batch, jnp.float32(step))
        if step == 1 or step % 25 == 0 or step == steps:
            print(f"{step:4}" + "".join(f"   {loss:18.3f}" for loss in losses.values()))
    tokens, labels = sequences(np.random.default_rng(2), TEST, length)
    tested = jax.jit(scores, static_argnums=2)
    return [float((tested(params, tokens, taps).argmax(-1) == labels).mean()) for taps, (params, _) in runs.items()]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of training (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of the sequences (%(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.length < 2 * SHORT:
        parser.error(f"want at least 1 of --steps and a --length of {2 * SHORT} or more, got {args.steps} and {args.length}")

    start = time.perf_counter()
    by_long, by_short = train(args.steps, args.length, (args.length, SHORT))
    print(f"in {time.perf_counter() - start:.0f} seconds")
    claims = {
        f"{args.length} taps name {by_long:.1%} of the values (goal: at least {GOAL:.0%})": by_long >= GOAL,
        f"{SHORT} taps guess {by_short:.1%}, one of {VALUES}": by_short < 2 / VALUES,
    }
    print("(fewer steps of training than the default need not reach the goal)\n")
    for claim, holds in claims.items():
        print(f"{claim}: {holds}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
