"""jax's own catalogue of products, run on ours: each of its `dot_general` and `conv_general_dilated` harnesses against a direct sum.

The catalogue is inside the jax wheel and has no public name: this file and jaxext/_compat.py are the only importers of `jax._src`.  It
compares nothing with anything by itself.
"""

from typing import Any

import jax
import numpy as np
import pytest
from cases import check, wide
from direct_sum import Convolution, Product
from jax import lax
from jax._src.internal_test_util.test_harnesses import all_harnesses

import jaxext

HARNESSES = {
    primitive: [harness for harness in all_harnesses if harness.group_name == primitive.name]
    for primitive in (lax.dot_general_p, lax.conv_general_dilated_p)
}
OURS = {lax.dot_general_p: "matmul_", lax.conv_general_dilated_p: "conv"}
SIZE = 20  # calls in a program: compiling takes most of the time


def direct(eqn):
    """The definition of a call of lax."""
    (x, w), given = (v.aval.shape for v in eqn.invars), eqn.params
    if eqn.primitive is lax.dot_general_p:
        return Product.of(x, w, given["dimension_numbers"])
    return Convolution(
        x,
        w,
        given["window_strides"],
        given["padding"],
        given["lhs_dilation"],
        given["rhs_dilation"],
        given["feature_group_count"],
        given["batch_group_count"],
        given["dimension_numbers"],
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("primitive", "first"), [pytest.param(p, i, id=f"{p.name}-{i}") for p, all in HARNESSES.items() for i in range(0, len(all), SIZE)]
)
def test_harnesses(primitive, first):
    harnesses = HARNESSES[primitive][first : first + SIZE]
    args = [harness.dyn_args_maker(np.random.RandomState(0)) for harness in harnesses]
    everything = lambda args: [harness.dyn_fun(*of) for harness, of in zip(harnesses, args, strict=True)]
    calls = jax.make_jaxpr(everything)(args).eqns
    assert [eqn.primitive for eqn in calls] == [primitive] * len(harnesses)
    by_lax = jax.jit(lambda args: everything(args))(args)
    with jaxext.in_place_of_lax():
        rows = jaxext.explain(everything)(args).rows
        got = jax.jit(lambda args: everything(args))(args)
    assert sum(row.times for row in rows) == len(harnesses) and all(row.op.startswith(OURS[primitive]) for row in rows)
    for harness, call, (x, w), y, y_lax in zip(harnesses, calls, args, got, by_lax, strict=True):
        try:
            check(y, y_lax, direct(call).y(wide(x), wide(w)))
        except AssertionError as error:
            error.add_note(harness.fullname)
            raise


def test_the_catalogue_is_there():
    """Should a jax rename its groups, no harness would be run and none would fail."""
    assert len(HARNESSES[lax.dot_general_p]) >= 246
    assert len(HARNESSES[lax.conv_general_dilated_p]) >= 110


def test_the_direct_sum_is_lax_convolution():
    """No harness crops by negative padding with both dilations and groups."""
    rng = np.random.default_rng(0)
    x: Any = rng.integers(-4, 5, (2, 4, 5, 4)).astype(float)
    w: Any = rng.integers(-4, 5, (6, 2, 3, 2)).astype(float)
    how: Any = ((2, 1), ((-1, 2), (3, -1)), (2, 3), (1, 2), 2, 1, lax.ConvDimensionNumbers(*((0, 1, 2, 3),) * 3))
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count", "dimension_numbers")
    want = lax.conv_general_dilated(x, w, **dict(zip(names, how, strict=True)))
    assert want.size > 0
    np.testing.assert_array_equal(Convolution(x.shape, w.shape, *how).y(x, w), want)
