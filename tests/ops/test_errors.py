"""Wrong calls by the hundred: ours raise the class that the namesake raises, and take what it takes.

Nothing is compiled: calls are traced with arrays, with traced operands and with a traced argument, and run eagerly only where lax refuses.
"""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from public_operations import OF_ONE_MATRIX

import jaxext
from jaxext.extend import define

NHWC = ("NHWC", "HWIO", "NHWC")
A, B, V = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32), np.ones(5, np.float32)
X: Any = np.ones((2, 6, 5, 4), np.float32)
W: Any = np.ones((3, 3, 4, 6), np.float32)
PADS = ((1, 1), (0, 1))

# Operation -> its namesake and good calls, of which each argument is then spoilt.
CALLS = {
    jaxext.matmul: (jnp.matmul, [dict(a=A, b=B)]),
    jaxext.dot_general: (lax.dot_general, [dict(lhs=A, rhs=B, dimension_numbers=(((1,), (0,)), ((), ())))]),
    jaxext.conv_general_dilated: (
        lax.conv_general_dilated,
        [dict(lhs=X, rhs=W, window_strides=(1, 1), padding=padding, dimension_numbers=NHWC) for padding in ("SAME", PADS)],
    ),
    jaxext.conv: (lax.conv, [dict(lhs=X, rhs=np.ones((3, 6, 2, 2), np.float32), window_strides=(1, 1), padding="SAME")]),
    jaxext.conv_transpose: (lax.conv_transpose, [dict(lhs=X, rhs=W, strides=(2, 2), padding="SAME")]),
    jaxext.convolve: (jnp.convolve, [dict(a=V, v=V[:3])]),
}


class Unhashable:
    def __hash__(self):
        raise TypeError("unhashable")


class Index:
    def __index__(self):
        return 1


def layout(lhs=(0, 3, 1, 2), rhs=(3, 2, 0, 1), out=(0, 3, 1, 2)):
    return lambda: lax.ConvDimensionNumbers(lhs, rhs, out)


# Each makes a value anew, since an iterator is used up.
ANYTHING = {
    "None": lambda: None,
    "string": lambda: "nonsense",
    "float": lambda: 1.5,
    "zero": lambda: 0,
    "two": lambda: 2,
    "huge": lambda: 2**70,
    "object": object,
    "unhashable": Unhashable,
    "empty": tuple,
    "ones": lambda: (1, 1),
    "floats": lambda: (1.0, 1.0),
    "numpy floats": lambda: np.ones((2, 2)),
    "jax array": lambda: jnp.ones(2, int),
    "dictionary": lambda: {"a": 1},
    "sharding": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "partition spec": lambda: jax.P("nowhere"),
}
ARRAYS = {
    "bool": lambda: True,
    "numpy scalar": lambda: np.float32(1),
    "list": lambda: A.tolist(),
    "pair": lambda: (A, A),
    "rank 3": lambda: X[0],
    "rank 5": lambda: X[None],
    "no elements": lambda: X[:0],
    "no taps": lambda: W[:0],
    "no channels": lambda: X[..., :0],
    "float64": lambda: A.astype(np.float64),
    "float16": lambda: X.astype(np.float16),
    "integers": lambda: X.astype(np.int32),
    "objects": lambda: A.astype(object),
    "struct": lambda: jax.ShapeDtypeStruct((2, 3), np.float32),
    "key": lambda: jax.random.key(0),
}
WINDOWS = {
    "one": lambda: (1,),
    "three": lambda: (1, 1, 1),
    "a zero": lambda: (0, 1),
    "a negative": lambda: (-1, 1),
    "half": lambda: (1.5, 1),
    "wraps around": lambda: (2**62, 1),
    "beyond 64 bits": lambda: (2**70, 1),
    "numpy": lambda: np.array([1, 1]),
    "numpy floats in a row": lambda: np.array([1.0, 1.0]),
    "indices": lambda: (Index(), Index()),
    "iterator": lambda: iter([1, 1]),
    "range": lambda: range(1, 3),
    "set": lambda: {1, 2},
    "flags": lambda: (True, True),
    "pairs": lambda: PADS,
    "pairs of floats": lambda: ((1.0, 1), (0, 1)),
    "one pair": lambda: ((1, 1),),
    "wide pairs": lambda: ((2**62, 0), (0, 0)),
    "crop": lambda: ((-100, 0), (0, 0)),
    "lower case": lambda: "same_lower",
}
LAYOUTS = {
    "tuple": lambda: ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
    "good": layout(),
    "out twice": layout(out=(0, 0, 2, 3)),
    "out beyond": layout(out=(0, 1, 2, 9)),
    "out long": layout(out=(0, 1, 2, 3, 4)),
    "no out": layout(out=None),
    "lhs twice": layout(lhs=(0, 3, 1, 1)),
    "lhs negative": layout(lhs=(-4, -1, 1, 2)),
    "lhs floats": layout(lhs=(0.0, 3.0, 1.0, 2.0)),
    "lhs list": layout(lhs=[0, 3, 1, 2]),
    "short": layout((0, 1), (0, 1), (0, 1)),
    "two": lambda: NHWC[:2],
    "letters": lambda: ("NHWC", "HWIO", "NHQC"),
}
CONTRACTIONS = {
    "lists": lambda: [[[1], [0]], [[], []]],
    "negative": lambda: (((-1,), (0,)), ((), ())),
    "floats": lambda: (((1.0,), (0,)), ((), ())),
    "flags": lambda: (((True,), (False,)), ((), ())),
    "beyond": lambda: (((5,), (0,)), ((), ())),
    "huge": lambda: (((2**70,), (0,)), ((), ())),
    "twice": lambda: (((1, 1), (0, 0)), ((), ())),
    "numpy": lambda: ((np.array([1]), np.array([0])), ((), ())),
    "jax": lambda: ((jnp.array([1]), jnp.array([0])), ((), ())),
    "flat": lambda: ((1, 0), ((), ())),
    "no batch": lambda: (((1,), (0,)), None),
    "letters": lambda: (("1", "0"), ("", "")),
    "sets": lambda: (({1}, {0}), (set(), set())),
    "iterators": lambda: ((iter([1]), iter([0])), (iter([]), iter([]))),
}
GROUPS = {"float one": lambda: 1.0, "true": lambda: True, "numpy": lambda: np.int8(1), "array": lambda: np.array(1), "2**62": lambda: 2**62}
DTYPES = {"int8": lambda: "int8", "complex": lambda: np.complex64, "key": lambda: jax.random.key(0).dtype, "date": lambda: "datetime64[s]"}
PRECISIONS = {
    "pair": lambda: ("high", "highest"),
    "list": lambda: ["high", "highest"],
    "preset": lambda: lax.DotAlgorithmPreset.F32_F32_F32,
}
MORE = {
    **dict.fromkeys(("lhs", "rhs", "a", "b", "v"), ARRAYS),
    **dict.fromkeys(("window_strides", "strides", "padding", "lhs_dilation", "rhs_dilation"), WINDOWS),
    **dict.fromkeys(("feature_group_count", "batch_group_count"), GROUPS),
    "preferred_element_type": DTYPES,
    "precision": PRECISIONS,
}


def values_of(op, argument):
    if argument == "dimension_numbers":
        return ANYTHING | (CONTRACTIONS if op is jaxext.dot_general else LAYOUTS)
    return ANYTHING | MORE.get(argument, {})


CASES = [
    pytest.param(op, argument, values_of(op, argument), id=f"{op.__name__}-{argument}")
    for op, (namesake, _) in CALLS.items()
    for argument in inspect.signature(namesake).parameters
    if op is not jaxext.conv or argument in ("lhs", "rhs", "window_strides", "padding")  # the others are conv_general_dilated's
]


def outcome(f, *args, **kwargs):
    """Shape and dtype, or the exception."""
    try:
        y = f(*args, **kwargs)
    except Exception as error:
        return error
    return y.shape, y.dtype, y.weak_type


def traced(f, given, names):
    """The call with the arguments of these names traced."""
    static = {name: value for name, value in given.items() if name not in names}
    return outcome(jax.eval_shape, lambda operands: f(**operands, **static), {name: given[name] for name in names})


def refused_later(f, given):
    """The error of lowering a call that can be traced."""
    try:
        jax.jit(lambda: f(**given)).lower()
    except Exception as error:
        return error
    return None


# What ours refuses while tracing and lax only in its compiler, or by reading elsewhere or ending the process where 32 or 64 bits overflow.
EARLIER = "conv_general_dilated: (lhs_dilation|rhs_dilation|window_strides|.*dimension_numbers|rhs) .*want |.*fits? in (32|64) bits"


def difference(want, got, namesake, given):
    """Return the difference as a sentence, or None."""
    if isinstance(got, ValueError | TypeError) and not isinstance(want, Exception):
        if re.match(EARLIER, str(got)) is None:
            return f"want {want}, got {got!r:.300}"
        if " bits" in str(got):
            return None
        want = refused_later(namesake, given())
    if isinstance(want, Exception):
        same = type(want) is type(got) and (bool(str(got)) or not str(want))
    else:
        same = want == got
    return None if same else f"want {want!r:.300}, got {got!r:.300}"


# Values that are tried as a traced argument, too.
TRACED = ("two", "ones", "float", "pairs")

# A jax array among static arguments, outside of jit: our namesake is traced, and lax's is not.  Both are a TypeError, but for
# dot_general's dimension numbers: there lax takes one, though not under jit.
EAGER_JAX_ARRAYS = ("jax array", "jax")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("op", "argument", "values"), CASES)
def test_every_argument_spoilt(op, argument, values):
    namesake, calls = CALLS[op]
    different = []
    for call, tried in zip(calls, (values, WINDOWS if WINDOWS.keys() <= values.keys() else {}), strict=False):
        operands = list(call)[:2]
        for name, make in tried.items():
            given = lambda call=call, make=make: call | {argument: make()}
            for names in (operands, [argument]) if name in TRACED and argument not in operands else (operands,):
                want = traced(namesake, given(), names)
                different.append((name, names, difference(want, traced(op, given(), names), namesake, given)))
            if not isinstance(want, Exception):
                continue
            want, got = outcome(namesake, **given()), outcome(op, **given())
            if argument not in operands and name in EAGER_JAX_ARRAYS:
                assert isinstance(got, (TypeError, type(want)))
            else:
                different.append((name, "eager", difference(want, got, namesake, given)))
    assert len(different) >= len(values)
    assert [each for each in different if each[-1]] == []


def test_a_difference_is_found():
    """The test above compares by `difference`, which must find these."""
    given = lambda: dict(lhs=A, rhs=B, dimension_numbers=None)
    found = lambda want, got: difference(want, got, lax.dot_general, given)
    assert found(TypeError("a"), TypeError("b")) is None
    assert found(TypeError("a"), ValueError("a"))
    assert found(TypeError("a"), TypeError())
    assert found(((2, 4), np.float32, False), TypeError("a"))
    assert found(((2, 4), np.float32, False), ((2, 4), np.float32, True))
    assert found(TypeError("a"), ((2, 4), np.float32, False))


def test_traced_static_arguments_say_why():
    """lax's own message, which links to the explanation."""
    with pytest.raises(jax.errors.TracerArrayConversionError, match="docs.jax.dev"):
        jax.jit(lambda strides: jaxext.conv_general_dilated(X, W, strides, "SAME", dimension_numbers=NHWC))(np.ones(2, int))


def test_empty_dilations_are_ones():
    given: dict[str, Any] = dict(
        lhs=X, rhs=W, window_strides=(1, 1), padding=PADS, dimension_numbers=NHWC, lhs_dilation=(), rhs_dilation=()
    )
    np.testing.assert_array_equal(jaxext.conv_general_dilated(**given), lax.conv_general_dilated(**given))


def test_masked_arrays_are_left_to_lax():
    """The shape is refused before the mask: jit, and so jnp, takes a masked array if it has compiled the call for a plain one."""
    call: dict[str, Any] = dict(lhs=np.ma.array(A), rhs=W, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
    for convolution in (lax.conv_general_dilated, jaxext.conv_general_dilated):
        with pytest.raises(TypeError, match="ndim to be equal, got 2 and 4"):
            convolution(**call)


def test_a_result_is_refused_from_2_to_the_63_elements_on():
    result = lambda n: jax.eval_shape(
        lambda x, w: jaxext.conv_general_dilated(x, w, (1,), "VALID"),
        jax.ShapeDtypeStruct((2 * n, 1, 2**30), np.float32),
        jax.ShapeDtypeStruct((1, 1, 1), np.float32),
    )
    assert result(2**32 - 1).shape == (2**33 - 2, 1, 2**30)
    with pytest.raises(ValueError, match="want a number of elements that fits in 64 bits"):
        result(2**32)


HUGE = 2**31
LARGEST: dict[str, tuple[Any, Any]] = {  # that 32 bits can count, and what they cannot
    "window_strides": ((HUGE - 1,), (np.int64(HUGE),)),
    "padding": ([(0, HUGE - 3)], [(0, HUGE - 2)]),
    "rhs_dilation": ((HUGE - 1,), (HUGE,)),
    "lhs_dilation": ((HUGE - 2,), (HUGE - 1,)),
}


@pytest.mark.parametrize("name", LARGEST)
def test_windows_are_refused_beyond_32_bits(name):
    """XLA can read elsewhere there."""
    x, w = jnp.ones((1, 2, 2)), jnp.ones((2, 2, 1))
    within, beyond = ({"window_strides": (1,), "padding": [(0, 0)], name: value} for value in LARGEST[name])
    calls = (
        lambda **how: jaxext.conv_general_dilated(x, w, **how),
        lambda **how: jaxext.conv_bias_act(x, w, **how, bias=np.ones(2, np.float32)),
        lambda **how: jax.vmap(lambda x: jaxext.in_place_of_lax()(lax.conv_general_dilated)(x, w, **how))(x[None]),
    )
    for call in calls:
        jax.eval_shape(lambda call=call: call(**within))
        with pytest.raises(ValueError, match="want sizes that fit in 32 bits"):
            jax.eval_shape(lambda call=call: call(**beyond))


GROUPS = np.array([1, 1], np.int32)
DTYPED = {
    "matmul": (A, B),
    "dot_general": (A, B, (((1,), (0,)), ((), ()))),
    "conv": (X, np.ones((3, 6, 2, 2), np.float32), (1, 1), "SAME"),
    "conv_general_dilated": (X, np.ones((6, 6, 2, 2), np.float32), (1, 1), "SAME"),
    "conv_transpose": (X, W, (2, 2), "SAME"),
    "convolve": (V, V[:3]),
    "linear": (A, B),
    "gated_linear_unit": (A, np.ones((3, 2, 4), np.float32)),
    "ragged_dot": (A, np.ones((2, 3, 4), np.float32), GROUPS),
    "ragged_linear": (A, np.ones((2, 3, 4), np.float32), GROUPS),
    "ragged_scaled_dot": (A, np.ones((2, 3, 4), np.float32), GROUPS),
    **dict.fromkeys(OF_ONE_MATRIX, (A,)),
    "scaled_dot": (A, B),
    "quantized_matmul": (A, jaxext.quantization.quantize(B)),
}


@pytest.mark.parametrize("operation", DTYPED)
def test_a_result_of_no_dtype(operation):
    for dtype in ("floaty", 5):
        with pytest.raises(TypeError, match=f"{operation}: preferred_element_type is {dtype!r}, want a dtype"):
            getattr(jaxext, operation)(*DTYPED[operation], preferred_element_type=dtype)


@pytest.mark.parametrize(
    ("operation", "shapes", "names"),
    [
        (jaxext.linear, [(3, 4), (4, 5), (5,)], "x w bias"),
        (lambda x, w, r: jaxext.linear(x, w, residual=r), [(3, 4), (4, 5), (3, 5)], "x w residual"),
        (lambda x, w: jaxext.ragged_dot(x, w, jnp.array([2, 4])), [(6, 4), (2, 4, 5)], "lhs rhs"),
        (jaxext.gram, [(3, 4)], "x"),
        (jaxext.causal_conv1d, [(2, 8, 4), (3, 4), (4,)], "x w bias"),
        (
            lambda x, *w: jaxext.moe(x, jnp.zeros((6, 2), int), w[0], w[1], w[2], w[3]),
            [(6, 4), (6, 2), (3, 4, 5), (3, 4, 5), (3, 5, 4)],
            "x weights w_gate w_up w_down",
        ),
        (define("keyed_sum", x="B N K", w="B K M", y="B N M"), [(2, 3, 4), (2, 4, 5)], "x w"),
    ],
)
def test_keys_of_random_numbers_are_no_numbers(operation, shapes, names):
    arrays: list[Any] = [jnp.ones(shape) for shape in shapes]
    for i, (name, shape) in enumerate(zip(names.split(), shapes, strict=True)):
        keys = jax.random.split(jax.random.key(0), shape)
        with pytest.raises(TypeError, match=rf"^\w+: {name} is .*key<fry>.*, want an array of numbers"):
            operation(*arrays[:i], keys, *arrays[i + 1 :])
