"""Data-parallel training of a 784-512-256-10 network with pmap, with and without an all-reduce of the gradients.

    each device d:   g_d = gradient of the mean loss over its part of the batch
    all of them:     g = (1/D) Σ_d g_d,  the gradient over the whole batch, because the parts are equally long

    pip install '.[demo]'
    python examples/pmap_mlp.py

What to see: with the mean over devices (`lax.pmean`), the parameters after every step equal those of one device on the whole batch, up to
rounding (the column "all - one").  Without it, each device trains its own network on its part of the data, and the replicas drift apart.
The images are scikit-learn's handwritten digits, enlarged to MNIST's 28x28.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight, so that there are devices to train on.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from sklearn.datasets import load_digits  # pip install '.[demo]'

import jaxext

LAYERS = (784, 512, 256, 10)
BATCH = 128
RATE = 0.2
ROUNDING = 1e-5  # what orders of summation may differ by, in parameters that are 0.1 at most and steps of training that add it up


def load():
    """Images as vectors of 784 values from 0 to 1, and labels, shuffled once and for all."""
    images, labels = load_digits(return_X_y=True)
    enlarged = np.kron(images.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3)))  # 24x24
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).reshape(len(images), -1)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order].astype(np.float32), labels[order].astype(np.int32)


def init(seed=0):
    """A list of (weights, biases)."""
    rng = np.random.default_rng(seed)
    layers = zip(LAYERS[:-1], LAYERS[1:], strict=True)
    return [((rng.normal(size=(m, n)) / m**0.5).astype(np.float32), np.zeros(n, np.float32)) for m, n in layers]


def logits(params, image):
    *hidden, (weights, biases) = params
    x = image
    for w, b in hidden:
        x = jnp.tanh(jaxext.matmul(x, w) + b)
    return jaxext.matmul(x, weights) + biases


def mean_loss(params, images, labels):
    """Cross-entropy; the network is written for one image, and vmap makes matrix products of its layers."""
    logp = jax.nn.log_softmax(jax.vmap(logits, in_axes=(None, 0))(params, images))
    return -jnp.take_along_axis(logp, labels[:, None], axis=1).mean()


def update(params, images, labels, all_reduce=lambda x: x):
    """One step of gradient descent: (parameters, loss)."""
    loss, grads = all_reduce(jax.value_and_grad(mean_loss)(params, images, labels))
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


on_one_device = jax.jit(update)

# in_axes=None gives every device the same parameters, and out_axes=None says that they are still the same after the step: this is what
# device_put_replicated was for.  That they are, pmean sees to.
data_parallel = jax.pmap(
    functools.partial(update, all_reduce=functools.partial(lax.pmean, axis_name="data")),
    axis_name="data",
    in_axes=(None, 0, 0),
    out_axes=None,
)

# The same without pmean.  Each device has parameters of its own now, along a leading axis.
without_all_reduce = jax.pmap(update)


@jax.jit
def difference(params, others):
    """The largest between two sets of parameters."""
    return jnp.array([jnp.abs(p - q).max() for p, q in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True)]).max()


@jax.jit
def spread(replicas):
    """The largest difference between the replicas of a parameter."""
    return jnp.array([jnp.ptp(p, axis=0).max() for p in jax.tree.leaves(replicas)]).max()


@jax.jit
def accuracy(params, images, labels):
    return (jax.vmap(logits, in_axes=(None, 0))(params, images).argmax(1) == labels).mean()


def train(steps, count):
    """Train one device, all of them, and the replicas on the same batches; yields the rows of the table, every ten steps."""
    images, labels = load()
    size = BATCH // count * count
    one = many = init()
    replicas = jax.tree.map(lambda p: np.broadcast_to(p, (count, *p.shape)), one)
    for step in range(1, steps + 1):
        batch = np.arange(step * size, (step + 1) * size) % len(images)
        x, y = images[batch], labels[batch]
        parts = x.reshape(count, -1, LAYERS[0]), y.reshape(count, -1)
        one, loss_of_one = on_one_device(one, x, y)
        many, loss = data_parallel(many, *parts)
        replicas, _ = without_all_reduce(replicas, *parts)
        if step == 1 or step % 10 == 0 or step == steps:
            yield step, loss, loss_of_one, accuracy(many, images, labels), difference(one, many), spread(replicas)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementation",
        choices=["triton", "xla"],
        help="of every product (default: what jaxext prefers); the CUDA kernels take 16-bit operands, these have 32",
    )
    parser.add_argument("--steps", type=int, default=40, help="of training (%(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"argument --steps: it is {args.steps}, want at least 1")

    count = jax.device_count()
    print(f"The network {'-'.join(map(str, LAYERS))} on {count} x {jax.devices()[0].platform}, {BATCH // count} images each\n")
    print("step   loss on all   loss on one   recognised   all - one   replicas without all-reduce")
    rows = []
    # GPUs round float32 operands to TF32 by default, by which one device and many would differ more than by order of summation.
    with jax.default_matmul_precision("highest"), jaxext.use_implementation(args.implementation):
        for row in train(args.steps, count):
            rows.append([float(value) for value in row])
            print("{:4.0f}   {:11.6f}   {:11.6f}   {:10.1%}   {:9.1e}   {:27.1e}".format(*rows[-1]))

    apart, drift = np.array(rows).T[-2:]
    equal = bool(apart.max() < ROUNDING)
    print(f"\nWith the all-reduce, {count} devices train the network that one device trains: {equal}")
    if count == 1:  # whose gradient is the mean already
        return 0 if equal else 1
    drifted = bool(drift.min() > 1000 * ROUNDING)
    print(f"Without it, they train {count} networks: {drifted}")
    return 0 if equal and drifted else 1


if __name__ == "__main__":
    sys.exit(main())
