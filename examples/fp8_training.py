"""A small network trained on handwritten digits in 8-bit floats, beside bfloat16.  Its weights are then quantised to int8 and int4.

    pip install '.[demo]'
    python examples/fp8_training.py

What to see: `jaxext.fp8_matmul` in place of `@` trains as well as bfloat16, and saves fewer bytes for the gradients.  The trained weights,
quantised to 8 or 4 bits by `jaxext.quantization.quantize`, classify about as well in a quarter or an eighth of float32's memory.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets  # pip install '.[demo]'

import jaxext

SIZES = (64, 128, 128, 10)
BATCH = 128


def load():
    """Pixels in float32, and digits: of 1,437 images to train with, and of 360 to test."""
    images, digits = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    x, y = (images[order] / 16).astype(np.float32), digits[order].astype(np.int32)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def init(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    return [jax.random.normal(key, (k, n)) * (2 / k) ** 0.5 for key, k, n in zip(keys, SIZES[:-1], SIZES[1:], strict=True)]


def logits(weights, x, product):
    """`product(x, w)` multiplies.  Activations are bfloat16, so that what is kept for the gradients is, too, or smaller."""
    for i, w in enumerate(weights):
        x = product(x.astype(jnp.bfloat16), w)
        x = jax.nn.relu(x) if i < len(weights) - 1 else x
    return x.astype(jnp.float32)


def in_bfloat16(x, w):
    return jaxext.matmul(x, w.astype(jnp.bfloat16))


def in_fp8(x, w):
    return jaxext.fp8_matmul(x, w)


def loss(weights, x, y, product):
    z = logits(weights, x, product)
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()


def accuracy(weights, data, product) -> float:
    x, y = data
    return float((logits(weights, x, product).argmax(-1) == y).mean())


def train(data, product, epochs: int, rate: float = 0.1, momentum: float = 0.9):
    x, y = map(jnp.asarray, data)

    @jax.jit
    def epoch(weights, speed, order):
        def step(state, batch):
            weights, speed = state
            gradient = jax.grad(loss)(weights, x[batch], y[batch], product)
            speed = jax.tree.map(lambda v, g: momentum * v + g, speed, gradient)
            return (jax.tree.map(lambda w, v: w - rate * v, weights, speed), speed), None

        return jax.lax.scan(step, (weights, speed), order)[0]

    weights = init()
    speed = jax.tree.map(jnp.zeros_like, weights)
    rng = np.random.default_rng(1)
    for _ in range(epochs):
        weights, speed = epoch(weights, speed, rng.permutation(len(y))[: len(y) // BATCH * BATCH].reshape(-1, BATCH))
    return weights


def kept(weights, data, product) -> int:
    """Bytes that a step keeps for its gradients, besides the weights themselves."""
    x, y = data
    pullback = jax.vjp(lambda weights: loss(weights, x[:BATCH], y[:BATCH], product), weights)[1]
    return sum(of.nbytes for of in jax.tree.leaves(pullback) if of.dtype.itemsize < 4)


def main(args=None) -> int:
    parser = argparse.ArgumentParser(description="Train on digits in 8-bit floats, and round the weights to int8 and int4.")
    parser.add_argument("--epochs", type=int, default=40)
    epochs = parser.parse_args(args).epochs

    training, test = load()
    results, weights = {}, init()
    for name, product in (("bfloat16", in_bfloat16), ("fp8", in_fp8)):
        weights = train(training, product, epochs)
        results[name] = accuracy(weights, test, product)
        print(f"{name:9} {results[name]:.1%} of the test images, {kept(weights, training, product) / 1024:.0f} KiB kept in a step")
    for bits, group in ((8, None), (4, 32)):
        small = [jaxext.quantization.quantize(w, bits=bits, group=group) for w in weights]
        results[f"int{bits}"] = accuracy(small, test, jaxext.quantized_matmul)
        print(f"int{bits:<6} {results[f'int{bits}']:.1%} with the weights of fp8, rounded")
    if results["fp8"] < results["bfloat16"] - 0.003 or results["int4"] < results["fp8"] - 0.02:
        print("training in fp8 lost more than 0.3 %, or int4 more than 2 %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
