"""The named problems that every test and benchmark of values draws from, and the one way to judge a result.

Truth is lax (or numpy) in float64 on the same operands, cast up; a result may be off by a small multiple of what lax itself is off at
that dtype.  Integers and booleans have no tolerance.  It must not know jaxext: an operation is passed in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from direct_sum import Convolution, Product
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxext import testing


@dataclasses.dataclass(frozen=True, eq=False)
class ConvCase:
    """A call of `lax.conv_general_dilated`."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    kwargs: Mapping[str, Any]

    def run(self, op: Callable, x, w, **more):
        return op(x, w, **self.kwargs, **more)

    def operands(self, dtype, seed: int = 0, integers: bool = False) -> tuple[Any, Any]:
        return random(self.x, dtype, seed, integers), random(self.w, dtype, seed + 1, integers)

    @property
    def op(self) -> Callable:
        return lax.conv_general_dilated

    @property
    def direct(self) -> Convolution:
        """Its definition."""
        given = dict(self.kwargs)
        layouts = lax.conv_dimension_numbers(self.x, self.w, given["dimension_numbers"])
        sizes, taps = ([shape[axis] for axis in layout[2:]] for shape, layout in ((self.x, layouts[0]), (self.w, layouts[1])))
        ones = (1,) * len(sizes)
        strides, input_dilation, filter_dilation = (given.get(name, ones) for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
        padding = given["padding"]
        if isinstance(padding, str):
            dilated = [(r - 1) * d + 1 for r, d in zip(taps, filter_dilation, strict=True)]
            padding = lax.padtype_to_pads(sizes, dilated, strides, padding)
        groups = given.get("feature_group_count", 1), given.get("batch_group_count", 1)
        return Convolution(self.x, self.w, strides, padding, input_dilation, filter_dilation, *groups, (layouts[0], layouts[1], layouts[2]))


@dataclasses.dataclass(frozen=True, eq=False)
class DotCase:
    """A call of `lax.dot_general`."""

    name: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dimension_numbers: tuple

    def run(self, op: Callable, lhs, rhs, **more):
        return op(lhs, rhs, self.dimension_numbers, **more)

    def operands(self, dtype, seed: int = 0, integers: bool = False) -> tuple[Any, Any]:
        return random(self.lhs, dtype, seed, integers), random(self.rhs, dtype, seed + 1, integers)

    @property
    def op(self) -> Callable:
        return lax.dot_general

    @property
    def direct(self) -> Product:
        """Its definition."""
        return Product.of(self.lhs, self.rhs, self.dimension_numbers)


def random(shape, dtype, seed: int = 0, integers: bool = False) -> Any:
    """Normal numbers; integers, and whatever `integers` asks for, are small enough for exact sums in every dtype but the 8-bit ones."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype == np.bool_:
        return rng.random(shape) < 0.3

    def draw():
        if integers or jnp.issubdtype(dtype, jnp.integer):
            return rng.integers(0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -3, 4, shape)
        return np.asarray(rng.normal(size=shape))

    x = draw()
    return (x + 1j * draw() if jnp.issubdtype(dtype, jnp.complexfloating) else x).astype(dtype)


def wide(x) -> Any:
    """The same numbers in the dtype in which truth is computed."""
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else np.int64)


def truth(case, *operands) -> np.ndarray:
    """lax in float64, complex128 or int64."""
    return np.asarray(case.run(case.op, *map(wide, operands)))


def check(got, lax_value, truth64, multiple: float = 4) -> None:
    """`got` has lax's shape and dtype, and is as near to the truth as lax, up to `multiple`; one rounding of the result is free.

    Where lax is wrong outright (XLA's CPU convolution with negative padding before jaxlib 0.12) its error is no excuse.
    """
    got, lax_value, truth64 = np.asarray(got), np.asarray(lax_value), np.asarray(truth64)
    assert got.shape == lax_value.shape == truth64.shape
    assert got.dtype == lax_value.dtype
    if not jnp.issubdtype(got.dtype, jnp.inexact):  # integers wrap, a sum of booleans is "any"
        np.testing.assert_array_equal(got, truth64.astype(got.dtype))
        return
    assert np.isfinite(wide(got)).all()
    if not got.size:
        return
    scale = float(np.abs(truth64).max())
    rounding = float(jnp.finfo(got.dtype).eps) * scale
    error, error_of_lax = (float(np.abs(wide(y) - truth64).max()) for y in (got, lax_value))
    allowed = multiple * max(min(error_of_lax, scale / 64), rounding)
    assert error <= allowed, f"error {error:.3g}, lax {error_of_lax:.3g}, scale {scale:.3g}"


def check_second_derivatives(ours: Callable, plain: Callable, *args) -> None:
    """The hessian, forward over reverse and reverse over reverse, of a loss of float64 operands is that of `plain`."""
    loss, all_of_them = (lambda f: lambda *args: jnp.sin(f(*args)).sum()), tuple(range(len(args)))
    want = jax.jit(jax.hessian(loss(plain), all_of_them))(*args)
    for derivative in (jax.hessian(loss(ours), all_of_them), jax.jacrev(jax.jacrev(loss(ours), all_of_them), all_of_them)):
        for got, true in zip(jax.tree.leaves(jax.jit(derivative)(*args)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, true, rtol=1e-10, atol=1e-12)


def other_checks(*checks: str) -> dict[str, str]:
    """The `skip` of `check_op` that leaves these checks: each program costs seconds."""
    return {name: "not in this test" for name in testing.CHECKS if name not in checks}


def equations(fun: Callable, *args) -> list:
    """Every equation of `fun`, those of programs within it included: what jit inlines depends on the version."""
    found = []

    def visit(value):
        if isinstance(value, Jaxpr | ClosedJaxpr):
            for eqn in value.eqns:
                found.append(eqn)
                visit(tuple(eqn.params.values()))
        elif isinstance(value, tuple | list):
            for inner in value:
                visit(inner)

    visit(jax.make_jaxpr(fun)(*args))
    return found


def _conv(name, x, w, strides=None, padding: Any = "SAME", layout=None, **kwargs) -> ConvCase:
    """Channels last unless a layout is given."""
    space = "DHW"[-(len(x) - 2) :] if len(x) > 2 else ""
    layout = layout or (f"N{space}C", f"{space}IO", f"N{space}C")
    kwargs |= {"window_strides": strides or (1,) * (len(x) - 2), "padding": padding, "dimension_numbers": layout}
    return ConvCase(name, x, w, MappingProxyType(kwargs))


CONVS: tuple[ConvCase, ...] = (
    _conv("1x1", (2, 5, 5, 3), (1, 1, 3, 4)),
    _conv("3x3_same", (2, 6, 5, 3), (3, 3, 3, 4)),
    _conv("7x7_stride2_rgb", (1, 11, 9, 3), (7, 7, 3, 4), (2, 2)),
    _conv("1x1_stride2", (2, 5, 6, 3), (1, 1, 3, 4), (2, 2), "VALID"),
    _conv("stride_above_filter", (1, 9, 8, 2), (2, 2, 2, 3), (3, 3), "VALID"),
    _conv("same_lower", (1, 6, 6, 2), (4, 4, 2, 3), (2, 2), "SAME_LOWER"),
    _conv("asymmetric_padding", (1, 5, 6, 2), (3, 2, 2, 3), (2, 1), ((0, 3), (2, 1))),
    _conv("negative_padding", (1, 9, 8, 2), (3, 3, 2, 3), (1, 2), ((-2, 1), (1, -3))),
    _conv("padding_beyond_filter", (1, 4, 3, 2), (2, 2, 2, 2), (1, 1), ((4, 5), (3, 0))),
    _conv("crop_to_nothing", (1, 4, 5, 2), (3, 3, 2, 2), (1, 1), ((-2, -2), (0, 0))),
    _conv("filter_dilated", (1, 9, 8, 2), (3, 3, 2, 3), (1, 1), "SAME", rhs_dilation=(2, 3)),
    _conv("input_dilated", (1, 5, 4, 2), (3, 3, 2, 3), (1, 1), ((2, 2), (1, 2)), lhs_dilation=(2, 3)),
    _conv("everything", (2, 7, 6, 4), (3, 2, 2, 6), (2, 3), ((-1, 3), (2, -1)),
          lhs_dilation=(3, 2), rhs_dilation=(2, 1), feature_group_count=2),
    _conv("strided_negative_dilated", (1, 7, 7, 1), (2, 3, 1, 2), (3, 2), ((-2, -1), (-1, -2)), lhs_dilation=(2, 2)),
    _conv("depthwise_3x3", (2, 7, 6, 8), (3, 3, 1, 8), feature_group_count=8),
    _conv("depthwise_multiplier_stride2", (2, 7, 6, 4), (3, 3, 1, 8), (2, 2), feature_group_count=4),
    _conv("grouped", (2, 6, 5, 8), (3, 3, 4, 6), feature_group_count=2),
    _conv("grouped_one_filter_each", (2, 5, 5, 6), (3, 3, 2, 3), feature_group_count=3),
    _conv("batch_groups", (6, 5, 4, 3), (3, 3, 3, 6), batch_group_count=3),
    _conv("batch_groups_stride2", (4, 6, 5, 2), (3, 3, 2, 4), (2, 2), batch_group_count=2),
    _conv("nchw", (2, 3, 6, 5), (4, 3, 3, 2), layout=("NCHW", "OIHW", "NCHW")),
    _conv("chwn", (3, 6, 5, 2), (3, 3, 2, 4), layout=("CHWN", "IHWO", "CHWN")),
    _conv("mixed_layouts", (6, 2, 3, 5), (4, 3, 2, 3), (2, 1), layout=("HNCW", "OWHI", "CWNH")),
    _conv("nchw_depthwise", (2, 4, 6, 5), (4, 1, 3, 3), layout=("NCHW", "OIHW", "NCHW"), feature_group_count=4),
    _conv("1d", (2, 9, 3), (3, 3, 4), (2,)),
    _conv("1d_causal_depthwise", (2, 9, 8), (4, 1, 8), (1,), ((3, 0),), feature_group_count=8),
    _conv("1d_wide_filter", (1, 5, 2), (8, 2, 3), (1,), ((7, 7),)),
    _conv("3d", (1, 4, 5, 4, 2), (2, 3, 2, 2, 3), (2, 1, 1)),
    _conv("3d_depthwise", (1, 4, 3, 4, 4), (2, 2, 3, 1, 4), feature_group_count=4),
    _conv("0d", (3, 4), (4, 5), (), (), layout=("NC", "IO", "NC")),
    _conv("size_one", (1, 1, 1, 1), (1, 1, 1, 1)),
    _conv("filter_beyond_input", (1, 2, 2, 2), (3, 3, 2, 2), (1, 1), "VALID"),
    _conv("no_batch", (0, 5, 5, 2), (3, 3, 2, 3)),
    _conv("no_input_channels", (2, 5, 5, 0), (3, 3, 0, 3)),
    _conv("no_output_channels", (2, 5, 5, 2), (3, 3, 2, 0)),
    _conv("no_rows", (2, 0, 5, 2), (3, 3, 2, 3), (1, 1), ((2, 2), (1, 1))),
)  # fmt: skip

DOTS: tuple[DotCase, ...] = (
    DotCase("nn", (5, 3), (3, 4), (((1,), (0,)), ((), ()))),
    DotCase("nt", (5, 3), (4, 3), (((1,), (1,)), ((), ()))),
    DotCase("tn", (3, 5), (3, 4), (((0,), (0,)), ((), ()))),
    DotCase("tt", (3, 5), (4, 3), (((0,), (1,)), ((), ()))),
    DotCase("odd", (17, 31), (31, 13), (((1,), (0,)), ((), ()))),
    DotCase("batched", (2, 5, 3), (2, 3, 4), (((2,), (1,)), ((0,), (0,)))),
    DotCase("batched_tn", (2, 3, 5), (2, 3, 4), (((1,), (1,)), ((0,), (0,)))),
    DotCase("batch_last", (5, 3, 2), (3, 4, 2), (((1,), (0,)), ((2,), (2,)))),
    DotCase("two_batches_crossed", (2, 5, 7, 3), (7, 3, 2, 4), (((3,), (1,)), ((0, 2), (2, 0)))),
    DotCase("two_contracted_crossed", (3, 5, 2), (2, 4, 3), (((0, 2), (2, 0)), ((), ()))),
    DotCase("contracted_between_free", (4, 3, 2, 5), (6, 3, 5, 2), (((1, 3), (1, 2)), ((), ()))),
    DotCase("everything", (2, 3, 4, 5, 2), (5, 2, 3, 2, 3), (((1, 3), (2, 0)), ((0, 4), (1, 3)))),
    DotCase("outer", (4,), (3,), (((), ()), ((), ()))),
    DotCase("outer_batched", (2, 4), (2, 3), (((), ()), ((0,), (0,)))),
    DotCase("inner", (6,), (6,), (((0,), (0,)), ((), ()))),
    DotCase("elementwise", (3, 4), (3, 4), (((), ()), ((0, 1), (0, 1)))),
    DotCase("matrix_vector", (4, 3), (3,), (((1,), (0,)), ((), ()))),
    DotCase("vector_matrix", (3,), (3, 4), (((0,), (0,)), ((), ()))),
    DotCase("scalars", (), (), (((), ()), ((), ()))),
    DotCase("scalar_times_matrix", (), (3, 4), (((), ()), ((), ()))),
    DotCase("all_contracted", (3, 4), (4, 3), (((0, 1), (1, 0)), ((), ()))),
    DotCase("size_one", (1, 1), (1, 1), (((1,), (0,)), ((), ()))),
    DotCase("no_rows", (0, 3), (3, 4), (((1,), (0,)), ((), ()))),
    DotCase("nothing_contracted", (2, 0), (0, 4), (((1,), (0,)), ((), ()))),
    DotCase("no_batch", (0, 2, 3), (0, 3, 4), (((2,), (1,)), ((0,), (0,)))),
)

CASES: tuple[ConvCase | DotCase, ...] = (*CONVS, *DOTS)


@functools.cache
def named(name: str) -> ConvCase | DotCase:
    """The one case of that name; a convolution's may be told apart from a product's by "conv:" or "dot:" in front."""
    kind, _, rest = name.rpartition(":")
    pool = {"conv": CONVS, "dot": DOTS, "": CASES}[kind]
    (case,) = (case for case in pool if case.name == rest)
    return case
