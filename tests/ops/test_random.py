"""Random convolution geometries and dot dimension numbers against a direct sum in numpy; small integers, so bit for bit.

The direct sum shares nothing with lax or with `Window`.  The examples are drawn without a clock and without a database: they are the same
in every run.  Ten are one program, with value and gradients of each, because compiling takes most of the time.
"""

import functools
import math

import jax
import numpy as np
import pytest
from cases import random
from direct_sum import Convolution, Product
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxext

examples = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def geometries(draw):
    """A convolution that lax takes, NCHW: sizes, window, groups, and a permutation of the axes of each array."""
    rank = draw(st.integers(1, 3))

    def each(values):
        return draw(st.tuples(*(values,) * rank))

    kind = draw(st.sampled_from(["plain", "feature", "depthwise", "batch"]))
    groups = 1 if kind == "plain" else draw(st.integers(2, 3))
    per_group = 1 if kind == "depthwise" else draw(st.integers(1, 2))
    feature_groups, batch_groups = (1, groups) if kind == "batch" else (groups, 1)
    batch = draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 2)) * batch_groups
    inputs, taps = each(st.integers(1, 5)), each(st.integers(1, 3))
    strides, lows, highs = (each(st.integers(*bounds)) for bounds in ((1, 3), (-2, 3), (-2, 3)))
    lows = tuple(max(low, -i) for low, i in zip(lows, inputs, strict=True))  # lax refuses to crop more than there is
    highs = tuple(max(high, -i - low) for low, high, i in zip(lows, highs, inputs, strict=True))
    window = strides, lows, highs, each(st.integers(1, 3 if rank < 3 else 2)), each(st.integers(1, 2))
    layouts = tuple(draw(st.permutations(range(rank + 2))) for _ in range(3))
    return (
        (batch, per_group * feature_groups, *inputs),
        (draw(st.integers(1, 2)) * groups, per_group, *taps),
        window,
        feature_groups,
        batch_groups,
        layouts,
    )


def truth(geometry):
    x, w, (strides, lows, highs, input_dilation, filter_dilation), *groups, _ = geometry
    return Convolution(x, w, strides, list(zip(lows, highs, strict=True)), input_dilation, filter_dilation, *groups)


def convolve(geometry, op):
    """`op` on NCHW operands, given to it in the drawn layouts."""
    _, _, (strides, lows, highs, input_dilation, filter_dilation), feature_groups, batch_groups, layouts = geometry
    numbers = lax.ConvDimensionNumbers(*(tuple(np.argsort(layout).tolist()) for layout in layouts))

    def run(x, w):
        y = op(
            x.transpose(layouts[0]),
            w.transpose(layouts[1]),
            strides,
            list(zip(lows, highs, strict=True)),
            input_dilation,
            filter_dilation,
            numbers,
            feature_groups,
            batch_groups,
        )
        return y.transpose(numbers.out_spec)

    return run


def of_convolution(geometry):
    """The function of two operands, and the direct sum."""
    return convolve(geometry, jaxext.conv_general_dilated), truth(geometry)


def check(problems):
    """Value and both gradients of each, given as a function and its direct sum."""
    operands = [
        [random(shape, np.float64, i, integers=True) for i, shape in enumerate((direct.x, direct.w, direct.output))]
        for _, direct in problems
    ]

    @jax.jit
    def program(operands):
        results = []
        for (run, _), (x, w, ct) in zip(problems, operands, strict=True):
            y, pullback = jax.vjp(run, x, w)
            results.append((y, *pullback(ct)))
        return results

    for (_, direct), (x, w, ct), got in zip(problems, operands, program(operands), strict=True):
        for name, result, want in zip(
            ("value", "gradient of x", "gradient of w"), got, (direct.y(x, w), direct.dx(ct, w), direct.dw(x, ct)), strict=True
        ):
            np.testing.assert_array_equal(result, want, err_msg=f"{name} of {direct}")


def several(strategy):
    """The problems of one program."""
    return st.lists(strategy, min_size=10, max_size=10)


@examples(max_examples=4)
@given(several(geometries()))
def test_convolution(problems):
    check([of_convolution(geometry) for geometry in problems])


@st.composite
def products(draw):
    """Shapes and dimension numbers of a dot_general, each operand's axes in any order."""
    size = st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 3)
    sizes = {kind: draw(st.lists(size, max_size=2)) for kind in ("batch", "contracted", "lhs", "rhs")}

    def shuffled(free):
        return draw(st.permutations([(kind, i) for kind in ("batch", "contracted", free) for i in range(len(sizes[kind]))]))

    operands = shuffled("lhs"), shuffled("rhs")

    def where(kind):
        return tuple(tuple(axes.index((kind, i)) for i in range(len(sizes[kind]))) for axes in operands)

    shapes = (tuple(sizes[kind][i] for kind, i in axes) for axes in operands)
    return *shapes, (where("contracted"), where("batch"))


def of_product(product):
    """The function of two operands, and the direct sum."""
    lhs, rhs, numbers = product
    return functools.partial(jaxext.dot_general, dimension_numbers=numbers), Product.of(lhs, rhs, numbers)


@examples(max_examples=4)
@given(several(products()))
def test_dot_general(problems):
    check([of_product(product) for product in problems])


@pytest.mark.parametrize("strategy", [geometries(), products()], ids=["convolution", "dot_general"])
def test_the_examples_are_many_and_different(strategy):
    """A strategy that degenerates would leave the tests above green."""
    seen = set()

    @examples(max_examples=4)
    @given(several(strategy))
    def draw(problems):
        seen.update(map(repr, problems))

    draw()
    assert len(seen) >= 30


def test_the_direct_sum_is_lax_convolution():
    """The truth against lax itself, once: negative padding, both dilations, groups."""
    x, w = random((2, 4, 5, 4), np.float64, 1, integers=True), random((6, 2, 3, 2), np.float64, 2, integers=True)
    geometry = (x.shape, w.shape, ((2, 1), (-1, 2), (3, -1), (2, 3), (1, 2)), 2, 1, (range(4),) * 3)
    want = convolve(geometry, lax.conv_general_dilated)(x, w)
    assert math.prod(want.shape) > 0
    np.testing.assert_array_equal(truth(geometry).y(x, w), want)
