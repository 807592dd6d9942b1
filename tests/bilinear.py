"""The problems on which transformations and shardings are tested: small, one of each kind, with a label for every axis.

A role of a problem is a function of two arrays, linear in each: `fprop` is the operation, `dgrad` and `wgrad` are its transposes, so
testing the three as functions tests every primitive of a form by itself.  Operands are small integers in float32, on which every order of
summation gives the same result: comparisons are bit for bit.  Truth is lax, on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

import jaxext

OURS = types.SimpleNamespace(dot=jaxext.dot_general, conv=jaxext.conv_general_dilated)
LAX = types.SimpleNamespace(dot=lax.dot_general, conv=lax.conv_general_dilated)
ROLES = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Problem:
    """`call(ops, x, w)` is the operation; `axes` labels the axes of x, w and y: labels that match are split together."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    axes: tuple[str, str, str]
    call: Callable

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def y(self) -> tuple[int, ...]:
        return jax.eval_shape(functools.partial(self.call, LAX), *map(_struct, (self.x, self.w))).shape

    def role(self, role: str, ops=OURS) -> Callable:
        """(x, w) -> y, (y, w) -> x or (x, y) -> w."""
        call = functools.partial(self.call, ops)
        return {
            "fprop": call,
            "dgrad": lambda y, w: jax.linear_transpose(lambda x: call(x, w), _struct(self.x, y.dtype))(y)[0],
            "wgrad": lambda x, y: jax.linear_transpose(lambda w: call(x, w), _struct(self.w, y.dtype))(y)[0],
        }[role]

    def slots(self, role: str) -> tuple[str, str, str]:
        """Both operands and the result."""
        return {"fprop": ("x", "w", "y"), "dgrad": ("y", "w", "x"), "wgrad": ("x", "y", "w")}[role]

    def labels(self, slot: str) -> list[str]:
        return self.axes["xwy".index(slot)].split()

    def operands(self, role: str, *lead: int, dtype: DTypeLike = np.float32) -> tuple[np.ndarray, np.ndarray]:
        """Small integers, with further axes in front."""
        first, second, _ = self.slots(role)
        return integers((*lead, *getattr(self, first)), 0, dtype), integers((*lead, *getattr(self, second)), 1, dtype)


def _struct(shape, dtype: DTypeLike = np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(shape, seed=0, dtype: DTypeLike = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def dot(lhs_contract, rhs_contract, lhs_batch=(), rhs_batch=()):
    dimension_numbers = ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))
    return lambda ops, x, w, **more: ops.dot(x, w, dimension_numbers, **more)


def conv(strides, padding, layout, **kwargs):
    return lambda ops, x, w, **more: ops.conv(x, w, strides, padding, dimension_numbers=layout, **kwargs, **more)


NWC, NHWC, NCHW = ("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
NDHWC = ("NDHWC", "DHWIO", "NDHWC")

# Every labelled axis has a size that 8 divides, so that any mesh axis can split it; G stands for the groups' axis of channels.
DOT = Problem("dot", (8, 16), (16, 24), ("N C", "C K", "N K"), dot((1,), (0,)))
DOT_BATCHED = Problem("dot_batched", (8, 5, 16), (16, 8, 24), ("B . C", "C B K", "B . K"), dot((2,), (0,), (0,), (1,)))
CONV1D = Problem("conv1d", (8, 9, 16), (3, 16, 8), ("N . C", ". C K", "N . K"), conv((2,), [(2, 1)], NWC, rhs_dilation=(2,)))
CAUSAL = Problem("causal", (8, 9, 16), (4, 1, 16), ("N . G", ". . G", "N . G"), conv((1,), [(3, 0)], NWC, feature_group_count=16))
CONV2D = Problem(
    "conv2d", (8, 6, 5, 8), (3, 2, 8, 16), ("N . . C", ". . C K", "N . . K"), conv((2, 1), [(1, 0), (0, 2)], NHWC, rhs_dilation=(1, 2))
)
CONV2D_NCHW = Problem("conv2d_nchw", (8, 8, 5, 4), (16, 8, 3, 3), ("N C . .", "K C . .", "N K . ."), conv((1, 1), "SAME", NCHW))
GROUPED = Problem(
    "grouped", (8, 5, 6, 16), (3, 3, 2, 32), ("N . . G", ". . . G", "N . . G"), conv((2, 1), "SAME", NHWC, feature_group_count=8)
)
DEPTHWISE = Problem(
    "depthwise", (8, 6, 5, 16), (3, 3, 1, 16), ("N . . G", ". . . G", "N . . G"), conv((1, 1), "SAME", NHWC, feature_group_count=16)
)
BATCH_GROUPS = Problem(
    "batch_groups", (16, 4, 3, 8), (3, 3, 8, 16), (". . . C", ". . C .", ". . . ."), conv((1, 1), "SAME", NHWC, batch_group_count=2)
)
TRANSPOSED = Problem("transposed", (8, 4, 3, 8), (3, 3, 8, 8), ("N . . C", ". . C K", "N . . K"),
    conv((1, 1), [(1, 2), (2, 1)], NHWC, lhs_dilation=(2, 2)))  # fmt: skip
CONV3D = Problem("conv3d", (8, 3, 4, 3, 8), (2, 3, 1, 8, 8), ("N . . . C", ". . . C K", "N . . . K"), conv((1, 2, 1), "SAME", NDHWC))

PROBLEMS = (DOT, DOT_BATCHED, CONV1D, CAUSAL, CONV2D, CONV2D_NCHW, GROUPED, DEPTHWISE, BATCH_GROUPS, TRANSPOSED, CONV3D)
# One of each family, where a test is about the transformation and not about the primitive.
FEW = (DOT_BATCHED, CONV2D, GROUPED, DEPTHWISE)


def truth(problem: Problem, role: str, *operands) -> np.ndarray:
    """lax, compiled for one device."""
    return np.asarray(_truth(problem, role)(*map(np.asarray, operands)))


@functools.cache
def _truth(problem, role):
    return jax.jit(problem.role(role, LAX))


def same(got, want) -> None:
    """Trees are equal, bit for bit, in shape and dtype, and finite."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        assert np.isfinite(g).all()
        np.testing.assert_array_equal(g, w)


def close(got, want, rtol) -> None:
    """Trees are equal but for rounding, relative to the largest element of each array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g, w, rtol=0, atol=rtol * max(1.0, np.abs(w).max(initial=0)))
