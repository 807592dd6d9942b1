"""Arrays spread over devices: computation follows the data, as in JAX's tutorial "Distributed arrays and automatic parallelization".

    python examples/sharded_arrays.py

Today a mesh with named axes and a `PartitionSpec` replace the tutorial's `PositionalSharding(devices).reshape(4, 2)`; a None in the spec
replaces its `.replicate(1)`.  The matrices hold small integers, whose sums are exact in float32 in any order.  So all layouts must give
the same bits.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight.  GPUs are left alone: where there are any, JAX takes them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

# Of float32 operands that is the default; 16-bit ones are added up in float32 too, and the result is not rounded.
matmul = functools.partial(jaxext.matmul, preferred_element_type=jnp.float32)

COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def claim(text, holds):
    if not holds:
        raise RuntimeError(f"this does not hold: {text}")
    print(text)


def same(x, y):
    """Bit for bit; the comparison itself takes place on the devices."""
    return bool(jnp.array_equal(jax.device_put(x, y.sharding), y))


def matrix(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape, np.int8), dtype)


def mesh_of(devices, shape, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, ("rows", "cols"), (axis_type,) * 2, devices=devices)


def square(count):
    """Four by two for eight devices."""
    return (count // 2, 2) if count > 1 else (1, 1)


def collectives(compiled):
    """Return the collectives in the compiled program."""
    return set(COLLECTIVE.findall(compiled.as_text()))


def show_layouts(x, devices):
    """An array is laid out by `device_put`; what is computed from it elementwise lies as it does, and nobody asked for that."""
    n = len(devices)
    for shape in dict.fromkeys([(n, 1), square(n), (1, n)]):
        y = jax.device_put(x, NamedSharding(mesh_of(devices, shape), P("rows", "cols")))
        print(f"\nsplit {shape[0]} x {shape[1]}: each device holds {y.addressable_shards[0].data.shape} of {y.shape}")
        jax.debug.visualize_array_sharding(y, scale=0.5)
        claim("its sine lies in the same way", jnp.sin(y).sharding.is_equivalent_to(y.sharding, y.ndim))

    mesh = mesh_of(devices, square(n))
    for spec in (P("rows", None), P(None, "cols"), P()):
        y = jax.device_put(x, NamedSharding(mesh, spec))
        print(f"\n{spec} on a mesh of {mesh.devices.shape}: axes that are not split are replicated")
        jax.debug.visualize_array_sharding(y, scale=0.5)
    claim("replicated, it is whole on every device", all(shard.data.shape == x.shape for shard in y.addressable_shards))


def show_products(a, b, devices):
    """Show that the sharding of a matrix product, and its communication, follow from the shardings of its operands."""
    mesh = mesh_of(devices, square(len(devices)))
    want = jnp.matmul(a, b, preferred_element_type=jnp.float32)

    def product(left, right):
        """(its sharding, the collectives) of a product of matrices that lie like that."""
        x, y = jax.device_put(a, NamedSharding(mesh, left)), jax.device_put(b, NamedSharding(mesh, right))
        compiled = jax.jit(matmul).lower(x, y).compile()
        z, sent = compiled(x, y), collectives(compiled)
        print(f"\n{left} @ {right} -> {z.sharding.spec}, sending: {', '.join(sorted(sent)) or 'nothing'}")
        claim("the same bits as on one device", same(want, z))
        return z, sent

    z, sent = product(P("rows", None), P(None, "cols"))
    jax.debug.visualize_array_sharding(z, scale=0.5)
    claim("each device computes its block of the result, and nothing is gathered", not sent)
    claim("rows come from the left, columns from the right", z.sharding.is_equivalent_to(NamedSharding(mesh, P("rows", "cols")), 2))

    z, sent = product(P("rows", "cols"), P("cols", None))
    claim("the summed axis is split, so that parts of the sum are added up", sent == ({"all-reduce"} if len(devices) > 1 else set()))
    claim("still nothing is gathered", z.sharding.is_equivalent_to(NamedSharding(mesh, P("rows", None)), 2))

    _, sent = product(P("rows", "cols"), P("rows", "cols"))
    if sent:
        print("here the operands split the summed axis in two different ways, so XLA must move data")

    # Meshes whose axes are Explicit put the sharding into the type, where it is known while the function is traced.
    mesh = mesh_of(devices, square(len(devices)), AxisType.Explicit)
    x, y = jax.device_put(a, NamedSharding(mesh, P("rows", None))), jax.device_put(b, NamedSharding(mesh, P(None, "cols")))
    z = jax.eval_shape(matmul, x, y)
    claim(f"\nthe type of the product on an explicit mesh: {z.sharding.spec}", z.sharding.spec == P("rows", "cols"))


def show_pmap(a, b, devices):
    """The older way: one program per device, each with its own slice of the first axis, and collectives written out."""
    n = len(devices)
    size = len(a) // n
    pairs = a[:, :size].reshape(n, size, size), b[:, :size].reshape(n, size, size)
    products = jax.pmap(matmul, devices=devices)(*pairs)
    want = jnp.matmul(*pairs, preferred_element_type=jnp.float32)
    claim(f"\npmap(matmul) of {n} pairs of matrices: one per device, {products.shape}", same(want, products))

    def add_up(x, y):
        return jax.lax.psum(matmul(x, y), "devices")

    want = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    columns, rows = a.reshape(len(a), n, -1).swapaxes(0, 1), b.reshape(n, -1, len(b))
    total = jax.pmap(add_up, "devices", devices=devices)(columns, rows)
    claim("psum adds up the products of columns and rows: all devices hold all of a @ b", all(same(want, t) for t in total))

    mesh = jax.make_mesh((n,), ("devices",), (AxisType.Auto,), devices=devices)
    total = jax.jit(jax.shard_map(add_up, mesh=mesh, in_specs=(P(None, "devices"), P("devices", None)), out_specs=P()))(a, b)
    claim("shard_map says the same of one array without reshaping it", same(want, total))


def milliseconds(f, *args):
    def run():
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        return (time.perf_counter() - start) * 1e3

    run()  # compiles
    return min(run() for _ in range(3))


def show_times(a, b, devices):
    mesh = mesh_of(devices, square(len(devices)))
    x, y = jax.device_put(a, NamedSharding(mesh, P("rows", None))), jax.device_put(b, NamedSharding(mesh, P(None, "cols")))
    print(f"\nmilliseconds        on 1 device       on {len(devices)}")
    for name, f, one, all_of_them in (("sin(a)", jnp.sin, (a,), (x,)), ("a @ b", matmul, (a, b), (x, y))):
        f = jax.jit(f)
        print(f"{name:20} {milliseconds(f, *one):10.2f} {milliseconds(f, *all_of_them):11.2f}")
    if devices[0].platform == "cpu":
        print("These devices share the cores of one CPU, so the times say nothing about eight real devices.")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["triton", "cuda", "xla"], help="of matmul (default: what jaxext prefers)")
    parser.add_argument("--size", type=int, default=1024 if jax.default_backend() == "cpu" else 8192, help="of the matrices (%(default)s)")
    parser.add_argument("--devices", type=int, default=jax.device_count(), help="how many of them to use (all: %(default)s)")
    args = parser.parse_args(argv)
    if args.size < 1 or not 1 <= args.devices <= jax.device_count():
        parser.error(f"want a --size of at least 1 and --devices from 1 to {jax.device_count()}, got {args.size} and {args.devices}")
    devices = jax.devices()[: 1 << args.devices.bit_length() - 1]  # a power of two splits the arrays evenly
    dtype = jnp.bfloat16 if args.implementation == "cuda" else jnp.float32  # the CUDA kernels take 16-bit operands
    a, b = (matrix(seed, (args.size, args.size), dtype) for seed in range(2))
    with jaxext.use_implementation(args.implementation):
        show_layouts(a, devices)
        show_products(a, b, devices)
        show_pmap(a, b, devices)
        show_times(a, b, devices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
