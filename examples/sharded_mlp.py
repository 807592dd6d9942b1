"""The 784-8192-8192-8192-10 network of JAX's tutorial "Distributed arrays and automatic parallelization", on 1, 8 and 4 x 2 devices.

    python examples/sharded_mlp.py

The batch is split over the mesh axis "data", and the layers alternately over "model".  One layer is split by the columns of its matrix, so
that each device computes some of the outputs; the next by the rows that multiply these outputs.  Two layers then need one sum over "model",
and nothing is ever gathered.  Only `place` defines this: the code and the losses are the same on every mesh, one device included.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight.  GPUs are left alone: where there are any, JAX takes them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import functools
import itertools
import math
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

COLLECTIVE = re.compile(r" = (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
ARRAY = re.compile(r"[a-z]+(\d+)\[([\d,]*)\]")


# --- the network, for one device and for many


def init(rng, sizes):
    """[(matrix, bias), ...] of the layers."""
    return [
        (rng.standard_normal((n, m), np.float32) / np.float32(math.sqrt(n)), np.zeros(m, np.float32)) for n, m in itertools.pairwise(sizes)
    ]


def examples(rng, count, inputs, outputs):
    return rng.standard_normal((count, inputs), np.float32), rng.standard_normal((count, outputs), np.float32)


def predict(dtype, params, x):
    """Matrices are multiplied in `dtype`; everything else is float32."""

    def layer(x, weights, bias, implementation=None):
        return jaxext.matmul(x.astype(dtype), weights.astype(dtype), implementation=implementation).astype(jnp.float32) + bias

    *hidden, last = params
    for weights, bias in hidden:
        x = jax.nn.relu(layer(x, weights, bias))
    # The last matrix has ten columns: rows of 20 bytes, which the CUDA kernels refuse, and not 1/2000 of the work.
    return layer(x, *last, implementation="xla")


def loss(dtype, params, batch):
    x, y = batch
    return jnp.mean(jnp.sum((predict(dtype, params, x) - y) ** 2, axis=-1))


@functools.partial(jax.jit, static_argnums=0)
def step(dtype, params, batch, rate):
    value, grads = jax.value_and_grad(loss, argnums=1)(dtype, params, batch)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


# --- where it lies, the one thing that differs


def place(mesh, params, batch):
    """The batch split over "data", layers alternately over "model": columns with their biases, then rows."""

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    placed = [
        (put(weights, None, "model"), put(bias, "model")) if i % 2 == 0 else (put(weights, "model", None), put(bias))
        for i, (weights, bias) in enumerate(params)
    ]
    return placed, tuple(put(x, "data") for x in batch)


def meshes(devices):
    """One device, all for the batch, and half of them for the batch times two for the model: as many of these as there are."""
    n = len(devices)
    shapes = dict.fromkeys([(1, 1), (n, 1), (n // 2, 2) if n > 1 else (1, 1)])
    return [jax.make_mesh(s, ("data", "model"), (AxisType.Auto,) * 2, devices=devices[: math.prod(s)]) for s in shapes]


def collectives(compiled):
    """{collective: (how many, megabytes that they give each device)}, read from the compiled program; one may carry many arrays."""
    found = {}
    for line in compiled.as_text().splitlines():
        if match := COLLECTIVE.search(line):
            arrays = [(int(bits), [int(n) for n in dims.split(",") if n]) for bits, dims in ARRAY.findall(match[1])]
            count, megabytes = found.get(match[2], (0, 0.0))
            found[match[2]] = count + 1, megabytes + sum(bits / 8 * math.prod(dims) for bits, dims in arrays) / 1e6
    return found


def train(mesh, dtype, params, batch, rate, steps):
    """(losses before each step, trained parameters, collectives of a step, seconds of the last one)."""
    params, batch = place(mesh, params, batch)
    compiled = step.lower(dtype, params, batch, rate).compile()
    losses = []
    for _ in range(steps):
        start = time.perf_counter()
        params, value = jax.block_until_ready(compiled(params, batch, rate))
        seconds = time.perf_counter() - start
        losses.append(value)
    return np.array(losses), params, collectives(compiled), seconds


def main(argv=None):
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["triton", "cuda", "xla"], help="of matmul (default: what jaxext prefers)")
    parser.add_argument("--width", type=int, default=512 if on_cpu else 8192, help="of the hidden layers (%(default)s)")
    parser.add_argument("--batch", type=int, default=512 if on_cpu else 8192, help="examples (%(default)s)")
    parser.add_argument("--devices", type=int, default=jax.device_count(), help="how many of them to use (all: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.width, args.batch) < 1 or not 1 <= args.devices <= jax.device_count():
        wanted = f"want --width and --batch of at least 1, and --devices from 1 to {jax.device_count()}"
        parser.error(f"{wanted}, got {args.width}, {args.batch} and {args.devices}")
    devices = jax.devices()[: 1 << args.devices.bit_length() - 1]  # a power of two splits the arrays evenly
    # The CUDA kernels take 16-bit operands; sums of rounded parts then differ a little more.
    dtype, tolerance = (jnp.bfloat16, 1e-3) if args.implementation == "cuda" else (jnp.float32, 1e-4)

    sizes = (784, args.width, args.width, args.width, 10)
    rng = np.random.default_rng(0)
    params, batch = init(rng, sizes), examples(rng, args.batch, sizes[0], sizes[-1])
    print(f"{'-'.join(map(str, sizes))}, {sum(x.size for x in jax.tree.leaves(params)):,} parameters, a batch of {args.batch}\n")

    runs = []
    for mesh in meshes(devices):
        data, model = mesh.devices.shape
        with jaxext.use_implementation(args.implementation):
            losses, _, sent, seconds = train(mesh, dtype, params, batch, rate=1 / args.width, steps=6)
        print(f"{data}-way data x {model}-way model parallelism: {1e3 * seconds:.0f} ms for the last step")
        print("  losses", *(f"{value:.5f}" for value in losses))
        for name, (count, megabytes) in sent.items():
            print(f"  {count} {name}, {megabytes:.2f} MB")
        runs.append(losses)
        if data * model == 1 and sent or not set(sent) <= {"all-reduce"}:
            print("  this should need only a sum over devices")
            return 1

    print(f"\nLargest difference of the losses from those on one device: {max(abs(run / runs[0] - 1).max() for run in runs):.1e}")
    learned = all((np.diff(run) < 0).all() for run in runs)
    return 0 if learned and all(np.allclose(run, runs[0], rtol=tolerance) for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
