"""A mixture of experts on handwritten digits: on one device, and with the experts split over all devices, with the same losses.

    router:   p = softmax(x R);  each row goes to the TOP experts with the largest p + b
    layer:    y = x + Σ_e p_e down_e(relu(up_e(x)))  over these experts

    pip install '.[demo]'
    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --balance

What to see: the layer is one call of `jaxext.moe`, which multiplies each row only by the matrices of its own experts.  With `axis_name`
each device has some of the experts and a part of the batch, and rows travel to their experts and back.  The column "all - one" is the
difference between the parameters trained on one device and on all of them.

b is zero, and a few experts get most rows: "busiest" is the largest share of one expert, which would be 1/16 if all had equally many.
With `--balance` b is the bias of DeepSeek-V3.  After each step it grows for experts with fewer rows than the mean, and shrinks for those
with more.  It only affects the choice of experts: it adds no loss, and has no gradient.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight, so that there are devices for the experts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure  # pip install '.[demo]'
from sklearn.datasets import load_digits  # pip install '.[demo]'

import jaxext

WIDTH, HIDDEN, EXPERTS, TOP = 64, 32, 16, 2
BATCH = 128
RATE = 0.2
BIAS_STEP = 0.01  # by which `--balance` moves the bias of an expert
ROUNDING = 1e-5  # what orders of summation may differ by, in steps of training that add it up
SHARDINGS = {"router": P(), "bias": P(), "up": P("devices"), "down": P("devices"), "out": P()}


def load():
    """Images as rows of 64 values from 0 to 1, and labels, shuffled once and for all."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)


def init(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH), "out": (WIDTH, 10)}
    params = {name: (rng.normal(size=shape) / math.sqrt(shape[-2])).astype(np.float32) for name, shape in shapes.items()}
    return params | {"bias": np.zeros(EXPERTS, np.float32)}


# --- the layer and the network


def routed(params, x):
    """Return the weights of the experts of each row, and the experts' indices."""
    scores = jax.nn.softmax(jaxext.matmul(x, params["router"]))
    _, chosen = lax.top_k(scores + params["bias"], TOP)
    return jnp.take_along_axis(scores, chosen, axis=1), chosen


def mixture(params, x, axis_name=None):
    """Return the layer's result, and the experts of each row; with `axis_name` the experts are split over that axis."""
    weights, chosen = routed(params, x)
    y = jaxext.moe(x, chosen, weights, None, params["up"], params["down"], activation="relu", axis_name=axis_name)
    return x + y, chosen


def losses(params, images, labels, axis_name=None):
    """Cross-entropy of each image, whether it is recognised, and its experts."""
    y, chosen = mixture(params, images, axis_name)
    scores = jaxext.matmul(y, params["out"])
    logp = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0], scores.argmax(1) == labels, chosen


def on_all_devices(mesh):
    """Images and experts are split over the devices, router and output matrix are on each."""
    split = P("devices")
    spread = functools.partial(losses, axis_name="devices")
    return jax.shard_map(spread, mesh=mesh, in_specs=(SHARDINGS, split, split), out_specs=split)


# --- training


def shares(chosen):
    """Return the part of the choices that each expert gets."""
    return jnp.bincount(chosen.ravel(), length=EXPERTS) / chosen.size


@functools.partial(jax.jit, static_argnums=0)
def update(losses_of, params, images, labels, bias_step):
    """One step of gradient descent, and of the bias: (parameters, loss)."""

    def mean(params):
        loss, _, chosen = losses_of(params, images, labels)
        return loss.mean(), chosen

    (loss, chosen), grads = jax.value_and_grad(mean, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params | {"bias": params["bias"] + bias_step * jnp.sign(1 / EXPERTS - shares(chosen))}, loss


@functools.partial(jax.jit, static_argnums=0)
def tested(losses_of, params, images, labels):
    """Return the part of the images that is recognised, and the share of the expert that gets most of them."""
    _, recognised, chosen = losses_of(params, images, labels)
    return recognised.mean(), shares(chosen).max()


def train(steps, mesh, bias_step=0.0):
    """Train on one device and on all of them on the same batches; yields parameters and a row of the table, every ten steps."""
    images, labels = load()
    size, several = (n // mesh.size * mesh.size for n in (BATCH, len(images)))
    spread = on_all_devices(mesh)
    one = init()
    many = {name: jax.device_put(p, jax.NamedSharding(mesh, SHARDINGS[name])) for name, p in init().items()}
    for step in range(1, steps + 1):
        batch = np.arange(step * size, (step + 1) * size) % len(images)
        one, loss_of_one = update(losses, one, images[batch], labels[batch], bias_step)
        many, loss = update(spread, many, images[batch], labels[batch], bias_step)
        if step == 1 or step % 10 == 0 or step == steps:
            apart = max(float(np.abs(np.asarray(one[name]) - np.asarray(many[name])).max()) for name in one)
            yield one, (step, loss, loss_of_one, *tested(spread, many, images[:several], labels[:several]), apart)


def plot(params, path):
    """Plot the share of each digit's images that goes to each expert."""
    images, labels = load()
    _, chosen = jax.jit(routed)(params, images)
    counts = np.zeros((10, EXPERTS))
    np.add.at(counts, (np.repeat(labels, TOP), np.asarray(chosen).ravel()), 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(counts / np.bincount(labels)[:, None], cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="expert", ylabel="digit", xticks=range(EXPERTS), yticks=range(10))
    figure.colorbar(shown, label="share of the digit's images", shrink=0.8)
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementation",
        choices=["triton", "xla"],
        help="of every product (default: what jaxext prefers); the CUDA kernels take 16-bit operands, these have 32",
    )
    parser.add_argument("--steps", type=int, default=100, help="of training (%(default)s)")
    parser.add_argument("--balance", action="store_true", help="move a bias of each expert, so that all get as many rows")
    parser.add_argument("--plot", metavar="PATH", help="where to draw which experts see which digits")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"argument --steps: it is {args.steps}, want at least 1")

    devices = jax.devices()
    count = math.gcd(EXPERTS, len(devices))
    mesh = jax.make_mesh((count,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:count])
    print(f"{EXPERTS} experts, {TOP} for each row, on {count} x {devices[0].platform}: {EXPERTS // count} on each\n")
    print("step   loss on all   loss on one   recognised   busiest   all - one")
    rows, trained = [], init()
    # GPUs round float32 operands to TF32 by default, by which one device and many would differ more than by order of summation.
    with jax.default_matmul_precision("highest"), jaxext.use_implementation(args.implementation):
        for params, row in train(args.steps, mesh, BIAS_STEP if args.balance else 0.0):
            trained = params
            rows.append([float(value) for value in row])
            print("{:4.0f}   {:11.6f}   {:11.6f}   {:10.1%}   {:7.1%}   {:9.1e}".format(*rows[-1]))
        if args.plot:
            plot(trained, args.plot)

    equal = max(row[-1] for row in rows) < ROUNDING
    print(f"\n{count} devices with {EXPERTS // count} experts each train the network that one device trains: {equal}")
    balanced = not args.balance or rows[-1][4] <= rows[0][4]
    if args.balance:
        print(f"the busiest expert gets no more of the choices than at first: {balanced}")
    return 0 if equal and balanced else 1


if __name__ == "__main__":
    sys.exit(main())
