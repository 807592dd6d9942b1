"""Values of every operation and of both its gradients, against float64, in every dtype, precision, layout and geometry that lax takes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, CONVS, DOTS, ConvCase, check, equations, named, random, wide
from jax import lax

import jaxext

F8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def ours(case):
    return jaxext.conv_general_dilated if isinstance(case, ConvCase) else jaxext.dot_general


@functools.cache
def program(op, case, **kwargs):
    """(cotangent, *operands) -> the case's result and both gradients, compiled once per dtype for all tests."""
    return jax.jit(functools.partial(value_and_gradients, functools.partial(case.run, op, **kwargs)))


def value_and_gradients(run, ct, *operands):
    """The result and the cotangents of both operands, for a cotangent that is cast to the result's dtype."""
    y, pull = jax.vjp(run, *operands)
    return y, *pull(ct.astype(y.dtype))


def cotangent(case, operands, dtype, integers=False):
    shape = jax.eval_shape(functools.partial(case.run, case.op), *map(wide, operands)).shape
    return random(shape, dtype, 7, integers)


@by_name(CASES)
def test_every_case_with_its_gradients(case):
    """float32 against float64; and bfloat16 to float32, which lax's convolution cannot differentiate, on integers, bit for bit."""
    check_against_lax(case, np.float32)
    args = case.operands(jnp.bfloat16, integers=True)
    ct = cotangent(case, args, np.float32, integers=True)
    exact = program(case.op, case)(wide(ct), *map(wide, args))
    got = program(ours(case), case, preferred_element_type=np.float32)(ct, *args)
    for y, true, dtype in zip(got, exact, (np.float32, jnp.bfloat16, jnp.bfloat16), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y), np.asarray(true).astype(dtype))


def check_against_lax(case, dtype, **kwargs):
    args = case.operands(dtype)
    ct = cotangent(case, args, dtype)
    got, by_lax = (program(op, case, **kwargs)(ct, *args) for op in (ours(case), case.op))
    for y, y_lax, true in zip(got, by_lax, program(case.op, case)(wide(ct), *map(wide, args)), strict=True):
        check(y, y_lax, true)


# Between them these run every algorithm of the `xla` implementation, and every role of both families.
OF_ALL_DTYPES = ("conv:everything", "depthwise_multiplier_stride2", "grouped", "batch_groups_stride2", "dot:everything", "batched_tn")


@by_name([named(name) for name in OF_ALL_DTYPES])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16, *F8, np.complex64, np.complex128], ids=lambda d: np.dtype(d).name)
def test_dtypes(case, dtype):
    check_against_lax(case, dtype)


@by_name([named(name) for name in OF_ALL_DTYPES])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.bool_], ids=lambda d: np.dtype(d).name)
def test_integers_and_booleans_are_exact(case, dtype):
    args = case.operands(dtype)
    check(case.run(ours(case), *args), case.run(case.op, *args), case.run(case.op, *map(wide, args)))


@by_name([named(name) for name in ("grouped", "depthwise_3x3", "conv:everything", "tt", "dot:everything")])
@pytest.mark.parametrize(
    ("dtype", "preferred"),
    [(np.int8, np.int32), (np.uint8, np.uint32), (np.float16, np.float32), (jnp.float8_e4m3fn, np.float32), (np.float32, np.float64)],
    ids=lambda d: np.dtype(d).name,
)
def test_wider_results(case, dtype, preferred):
    """The sum is taken in the wider dtype: small integers stay exact in it, where the operands' own dtype would wrap or round."""
    args = case.operands(dtype, integers=True)
    got, by_lax = (case.run(op, *args, preferred_element_type=preferred) for op in (ours(case), case.op))
    assert got.dtype == by_lax.dtype == preferred
    np.testing.assert_array_equal(got, case.run(case.op, *map(wide, args)).astype(preferred))


@pytest.mark.parametrize(
    ("lhs", "rhs", "preferred"),
    [
        (np.float32, jnp.bfloat16, np.float32),
        (jnp.bfloat16, np.float32, None),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16),
        (np.int8, np.int32, np.int32),
        (np.float32, np.int8, np.float32),
        (np.float32, np.complex64, np.complex64),
        (np.float64, np.float32, None),
    ],
)
def test_dot_general_of_mixed_dtypes(lhs, rhs, preferred):
    """lax takes operands of two dtypes; so do we, and the gradient of each has its own."""
    case = named("batched_tn")
    args = case.operands(lhs)[0], case.operands(rhs)[1]
    run = functools.partial(case.run, preferred_element_type=preferred)
    got, by_lax = (run(op, *args) for op in (jaxext.dot_general, lax.dot_general))
    true = case.run(lax.dot_general, *(wide(x).astype(np.result_type(*map(wide, args))) for x in args))
    check(got, by_lax, true)
    if all(jnp.issubdtype(d, jnp.floating) for d in (lhs, rhs)):
        ct = np.ones_like(got)
        _, *gradients = value_and_gradients(functools.partial(run, jaxext.dot_general), ct, *args)
        _, *true = value_and_gradients(functools.partial(case.run, lax.dot_general), wide(ct), *map(wide, args))
        _, *by_lax = value_and_gradients(functools.partial(run, lax.dot_general), ct, *args)
        for y, y_lax, t in zip(gradients, by_lax, true, strict=True):
            check(y, y_lax, t)


PRECISIONS = [
    lax.Precision.HIGHEST,
    "highest",
    "tensorfloat32",
    ("float32", "default"),
    (lax.Precision.HIGH, lax.Precision.DEFAULT),
    lax.DotAlgorithmPreset.F32_F32_F32,
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    lax.DotAlgorithmPreset.F64_F64_F64,
    "F32_F32_F32",
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision(precision):
    """Every spelling reaches the product, and those of its gradients, as lax canonicalises it; the values are as good as lax's."""
    case = named("tn")
    check_against_lax(case, np.float32, precision=precision)
    args = case.operands(np.float32)
    ct = cotangent(case, args, np.float32)
    runs = (functools.partial(case.run, op, precision=precision) for op in (ours(case), case.op))
    found, of_lax = ([eqn.params["precision"] for eqn in products(functools.partial(value_and_gradients, run), ct, *args)] for run in runs)
    assert found == [of_lax[0]] * 3


def products(fun, *args):
    """The equations of `fun` that carry a precision: products, whoever made them."""
    return [eqn for eqn in equations(fun, *args) if "precision" in eqn.params]


@by_name([named("grouped"), named("nn")])
def test_default_matmul_precision(case):
    args = case.operands(np.float32)
    for precision in ("bfloat16", "float32", "F32_F32_F32"):
        with jax.default_matmul_precision(precision):
            (eqn,), (of_lax,) = (products(functools.partial(case.run, op), *args) for op in (ours(case), case.op))
        assert eqn.params["precision"] == of_lax.params["precision"] is not None


def test_convolution_precision():
    case = named("3x3_same")
    args = case.operands(np.float32)
    for precision in ("highest", ("default", "high"), lax.DotAlgorithmPreset.F32_F32_F32):
        got, by_lax = (case.run(op, *args, precision=precision) for op in (ours(case), case.op))
        check(got, by_lax, case.run(case.op, *map(wide, args)))
        (eqn,), (of_lax,) = (products(functools.partial(case.run, op, precision=precision), *args) for op in (ours(case), case.op))
        assert eqn.params["precision"] == of_lax.params["precision"]


def test_four_spatial_axes():
    numbers = lax.ConvDimensionNumbers((0, 5, 1, 2, 3, 4), (5, 4, 0, 1, 2, 3), (0, 5, 1, 2, 3, 4))
    x, w = random((2, 3, 4, 2, 3, 2), np.int32), random((2, 2, 1, 3, 2, 3), np.int32)
    got, want = (
        op(x, w, (1, 2, 1, 1), "SAME", dimension_numbers=numbers) for op in (jaxext.conv_general_dilated, lax.conv_general_dilated)
    )
    np.testing.assert_array_equal(got, want)


@by_name([named("mixed_layouts"), named("chwn"), named("1d")])
def test_dimension_numbers_objects(case):
    """Strings, a tuple of lists of axes and `ConvDimensionNumbers` say the same."""
    args = case.operands(np.int32)
    numbers = lax.conv_dimension_numbers(case.x, case.w, case.kwargs["dimension_numbers"])
    want = case.run(lax.conv_general_dilated, *args)
    for spelled in (numbers, case.kwargs["dimension_numbers"], list(case.kwargs["dimension_numbers"])):
        np.testing.assert_array_equal(ours(case)(*args, **(dict(case.kwargs) | {"dimension_numbers": spelled})), want)


TRANSPOSED = [
    ("same", (2, 2), "SAME", {}),
    ("valid", (2, 3), "VALID", {}),
    ("stride_above_filter", (4, 5), "VALID", {}),
    ("unit_stride", (1, 1), "SAME", {}),
    ("pairs", (2, 2), ((1, 2), (0, 3)), {}),
    ("negative_pairs", (2, 2), ((-1, 2), (0, -1)), {}),
    ("dilated", (2, 1), "SAME", dict(rhs_dilation=(1, 2))),
    ("transpose_kernel", (2, 2), "SAME", dict(transpose_kernel=True)),
    ("consistent", (2, 2), ((1, 0), (0, 1)), dict(use_consistent_padding=True)),
    ("consistent_same", (2, 3), "SAME", dict(use_consistent_padding=True, transpose_kernel=True)),
    ("nchw", (2, 2), "SAME", dict(dimension_numbers=("NCHW", "OIHW", "NCHW"))),
]


@pytest.mark.parametrize(("strides", "padding", "kwargs"), [t[1:] for t in TRANSPOSED], ids=[t[0] for t in TRANSPOSED])
def test_conv_transpose(strides, padding, kwargs):
    x, w = {
        (False, False): ((2, 4, 5, 3), (3, 4, 3, 2)),
        (False, True): ((2, 4, 5, 3), (3, 4, 2, 3)),
        (True, False): ((2, 3, 4, 5), (2, 3, 3, 4)),
    }["dimension_numbers" in kwargs, "transpose_kernel" in kwargs]
    check_like(jaxext.conv_transpose, lax.conv_transpose, (x, w), strides=strides, padding=padding, **kwargs)


def test_conv():
    check_like(jaxext.conv, lax.conv, ((2, 3, 5, 4), (4, 3, 3, 2)), window_strides=(2, 1), padding="SAME")
    check_like(jaxext.conv, lax.conv, ((2, 3, 7), (4, 3, 3)), window_strides=(2,), padding="VALID")


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("shapes", [((7,), (3,)), ((3,), (8,)), ((1,), (4,))], ids=str)
def test_convolve(mode, shapes):
    check_like(jaxext.convolve, jnp.convolve, shapes, mode=mode)


MATMULS = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((5, 3), (3,)),
    ((5, 3), (3, 4)),
    ((2, 5, 3), (3,)),
    ((3,), (2, 3, 4)),
    ((2, 5, 3), (3, 4)),
    ((5, 3), (2, 3, 4)),
    ((2, 1, 5, 3), (6, 3, 4)),
    ((1, 6, 5, 3), (2, 1, 3, 4)),
    ((2, 0, 3), (2, 3, 4)),
    ((2, 5, 0), (0, 4)),
]


@pytest.mark.parametrize("shapes", MATMULS, ids=str)
def test_matmul(shapes):
    check_like(jaxext.matmul, jnp.matmul, shapes)


def check_like(op, namesake, shapes, **kwargs):
    """float32 values and gradients against the namesake's in float64."""
    args = [random(shape, np.float32, seed) for seed, shape in enumerate(shapes)]
    run = functools.partial(op, **kwargs)
    of_namesake = functools.partial(namesake, **kwargs)
    ct = random(jax.eval_shape(of_namesake, *args).shape, np.float32, 7)
    got, by_lax = (value_and_gradients(f, ct, *args) for f in (run, of_namesake))
    for y, y_lax, true in zip(got, by_lax, value_and_gradients(of_namesake, wide(ct), *map(wide, args)), strict=True):
        check(y, y_lax, true)


def test_names_are_unique_and_cases_are_what_they_say():
    """A case that lax itself refuses, or a name that hides another, would test nothing."""
    for cases in (CONVS, DOTS):
        assert len({case.name for case in cases}) == len(cases)

    def shape(name):
        case = named(name)
        return jax.eval_shape(functools.partial(case.run, case.op), *case.operands(np.float32)).shape

    assert 0 in shape("crop_to_nothing")
    assert shape("no_input_channels") == (2, 5, 5, 3)
    assert shape("nothing_contracted") == (2, 4)


def test_check_bites():
    """What `check` must refuse: NaN where lax has none, an error beyond lax's, another dtype, another shape, a wrong integer."""
    true = np.array([1.0, 2.0])
    good = true.astype(np.float32)
    check(good, good, true)
    for bad in (good * np.nan, good * 1.001, true, good[:1], good[None]):
        with pytest.raises(AssertionError):
            check(bad, good, true)
    whole = np.array([1, 2])
    with pytest.raises(AssertionError):
        check(whole + 1, whole, whole)
    with pytest.raises(AssertionError):
        check(np.inf * good, np.inf * good, true)


@by_name([named(name) for name in ("3x3_same", "1x1_stride2", "grouped", "tn", "batched")])
def test_the_precision_is_that_of_every_product_of_the_program(case):
    """What is lowered says so itself: on CPUs, where most precisions are the same, no value does."""
    args = case.operands(np.float32)
    run = functools.partial(case.run, ours(case), precision=lax.Precision.HIGHEST)
    program = jax.jit(functools.partial(value_and_gradients, run)).lower(cotangent(case, args, np.float32), *args).as_text()
    products = [line for line in program.splitlines() if re.search(r"stablehlo\.(convolution|dot_general)", line)]
    assert products and all(line.count("HIGHEST") == 2 for line in products), products
