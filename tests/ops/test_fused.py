"""Products with an epilogue: values against float64, derivatives, transformations, and what a program computes and saves."""

import functools
import re
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations, random
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.core import choose, primitive

ACTIVATIONS = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "squared_relu": lambda z: jax.nn.relu(z) ** 2,
    jnp.sin: jnp.sin,
}
NHWC = ("NHWC", "HWIO", "NHWC")


def name_of(value):
    return getattr(value, "__name__", str(value))


def linear(activation, x, w, bias=None, residual=None):
    """The composition in the dtype of its operands."""
    z = x @ w
    y = ACTIVATIONS[activation](z if bias is None else z + jnp.broadcast_to(bias, z.shape))
    return y if residual is None else y + residual


def gated(activation, x, weights):
    return ACTIVATIONS[activation](x @ weights[:, 0]) * (x @ weights[:, 1])


def conv(activation, static, lhs, rhs, bias=None, residual=None):
    z = lax.conv_general_dilated(lhs, rhs, **static)
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, static["dimension_numbers"]).out_spec
    if bias is not None:
        z = z + lax.broadcast_in_dim(bias, z.shape, [layout[1]])
    y = ACTIVATIONS[activation](z)
    return y if residual is None else y + residual


def close(ours, plain, *arrays, units: Any = 2):
    """Each result is as near to plain jnp in float64 as so many roundings to the dtype allow, or twice as far as plain jnp is.

    A second number of roundings is that of the results after the first, such as gradients.
    Each of the three is one program, since compiling takes most of the time.
    """
    ours, plain = jax.jit(ours), jax.jit(plain)
    arrays = [jnp.asarray(x) for x in arrays]  # numpy would multiply bfloat16 as float32
    dtype = arrays[0].dtype
    with jax.enable_x64(True):
        truths = jax.tree.leaves(plain(*doubles(arrays)))
    first, others = units if isinstance(units, tuple) else (units, units)
    for at, (one, by_jnp, truth) in enumerate(zip(jax.tree.leaves(ours(*arrays)), jax.tree.leaves(plain(*arrays)), truths, strict=True)):
        error, of_jnp = (np.abs(np.asarray(y, np.float64) - truth).max(initial=0) for y in (one, by_jnp))
        assert one.dtype == dtype and one.shape == truth.shape
        allowed = others if at else first
        assert error <= max(2 * of_jnp, allowed * float(jnp.finfo(dtype).eps) * np.abs(truth).max(initial=0)), (error, of_jnp, one.shape)


def doubles(arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def summed(function):
    """A scalar in which each element has another weight, so that the cotangents differ."""

    def scalar(*args):
        y = function(*args)
        return jnp.sum(jnp.cos(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype) * y)

    return scalar


def with_gradients(function):
    """Return the result and the gradients of all operands."""
    return lambda *args: (function(*args), jax.grad(summed(function), range(len(args)))(*args))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        (None, jnp.float32),
        ("relu6", jnp.float16),
        ("gelu", jnp.float32),
        ("silu", jnp.bfloat16),
        ("sigmoid", jnp.float16),
        ("leaky_relu", jnp.float32),
        (jnp.sin, jnp.float16),
    ],
    ids=name_of,
)
def test_linear(activation, dtype):
    """The values and all gradients, with bias and residual; of one activation also with one of the two."""
    arrays = [random(shape, dtype, seed) for seed, shape in enumerate([(3, 5, 8), (8, 6), (6,), (3, 5, 6)])]
    for bias, residual in ((2, 3), (2, None), (None, 3))[: 3 if activation == "silu" else 1]:
        args = arrays[:2] + [arrays[i] for i in (bias, residual) if i is not None]

        def ours(x, w, *more, bias=bias, residual=residual):
            more = list(more)
            given = dict(bias=more.pop(0) if bias else None, residual=more.pop(0) if residual else None)
            return jaxext.linear(x, w, activation=activation, **given)

        def plain(x, w, *more, bias=bias, residual=residual):
            more = list(more)
            return linear(activation, x, w, more.pop(0) if bias else None, more.pop(0) if residual else None)

        close(with_gradients(ours), with_gradients(plain), *args)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=name_of)
def test_nothing_cancels_in_the_derivative_of_gelu_tanh(dtype):
    """jax's own is off by 30 roundings in float32, by 165 in float64, where 1 - tanh(u)^2 is nearly zero and is multiplied by z^3."""
    z = np.linspace(-12, 12, 2401).astype(dtype)
    exact, root = z.astype(np.longdouble), np.sqrt(np.longdouble(8) / np.pi)
    twice, slope = root * (exact + 0.044715 * exact**3), root * (1 + 3 * 0.044715 * exact**2)
    y = 1 / (1 + np.exp(-twice))
    function = lambda z: jaxext.linear(z, jnp.ones((1, 1), dtype), activation="gelu_tanh")
    with jax.enable_x64(dtype is np.float64):
        _, got = jax.jvp(function, (z[:, None],), (np.ones((z.size, 1), dtype),))
        second = jax.grad(jax.grad(lambda z: function(z[None, None])[0, 0]))(np.zeros((), dtype))
    assert np.abs(np.asarray(got)[:, 0] - (y + exact * slope / (1 + np.exp(twice)) * y)).max() < 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(second, root / 2, rtol=1e-6)  # where |u| has a kink


def test_the_derivative_of_gelu_tanh_of_complex_numbers():
    """It is an analytic function."""
    z = np.array([1 + 1j, 2 - 1j, -3 + 0.5j], np.complex128)
    _, got = jax.jvp(lambda z: jaxext.linear(z[:, None], jnp.ones((1, 1), z.dtype), activation="gelu_tanh")[:, 0], (z,), (np.ones_like(z),))
    h = 1e-6
    want = (jax.nn.gelu(z + h, approximate=True) - jax.nn.gelu(z - h, approximate=True)) / (2 * h)
    np.testing.assert_allclose(got, want, rtol=1e-7)


@pytest.mark.parametrize(("activation", "dtype"), [("silu", jnp.float32), ("gelu_tanh", jnp.bfloat16)], ids=name_of)
def test_gated_linear_unit(activation, dtype):
    args = [random(shape, dtype, seed) for seed, shape in enumerate([(3, 5, 8), (8, 2, 6)])]
    ours, plain = functools.partial(jaxext.gated_linear_unit, activation=activation), functools.partial(gated, activation)
    close(with_gradients(ours), with_gradients(plain), *args)


CONVOLUTIONS = {
    "batch groups": (
        (4, 5, 5, 3),
        (3, 3, 3, 6),
        dict(window_strides=(1, 1), padding="VALID", batch_group_count=2, dimension_numbers=NHWC),
    ),
    "channels first": ((2, 4, 7, 6), (5, 4, 3, 3), dict(window_strides=(1, 1), padding="SAME", dimension_numbers=None)),
}


@pytest.mark.parametrize(("case", "dtype"), [*zip(CONVOLUTIONS, (jnp.float32, jnp.bfloat16), strict=True)], ids=name_of)
def test_conv_bias_act(case, dtype):
    lhs, rhs, static = CONVOLUTIONS[case]
    shape = jax.eval_shape(functools.partial(lax.conv_general_dilated, **static), *(jnp.zeros(s) for s in (lhs, rhs))).shape
    layout = lax.conv_dimension_numbers(lhs, rhs, static["dimension_numbers"]).out_spec
    args = [random(s, dtype, seed) for seed, s in enumerate([lhs, rhs, (shape[layout[1]],), shape])]
    ours = lambda x, w, b, r: jaxext.conv_bias_act(x, w, **static, bias=b, activation="silu", residual=r)
    plain = functools.partial(conv, "silu", static)
    close(with_gradients(ours), with_gradients(plain), *args)


X, W, BIAS, RESIDUAL = (random(shape, np.float32, seed) for seed, shape in enumerate([(4, 6), (6, 8), (8,), (4, 8)]))


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2], ids=name_of)
def test_a_split_contraction(kind):
    """Each device multiplies its part, the parts are added up, and the epilogue sees the whole sum."""
    mesh = jax.make_mesh((2,), ("k",), axis_types=(kind,), devices=jax.devices()[:2])
    kwargs: Any = dict(out_sharding=P()) if kind is jax.sharding.AxisType.Explicit else {}
    ours = jax.jit(lambda x, w, b, r: jaxext.linear(x, w, b, activation="silu", residual=r, **kwargs))
    specs = (P(None, "k"), P("k"), P(), P())
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip((X, W, BIAS, RESIDUAL), specs, strict=True)]
        compiled = str(ours.lower(*args).compile().as_text())
        got = ours(*args)
    np.testing.assert_allclose(got, linear("silu", X, W, BIAS, RESIDUAL), rtol=1e-5, atol=1e-5)
    assert "all-reduce" in compiled and "all-gather" not in compiled


def test_axes_that_must_be_whole_are_gathered_for_an_asked_sharding():
    """The mesh is explicit: rows of an image, and gate and up, are refused unless the sharding of the result is given."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    x, w = random((1, 4, 4, 2), np.float32, 0), random((3, 3, 2, 4), np.float32, 1)
    a, gates = random((6, 8), np.float32, 2), random((8, 2, 4), np.float32, 3)
    image = functools.partial(jaxext.conv_bias_act, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    calls: Any = [
        (functools.partial(image, activation="relu"), x, w, P(None, "d"), P()),
        (functools.partial(jaxext.gated_linear_unit, activation="silu"), a, gates, P(), P(None, "d")),
    ]
    for call, first, second, *specs in calls:
        with jax.set_mesh(mesh):
            placed = [jax.device_put(each, jax.NamedSharding(mesh, spec)) for each, spec in zip((first, second), specs, strict=True)]
            with pytest.raises(Exception, match="want it unsharded"):
                jax.jit(call)(*placed)
            got = jax.jit(functools.partial(call, out_sharding=P()))(*placed)
        np.testing.assert_allclose(got, call(first, second), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("specs", "which"),
    [
        ((P("d"), P(), P(), P()), (0, 1, 2, 3)),
        ((P("d"), P(None, "t"), P(), P("d")), (2,)),
        ((P(), P(None, "t"), P("t"), P("d")), (3,)),
    ],
    ids=["rows", "both", "all"],
)
def test_derivatives_have_the_shardings_of_their_values(which, specs):
    """The mesh is explicit; a residual or a bias may be sharded less than the result, and alone have a tangent."""
    args, ours = (X, W, BIAS, RESIDUAL), lambda x, w, b, r: jaxext.linear(x, w, b, activation="silu", residual=r)
    total = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), which)

    def along(f, args):
        some = [args[i] for i in which]
        return jax.jvp(lambda *some: f(*(some[which.index(i)] if i in which else args[i] for i in range(4))), some, some)

    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        gradients, tangents = jax.jit(total(ours))(*placed), jax.jit(functools.partial(along, ours))(placed)
        assert [jax.typeof(y).sharding for y in gradients] == [jax.typeof(placed[i]).sharding for i in which]
    plain = functools.partial(linear, "silu")
    for got, want in zip((*gradients, *tangents), (*total(plain)(*args), *along(plain, args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mapped", [(0, None, None, 0), (None, 1, 0, None), (None, None, 0, None), (1, 0, 0, 1)])
def test_vmap_repeats_no_factor(mapped):
    """The product is computed once for what it does not depend on."""
    args = [np.stack([a, -a, 2 * a], d) if d is not None else a for a, d in zip((X, W, BIAS, RESIDUAL), mapped, strict=True)]
    ours = jax.vmap(lambda x, w, b, r: jaxext.linear(x, w, b, activation="tanh", residual=r), mapped)
    close(ours, jax.vmap(functools.partial(linear, "tanh"), mapped), *args)
    products = [eqn for eqn in equations(ours, *args) if eqn.primitive.name in ("linear", "matmul_nn")]
    factors = sum(aval.size for aval in (atom.aval for atom in products[0].invars[:2]))
    assert len(products) == 1 and factors == args[0].size + args[1].size


SAVED = [
    ("gelu", True, ("c", "preactivation")),
    ("relu", False, ("c",)),
    ("relu", True, ("c", "preactivation")),
    ("tanh", False, ("c",)),
    (None, True, ("c",)),
]


@pytest.mark.parametrize(("activation", "residual", "results"), SAVED)
def test_the_preactivation_is_computed_only_for_a_derivative_that_needs_it(activation, residual, results):
    ours = lambda x, w, b: jaxext.linear(x, w, b, activation=activation, residual=RESIDUAL if residual else None)
    computed = lambda f: [eqn.params["wanted"] for eqn in equations(f, X, W, BIAS) if eqn.primitive.name == "linear"]
    assert computed(ours) == [("c",)]
    assert computed(jax.grad(lambda *args: ours(*args).sum())) == [results]


def test_an_unread_preactivation_is_dropped():
    """The compiled program of a value whose pullback is not used computes one result."""
    value = jax.jit(lambda x, w: jax.vjp(lambda x, w: jaxext.linear(x, w, activation="gelu"), x, w)[0])
    assert "preactivation" in str(jax.make_jaxpr(value)(X, W))
    asked = []
    with mock.patch.object(primitive, "chosen", lambda call, *args: asked.append(call.results) or choose.chosen(call, *args)):
        value.lower(X, W)
    assert [[*results] for results in asked if "c" in results][0] == ["c"]


def test_what_a_training_step_saves():
    """The preactivation, with the dtype of the result, and no slope in float32; a policy finds it by its name."""
    x, w, b = (a.astype(jnp.bfloat16) for a in (X, W, BIAS))
    ours = lambda x, w, b: jaxext.linear(x, w, b, activation="gelu")
    residuals = [leaf for leaf in jax.tree.leaves(jax.vjp(ours, x, w, b)[1]) if hasattr(leaf, "shape")]
    assert {(leaf.shape, leaf.dtype.name) for leaf in residuals} == {((4, 6), "bfloat16"), ((6, 8), "bfloat16"), ((4, 8), "bfloat16")}
    policy = jax.checkpoint_policies.save_only_these_names("preactivation")
    step = lambda f: equations(jax.grad(lambda *args: f(*args).astype(jnp.float32).sum()), x, w, b)
    products = lambda f: [eqn.primitive.name for eqn in step(f) if eqn.primitive.name == "linear"]
    assert len(products(jax.checkpoint(ours, policy=policy))) == 1
    assert len(products(jax.checkpoint(ours))) == 2
    assert len(products(jax.checkpoint(ours, policy=jaxext.checkpoint_policies.dots_saveable))) == 1


def test_the_result_is_rounded_once():
    """1 + 2^-9 is 1 in bfloat16; only a sum that is kept in float32 sees the small bias, and only once."""
    x, w = jnp.ones((1, 2), jnp.bfloat16), jnp.full((2, 1), 0.5, jnp.bfloat16)
    y = jaxext.linear(x, w, jnp.array([2.0**-9]), residual=jnp.full((1, 1), -1, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and float(y[0, 0]) == 2.0**-9


def test_the_composition_is_what_plain_jnp_compiles_to():
    """The same operations of XLA in the compiled program, forward and backward."""
    ours = lambda x, w, b, r: jaxext.linear(x, w, b, activation="gelu", residual=r)
    plain = functools.partial(linear, "gelu")

    def kinds(f):
        text = str(jax.jit(f).lower(X, W, BIAS, RESIDUAL).compile().as_text())
        return sorted(re.findall(r"= \S+ (dot|fusion|custom-call|all-reduce|copy|transpose)\(", text))

    assert kinds(ours) == kinds(plain)


@settings(max_examples=15, deadline=None)
@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    sizes=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    bias=st.booleans(),
    residual=st.booleans(),
    activation=st.sampled_from([None, "relu", "gelu_tanh", "squared_relu"]),
)
def test_any_shape(lead, sizes, bias, residual, activation):
    """Empty axes included: an empty sum leaves the epilogue."""
    k, n = sizes
    args = dict(x=random((*lead, k), np.float32), w=random((k, n), np.float32, 1))
    args |= {"bias": random((n,), np.float32, 2)} if bias else {}
    args |= {"residual": random((*lead, n), np.float32, 3)} if residual else {}
    got = jaxext.linear(**args, activation=activation)
    want = linear(activation, **doubles_by_name(args))
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def doubles_by_name(args):
    return {name: np.asarray(x, np.float64) for name, x in args.items()}


def test_functions_of_jax_count_as_their_names():
    for function, name in ((jax.nn.silu, "silu"), (jax.nn.gelu, "gelu_tanh"), (jax.nn.relu, "relu"), (jnp.tanh, "tanh")):
        (eqn,) = (e for e in equations(lambda f=function: jaxext.linear(X, W, activation=f)) if e.primitive.name == "linear")
        assert eqn.params["static"].options.activation == name


def test_another_function_follows_the_product():
    (row,) = jaxext.explain(lambda x, w: jaxext.linear(x, w, BIAS, activation=jnp.sin), platform="cuda")(X, W).rows
    assert row.op == "linear"
    assert [
        eqn.params["static"].options.activation
        for eqn in equations(lambda: jaxext.linear(X, W, BIAS, activation=jnp.sin))
        if "static" in eqn.params
    ] == [None]


def test_tune_measures_an_operation_with_all_its_results(tmp_path):
    loss = lambda x, w, b: jaxext.linear(x, w, b, activation="gelu").sum()
    tuned = jaxext.tune(jax.grad(loss), table=tmp_path / "table.json")(X, W, BIAS)
    (of_linear,) = (trial for trial in tuned.rows if trial.problem.startswith("linear "))
    assert "activation=gelu a=float32, b=float32, bias=float32 -> float32 preactivation=float32" in of_linear.problem
    assert of_linear.winner is not None and of_linear.winner.error is not None
    assert of_linear.winner.name == "xla algorithm=composition" and of_linear.winner.error[0] < 1e-6
    with jaxext.use_table(tmp_path / "table.json"):
        assert jaxext.explain(jax.grad(loss))(X, W, BIAS).rows[0].why.startswith("measured at ")


def test_nothing_to_fuse_is_a_product():
    assert [eqn.primitive.name for eqn in equations(jaxext.linear, X, W) if "linear" in eqn.primitive.name] == []
    assert jaxext.explain(jaxext.linear)(X, W).rows[0].op == "matmul_nn"


def test_integers_and_complex_numbers():
    x, w, b = np.array([[1, 2]], np.int8), np.array([[3], [4]], np.int8), np.array([5], np.int32)
    y = jaxext.linear(x, w, b, preferred_element_type=jnp.int32)
    assert y.dtype == jnp.int32 and y.tolist() == [[16]]
    z = jaxext.linear(X * 1j, W * (1 + 0j), BIAS)
    np.testing.assert_allclose(z, X @ W * 1j + BIAS, rtol=1e-4)


ERRORS = [
    (lambda: jaxext.linear(cast(Any, [1.0]), W), TypeError, r"linear: x is \[1.0\], want an array"),
    (lambda: jaxext.linear(jnp.ones(()), W), TypeError, r"linear: x has the shape \(\), want \(..., K\)"),
    (lambda: jaxext.linear(X, W.T), TypeError, r"linear: w has the shape \(8, 6\), want \(6, N\), since x has the shape \(4, 6\)"),
    (lambda: jaxext.linear(X, W, BIAS[:7]), TypeError, r"linear: bias has the shape \(7,\), want \(8,\): an element for each column of w"),
    (lambda: jaxext.linear(X, W, residual=RESIDUAL[:1]), TypeError, r"linear: residual has the shape \(1, 8\), want \(4, 8\)"),
    (
        lambda: jaxext.linear(X, W, activation="swoosh"),
        ValueError,
        r"activation is 'swoosh', want one of \['relu', .*, 'swish'\], a function",
    ),
    (lambda: jaxext.linear(X, W, activation=cast(Any, 3)), TypeError, r"linear: activation is 3, want one of"),
    (lambda: jaxext.linear(X, W, BIAS * 1j), TypeError, r"linear: bias is complex64, want a dtype that converts to float32"),
    (
        lambda: jaxext.linear(np.ones((1, 2), np.int32), np.ones((2, 1), np.int32), activation="relu"),
        TypeError,
        r"linear: the result is int32 and activation is 'relu', want None for a result of integers",
    ),
    (
        lambda: jaxext.gated_linear_unit(X, W),
        TypeError,
        r"gated_linear_unit: w has the shape \(6, 8\), want \(6, 2, N\): gate and up",
    ),
    (
        lambda: jaxext.conv_bias_act(X[None, ..., None], W[None, :1, :1, None], (1, 1), "SAME", dimension_numbers=NHWC, bias=BIAS),
        TypeError,
        r"conv_bias_act: bias has the shape \(8,\), want \(1,\): an element for each output channel",
    ),
    (lambda: jaxext.linear(X, W, BIAS, implementation="cublas"), ValueError, r"linear: implementation is 'cublas', want one of"),
    (lambda: jaxext.linear(X, W, BIAS, implementation="cuda"), NotImplementedError, "linear: implementation 'cuda' does not support this"),
    (lambda: jaxext.linear(X, W, BIAS, out_sharding=P("x")), ValueError, "linear: out_sharding is"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_every_operation_knows_the_same_activations():
    """Swish is silu: the same program, not another one that kernels do not fuse."""
    sizes, weights = np.array([1, 3], np.int32), np.stack([W, W], 1)
    calls = {
        "linear": lambda activation: jaxext.linear(X, W, activation=activation),
        "gated_linear_unit": lambda activation: jaxext.gated_linear_unit(X, weights, activation=activation),
        "conv_bias_act": lambda activation: jaxext.conv_bias_act(X.T[None], W.T[..., None], (1,), "SAME", activation=activation),
        "ragged_linear": lambda activation: jaxext.ragged_linear(X, np.stack([W, W]), sizes, activation=activation),
        "ragged_gated_linear_unit": lambda activation: jaxext.ragged_gated_linear_unit(
            X, np.stack([weights] * 2), sizes, activation=activation
        ),
        "causal_conv1d": lambda activation: jaxext.causal_conv1d(X, X[:2], activation=activation),
        "causal_conv1d_update": lambda activation: jaxext.causal_conv1d_update(X, np.stack([X] * 2, 1), X[:3], activation=activation)[0],
    }
    for name, call in calls.items():
        assert str(jax.make_jaxpr(lambda call=call: call("swish"))()) == str(jax.make_jaxpr(lambda call=call: call("silu"))()), name
        with pytest.raises(ValueError, match=f"^{name}: activation is 'swoosh', want one of .*'swish'"):
            call("swoosh")
