"""Derivatives of every kind through jaxext's matmul: grad of grad of grad, Jacobians, Hessians, per-example gradients.

    python examples/autodiff.py

What to see: a matmul is linear in each operand, so each of its derivatives is a matmul again, in one of three roles (matmul_nn, matmul_nt,
matmul_tn: a b, c bᵀ and aᵀ c).  Forward mode, reverse mode and any mixture of them, of any order, bind the same three primitives.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight, over which the examples of a batch are split below.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxext

# cubic(x) = Σ_ijk C[i,j,k] p_i p_j p_k with p = (1, x): three products in a row, each with p as an operand.
CUBIC = np.array([[[1, -3], [0, 2]], [[0, 0], [0, 1]]], np.float32)


def cubic(x):
    """x³ + 2x² - 3x + 1."""
    p = jnp.array([1.0, x])
    return jaxext.matmul(jaxext.matmul(jaxext.matmul(CUBIC, p), p), p)


def net(params, x):
    """A multi-layer perceptron for one example: a list of (weights, biases), tanh between them."""
    *hidden, (weights, biases) = params
    for w, b in hidden:
        x = jnp.tanh(jaxext.matmul(x, w) + b)
    return jaxext.matmul(x, weights) + biases


def cross_entropy(params, x, label):
    return -jax.nn.log_softmax(net(params, x))[label]


def mean_cross_entropy(params, xs, labels):
    return jax.vmap(cross_entropy, in_axes=(None, 0, 0))(params, xs, labels).mean()


def show(what, got, want, tolerance=1e-4):
    """Print by how much two trees differ, in parts of the largest element, and fail if rounding does not explain it."""
    pairs = [(np.asarray(g), np.asarray(w)) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    off = max(np.abs(g - w).max() for g, w in pairs) / max(np.abs(w).max() for _, w in pairs)
    print(f"  {what:72} {off:.0e}")
    if not off <= tolerance:
        raise AssertionError(f"{what}: they differ by {off:.1e} of the largest element, want {tolerance:.0e} at most")


def scalar_derivatives():
    print("x³ + 2x² - 3x + 1 and its derivatives at x = 2:")
    derivative, want = cubic, iter((11, 17, 16, 6, 0))
    for order in range(5):
        value = derivative(2.0)
        np.testing.assert_array_equal(value, next(want))
        print(f"  {'grad of ' * order}cubic: {value:g}")
        derivative = jax.grad(derivative)


def jacobians():
    """One column per forward pass, or one row per backward pass: the same matrix, and which is cheaper depends on its shape."""
    print("\nThe Jacobian of y = tanh(x W), 5 outputs by 20 inputs; relative differences:")
    weights, x = random((20, 5), 1) / 4, random(20, 2)

    def layer(x):
        return jnp.tanh(jaxext.matmul(x, weights))

    v = random(20, 3)
    forward, reverse, in_one_direction = jax.jit(lambda x: (jax.jacfwd(layer)(x), jax.jacrev(layer)(x), jax.jvp(layer, (x,), (v,))[1]))(x)
    by_hand = (1 - np.tanh(x @ weights) ** 2)[:, None] * weights.T
    show("jacfwd, 20 directions by vmap, and diag(1 - y²) Wᵀ", forward, by_hand)
    show("jacrev, 5 directions by vmap, and diag(1 - y²) Wᵀ", reverse, by_hand)
    show("jvp in one direction, and the Jacobian times it", in_one_direction, by_hand @ v)


def hessians():
    params, unravel = ravel_pytree(init((4, 6, 3), 4))
    xs, labels = random((10, 4), 5), np.arange(10) % 3

    def loss(flat):
        return mean_cross_entropy(unravel(flat), xs, labels)

    print(f"\nThe Hessian of a 4-6-3 network's loss, {params.size} by {params.size}; relative differences:")
    modes = [(outer, inner) for outer in (jax.jacfwd, jax.jacrev) for inner in (jax.jacrev, jax.jacfwd)]
    hessian, *others = jax.jit(lambda p: [outer(inner(loss))(p) for outer, inner in modes])(params)
    for (outer, inner), other in zip(modes[1:], others, strict=True):
        show(f"{outer.__name__} of {inner.__name__}, and jacfwd of jacrev, which is jax.hessian", other, hessian)
    show("the Hessian and its transpose", hessian.T, hessian)

    v = random(params.size, 6) / 100
    gradient_and_its_jvp = jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (v,)))
    show("jvp of grad in direction v, and the Hessian times v", gradient_and_its_jvp(params)[1], hessian @ v)
    after, before = (gradient_and_its_jvp(params + step)[0] for step in (v, -v))
    show("the finite difference of grad, and the Hessian times v", (after - before) / 2, hessian @ v, tolerance=1e-2)


def per_example_gradients():
    """jit(vmap(grad)) of a network for one example: the gradient of every example, as one program of batched products."""
    on_cpu = jax.default_backend() == "cpu"
    width, examples = (128, 4) if on_cpu else (2048, 32)  # per device; at full width a gradient has 10 million numbers
    sizes, devices = (784, width, width, width, 10), jax.devices()
    params, batch = init(sizes, 7), examples * len(devices)
    xs, labels = random((batch, 784), 8), np.arange(batch, dtype=np.int32) % 10

    print(f"\nThe gradients of {batch} single examples, {'-'.join(map(str, sizes))}, on {len(devices)} x {devices[0].platform}:")
    each = jax.jit(jax.vmap(jax.grad(cross_entropy), in_axes=(None, 0, 0)))
    split = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    gradients = each(params, *jax.device_put((xs, labels), split))
    for i, (weights, _) in enumerate(gradients):
        print(f"  of the weights of layer {i + 1}: {'x'.join(map(str, weights.shape))}, split as {weights.sharding.spec}")

    norms, first, mean = summary(gradients)
    print(f"  their norms, from {norms.min():.2f} to {norms.max():.2f}, are what private training clips\n\nRelative differences:")
    alone = jax.jit(jax.grad(cross_entropy))
    for i, gradient in enumerate(first):
        show(f"row {i} of jit(vmap(grad)), and grad of example {i} alone", gradient, alone(params, xs[i], labels[i]))
    show("mean of jit(vmap(grad)), and grad of the mean", mean, jax.jit(jax.grad(mean_cross_entropy))(params, xs, labels))
    show_products(jax.vmap(jax.grad(cross_entropy), in_axes=(None, 0, 0)), params, xs, labels)


@jax.jit
def summary(gradients):
    """The norm of each example's gradient, the gradients of the first three, and the mean of all."""
    squares = [jnp.square(g).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(gradients)]
    first = [jax.tree.map(lambda g, i=i: g[i], gradients) for i in range(3)]
    return jnp.sqrt(sum(squares)), first, jax.tree.map(lambda g: g.mean(0), gradients)


def show_products(function, *args):
    print("\nThis runs: layers as matmuls of the whole batch, and for each weight's gradients a batch of outer products:")
    for row in jaxext.explain(function)(*args).rows:
        print(f"  {row.times} x {row.op}   {' '.join(row.operands)} -> {' '.join(row.results)}")


def init(sizes, seed):
    layers = enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    return [(random((m, n), (seed, i)) / np.float32(m**0.5), np.zeros(n, np.float32)) for i, (m, n) in layers]


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

    # GPUs round float32 operands to TF32 by default, and the differences below would be those of TF32.
    with jax.default_matmul_precision("highest"), jaxext.use_implementation(args.implementation):
        scalar_derivatives()
        jacobians()
        hessians()
        per_example_gradients()
    return 0


if __name__ == "__main__":
    sys.exit(main())
