"""A small ConvNet on scikit-learn's handwritten digits: jaxext's convolutions and matmul under jit, grad, vmap and a sharded batch.

    pip install '.[demo]'
    python examples/digits.py                # jaxext
    python examples/digits.py --reference    # the same run with jax.lax and jax.numpy

The losses of the two runs agree to 1e-4.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight, so that the data-parallel run below has devices to run on.
# XLA reads the variable once, so it is set before jax is imported.  GPUs are left alone: where there are any, JAX takes them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure  # pip install '.[demo]'
from rich.progress import track
from sklearn.datasets import load_digits  # pip install '.[demo]'

import jaxext

BATCH, TEST = 64, 360
GOAL = 0.97

# The only difference between the two runs: the functions have the same signatures.
OURS = (jaxext.conv_general_dilated, jaxext.matmul)
REFERENCE = (jax.lax.conv_general_dilated, jnp.matmul)


# --- data: 1797 images of 8x8 pixels, which come with scikit-learn


def load():
    """((training images, labels), (test images, labels)), shuffled once and for all."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)  # 0..16 -> -1..1, NHWC
    labels = labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[TEST:], order[:TEST]
    return (images[train], labels[train]), (images[test], labels[test])


# --- the net


def init(key):
    """Filters (HWIO) and matrices; the depthwise filter has one input channel per group."""
    shapes = {"stem": (3, 3, 1, 32), "depthwise": (3, 3, 1, 32), "pointwise": (1, 1, 32, 64), "hidden": (4 * 4 * 64, 64), "out": (64, 10)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: jax.random.normal(keys[name], shape) * math.sqrt(2 / math.prod(shape[:-1])) for name, shape in shapes.items()}


def logits(ops, params, images):
    conv, matmul = ops

    def layer(x, name, stride=1, groups=1):
        return conv(
            x,
            params[name],
            window_strides=(stride, stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x = jax.nn.relu(layer(images, "stem"))
    x = layer(x, "depthwise", stride=2, groups=32)  # each channel by itself, 8x8 -> 4x4 ...
    x = jax.nn.relu(layer(x, "pointwise"))  # ... then the channels among each other
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(matmul(x, params["hidden"]))
    return matmul(x, params["out"])


def losses(ops, params, images, labels):
    """Cross-entropy of each example."""
    logp = jax.nn.log_softmax(logits(ops, params, images))
    return -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]


def mean_loss(ops, params, images, labels):
    return losses(ops, params, images, labels).mean()


# --- training: plain SGD with momentum, the batch split over all devices


@functools.partial(jax.jit, static_argnums=0)
def step(ops, params, velocity, images, labels, rate):
    loss, grads = jax.value_and_grad(mean_loss, argnums=1)(ops, params, images, labels)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - rate * v, params, velocity)
    return params, velocity, loss


@functools.partial(jax.jit, static_argnums=0)
def accuracy(ops, params, images, labels):
    return (logits(ops, params, images).argmax(1) == labels).mean()


def train(ops=OURS, epochs=12, rate=0.01):
    """(trained parameters, [training loss of each epoch], [test accuracy after each epoch])."""
    devices = jax.devices()
    size, tested = (n // len(devices) * len(devices) for n in (BATCH, TEST))  # what can be split over all of them
    mesh = Mesh(np.array(devices), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    (images, labels), (test_images, test_labels) = load()
    test_images, test_labels = jax.device_put((test_images[:tested], test_labels[:tested]), split)
    params = jax.device_put(init(jax.random.key(0)), whole)
    velocity = jax.tree.map(jnp.zeros_like, params)

    curve, accuracies = [], []
    steps = len(images) // size
    for epoch in track(range(epochs), description=f"training on {len(devices)} x {devices[0].platform}"):
        order = np.random.default_rng(epoch).permutation(len(images))[: steps * size].reshape(steps, size)
        epoch_losses = []
        for i, batch in enumerate(order):
            decay = 1 - (epoch * steps + i) / (epochs * steps)  # linearly to zero
            x, y = jax.device_put((images[batch], labels[batch]), split)
            params, velocity, loss = step(ops, params, velocity, x, y, rate * decay)
            epoch_losses.append(loss)
        curve.append(float(np.mean(epoch_losses)))
        accuracies.append(float(accuracy(ops, params, test_images, test_labels)))
        print(f"epoch {epoch + 1:2}   loss {curve[-1]:.4f}   test accuracy {accuracies[-1]:.1%}")
    return params, curve, accuracies


# --- what was learned


@functools.partial(jax.jit, static_argnums=(0, 4))
def hardest(ops, params, images, labels, count=5):
    """(indices of the examples with the largest loss, their losses, norm of the gradient that each of them alone would give)."""
    largest, worst = jax.lax.top_k(losses(ops, params, images, labels), count)

    def loss_of_one(params, image, label):
        return losses(ops, params, image[None], label[None])[0]

    grads = jax.vmap(jax.grad(loss_of_one), in_axes=(None, 0, 0))(params, images[worst], labels[worst])
    squares = [jnp.sum(g**2, axis=range(1, g.ndim)) for g in grads.values()]
    return worst, largest, jnp.sqrt(sum(squares))


def plot(path, curve, accuracies, images, titles):
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplot_mosaic([["curves"] * len(images), [str(i) for i in range(len(images))]])
    epochs = range(1, len(curve) + 1)
    axes["curves"].plot(epochs, curve, label="training loss")
    axes["curves"].plot(epochs, accuracies, label="test accuracy")
    axes["curves"].set(xlabel="epoch", ylim=(0, None))
    axes["curves"].legend()
    for i, (image, title) in enumerate(zip(images, titles, strict=True)):
        axes[str(i)].imshow(image[..., 0], cmap="gray_r")
        axes[str(i)].set_title(title, fontsize=9)
        axes[str(i)].axis("off")
    figure.savefig(path, dpi=120)


def report(ops, params, images, labels, curve, accuracies, path):
    """Prints the five digits with the largest loss and plots them below the curves."""
    worst, largest, norms = map(np.asarray, hardest(ops, params, images, labels))
    found = np.argmax(logits(ops, params, images[worst]), axis=1)
    print("\nThe five test digits with the largest loss, and the norm of the gradient that each would give by itself:")
    titles = []
    for index, label, digit, loss, norm in zip(worst, labels[worst], found, largest, norms, strict=True):
        title = f"a {label}, taken for {digit}" if label != digit else f"a {label}, recognised"
        print(f"  test image {index:3}   {title:16}   loss = {loss:.2f}   |gradient| = {norm:.2f}")
        titles.append(f"{title}\nloss = {loss:.2f}\n|gradient| = {norm:.2f}")

    plot(path, curve, accuracies, images[worst], titles)
    print(f"\nPlot saved to {path}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", action="store_true", help="jax.lax and jax.numpy in place of jaxext")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--plot", default="digits.png", metavar="PATH", help="where to save the plot (default: %(default)s)")
    args = parser.parse_args(argv)
    ops = REFERENCE if args.reference else OURS
    (images, labels), (test_images, test_labels) = load()

    if not args.reference:
        print("The gradient of one training step runs:\n")
        grad = jax.grad(functools.partial(mean_loss, ops))
        print(jaxext.explain(grad)(init(jax.random.key(0)), images[:BATCH], labels[:BATCH]), "\n")

    params, curve, accuracies = train(ops, args.epochs)
    report(ops, params, test_images, test_labels, curve, accuracies, args.plot)
    print(f"Test accuracy {accuracies[-1]:.1%} (goal: at least {GOAL:.0%})")
    return 0 if accuracies[-1] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
