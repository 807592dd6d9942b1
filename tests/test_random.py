"""Random convolution geometries and dot dimension numbers against a direct sum in numpy; small integers, so bit for bit.

The sum is over an explicit table of which element of x meets which tap at which output, so it shares nothing with lax or with `Window`.
The gradients of a bilinear operation need no other truth than its values: ⟨ct, op(x, w)⟩ is linear in each operand, so the gradient of the
direct sum is read off by the same table.  Drawn without a clock and without a database: the same examples in every run.
"""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from cases import random
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


def meetings(i, r, stride, low, high, input_dilation, filter_dilation):
    """One axis of a convolution: T[o, i, r] = 1 where output o multiplies element i of the input by tap r of the filter."""
    padded = low + (max(i - 1, 0) * input_dilation + min(i, 1)) + high
    outputs = max(0, (max(padded, 0) - ((r - 1) * filter_dilation + 1)) // stride + 1)
    table = np.zeros((outputs, i, r), np.int64)
    for o, e, t in itertools.product(range(outputs), range(i), range(r)):
        table[o, e, t] = o * stride + t * filter_dilation == e * input_dilation + low
    return table


def convolution(x, w, geometry, feature_groups, batch_groups):
    """The trilinear form's operands and tables for `np.einsum`, as (subscripts of x, w and y; shape of y; tables)."""
    rank = x.ndim - 2
    tables = [meetings(*axis) for axis in zip(x.shape[2:], w.shape[2:], *geometry, strict=True)]
    groups = feature_groups * batch_groups
    inputs, taps, outputs = "abc"[:rank], "def"[:rank], "ghi"[:rank]
    xs = x.reshape(batch_groups, x.shape[0] // batch_groups, feature_groups, x.shape[1] // feature_groups, *x.shape[2:])
    ws = w.reshape(batch_groups, feature_groups, w.shape[0] // groups, *w.shape[1:])
    terms = {"x": ("BNGC" + inputs, xs), "w": ("BGKC" + taps, ws)}
    sums = [(o + i + t, table) for o, i, t, table in zip(outputs, inputs, taps, tables, strict=True)]
    return terms, sums, "NBGK" + outputs, tables


def direct(terms, sums, result):
    subscripts, arrays = zip(*terms, *sums, strict=True)
    return np.einsum(f"{','.join(subscripts)}->{result}", *arrays, optimize=True)


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


def check_convolution(geometry, gradients):
    x_shape, w_shape, window, feature_groups, batch_groups, _ = geometry
    x, w = random(x_shape, np.float64, 1, integers=True), random(w_shape, np.float64, 2, integers=True)
    terms, sums, result, tables = convolution(x, w, window, feature_groups, batch_groups)
    want = direct(terms.values(), sums, result)
    shape = (x_shape[0] // batch_groups, w_shape[0], *(table.shape[0] for table in tables))
    run = convolve(geometry, jaxext.conv_general_dilated)
    if not gradients:
        np.testing.assert_array_equal(jax.jit(run)(x, w), want.reshape(shape))
        return
    y = random(shape, np.float64, 3, integers=True)
    ct = (result, y.reshape(want.shape))
    got = jax.jit(lambda x, w, y: jax.vjp(run, x, w)[1](y))(x, w, y)
    for slot, other, gradient, shape in (("x", "w", got[0], x_shape), ("w", "x", got[1], w_shape)):
        np.testing.assert_array_equal(gradient, direct([terms[other], ct], sums, terms[slot][0]).reshape(shape))


@examples(max_examples=200)
@given(geometries())
def test_convolution(geometry):
    check_convolution(geometry, gradients=False)


@examples(max_examples=80)
@given(geometries())
def test_gradients_of_convolution(geometry):
    check_convolution(geometry, gradients=True)


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


def check_product(product, gradients):
    lhs_shape, rhs_shape, numbers = product
    lhs, rhs = random(lhs_shape, np.float64, 1, integers=True), random(rhs_shape, np.float64, 2, integers=True)
    (lc, rc), (lb, rb) = numbers
    letters = iter("abcdefghijkl")
    lhs_axes = [next(letters) for _ in lhs_shape]
    rhs_axes = [next(letters) for _ in rhs_shape]
    for i, j in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        rhs_axes[j] = lhs_axes[i]
    free = [a for i, a in enumerate(lhs_axes) if i not in (*lc, *lb)] + [a for i, a in enumerate(rhs_axes) if i not in (*rc, *rb)]
    a, b, c = "".join(lhs_axes), "".join(rhs_axes), "".join([lhs_axes[i] for i in lb] + free)
    want = np.einsum(f"{a},{b}->{c}", lhs, rhs)
    run = functools.partial(jaxext.dot_general, dimension_numbers=numbers)
    if not gradients:
        np.testing.assert_array_equal(jax.jit(run)(lhs, rhs), want)
        return
    ct = random(want.shape, np.float64, 3, integers=True)
    got = jax.jit(lambda lhs, rhs, ct: jax.vjp(run, lhs, rhs)[1](ct))(lhs, rhs, ct)
    np.testing.assert_array_equal(got[0], np.einsum(f"{c},{b}->{a}", ct, rhs))
    np.testing.assert_array_equal(got[1], np.einsum(f"{a},{c}->{b}", lhs, ct))


@examples(max_examples=180)
@given(products())
def test_dot_general(product):
    check_product(product, gradients=False)


@examples(max_examples=80)
@given(products())
def test_gradients_of_dot_general(product):
    check_product(product, gradients=True)


@pytest.mark.parametrize("strategy", [geometries(), products()], ids=["convolution", "dot_general"])
def test_the_examples_are_many_and_different(strategy):
    """A strategy that degenerates would leave the tests above green."""
    seen = set()

    @examples(max_examples=100)
    @given(strategy)
    def draw(problem):
        seen.add(repr(problem))

    draw()
    assert len(seen) >= 80


def test_the_direct_sum_is_lax_convolution():
    """The table against lax itself, once: negative padding, both dilations, groups."""
    x, w = random((2, 4, 5, 4), np.float64, 1, integers=True), random((6, 2, 3, 2), np.float64, 2, integers=True)
    geometry = (x.shape, w.shape, ((2, 1), (-1, 2), (3, -1), (2, 3), (1, 2)), 2, 1, (range(4),) * 3)
    terms, sums, result, _ = convolution(x, w, geometry[2], 2, 1)
    want = convolve(geometry, lax.conv_general_dilated)(x, w)
    assert math.prod(want.shape) > 0
    np.testing.assert_array_equal(direct(terms.values(), sums, result).reshape(want.shape), want)
