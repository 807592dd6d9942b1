"""Clipped sums of gradients: jaxext's beside those of gradients made by vmap, interleaved, with memory, and errors against float64.

    python -m benchmarks.private_training sums --json private_cpu.json

`vmap, lax` makes the gradients of all examples by vmap(grad), clips and adds them, with lax's products; `vmap, jaxext` does so with
jaxext's.  Times are medians in ms, errors those of the norm, memory the temporary MiB of the compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

import jaxext

from .race import race, run

CLIP = 1.0
LAYOUT = ("NHWC", "HWIO", "NHWC")


def entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels.astype(jnp.int32)[:, None], -1).mean()


def mlp(conv, p, x, labels):
    for w, b in p[:-1]:
        x = jax.nn.relu(x @ w + b)
    return entropy(x @ p[-1][0] + p[-1][1], labels)


def group_norm(x, scale, shift):
    y = x.reshape(*x.shape[:-1], 8, -1)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * scale + shift


def wide_resnet(conv, p, x, labels):
    """Compute the loss of a wide ResNet with group norm, as for private training (De et al., 2022)."""
    conv = functools.partial(conv, padding="SAME", dimension_numbers=LAYOUT)
    x = conv(x, p["stem"], (1, 1))
    for i, block in enumerate(p["blocks"]):
        stride = (1, 1) if i == 0 else (2, 2)
        h = jax.nn.relu(group_norm(x, *block["first norm"]))
        skip, h = conv(h, block["skip"], stride), conv(h, block["first"], stride)
        x = skip + conv(jax.nn.relu(group_norm(h, *block["second norm"])), block["second"], (1, 1))
    return entropy(jax.nn.relu(group_norm(x, *p["norm"])).mean((1, 2)) @ p["head"][0] + p["head"][1], labels)


def normal(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) / max(1, functools.reduce(int.__mul__, shape[:-1], 1)) ** 0.5


def of_mlp(size, width):
    p = [(normal(k, n), normal(n)) for k, n in ((784, width), (width, width), (width, 10))]
    return p, normal(size, 784) * size**0.5


def of_resnet(size, pixels, widen):
    """WRN-10-widen."""
    channels = [16, 16 * widen, 32 * widen, 64 * widen]

    def norm(n):
        return jnp.ones(n), jnp.zeros(n)

    blocks = [
        {
            "first norm": norm(c),
            "skip": normal(1, 1, c, k),
            "first": normal(3, 3, c, k),
            "second norm": norm(k),
            "second": normal(3, 3, k, k),
        }
        for c, k in zip(channels[:-1], channels[1:], strict=True)
    ]
    p = {"stem": normal(3, 3, 3, 16), "blocks": blocks, "norm": norm(channels[-1]), "head": (normal(channels[-1], 10), normal(10))}
    return p, normal(size, pixels, pixels, 3) * (size * pixels**2) ** 0.5


NETWORKS: dict[str, tuple[Callable, Callable, tuple[int, ...]]] = {
    "MLP 784-512-512-10, 128 examples": (mlp, of_mlp, (128, 512)),
    "WRN-10-2 with group norm, 32 examples of 16x16": (wide_resnet, of_resnet, (32, 16, 2)),
    "WRN-10-4 with group norm, 32 examples of 32x32": (wide_resnet, of_resnet, (32, 32, 4)),
}


def by_vmap(loss):
    def clipped(p, x, labels):
        gradients = jax.vmap(lambda x, y: jax.grad(loss)(p, x[None], y[None]))(x, labels)
        squares = sum(jnp.sum(g.reshape(len(g), -1) ** 2, 1) for g in jax.tree.leaves(gradients))
        factors = jnp.minimum(1, CLIP * lax.rsqrt(squares))
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), gradients)

    return clipped


def sums(rounds: int) -> Iterator[dict]:
    for name, (network, make, sizes) in NETWORKS.items():
        p, x = make(*sizes)
        flat, tree = jax.tree.flatten(p)
        labels = jax.random.randint(jax.random.key(0), (len(x),), 0, 10).astype(jnp.float32)
        of_lax, of_jaxext = (functools.partial(network, conv) for conv in (lax.conv_general_dilated, jaxext.conv_general_dilated))
        forms = {
            "jaxext": jaxext.privacy.clipped_grad(of_jaxext, l2_clip_norm=CLIP, batch_argnums=(1, 2)),
            "vmap, lax": by_vmap(of_lax),
            "vmap, jaxext": by_vmap(of_jaxext),
        }
        forms = {form: functools.partial(_flat, tree, function) for form, function in forms.items()}
        arguments = (labels, x, *flat)
        row = {"network": name, "parameters": sum(leaf.size for leaf in flat), "examples": len(x)}
        yield row | race(forms, arguments, rounds, forms["vmap, lax"], memory=True)


def _flat(tree, function, labels, x, *leaves):
    return ravel_pytree(function(tree.unflatten(leaves), x, labels))[0]


def line(row: dict) -> str:
    ratios = "".join(
        f"  {name}: {took:.1f} ms, {row['MiB'][name]:.0f} MiB, error {row['error'][name]:.0e}" for name, took in row["ms"].items()
    )
    return f"{row['network']}, {row['parameters']:,} parameters:{ratios}"


def main(arguments=None) -> None:
    run(__doc__, {"sums": sums}, line, arguments)


if __name__ == "__main__":
    main()
