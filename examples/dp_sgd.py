"""DP-SGD: a small ConvNet learns handwritten digits with differential privacy.  jaxext clips the gradients, and this script adds the noise.

    w  <-  w - rate / batch (Σ_b g_b min(1, C / |g_b|) + σ C z),   z ~ N(0, 1)

    pip install '.[demo]'
    python examples/dp_sgd.py

What to see: the sum of clipped gradients is computed without a gradient for each example.  Each batch is a Poisson sample, padded to a
fixed size.  The plot shows the norms |g_b| by epoch; clipping cuts them at the line.  An accountant such as `jax_privacy.accounting` or
`dp_accounting` computes the privacy from the sampling probability, σ and the number of steps.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure  # pip install '.[demo]'
from sklearn.datasets import load_digits  # pip install '.[demo]'

import jaxext

TEST, BATCH, PADDED = 360, 192, 256
CLIP, NOISE = 1.0, 1.0
RATE, EPOCHS, GOAL = 1.0, 30, 0.88
ROUNDING = 1e-5
LAYOUT = ("NHWC", "HWIO", "NHWC")


def load():
    """Images from 0 to 1 of shape (8, 8, 1), and digits: to train with, and to test."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = (images[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32), digits[order].astype(np.int32)
    return (x[TEST:], y[TEST:]), (x[:TEST], y[:TEST])


# --- the network


def init(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"first": (3, 3, 1, 16), "second": (3, 3, 16, 32), "head": (4 * 4 * 32, 10)}
    weights = {
        name: jax.random.normal(key, shape) * (2 / np.prod(shape[:-1])) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {name: (w, jnp.zeros(w.shape[-1])) for name, w in weights.items()}


def logits(p, x):
    for name, stride in (("first", 1), ("second", 2)):
        w, b = p[name]
        x = jnp.tanh(jaxext.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT) + b)
    w, b = p["head"]
    return jaxext.matmul(x.reshape(len(x), -1), w) + b


def loss(p, x, y):
    """The mean over a batch, which here has one example."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(p, x)), y[:, None], 1).mean()


# --- a private step


clipped_grad = jaxext.privacy.clipped_grad(loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), return_grad_norms=True)


@jax.jit
def step(p, key, x, y, padding):
    """The parameters after a step, and the norms of the examples' gradients."""
    total, aux = clipped_grad(p, x, y, is_padding_example=padding)
    leaves, tree = jax.tree.flatten(total)
    keys = jax.random.split(key, len(leaves))
    noisy = [g + NOISE * CLIP * jax.random.normal(key, g.shape) for key, g in zip(keys, leaves, strict=True)]
    return jax.tree.map(lambda w, g: w - RATE / BATCH * g, p, tree.unflatten(noisy)), aux.grad_norms


# --- training


def batches(rng, count):
    """Poisson samples of an epoch, each padded: indices, and which of them are padding."""
    for _ in range(count // BATCH):
        chosen = np.flatnonzero(rng.random(count) < BATCH / count)[:PADDED]
        yield np.resize(chosen, PADDED), np.arange(PADDED) >= len(chosen)


def train(data, epochs):
    """The parameters, and for each epoch the norms of the gradients that it met."""
    x, y = map(jnp.asarray, data)
    p, key, rng, norms = init(), jax.random.key(1), np.random.default_rng(1), []
    for _ in range(epochs):
        met = []
        for indices, padding in batches(rng, len(y)):
            key, noise = jax.random.split(key)
            p, of_batch = step(p, noise, x[indices], y[indices], padding)
            met.append(np.asarray(of_batch)[~padding])
        norms.append(np.concatenate(met))
    return p, norms


def of_gradients(p, x, y):
    """The clipped sum by the gradients themselves, to compare."""
    found = jax.vmap(lambda *example: jax.grad(loss)(p, *(x[None] for x in example)))(x, y)
    norms = jnp.sqrt(sum((g**2).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(found)))
    return jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, CLIP / norms), g, 1), found)


def plot(norms, path):
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    epochs = np.arange(1, len(norms) + 1)
    for low, high, shade in ((5, 95, 0.15), (25, 75, 0.3)):
        lower, upper = (np.array([np.percentile(n, q) for n in norms]) for q in (low, high))
        axes.fill_between(epochs, lower, upper, alpha=shade, color="#0072B2", lw=0)
    axes.plot(epochs, [np.median(n) for n in norms], color="#0072B2", label="median, quartiles and 5 to 95 % of the examples")
    axes.axhline(CLIP, color="#D55E00", label="clip norm")
    axes.set(xlabel="epoch", ylabel="norm of an example's gradient", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description="Train on digits with differential privacy.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--plot", metavar="PATH", help="where to draw the norms by epoch")
    options = parser.parse_args(args)
    if options.epochs < 1:
        parser.error(f"--epochs is {options.epochs}, want at least 1")

    training, test = load()
    print(jaxext.privacy.explain_norms(loss, batch_argnums=(1, 2))(init(), *(x[:BATCH] for x in training)))
    p, norms = train(training, options.epochs)
    for epoch in sorted({1, 1 + options.epochs // 2, options.epochs}):
        cut = (norms[epoch - 1] > CLIP).mean()
        print(f"epoch {epoch:3}: median norm {np.median(norms[epoch - 1]):.2f}, {cut:.0%} of the gradients are clipped")
    batch = tuple(x[:BATCH] for x in training)
    ours, theirs = clipped_grad(p, *batch)[0], jax.jit(of_gradients)(p, *batch)
    apart = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    largest = max(float(jnp.abs(b).max()) for b in jax.tree.leaves(theirs))
    print(f"The clipped sum and the sum of clipped gradients differ by {apart / largest:.0e} of the largest element")
    accuracy = float((logits(p, test[0]).argmax(-1) == test[1]).mean())
    print(f"{accuracy:.1%} of the test images, with noise of {NOISE} times the clip norm")
    if options.plot:
        plot(norms, options.plot)
    if apart > ROUNDING * largest:
        print("the clipped sum is not that of the gradients")
        return 1
    if options.epochs >= EPOCHS and accuracy < GOAL:
        print(f"want {GOAL:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
