"""Values of every operation and of both its gradients, against float64, in every dtype, precision, layout and geometry that lax takes."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, CONVS, DOTS, ConvCase, check, equations, named, random, wide
from jax import lax

import jaxext

by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def ours(case):
    return jaxext.conv_general_dilated if isinstance(case, ConvCase) else jaxext.dot_general


def value_and_gradients(run, ct, *operands):
    """The result and the cotangents of both operands, for a cotangent that is cast to the result's dtype."""
    y, pull = jax.vjp(run, *operands)
    return y, *pull(ct.astype(y.dtype))


def truths(case, ct, x, w):
    """The results of `value_and_gradients`, by the direct sum."""
    ct, x, w = map(wide, (ct, x, w))
    return case.direct.y(x, w), case.direct.dx(ct, w), case.direct.dw(x, ct)


def arrays(case, dtype, ct_dtype=None, integers=False):
    """A cotangent and the operands."""
    return random(case.direct.output, ct_dtype or dtype, 7, integers), *case.operands(dtype, integers=integers)


def together(function, cases, args):
    """`function(case, *args)` of each case, in one program: compiling is what takes the time."""
    return jax.jit(lambda args: [function(case, *of) for case, of in zip(cases, args, strict=True)])(args)


@contextlib.contextmanager
def of(case):
    """Adds the case to an error."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"case {case}")
        raise


def check_against_lax(cases, dtype, **kwargs):
    """Values and gradients, against float64."""
    args = [arrays(case, dtype) for case in cases]
    both = lambda case, *args: [value_and_gradients(functools.partial(case.run, op, **kwargs), *args) for op in (ours(case), case.op)]
    for case, of_case, (got, by_lax) in zip(cases, args, together(both, cases, args), strict=True):
        with of(case.name):
            for y, y_lax, true in zip(got, by_lax, truths(case, *of_case), strict=True):
                check(y, y_lax, true)


@pytest.mark.sampled(2, "24")
@pytest.mark.parametrize("first", range(0, len(CASES), 8))
def test_every_case_with_its_gradients(first):
    """float32 against float64; and bfloat16 to float32, which lax's convolution cannot differentiate, on integers, bit for bit."""
    cases = CASES[first : first + 8]
    check_against_lax(cases, np.float32)
    args = [arrays(case, jnp.bfloat16, np.float32, integers=True) for case in cases]
    wider = lambda case, *args: value_and_gradients(functools.partial(case.run, ours(case), preferred_element_type=np.float32), *args)
    for case, of_case, got in zip(cases, args, together(wider, cases, args), strict=True):
        with of(case.name):
            for y, true, dtype in zip(got, truths(case, *of_case), (np.float32, jnp.bfloat16, jnp.bfloat16), strict=True):
                assert y.dtype == dtype
                np.testing.assert_array_equal(np.asarray(y), true.astype(dtype))


# Between them these run every algorithm of the `xla` implementation, and every role of both families.
OF_ALL_DTYPES = [
    named(name)
    for name in ("conv:everything", "depthwise_multiplier_stride2", "grouped", "batch_groups_stride2", "dot:everything", "batched_tn")
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2], ids=lambda d: np.dtype(d).name)
def test_dtypes(dtype):
    check_against_lax(OF_ALL_DTYPES, dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.bool_], ids=lambda d: np.dtype(d).name)
def test_integers_and_booleans_are_exact(dtype):
    args = [case.operands(dtype) for case in OF_ALL_DTYPES]
    both = lambda case, *args: [case.run(op, *args) for op in (ours(case), case.op)]
    for case, of_case, (got, by_lax) in zip(OF_ALL_DTYPES, args, together(both, OF_ALL_DTYPES, args), strict=True):
        with of(case.name):
            check(got, by_lax, case.direct.y(*map(wide, of_case)))


@pytest.mark.parametrize(
    ("dtype", "preferred"),
    [(np.uint8, np.uint32), (np.float16, np.float32), (jnp.float8_e4m3fn, np.float32)],
    ids=lambda d: np.dtype(d).name,
)
def test_wider_results(dtype, preferred):
    """The sum is taken in the wider dtype: small integers stay exact in it, where the operands' own dtype would wrap or round."""
    cases = [named(name) for name in ("grouped", "depthwise_3x3", "conv:everything", "tt", "dot:everything")]
    args = [case.operands(dtype, integers=True) for case in cases]
    wider = lambda case, *args: case.run(ours(case), *args, preferred_element_type=preferred)
    for case, of_case, got in zip(cases, args, together(wider, cases, args), strict=True):
        with of(case.name):
            assert got.dtype == preferred
            np.testing.assert_array_equal(got, case.direct.y(*map(wide, of_case)).astype(preferred))


@pytest.mark.parametrize("rows", [2, 8])
def test_two_summed_axes_of_bfloat16_into_float32(rows):
    """XLA's CPU backend has no kernel for some such products whose result is transposed, as that of swapped factors is."""
    x, y = (random((2, 6, n), jnp.bfloat16, n, integers=True) for n in (rows, 5))
    got = jaxext.dot_general(x, y, (((0, 1), (0, 1)), ((), ())), preferred_element_type=np.float32)
    np.testing.assert_array_equal(got, np.tensordot(wide(x), wide(y), ((0, 1), (0, 1))))


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
    runs = [functools.partial(case.run, op, preferred_element_type=preferred) for op in (jaxext.dot_general, lax.dot_general)]
    got, by_lax = jax.jit(lambda *args: [run(*args) for run in runs])(*args)
    check(got, by_lax, case.direct.y(*map(wide, args)))
    if all(jnp.issubdtype(d, jnp.floating) for d in (lhs, rhs)):
        args = np.ones(got.shape, got.dtype), *args
        for y, y_lax, true in zip(
            *jax.jit(lambda *args: [value_and_gradients(run, *args) for run in runs])(*args), truths(case, *args), strict=True
        ):
            check(y, y_lax, true)


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
    check_against_lax([case], np.float32, precision=precision)
    ct, *args = arrays(case, np.float32)
    runs = (functools.partial(case.run, op, precision=precision) for op in (ours(case), case.op))
    found, of_lax = ([*precisions(functools.partial(value_and_gradients, run), ct, *args)] for run in runs)
    assert found == [of_lax[0]] * 3


def precisions(fun, *args):
    """Yield the precision of each product of `fun`, whoever made it."""
    for eqn in equations(fun, *args):
        if "static" in eqn.params or "precision" in eqn.params:
            yield eqn.params["static"].precision if "static" in eqn.params else eqn.params["precision"]


@by_name([named("grouped"), named("nn")])
def test_default_matmul_precision(case):
    args = case.operands(np.float32)
    for precision in ("bfloat16", "float32", "F32_F32_F32"):
        with jax.default_matmul_precision(precision):
            (precision,), (of_lax,) = (precisions(functools.partial(case.run, op), *args) for op in (ours(case), case.op))
        assert precision == of_lax is not None


def test_convolution_precision():
    case = named("3x3_same")
    args = case.operands(np.float32)
    for precision in ("highest", ("default", "high"), lax.DotAlgorithmPreset.F32_F32_F32):
        got, by_lax = (case.run(op, *args, precision=precision) for op in (ours(case), case.op))
        check(got, by_lax, case.run(case.op, *map(wide, args)))
        (found,), (of_lax,) = (precisions(functools.partial(case.run, op, precision=precision), *args) for op in (ours(case), case.op))
        assert found == of_lax


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
    ((2, 2), "SAME", {}),
    ((4, 5), "VALID", {}),
    ((2, 2), ((-1, 2), (0, 3)), {}),
    ((2, 1), "SAME", dict(rhs_dilation=(1, 2), transpose_kernel=True)),
    ((2, 2), ((1, 0), (0, 1)), dict(use_consistent_padding=True)),
    ((2, 2), "SAME", dict(dimension_numbers=("NCHW", "OIHW", "NCHW"))),
]


def test_conv_transpose():
    calls = []
    for strides, padding, kwargs in TRANSPOSED:
        x, w = {
            (False, False): ((2, 4, 5, 3), (3, 4, 3, 2)),
            (False, True): ((2, 4, 5, 3), (3, 4, 2, 3)),
            (True, False): ((2, 3, 4, 5), (2, 3, 3, 4)),
        }["dimension_numbers" in kwargs, "transpose_kernel" in kwargs]
        calls.append(((x, w), dict(strides=strides, padding=padding, **kwargs)))
    check_like(jaxext.conv_transpose, lax.conv_transpose, calls)


def test_conv():
    two, one = (((2, 3, 5, 4), (4, 3, 3, 2)), ((2, 3, 7), (4, 3, 3)))
    calls = [(two, dict(window_strides=(2, 1), padding="SAME")), (one, dict(window_strides=(2,), padding="VALID"))]
    check_like(jaxext.conv, lax.conv, calls)


def test_convolve():
    shapes = ((7,), (3,)), ((3,), (8,)), ((1,), (4,))
    calls = [(of, dict(mode=mode)) for of, mode in itertools.product(shapes, ("full", "same", "valid"))]
    check_like(jaxext.convolve, jnp.convolve, calls)


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


def test_matmul():
    check_like(jaxext.matmul, jnp.matmul, [(shapes, {}) for shapes in MATMULS])


def check_like(op, namesake, calls):
    """float32 values and gradients of calls, given as shapes and keywords, against the namesake's in float64."""
    runs = [[functools.partial(f, **kwargs) for f in (op, namesake)] for _, kwargs in calls]
    args = [[random(shape, np.float32, seed) for seed, shape in enumerate(shapes)] for shapes, _ in calls]
    args = [(random(jax.eval_shape(run, *of).shape, np.float32, 7), *of) for (_, run), of in zip(runs, args, strict=True)]
    got = together(lambda pair, *of: [value_and_gradients(f, *of) for f in pair], runs, args)
    true = together(lambda pair, *of: value_and_gradients(pair[1], *of), runs, [[*map(wide, of)] for of in args])
    for call, (ours, by_lax), wanted in zip(calls, got, true, strict=True):
        with of(call):
            for y, y_lax, of_y in zip(ours, by_lax, wanted, strict=True):
                check(y, y_lax, of_y)


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
    """`check` must refuse NaN where lax has none, an error beyond lax's, another dtype, another shape, and a wrong integer."""
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
    """The lowered program shows the precision: on CPUs, where most precisions are the same, no value does."""
    run = functools.partial(case.run, ours(case), precision=lax.Precision.HIGHEST)
    program = jax.jit(functools.partial(value_and_gradients, run)).lower(*arrays(case, np.float32)).as_text()
    products = [line for line in program.splitlines() if re.search(r"stablehlo\.(convolution|dot_general)", line)]
    assert products and all(line.count("HIGHEST") == 2 for line in products), products
