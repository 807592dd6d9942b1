"""The doctor accuses exactly those shardings of lax's products that XLA gets wrong: a sample of them.  lax's own results are the truth."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

MESHES = [
    jax.make_mesh(sizes, ("a", "b"), devices=jax.devices()[: np.prod(sizes)], axis_types=(AxisType.Auto,) * 2) for sizes in ((2, 2), (4, 2))
]


def conv(strides=1, padding: Any = "SAME", **how):
    layouts = {3: ("NHC", "HIO", "NHC"), 4: ("NHWC", "HWIO", "NHWC")}
    return lambda x, w: lax.conv_general_dilated(x, w, (strides,) * (x.ndim - 2), padding, dimension_numbers=layouts[x.ndim], **how)


# Product -> itself, shapes of its operands.
PRODUCTS: dict[str, tuple[Callable, tuple[int, ...], tuple[int, ...]]] = {
    "even window": (conv(), (8, 16, 8), (4, 8, 8)),
    "dilated input": (conv(padding=((2, 2),), lhs_dilation=(2,)), (8, 16, 8), (4, 8, 8)),
    "strided along two axes": (conv(2), (8, 8, 8, 8), (3, 3, 8, 8)),
    "depthwise, two outputs": (conv(feature_group_count=8), (8, 16, 8), (3, 1, 16)),
    "groups": (conv(feature_group_count=2), (8, 16, 8), (3, 4, 8)),
    "batch groups": (conv(batch_group_count=8), (8, 16, 8), (3, 8, 8)),
    "two batch groups": (conv(batch_group_count=2), (8, 16, 8), (3, 8, 8)),
    "one tap": (conv(), (8, 16, 8), (1, 8, 8)),
}


def splits(mesh, shapes) -> Iterator[tuple[Any, list[list[tuple[str, ...]]]]]:
    """Each axis of the mesh shards a dimension of each operand, or none."""
    dimensions = [(None, *range(len(shape))) for shape in shapes]
    for choice in itertools.product(itertools.product(*dimensions), repeat=2):
        axes = [
            [tuple(axis for axis, of in zip("ab", choice, strict=True) if of[i] == d) for d in range(len(shape))]
            for i, shape in enumerate(shapes)
        ]
        counts = [[math.prod(mesh.shape[axis] for axis in each) for each in split] for split in axes]
        if all(n % count == 0 for shape, split in zip(shapes, counts, strict=True) for n, count in zip(shape, split, strict=True)):
            yield mesh, axes


def loss(product, x, w):
    """Return a loss that is not linear in the product."""
    return (product(x, w) ** 2).sum() / 2


# Role -> the function of the operands, and of the result's cotangent.
ROLES: dict[str, Callable] = {
    "forward": lambda product: product,
    "gradients": lambda product: jax.grad(functools.partial(loss, product), (0, 1)),
    "of a cotangent": lambda product: lambda x, w, ct: jax.vjp(product, x, w)[1](ct),
}


@pytest.mark.parametrize(
    ("name", "role", "sample", "accused"),
    [
        *((name, "gradients", 3, True) for name in ("even window", "dilated input", "groups", "batch groups")),
        *((name, "of a cotangent", 6, True) for name in ("strided along two axes", "batch groups")),
        ("two batch groups", "forward", 8, True),
        ("depthwise, two outputs", "forward", 16, True),
        ("one tap", "forward", 3, False),
    ],
)
def test_the_doctor_accuses_what_is_wrong(name, role, sample, accused):
    """Some of the sample are wrong, if the product is one to accuse, and others are right."""
    product, *shapes = PRODUCTS[name]
    rng = np.random.default_rng(0)
    operands = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    if role == "of a cotangent":
        operands.append(rng.integers(-2, 3, jax.eval_shape(product, *operands).shape).astype(np.float32))
    function = ROLES[role](product)
    want = jax.tree.leaves(function(*operands))
    # Seeds of text are the same in every process.
    every = [each for mesh in MESHES for each in splits(mesh, [x.shape for x in operands])]
    seen = []
    for mesh, axes in random.Random(f"{name} {role}").sample(every, sample):
        split = [jax.device_put(x, NamedSharding(mesh, P(*of))) for x, of in zip(operands, axes, strict=True)]
        report = jaxext.doctor(function, platform="cpu", gradients=False)(*split)
        if any(finding.what == "crash" for finding in report.findings):
            continue  # it ends the process
        got = jax.tree.leaves(jax.jit(function)(*split))
        right = all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))
        assert report.ok == right, axes
        seen.append(right)
    assert set(seen) == ({True, False} if accused else {True})
