"""Every operation passes the conformance kit: the whole matrix of transformations, bit for bit against lax in float64, and each declared
split with the collectives that its labels say.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import CAUSAL, CONV2D, DOT, DOT_BATCHED, GROUPED, LAX, NHWC, OURS, TRANSPOSED, Problem, conv, integers, slow
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import testing


def split(problem: Problem, part=None, **axes) -> testing.Split:
    """Labels of a problem split over mesh axes: with an all-reduce where the sum runs over one."""
    x, w, y = (P(*(axes.get(label) for label in problem.labels(slot))) for slot in "xwy")
    summed = tuple(axis for label, axis in axes.items() if label not in problem.labels("y"))
    if not summed:
        return testing.Split((x, w), y, part=part)
    return testing.Split((x, w), y, ("all-reduce",), lambda x, w: lax.psum(problem.call(OURS, x, w), summed))


def grouped(strides, groups):
    """Return the convolution that a device computes of groups of channels that are split."""
    return functools.partial(conv(strides, "SAME", NHWC, feature_group_count=groups), OURS)


# Smaller than bilinear's: XLA's grouped convolutions are slow on CPUs.
FEW_GROUPS = Problem("grouped", (4, 3, 2, 8), (2, 2, 2, 8), GROUPED.axes, conv((2, 1), "SAME", NHWC, feature_group_count=4))

SPLITS = (
    (DOT, [split(DOT, N="x", K="y"), split(DOT, C="x")]),
    (CONV2D, [split(CONV2D, N="x", K="y"), split(CONV2D, C="x")]),
    (FEW_GROUPS, [split(FEW_GROUPS, grouped((2, 1), 1), G="x")]),
    slow(DOT_BATCHED, [split(DOT_BATCHED, B="x", K="y"), split(DOT_BATCHED, C="y")]),
    slow(CAUSAL, [split(CAUSAL, N="x")]),
    slow(TRANSPOSED, [split(TRANSPOSED, N="x")]),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("problem", "splits"), SPLITS, ids=lambda v: str(v) if isinstance(v, Problem) else "")
def test_products(problem, splits):
    report = testing.check_op(
        problem.role("fprop"), problem.role("fprop", LAX), problem.operands("fprop"), tolerance=0, linear=(0, 1), splits=splits
    )
    report.raise_if_failed()
    halves = {name for name in testing.CHECKS if "halves" in name} if problem is FEW_GROUPS else set()  # a device's part has fewer groups
    assert {row.check for row in report.rows if row.outcome == "skipped"} == {"jacfwd", "jacrev", "hessian", *halves}


TRANSPOSE = dict(strides=(2,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"))
OTHERS = {
    "conv_transpose": (functools.partial(jaxext.conv_transpose, **TRANSPOSE), functools.partial(lax.conv_transpose, **TRANSPOSE),
        integers((2, 3, 4)), integers((3, 4, 2), 1)),
    "convolve": (functools.partial(jaxext.convolve, mode="same"), functools.partial(jnp.convolve, mode="same"),
        integers((9,)), integers((4,), 1)),
    "matmul": (jaxext.matmul, jnp.matmul, integers((3, 2, 4)), integers((4, 3), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", [slow("conv_transpose"), slow("convolve"), "matmul"])
def test_operations(name):
    """Small enough for full Jacobians and Hessians."""
    fn, reference, *args = OTHERS[name]
    report = testing.check_op(fn, reference, args, tolerance=0, linear=(0, 1))
    report.raise_if_failed()
    assert {row.detail for row in report.rows if row.outcome == "skipped"} == {"no splits are declared"}


def test_a_function_that_is_not_linear():
    """Several arguments, one of integers, several results, in bfloat16."""

    k = jnp.asarray(integers((4, 5), 1, jnp.bfloat16))

    def attention(q, index):
        scores = jnp.tanh(jaxext.matmul(q, k) / 4)
        return {"scores": scores, "best": jnp.argmax(scores, -1), "scaled": scores * index.astype(scores.dtype)}

    def reference(q, index):
        scores = jnp.tanh((q[:, :, None] * k[None].astype(q.dtype)).sum(1) / 4)
        return {"scores": scores, "best": jnp.argmax(scores, -1), "scaled": scores * index.astype(scores.dtype)}

    args = integers((3, 4), 0, jnp.bfloat16), np.int32(1)
    report = testing.check_op(attention, reference, args, tolerance=0.1)
    report.raise_if_failed()
    assert "16-bit" in report["shard_map over one axis of two"].detail
