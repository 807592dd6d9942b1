"""A small selective state space model that reads handwritten digits row by row, trained on whole sequences and run step by step.

    v, g = x U, x G;   v = silu(causal_conv1d(v))           each channel sees the last TAPS steps
    Δ = softplus(v D + d);   B, C = v P, v Q                what is kept depends on what is read
    h = exp(-Δ A) h + Δ v B;   y = x + (h C + v) silu(g) O  a state of STATE numbers for each channel

    pip install '.[demo]'
    python examples/mamba.py

What to see: training convolves whole sequences.  Afterwards the network reads the test images one row at a time, and keeps only the last
TAPS - 1 inputs of each convolution and the state h.  Both ways give the same scores.  The plot shows how a guess becomes certain.
"""

import argparse
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure  # pip install '.[demo]'
from sklearn.datasets import load_digits  # pip install '.[demo]'

import jaxext

WIDTH, INNER, STATE, TAPS, LAYERS = 24, 48, 8, 4, 2
BATCH, TEST = 64, 360
RATE = 0.006
GOAL = 0.9
ROUNDING = 1e-4


def load():
    """((training sequences, labels), (test sequences, labels)): 8 rows of 8 pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    sequences, labels = (images[order].reshape(-1, 8, 8) / 16).astype(np.float32), labels[order].astype(np.int32)
    return (sequences[TEST:], labels[TEST:]), (sequences[:TEST], labels[:TEST])


def init(seed=0):
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return (rng.normal(size=(rows, columns)) / math.sqrt(rows)).astype(np.float32)

    def layer():
        return {
            **{"U": matrix(WIDTH, INNER), "G": matrix(WIDTH, INNER), "O": matrix(INNER, WIDTH)},
            **{"weight": matrix(TAPS, INNER), "bias": np.zeros(INNER, np.float32)},
            **{"D": matrix(INNER, INNER), "d": np.full(INNER, -2, np.float32)},  # a memory of some steps, to begin with
            **{
                "P": matrix(INNER, STATE),
                "Q": matrix(INNER, STATE),
                "A": np.log(np.tile(np.arange(1.0, STATE + 1), (INNER, 1))).astype(np.float32),
            },
        }

    return {"in": matrix(8, WIDTH), "layers": [layer() for _ in range(LAYERS)], "out": matrix(WIDTH, 10)}


# --- one layer, on a whole sequence (T, WIDTH) and on a step of it


def selected(p, v):
    """Return the parameters of the state space that depend on v: step sizes, input weights and output weights."""
    return jax.nn.softplus(v @ p["D"] + p["d"]), v @ p["P"], v @ p["Q"]


def advanced(p, h, of_step):
    """The state (INNER, STATE) after a step, and its result."""
    v, (delta, b, c) = of_step
    h = jnp.exp(-delta[:, None] * jnp.exp(p["A"])) * h + (delta * v)[:, None] * b
    return h, h @ c + v


def layer(p, x):
    v = jaxext.causal_conv1d(x @ p["U"], p["weight"], p["bias"], activation="silu")
    _, y = jax.lax.scan(functools.partial(advanced, p), jnp.zeros((INNER, STATE)), (v, selected(p, v)))
    return x + (y * jax.nn.silu(x @ p["G"])) @ p["O"]


def layer_step(p, states, x):
    inputs, h = states
    v, inputs = jaxext.causal_conv1d_update(x @ p["U"], inputs, p["weight"], p["bias"], activation="silu")
    h, y = advanced(p, h, (v, selected(p, v)))
    return (inputs, h), x + (y * jax.nn.silu(x @ p["G"])) @ p["O"]


# --- the network


def scores(params, sequence):
    """Return scores of the ten digits, (T, 10), one row after each row of a sequence (T, 8)."""
    x = sequence @ params["in"]
    for p in params["layers"]:
        x = layer(p, x)
    return x @ params["out"]


def scores_by_steps(params, sequence):
    """The same, reading one row after the other."""

    def step(states, row):
        x, after = row @ params["in"], []
        for p, state in zip(params["layers"], states, strict=True):
            state, x = layer_step(p, state, x)
            after.append(state)
        return after, x @ params["out"]

    empty = [(jnp.zeros((TAPS - 1, INNER)), jnp.zeros((INNER, STATE))) for _ in params["layers"]]
    return jax.lax.scan(step, empty, sequence)[1]


def mean_loss(params, sequences, labels):
    """Cross-entropy after the last row."""
    last = jax.vmap(functools.partial(scores, params))(sequences)[:, -1]
    return -jnp.take_along_axis(jax.nn.log_softmax(last), labels[:, None], axis=1).mean()


@jax.jit
def update(params, moments, sequences, labels, count):
    """A step of Adam: (parameters, moments, loss)."""
    loss, grads = jax.value_and_grad(mean_loss)(params, sequences, labels)
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, grads)

    def moved(p, m, s):
        return p - RATE * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8)

    return jax.tree.map(moved, params, first, second), (first, second), loss


def train(sequences, labels, epochs):
    params = init()
    zeros = jax.tree.map(np.zeros_like, params)
    moments, count = (zeros, zeros), 0
    for epoch in range(1, epochs + 1):
        order = np.random.default_rng(epoch).permutation(len(labels))
        losses = []
        for begin in range(0, len(order) - BATCH + 1, BATCH):
            batch, count = order[begin : begin + BATCH], count + 1
            params, moments, loss = update(params, moments, sequences[batch], labels[batch], jnp.float32(count))
            losses.append(loss)
        print(f"epoch {epoch:2}   loss {float(np.mean(losses)):.4f}")
    return params


def plot(path, sequences, labels, probabilities):
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(2, len(labels))
    for (above, below), sequence, label, of_steps in zip(axes.T, sequences, labels, probabilities, strict=True):
        above.imshow(sequence, cmap="gray_r")
        above.set_title(f"a {label}", fontsize=9)
        above.axis("off")
        below.imshow(of_steps.T, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        below.set(xlabel="rows read", xticks=range(0, 8, 7), xticklabels=(1, 8), yticks=range(10))
    axes[1, 0].set_ylabel("digit")
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--plot", default="mamba.png", metavar="PATH", help="where to save the plot (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"argument --epochs: it is {args.epochs}, want at least 1")

    training, (sequences, labels) = load()
    params = train(*training, args.epochs)
    whole = jax.jit(jax.vmap(functools.partial(scores, params)))(sequences)
    by_steps = jax.jit(jax.vmap(functools.partial(scores_by_steps, params)))(sequences)
    accuracy = float((whole[:, -1].argmax(1) == labels).mean())
    apart = float(jnp.abs(whole - by_steps).max() / jnp.abs(whole).max())
    plot(args.plot, sequences[:5], labels[:5], np.asarray(jax.nn.softmax(by_steps[:5])))
    print(f"\nPlot saved to {args.plot}")
    print(f"Test accuracy {accuracy:.1%} (goal: at least {GOAL:.0%})")
    print(f"Step by step the same scores: {apart < ROUNDING} (they differ by {apart:.0e} of the largest)")
    return 0 if accuracy >= GOAL and apart < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
