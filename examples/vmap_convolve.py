"""The window convolution of JAX's tutorial on vmap, written for one signal and one window, then mapped over batches of both.

    convolve(x, w)[i] = x[i] w[0] + x[i+1] w[1] + x[i+2] w[2]

    python examples/vmap_convolve.py

jaxext's primitives have rules for vmap, jit and pmap: however the batch is mapped, one product stays one product.  The numbers are small
integers, and every result is compared, bit for bit, with NumPy's loop over the batch.
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


def convolve(x, w):
    """Each window of x, weighed with w; x and w are vectors, and nothing here knows of a batch."""
    windows = [x[i : i + len(w)] for i in range(len(x) - len(w) + 1)]
    return jnp.stack([jaxext.matmul(window, w) for window in windows])


def convolve_in_one(x, w):
    """The same as one product: what is called convolution in mathematics runs through w backwards."""
    return jaxext.convolve(x, w[::-1], "valid")


def batched_by_hand(xs, ws):
    """Convolve a batch without vmap: the slice skips the batch axis, and the product names it."""
    length = ws.shape[1]
    starts = range(xs.shape[1] - length + 1)
    each_with_its_own = (((1,), (1,)), ((0,), (0,)))  # contract axis 1 of both, axis 0 of both is the batch
    return jnp.stack([jaxext.dot_general(xs[:, i : i + length], ws, each_with_its_own) for i in starts], axis=1)


def numpy_loop(xs, ws):
    return np.stack([np.convolve(x, w[::-1], "valid") for x, w in zip(xs, ws, strict=True)])


def show(what, got, want):
    """Print a result, and fail if it is not the wanted one."""
    np.testing.assert_array_equal(got, want)
    print(f"  {what:62} {'x'.join(map(str, got.shape)):8}", np.asarray(got).tolist() if got.size <= 6 else "as NumPy's loop")


def one_and_many(x, w, xs, ws):
    print("One signal, one window:")
    show("convolve(x, w)", convolve(x, w), [11, 20, 29])
    show("jaxext.convolve(x, w reversed, 'valid')", convolve_in_one(x, w), [11, 20, 29])

    print("\nA batch of both:")
    want = numpy_loop(xs, ws)
    show("by hand", batched_by_hand(xs, ws), want)
    show("vmap(convolve)", jax.vmap(convolve)(xs, ws), want)
    show("jit(vmap(convolve))", jax.jit(jax.vmap(convolve))(xs, ws), want)
    show("vmap(jit(convolve))", jax.vmap(jax.jit(convolve))(xs, ws), want)
    show("vmap(jaxext.convolve): still one product", jax.vmap(convolve_in_one)(xs, ws), want)


def axes(x, w, xs, ws):
    """in_axes says which axis of each operand is the batch (None: the operand is shared), out_axes where it stands in the result."""
    print("\nWhere the batch stands:")
    want, one_window, one_signal = numpy_loop(xs, ws), numpy_loop(xs, [w] * len(xs)), numpy_loop([x] * len(ws), ws)
    for in_axes, out_axes, a, b, result in [
        ((0, 0), 0, xs, ws, want),
        ((1, 1), 1, xs.T, ws.T, want.T),
        ((0, 1), 0, xs, ws.T, want),
        ((1, 0), -1, xs.T, ws, want.T),
        ((0, None), 0, xs, w, one_window),
        ((None, 1), 1, x, ws.T, one_signal.T),
    ]:
        mapped = jax.vmap(convolve, in_axes=in_axes, out_axes=out_axes)
        show(f"vmap(convolve, in_axes={in_axes}, out_axes={out_axes})", mapped(a, b), result)

    every_pair = jax.vmap(jax.vmap(convolve, in_axes=(None, 0)), in_axes=(0, None))
    show("two vmaps: every signal with every window", every_pair(xs, ws), np.stack([numpy_loop([x] * len(ws), ws) for x in xs]))


def devices(xs, ws, count):
    """pmap is vmap over devices; the mapped axis is as long as there are devices."""
    print(f"\nOn {count} x {jax.devices()[0].platform}:")
    want = numpy_loop(xs, ws)
    each = jax.pmap(convolve)(xs[:count], ws[:count])
    show("pmap(convolve): each device a signal and its window", each, want[:count])
    print("    on", ", ".join(f"{shard.device}" for shard in each.addressable_shards))

    shared = jax.pmap(convolve, in_axes=(0, None))(xs[:count], ws[1])
    show("pmap(convolve, in_axes=(0, None)): the window on every device", shared, numpy_loop(xs[:count], [ws[1]] * count))

    of_devices = [a.reshape(count, -1, a.shape[-1]) for a in (xs, ws)]
    show("pmap(vmap(convolve)): each device a batch", jax.pmap(jax.vmap(convolve))(*of_devices), want.reshape(count, -1, 3))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementation",
        choices=["triton", "xla"],
        help="of every product (default: what jaxext prefers); the CUDA kernels take longer rows, of 16-bit numbers",
    )
    args = parser.parse_args(argv)

    x, w = np.arange(5, dtype=np.float32), np.array([2, 3, 4], np.float32)
    count = jax.device_count()
    batch = np.arange(2 * count, dtype=np.float32)[:, None]
    xs, ws = x + batch % 5, w - batch % 3  # no two neighbours are alike, so that a mixed-up batch shows

    with jaxext.use_implementation(args.implementation):
        one_and_many(x, w, xs, ws)
        axes(x, w, xs, ws)
        devices(xs, ws, count)

        print("\nFor the batch this runs, as three products of windows or as one convolution:\n")
        print(jaxext.explain(jax.vmap(convolve))(xs, ws), "\n")
        print(jaxext.explain(jax.vmap(convolve_in_one))(xs, ws))
    return 0


if __name__ == "__main__":
    sys.exit(main())
