"""The public operations against their namesakes: signature, result type, what they take, what they refuse, and who computes them."""

import doctest
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations
from jax import lax

import jaxext
import jaxext.ops.conv
import jaxext.ops.matmul
from jaxext import extend
from jaxext.core.implementation import Algorithm
from jaxext.lax import dispatch, substitute
from jaxext.ops.matmul import form as matmul

NAMESAKES = {
    jaxext.matmul: jnp.matmul,
    jaxext.dot_general: lax.dot_general,
    jaxext.conv_general_dilated: lax.conv_general_dilated,
    jaxext.conv: lax.conv,
    jaxext.conv_transpose: lax.conv_transpose,
    jaxext.convolve: jnp.convolve,
}
every_op = pytest.mark.parametrize("op", NAMESAKES, ids=lambda op: op.__name__)

NN = (((1,), (0,)), ((), ()))
NHWC = ("NHWC", "HWIO", "NHWC")
A, B = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
X, W = np.ones((2, 6, 5, 4), np.float32), np.ones((3, 3, 4, 6), np.float32)  # NHWC, HWIO
V = np.ones(5, np.float32)

# One good call of each.
CALLS = {
    jaxext.matmul: (A, B),
    jaxext.dot_general: (A, B, NN),
    jaxext.conv_general_dilated: (X, W, (1, 1), "SAME", None, None, NHWC),
    jaxext.conv: (X, np.ones((3, 6, 2, 2), np.float32), (1, 1), "SAME"),
    jaxext.conv_transpose: (X, W, (2, 2), "SAME"),
    jaxext.convolve: (V, V),
}


def implementations(fun, *args):
    """The `implementation` of each of our products in `fun`."""
    return [eqn.params["static"].implementation for eqn in equations(fun, *args) if "static" in eqn.params]


# Signature and result


@every_op
def test_signature_is_the_namesakes(op):
    """Names, kinds and defaults; and one keyword more."""
    *ours, last = inspect.signature(op).parameters.values()
    theirs = inspect.signature(NAMESAKES[op]).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    assert (last.name, last.kind, last.default) == ("implementation", inspect.Parameter.KEYWORD_ONLY, None)


@every_op
def test_arguments_by_keyword(op):
    names = list(inspect.signature(op).parameters)
    keywords = dict(zip(names, CALLS[op], strict=False))
    np.testing.assert_array_equal(op(**keywords), NAMESAKES[op](**keywords))


@every_op
def test_documented(op):
    assert NAMESAKES[op].__name__ in op.__doc__


SCALARS = (2.0, 3, True, np.float32(2))


@pytest.mark.parametrize("lhs", SCALARS, ids=repr)
@pytest.mark.parametrize("rhs", SCALARS, ids=repr)
def test_scalars_and_weak_types(lhs, rhs):
    """Python scalars are operands of dot_general, and make a weakly typed result, as in lax; matmul refuses them, as in jnp."""
    outer = (((), ()), ((), ()))
    assert outcome(jaxext.dot_general, lhs, rhs, outer) == outcome(lax.dot_general, lhs, rhs, outer)
    assert outcome(jaxext.matmul, lhs, rhs) == outcome(jnp.matmul, lhs, rhs)


def outcome(f, *args, **kwargs):
    """Shape, dtype and weak type of each result, or the class of the exception."""
    try:
        return [(y.shape, y.dtype, y.weak_type) for y in jax.tree.leaves(f(*args, **kwargs))]
    except Exception as error:
        return type(error)


def test_outcome_tells_apart():
    assert outcome(jnp.matmul, A, B) == [((2, 4), np.float32, False)]
    assert outcome(jnp.matmul, A, A) is TypeError
    assert outcome(lambda: jnp.asarray(1.0)) != outcome(lambda: jnp.asarray(1.0, np.float64))


@pytest.mark.parametrize(
    "args",
    [
        (jnp.asarray(2.0)[None], jnp.asarray(3.0)[None]),  # weak on both sides
        (jnp.asarray(2.0)[None], V[:1]),
        (A, A.astype(np.float64).T),  # strict promotion refuses
        (np.ones((2, 3), np.int8), np.ones((3, 4), np.int8)),
    ],
    ids=range(4),
)
def test_result_types_of_matmul(args):
    for mode in ("strict", "standard"):
        with jax.numpy_dtype_promotion(mode):
            for more in ({}, dict(preferred_element_type=np.float64), dict(preferred_element_type=np.int8)):
                assert outcome(jaxext.matmul, *args, **more) == outcome(jnp.matmul, *args, **more)
            if args[0].ndim == 1:
                assert outcome(jaxext.convolve, *args) == outcome(jnp.convolve, *args)


# What is taken


class HasArray:
    """An array in disguise, which jax no longer takes."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


SPELLINGS = [
    dict(window_strides=[2, 1]),
    dict(padding=((1, 0), (0, 2))),
    dict(padding="SAME_LOWER"),
    dict(lhs_dilation=[2, np.int64(1)], padding=[(1, 1), (1, 1)]),
    dict(dimension_numbers=None, padding="VALID", lhs=np.ones((2, 4, 6, 5), np.float32), rhs=np.ones((6, 4, 3, 3), np.float32)),
    dict(preferred_element_type=jnp.float64),
    dict(rhs=X.tolist()),
]


@pytest.mark.parametrize("changed", SPELLINGS, ids=range(len(SPELLINGS)))
def test_spellings_of_convolution(changed):
    """Any spelling that lax takes is taken, eagerly and traced; any other raises the same."""
    keywords = dict(lhs=X, rhs=W, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC) | changed
    want = outcome(lax.conv_general_dilated, **keywords)
    assert outcome(jaxext.conv_general_dilated, **keywords) == want
    operands = {name: keywords.pop(name) for name in ("lhs", "rhs")}
    assert outcome(lambda **xs: jax.eval_shape(functools.partial(jaxext.conv_general_dilated, **keywords), **xs), **operands) == outcome(
        lambda **xs: jax.eval_shape(functools.partial(lax.conv_general_dilated, **keywords), **xs), **operands
    )
    if isinstance(want, list):
        got = jaxext.conv_general_dilated(**operands, **keywords)
        np.testing.assert_array_equal(got, lax.conv_general_dilated(**operands, **keywords))


DOT_SPELLINGS = [
    dict(dimension_numbers=[[[1], [0]], [[], []]]),
    dict(dimension_numbers=(((np.int64(1),), [0]), ((), []))),
    dict(dimension_numbers=(np.array([[1], [0]]), ((), ()))),
    dict(dimension_numbers=((-1,), (0,)), rhs=B),
    dict(dimension_numbers=(((-1,), (0,)), ((), ()))),
    dict(dimension_numbers=None),
    dict(precision=("high", "default")),
    dict(precision=["high", "high"]),
    dict(preferred_element_type="float64"),
    dict(lhs=HasArray(A)),
    dict(lhs=A.tolist()),
    dict(lhs=jnp.asarray(A), rhs=jnp.asarray(B)),
]


@pytest.mark.parametrize("changed", DOT_SPELLINGS, ids=range(len(DOT_SPELLINGS)))
def test_spellings_of_dot_general(changed):
    keywords = dict(lhs=A, rhs=B, dimension_numbers=NN) | changed
    assert outcome(jaxext.dot_general, **keywords) == outcome(lax.dot_general, **keywords)


@jax.tree_util.register_pytree_node_class
class Parameter(HasArray):
    """A tree with one leaf and the array's own attributes, as flax's nnx.Param: jnp takes it, lax does not."""

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.parametrize("disguise", [HasArray, Parameter])
def test_disguised_arrays(disguise):
    """The namesake decides: ours computes what it takes, eagerly, traced and differentiated."""
    for op, *rest in ((jaxext.matmul,), (jaxext.dot_general, NN)):
        for args in ((disguise(A), B), (A, disguise(B))):
            ours, theirs = (functools.partial(f, *args, *rest) for f in (op, NAMESAKES[op]))
            assert outcome(ours) == outcome(theirs)
            assert outcome(jax.jit(ours)) == outcome(jax.jit(theirs))
    if disguise is Parameter:
        loss = lambda op: lambda a: op(Parameter(a), B).sum()
        ours, theirs = loss(jaxext.matmul), loss(jnp.matmul)
        np.testing.assert_array_equal(jax.jit(jax.grad(ours))(A), jax.grad(theirs)(A))
        assert implementations(ours, A) == [None]


@every_op
def test_shape_structs(op):
    """Operands may have no value, under eval_shape, and a traced operand may stand beside a concrete one."""
    x, w, *rest = CALLS[op]
    structs = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype))
    ours, theirs = (jax.eval_shape(lambda x, w, f=f: f(x, w, *rest), *structs) for f in (op, NAMESAKES[op]))
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(jax.jit(lambda x: op(x, w, *rest))(x), NAMESAKES[op](x, w, *rest))


def test_one_program_for_equal_calls():
    """An operation is traced once for each type of its operands, in whatever program it stands."""
    a, b = np.ones((2, 11)), np.ones((11, 3))  # a shape of this test's own
    traced = []

    def traces(*args, **kwargs):
        traced.append(1)
        return lax.dot_general(*args, **kwargs)

    static = dict(dimension_numbers=NN, precision=None)
    for _ in range(2):
        jax.make_jaxpr(lambda a, b: dispatch.call_namesake(traces, matmul.FAMILY, None, (a, b), static))(a, b)
        jax.make_jaxpr(jax.grad(lambda a, b: dispatch.call_namesake(traces, matmul.FAMILY, None, (a, b), dict(static)).sum()))(a, b)
        dispatch.call_namesake(traces, matmul.FAMILY, None, (a, b), static)
    assert len(traced) == 1


@pytest.mark.parametrize("convolve", [jnp.convolve, jaxext.convolve])
def test_convolve_is_one_equation(convolve):
    """The call is one equation in jnp too, so that an eager gradient runs two programs and not each equation of them."""
    assert [eqn.params["name"] for eqn in jax.make_jaxpr(convolve)(V, V).eqns] == ["convolve"]
    assert len(jax.make_jaxpr(jax.grad(lambda v: convolve(v, V)[0]))(V).eqns) < 10


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(jaxext.ops.conv) == doctest.TestResults(failed=0, attempted=5)
    assert doctest.testmod(jaxext.ops.matmul) == doctest.TestResults(failed=0, attempted=2)


# What is refused


def conv_call(**changed) -> tuple[Any, dict[str, Any]]:
    return jaxext.conv_general_dilated, dict(lhs=X, rhs=W, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC) | changed


def dot_call(**changed):
    return jaxext.dot_general, dict(lhs=A, rhs=B, dimension_numbers=NN) | changed


def transpose_call(**changed):
    return jaxext.conv_transpose, dict(lhs=X, rhs=W, strides=(2, 2), padding="SAME") | changed


BAD = {
    "channels": conv_call(rhs=np.ones((3, 3, 5, 6), np.float32)),
    "rank of x": conv_call(lhs=X[0]),
    "rank of w": conv_call(rhs=W[0]),
    "no array": conv_call(lhs=None),
    "a list": conv_call(lhs=X.tolist()),
    "a tuple": conv_call(rhs=(W, W)),
    "a string": conv_call(lhs="x"),
    "an object": conv_call(lhs=object()),
    "a dictionary": conv_call(lhs={"x": X}),
    "layout letters": conv_call(dimension_numbers=("NHWC", "HWIO", "NHQC")),
    "layout without C": conv_call(dimension_numbers=("NHWW", "HWIO", "NHWC")),
    "layout length": conv_call(dimension_numbers=("NHC", "HIO", "NHC")),
    "layout twice": conv_call(dimension_numbers=("NHWC", "HWIO")),
    "layout as a string": conv_call(dimension_numbers="NHWC"),
    "layout as a number": conv_call(dimension_numbers=3),
    "padding name": conv_call(padding="FULL"),
    "padding count": conv_call(padding=((1, 1),)),
    "padding flat": conv_call(padding=(1, 1)),
    "padding of floats": conv_call(padding=((1.5, 1), (0, 0))),
    "padding none": conv_call(padding=None),
    "stride zero": conv_call(window_strides=(0, 1)),
    "stride negative": conv_call(window_strides=(1, -1)),
    "stride of floats": conv_call(window_strides=(1.5, 1)),
    "stride count": conv_call(window_strides=(1,)),
    "stride as a number": conv_call(window_strides=1),
    "stride none": conv_call(window_strides=None),
    "input dilation zero": conv_call(lhs_dilation=(0, 1), padding="VALID"),
    "filter dilation zero": conv_call(rhs_dilation=(1, 0), padding="VALID"),
    "filter dilation count": conv_call(rhs_dilation=(1, 1, 1), padding="VALID"),
    "same with input dilation": conv_call(lhs_dilation=(2, 2)),
    "groups zero": conv_call(feature_group_count=0),
    "groups negative": conv_call(feature_group_count=-1),
    "groups that do not divide the input": conv_call(feature_group_count=3),
    "groups that do not divide the output": conv_call(feature_group_count=4, rhs=np.ones((3, 3, 1, 6), np.float32)),
    "batch groups zero": conv_call(batch_group_count=0),
    "batch groups that do not divide the batch": conv_call(batch_group_count=3),
    "batch groups that do not divide the output": conv_call(batch_group_count=2, rhs=np.ones((3, 3, 4, 5), np.float32)),
    "both groups": conv_call(feature_group_count=2, batch_group_count=2, rhs=np.ones((3, 3, 2, 6), np.float32)),
    "two dtypes": conv_call(rhs=W.astype(np.float64)),
    "float and integer": conv_call(rhs=W.astype(np.int32)),
    "strings of numpy": conv_call(lhs=np.full(X.shape, "x")),
    "narrower result": conv_call(preferred_element_type=np.float16),
    "integer result": conv_call(preferred_element_type=np.int32),
    "no dtype": conv_call(preferred_element_type="nonsense"),
    "precision name": conv_call(precision="very high"),
    "precision triple": conv_call(precision=("high", "high", "high")),
    "precision number": conv_call(precision=3),
    "dot sizes": dot_call(rhs=A),
    "dot axis out of range": dot_call(dimension_numbers=(((2,), (0,)), ((), ()))),
    "dot axis twice": dot_call(dimension_numbers=(((1, 1), (0, 0)), ((), ()))),
    "dot axis counts": dot_call(dimension_numbers=(((1,), ()), ((), ()))),
    "dot batch sizes": dot_call(dimension_numbers=(((), ()), ((0,), (0,)))),
    "dot batch and contracted": dot_call(dimension_numbers=(((1,), (0,)), ((1,), (0,)))),
    "dot numbers flat": dot_call(dimension_numbers=(1, 0)),
    "dot none": dot_call(rhs=None),
    "dot list": dot_call(rhs=B.tolist()),
    "dot string": dot_call(rhs="b"),
    "dot object": dot_call(rhs=object()),
    "dot precision": dot_call(precision="nonsense"),
    "dot out_sharding without a mesh": dot_call(out_sharding=jax.P("nowhere")),
    "dot out_sharding nonsense": dot_call(out_sharding="data"),
    "matmul sizes": (jaxext.matmul, dict(a=A, b=A)),
    "matmul batch": (jaxext.matmul, dict(a=np.ones((2, 3, 4)), b=np.ones((3, 4, 5)))),
    "matmul scalar": (jaxext.matmul, dict(a=A, b=np.float32(2))),
    "matmul none": (jaxext.matmul, dict(a=None, b=B)),
    "matmul list": (jaxext.matmul, dict(a=A.tolist(), b=B)),
    "matmul string": (jaxext.matmul, dict(a="a", b=B)),
    "matmul two dtypes": (jaxext.matmul, dict(a=A, b=B.astype(np.float64))),
    "convolve mode": (jaxext.convolve, dict(a=V, v=V, mode="half")),
    "convolve rank": (jaxext.convolve, dict(a=A, v=V)),
    "convolve empty": (jaxext.convolve, dict(a=V, v=V[:0])),
    "convolve list": (jaxext.convolve, dict(a=[1.0, 2.0], v=V)),
    "conv padding": (jaxext.conv, dict(lhs=X, rhs=W, window_strides=(1, 1), padding="FULL")),
    "conv channels": (jaxext.conv, dict(lhs=X, rhs=W, window_strides=(1, 1), padding="SAME")),
    "transpose padding": transpose_call(padding="FULL"),
    "transpose strides": transpose_call(strides=(2,)),
    "transpose stride zero": transpose_call(strides=(0, 1)),
    "transpose channels": transpose_call(rhs=np.ones((3, 3, 5, 6), np.float32)),
    "transpose ranks": transpose_call(rhs=W[0]),
    "transpose layout": transpose_call(dimension_numbers=("NHWC", "HWIO", "XYZC")),
}


@pytest.mark.parametrize(("op", "keywords"), BAD.values(), ids=BAD)
def test_bad_input_raises_what_the_namesake_raises(op, keywords):
    want = outcome(NAMESAKES[op], **keywords)
    assert isinstance(want, type), f"{NAMESAKES[op].__name__} takes it: {want}"
    assert outcome(op, **keywords) is want
    assert outcome(jax.jit(lambda: op(**keywords))) is outcome(jax.jit(lambda: NAMESAKES[op](**keywords)))


# Who computes


@every_op
def test_unknown_implementation(op):
    known = r"\['cuda', 'triton', ('fft', )?'xla'\]"
    with pytest.raises(ValueError, match=rf"{op.__name__}: implementation is 'fastest', want one of {known} or None"):
        op(*CALLS[op], implementation="fastest")


def test_unknown_implementation_in_a_context():
    with pytest.raises(ValueError, match=r"use_implementation: name is 'fastest', want one of \[.*'cuda', .*'triton', 'xla'\] or None"):
        jaxext.use_implementation("fastest")  # other tests may have registered more


@every_op
def test_implementation_governs_the_gradients(op):
    """The keyword and the context govern every product of the forward and the backward pass, also in the second derivative."""
    x, w, *rest = CALLS[op]

    def third_power(x, w, **how):
        return (op(x, w, *rest, **how) ** 3).sum()

    def second(x, w, **how):
        return jax.grad(lambda w: (jax.grad(functools.partial(third_power, **how))(x, w) ** 2).sum())(w)

    assert set(implementations(second, x, w)) == {None}
    found = implementations(functools.partial(second, implementation="xla"), x, w)
    assert set(found) == {"xla"}
    assert len(found) >= 5
    with jaxext.use_implementation("xla"):
        assert implementations(second, x, w) == found


def test_context_enters_the_cache_key_of_jit():
    """A jitted function that was traced outside is traced again inside, once, and the other way round."""
    traced = []

    @jax.jit
    def f(a, b):
        y = jaxext.matmul(a, b)
        traced.append(dispatch._named.value)
        return y

    for _ in range(2):
        f(A, B)
        with jaxext.use_implementation("xla"):
            f(A, B)
            assert implementations(f, A, B) == ["xla"]
        assert implementations(f, A, B) == [None]
    assert traced == [None, "xla"]


def test_contexts_nest_and_the_keyword_wins(second_implementation):
    f = functools.partial(implementations, jaxext.matmul, A, B)
    with jaxext.use_implementation("xla"):
        assert f() == ["xla"]
        with jaxext.use_implementation("picky"):
            assert f() == ["picky"]
            with jaxext.use_implementation(None):
                assert f() == [None]
            assert implementations(functools.partial(jaxext.matmul, implementation="xla"), A, B) == ["xla"]
        assert f() == ["xla"]
    assert f() == [None]
    with pytest.raises(KeyError), jaxext.use_implementation("xla"):
        raise KeyError
    assert f() == [None]


class Picky(extend.Implementation):
    """Computes products of float32, wrongly, so that one sees who did it."""

    name = "picky"

    def refuses(self, call):
        return None if call.dtype == np.float32 else f"{call.dtype} is beneath me"

    def candidates(self, call):
        return (Algorithm("minus one"),)

    def run(self, call, config, operands):
        return jnp.full(call.shape, -1, call.dtype)


@pytest.fixture
def second_implementation(monkeypatch):
    """`picky`, preferred to `xla` by matmul and unknown to convolution."""
    picky = Picky()
    monkeypatch.setitem(vars(matmul.FAMILY), "implementations", [picky, *matmul.FAMILY.implementations])
    jax.clear_caches()  # the list of implementations is fixed in a program, so no cache knows it as a key
    yield picky
    jax.clear_caches()


def test_named_preferred_and_refusing(second_implementation):
    """The first that supports the call computes it; one that is named and refuses raises its reason, forward or backward."""
    wide = A.astype(np.float64), B.astype(np.float64)
    for how in (dict(), dict(implementation="picky")):
        np.testing.assert_array_equal(jaxext.matmul(A, B, **how), np.full((2, 4), -1))
    np.testing.assert_array_equal(jaxext.matmul(A, B, implementation="xla"), A @ B)
    np.testing.assert_array_equal(jaxext.matmul(*wide), A @ B)
    refusal = r"matmul_nn: implementation 'picky' does not support this call: float64 is beneath me"
    with pytest.raises(NotImplementedError, match=refusal):
        jaxext.matmul(*wide, implementation="picky")
    with pytest.raises(NotImplementedError, match=refusal), jaxext.use_implementation("picky"):
        jax.jit(jaxext.matmul)(*wide)
    with pytest.raises(NotImplementedError, match="matmul_nt: .*beneath me"):
        mixed = functools.partial(jaxext.dot_general, dimension_numbers=NN, preferred_element_type=np.float32, implementation="picky")
        jax.grad(lambda a, b: mixed(a, b).sum())(*wide)


def test_an_implementation_of_one_family_is_unknown_to_the_other(second_implementation):
    with jaxext.use_implementation("picky"), pytest.raises(ValueError, match=r"conv_general_dilated: implementation is 'picky'"):
        jaxext.conv_general_dilated(*CALLS[jaxext.conv_general_dilated])


@pytest.mark.parametrize("name", ["lhs_dilation", "rhs_dilation"])
def test_a_wrong_number_of_dilations_is_named(name):
    given = conv_call(padding=((1, 1), (1, 1)), **{name: (2,)})[1]
    with pytest.raises(ValueError, match=rf"{name} is \(2,\), want one entry for each of 2 spatial axes"):
        jaxext.conv_general_dilated(**given)


EQUAL_BUT_OF_TWO_TYPES = [
    (None, np.dtype("float64")),  # numpy says so, and jit's cache took the one for the other: a result had the wrong dtype
    (1, True),
    (1, 1.0),
    ((1, 1), (1, 1.0)),
    (((1, 1),), ((1.0, 1.0),)),
    ((1, 1), [1, 1]),
    (np.array([1, 1]), np.array([1.0, 1.0])),
    (np.array([1, 1]), np.array([[1], [1]])),
]


@pytest.mark.parametrize(("one", "other"), EQUAL_BUT_OF_TWO_TYPES, ids=range(len(EQUAL_BUT_OF_TWO_TYPES)))
def test_keywords_of_two_types_are_two_keys(one, other):
    key: Any = lambda value: substitute.CacheKey.of({"a": value})
    assert key(one) == key(one)
    assert hash(key(one)) == hash(key(one))
    assert key(one) != key(other)


@pytest.mark.parametrize("value", [{}, {1}, object(), iter([1]), jnp.ones(1), (1, [object()]), np.array([None]), lambda: 0], ids=range(8))
def test_only_plain_values_are_keys(value):
    assert substitute.CacheKey.of({"a": value}) is None


def test_a_wrong_type_after_the_right_value():
    """The program of (1, 1) was taken for (1.0, 1.0), which lax refuses."""
    good, bad = (conv_call(window_strides=strides)[1] for strides in ((1, 1), (1.0, 1.0)))
    jaxext.conv_general_dilated(**good)
    with pytest.raises(TypeError):
        jaxext.conv_general_dilated(**bad)


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_static_argument_that_changes_after_the_call(kind):
    """A program that is traced again, for another shape, is still that of the values which are its key."""
    strides = kind([1, 2])
    given = conv_call(window_strides=strides)[1]
    assert jaxext.conv_general_dilated(**given).shape == (2, 6, 3, 6)
    strides[0] = 3
    again = conv_call(window_strides=kind([1, 2]), lhs=X[:1])[1]
    assert jaxext.conv_general_dilated(**again).shape == (1, 6, 3, 6)
    assert jaxext.conv_general_dilated(**given).shape == (2, 2, 3, 6)
