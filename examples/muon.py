"""The optimizer Muon in optax's form, by `jaxext.newton_schulz`.  It trains a network on handwritten digits, beside optax's own Muon.

    pip install '.[demo]'
    python examples/muon.py            # compares with optax.contrib.muon if optax is installed
    python examples/muon.py --help

What to see: Muon updates a matrix by its momentum, with all singular values brought to about 1.  One call takes all matrices of one shape,
here three layers.  The losses are those of optax's Muon.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure  # pip install '.[demo]'
from sklearn import datasets  # pip install '.[demo]'

import jaxext

SIZES = (64, 128, 128, 128, 128, 10)
BATCH = 128
GOAL = 0.96

# --- the optimizer


class Optimizer(NamedTuple):
    """A pair of functions like optax's GradientTransformation; `optax.chain` and all others take it."""

    init: Callable
    update: Callable


class State(NamedTuple):
    count: jax.Array
    momentum: Any
    squares: Any  # of what Adam moves


def muon(rate: float, beta: float = 0.95, eps: float = 1e-8, adam: tuple[float, float] = (0.9, 0.999)) -> Optimizer:
    """Muon with Nesterov's momentum for matrices, and Adam with it for everything else, as `optax.contrib.muon(rate)`."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return State(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(gradients, state, params=None):
        del params
        count = state.count + 1
        steps = count.astype(jnp.float32)
        betas = jax.tree.map(lambda g: beta if g.ndim == 2 else adam[0], gradients)
        momentum = jax.tree.map(lambda b, m, g: b * m + (1 - b) * g, betas, state.momentum, gradients)
        squares = jax.tree.map(lambda s, g: adam[1] * s + (1 - adam[1]) * g**2, state.squares, gradients)
        ahead = jax.tree.map(lambda b, m, g: b * m / (1 - b ** (steps + 1)) + (1 - b) * g / (1 - b**steps), betas, momentum, gradients)
        moved = jax.tree.map(lambda m, s: m if m.ndim == 2 else m / (jnp.sqrt(s / (1 - adam[1] ** steps)) + eps), ahead, squares)
        moved = of_each_shape(lambda x: jaxext.newton_schulz(x, eps=eps) * max(1, x.shape[-1] / x.shape[-2]) ** 0.5, moved)
        return jax.tree.map(lambda u: -rate * u, moved), State(count, momentum, squares)

    return Optimizer(init, update)


def of_each_shape(function: Callable, tree):
    """`function` of all matrices of one shape together."""
    leaves, structure = jax.tree.flatten(tree)
    for shape in {x.shape for x in leaves if x.ndim == 2}:
        which = [i for i, x in enumerate(leaves) if x.shape == shape]
        for i, y in zip(which, function(jnp.stack([leaves[i] for i in which])), strict=True):
            leaves[i] = y
    return jax.tree.unflatten(structure, leaves)


# --- the network


def load():
    """Pixels in float32, and digits: of 1,437 images to train with, and of 360 to test."""
    images, digits = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    x, y = (images[order] / 16).astype(np.float32), digits[order].astype(np.int32)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def init(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    pairs = zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    return [(jax.random.normal(key, (k, n)) * (2 / k) ** 0.5, jnp.zeros(n)) for key, k, n in pairs]


def logits(params, x):
    for w, b in params[:-1]:
        x = jaxext.linear(x, w, b, activation="relu")
    return jaxext.linear(x, *params[-1])


def loss(params, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], 1).mean()


def train(data, optimizer, epochs: int):
    """The parameters, and the mean loss of each epoch."""
    x, y = map(jnp.asarray, data)

    @jax.jit
    def epoch(params, state, order):
        def step(carry, batch):
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params, x[batch], y[batch])
            updates, state = optimizer.update(gradients, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), value

        (params, state), values = jax.lax.scan(step, (params, state), order)
        return params, state, values.mean()

    params = init()
    state, losses = optimizer.init(params), []
    rng = np.random.default_rng(1)
    for _ in range(epochs):
        order = rng.permutation(len(y))[: len(y) // BATCH * BATCH].reshape(-1, BATCH)
        params, state, value = epoch(params, state, order)
        losses.append(float(value))
    return params, losses


# --- what it does


def plot(data, losses, path):
    """The losses, and the singular values of a layer's first gradient before and after the iteration."""
    gradient = jax.grad(loss)(init(), *data)[1][0]
    before, after = (np.linalg.svd(np.asarray(x), compute_uv=False) for x in (gradient, jaxext.newton_schulz(gradient)))
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, "o-", color="#0072B2")
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.plot(before / np.linalg.norm(gradient), color="#D55E00", label="gradient, of norm 1")
    right.plot(after, color="#0072B2", label="after newton_schulz")
    right.set(xlabel="singular value, second layer", yscale="log", ylim=(1e-4, 2))
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description="Train on digits with Muon, and compare with optax's.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--plot", metavar="PATH", help="where to draw the losses, and singular values before and after")
    options = parser.parse_args(args)

    training, (images, digits) = load()
    params, losses = train(training, muon(options.rate), options.epochs)
    print(jaxext.explain(jaxext.newton_schulz)(jax.ShapeDtypeStruct((3, 128, 128), jnp.float32)), "\n")
    theirs = None
    if importlib.util.find_spec("optax"):
        from optax import contrib

        _, theirs = train(training, contrib.muon(options.rate), options.epochs)
    for i, value in enumerate(losses):
        print(f"epoch {i + 1:2}   loss {value:.6f}" + ("" if theirs is None else f"   optax.contrib.muon {theirs[i]:.6f}"))
    accuracy = float((logits(params, images).argmax(-1) == digits).mean())
    apart = None if theirs is None else max(abs(a - b) / b for a, b in zip(losses, theirs, strict=True))
    print(f"Test accuracy {accuracy:.1%} (goal: at least {GOAL:.0%})")
    if options.plot:
        plot(training, losses, options.plot)
    if apart is not None:
        print(f"The same losses as optax's: {apart < 1e-4} (they differ by {apart:.0e} at most)")
    return 0 if accuracy >= GOAL and (apart is None or apart < 1e-4) else 1


if __name__ == "__main__":
    sys.exit(main())
