"""A tour from a dot product to a linear layer to pairwise distances, each written for vectors and mapped by vmap.

    linear_layer(weights, biases, x) = x weights + biases

    python examples/linear_layer.py

What to see: vmap decides which matmul runs.  vmap over both operands of a dot product gives many dot products.  vmap over one gives a
matrix times a vector.  vmap over first one and then the other gives a full matmul, which no line below writes out.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight, so that pmap below has devices to run on.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxext


def dot_product(x, y):
    return jaxext.matmul(x, y)


def add_matrices(a, b):
    return a + b


def linear_layer(weights, biases, x):
    return jaxext.matmul(x, weights) + biases


def squared_distance(x, y):
    """|x - y|² = |x|² - 2 x·y + |y|², so that the work is in a product."""
    return dot_product(x, x) - 2 * dot_product(x, y) + dot_product(y, y)


# Of one layer: weights and biases are shared, inputs are mapped.
layer_of_batch = jax.vmap(linear_layer, in_axes=(None, None, 0))

# Each x with each y: the inner vmap runs over all y for one x, the outer over all x.
pairwise = jax.vmap(jax.vmap(squared_distance, in_axes=(None, 0)), in_axes=(0, None))


def show(what, got, want):
    """Print a result, and fail if it is not the wanted one."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    print(f"{what}:\n{np.round(np.asarray(got), 4) if got.size <= 16 else f'  of shape {got.shape}, as NumPy has it'}\n")


def show_products(what, function, *args):
    """Print which of jaxext's products a function runs."""
    rows = jaxext.explain(function)(*args).rows
    print(f"{what}:", *(f"  {row.op}   {' '.join(row.operands)} -> {row.result}" for row in rows), sep="\n", end="\n\n")


def vectors_and_matrices():
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    y = np.array([[7, 8, 9], [10, 11, 12]], np.float32)
    show("dot_product over two pairs of vectors", jax.vmap(dot_product)(x, y), np.array([50, 167]))

    a, b = np.ones((2, 3, 2, 2), np.float32)
    show("add_matrices over three pairs", jax.vmap(add_matrices, in_axes=0, out_axes=0)(a, b), np.full((3, 2, 2), 2))


def layers():
    """The tutorial prints the first layer's result beside the second layer's weights and inputs, which do not give it."""
    biases = np.array([0.1, 0.2], np.float32)
    weights = np.array([[0.6, 1.1], [0.5, 0.5]], np.float32)
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    want = np.array([[1.7, 2.3], [3.9, 5.5], [6.1, 8.7]])
    show("linear_layer over three inputs of two features", layer_of_batch(weights, biases, x), want)

    weights = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32)
    x = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)
    want = np.array([[2.3, 3.0], [5.0, 6.6], [7.7, 10.2]])
    show("linear_layer over three inputs of three features", layer_of_batch(weights, biases, x), want)

    weights, biases, x = random((5, 3), 0), random(3, 1), random((4, 2, 6, 5), 2)
    layer_of_array = layer_of_batch
    for _ in range(x.ndim - 2):  # one vmap more for each further axis
        layer_of_array = jax.vmap(layer_of_array, in_axes=(None, None, 0))
    show("linear_layer over an array of four axes, by nested vmaps", layer_of_array(weights, biases, x), x @ weights + biases)
    show_products("which is one product, and no axis was merged with another", layer_of_array, weights, biases, x)

    x = random((jax.device_count(), 20, 5), 3)
    on_devices = jax.pmap(layer_of_batch, in_axes=(None, None, 0))
    show("linear_layer over a batch on each device, by pmap", on_devices(weights, biases, x), x @ weights + biases)


def distances():
    corners = np.array([[0, 0], [3, 0], [0, 4]], np.float32)
    show("The sides of a right triangle", jnp.sqrt(pairwise(corners, corners)), np.array([[0, 3, 4], [3, 0, 5], [4, 5, 0]]))

    x, y = random((40, 7), 4), random((30, 7), 5)
    truth = np.square(x[:, None].astype(float) - y).sum(-1)
    show("Squared distances of 40 points to 30, by two vmaps", pairwise(x, y), truth)
    show_products("which are two batches of dot products and a product of matrices", pairwise, x, y)


def random(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementation",
        choices=["triton", "xla"],
        help="of every product (default: what jaxext prefers); the CUDA kernels take 16-bit operands, these have 32",
    )
    args = parser.parse_args(argv)

    # GPUs round float32 operands to TF32 by default; with a precision they print what a CPU prints.
    with jax.default_matmul_precision("highest"), jaxext.use_implementation(args.implementation):
        vectors_and_matrices()
        layers()
        distances()
    return 0


if __name__ == "__main__":
    sys.exit(main())
