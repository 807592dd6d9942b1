"""Fused, causal, ragged and scaled operations by `implementation="triton"`, from the operation to the kernel and back, interpreted.

Most operands are small integers, scales powers of two and activations piecewise linear, so that sums and gradients are exact: comparisons
are bit for bit.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.kernels import ragged
from jaxext.ops.ragged_gather import ragged_gather_linear

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")


@pytest.fixture(autouse=True)
def triton():
    with jaxext.use_implementation("triton"):
        yield


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """`ours` is the operation, `plain` the same by jnp, lax or xla; the arguments but the last `fixed` ones have gradients."""

    ours: Callable
    plain: Callable
    args: tuple
    fixed: int = 0
    tolerance: float = 0
    ops: tuple[str, ...] = ()  # the first ones of the program of the result and its gradients

    @property
    def others(self) -> tuple:
        """Other arguments of the same shapes."""
        return tuple(np.roll(x, 1, 0) if x.ndim == 1 else x[::-1] for x in self.args)

    def both(self, f: Callable) -> Callable:
        """The result, and all gradients for a cotangent."""

        def run(*args):
            varied = len(args) - self.fixed
            y, pullback = jax.vjp(lambda *varied: f(*varied, *args[len(varied) :]), *args[:varied])
            return y, pullback(random(y.shape, y.dtype, 9, not self.tolerance))

        return run

    def judge(self, got, want) -> None:
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == other.dtype
            one, other = (np.asarray(x, np.float64) for x in (one, other))
            np.testing.assert_allclose(one, other, rtol=self.tolerance, atol=self.tolerance)


def numbers(*shape, seed=0, dtype: Any = np.float32):
    return jnp.asarray(random(shape, np.float32, seed, integers=True)).astype(dtype)


def powers(*shape, seed=0):
    return jnp.exp2(jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape)).astype(jnp.float32))


def several(*shapes):
    return tuple(numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))


# With epilogues.
LINEAR = several((5, 9), (9, 7), (7,), (5, 7))


def linear(x, w, b, r=None, **more):
    return jaxext.linear(x, w, b, activation="relu", residual=r, **more)


def plain_linear(x, w, b, r: Any = 0):
    return jax.nn.relu(x @ w + b[None]) + r


def conv_bias_act(groups, channels, spatial, taps) -> Operation:
    space = "DHW"[-len(spatial) :]
    shapes = (2, *spatial, 4), (*taps, 4 // groups, channels), (channels,), (2, *spatial, channels)
    layout = (f"N{space}C", f"{space}IO", f"N{space}C")
    static: Any = dict(window_strides=(1,) * len(spatial), padding="SAME", dimension_numbers=layout, feature_group_count=groups)
    return Operation(
        lambda x, w, b, r: jaxext.conv_bias_act(x, w, **static, bias=b, activation="relu", residual=r),
        lambda x, w, b, r: jax.nn.relu(lax.conv_general_dilated(x, w, **static) + jnp.broadcast_to(b, r.shape)) + r,
        several(*shapes),
    )


FUSED = {
    "linear": Operation(linear, plain_linear, LINEAR),
    "linear without a residual": Operation(linear, plain_linear, LINEAR[:3]),  # its result has the slope
    "gated_linear_unit": Operation(
        functools.partial(jaxext.gated_linear_unit, activation="relu"),
        lambda x, w: jax.nn.relu(x @ w[:, 0]) * (x @ w[:, 1]),
        several((5, 9), (9, 2, 7)),
    ),
    "conv_bias_act": conv_bias_act(1, 4, (5, 4), (3, 3)),
    "conv_bias_act, groups": conv_bias_act(2, 4, (5, 4), (3, 3)),
    "conv_bias_act, depthwise": conv_bias_act(4, 8, (5, 4), (3, 3)),
    # they were taken for gated products, and so refused: T is an axis of their filters
    "conv_bias_act, three axes": conv_bias_act(1, 4, (3, 3, 4), (2, 3, 3)),
    "conv_bias_act, depthwise, three axes": conv_bias_act(4, 4, (3, 3, 4), (2, 3, 3)),
}


# Causal convolutions.
X, WEIGHT, BIAS, STATE = (random(shape, np.float32, seed) for seed, shape in enumerate(((2, 13, 6), (4, 6), (6,), (2, 3, 6))))
NUMBERS = np.array([[0] * 5 + [1] * 8, [3] * 2 + [4] * 10 + [9]], np.int32)
by_triton, xla_bits = (functools.partial(jaxext.causal_conv1d, activation="silu", implementation=name) for name in ("triton", "xla"))


def causal(*args, names=(), fixed=0) -> Operation:
    """The last arguments have these names."""

    def by(f):
        return lambda *args: f(*args[: len(args) - len(names)], **dict(zip(names, args[len(args) - len(names) :], strict=True)))

    return Operation(by(by_triton), by(xla_bits), args, fixed, 1e-5, ("causal_conv1d", "causal_conv1d_backward"))


CAUSAL = {
    "causal": causal(X, WEIGHT),
    "causal, bias": causal(X, WEIGHT, BIAS),
    "causal, state": causal(X, WEIGHT, BIAS, STATE, names=["initial_states"]),
    "causal, packed": causal(X, WEIGHT, BIAS, NUMBERS, names=["seq_idx"], fixed=1),
    "causal, packed, state": causal(X, WEIGHT, BIAS, STATE, NUMBERS, names=["initial_states", "seq_idx"], fixed=1),
}


# Ragged products.
SIZES = jnp.array([13, 0, 20, 3])


def plain_ragged(x, w, sizes):
    """Rows of no group are zero."""
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")
    of_each = jnp.einsum("mk,gkn->gmn", x, w)
    return sum((jnp.where((group == g)[:, None], of_each[g], 0) for g in range(len(w))), jnp.zeros(of_each.shape[1:], x.dtype))


def layer(x, gates, down, bias, scale):
    """Two launches forward: a gate, and what the router's weight of each row scales."""
    hidden = jaxext.ragged_gated_linear_unit(x, gates, SIZES, activation="silu", precision="highest")
    return jaxext.ragged_linear(hidden, down, SIZES, bias, row_scale=scale, precision="highest")


def plain_layer(x, gates, down, bias, scale):
    gate, up = (plain_ragged(x, gates[:, :, i], SIZES) for i in range(2))
    ones = np.ones((40, 1), np.float32)
    return (plain_ragged(jax.nn.silu(gate) * up, down, SIZES) + plain_ragged(ones, bias[:, None], SIZES)) * scale[:, None]


# 40 places of 25 rows, the last of which has none, and of no row.
ROW = np.random.default_rng(0).integers(-1, 24, 40).astype(np.int32)
PLACES = [np.flatnonzero(ROW == s).astype(np.int32) for s in range(25)]
PLACE = np.stack([np.pad(of, (0, 8 - len(of)), constant_values=40) for of in PLACES])


def gathered(x, gates, w):
    """A gate, and a product without an epilogue."""
    product = functools.partial(ragged_gather_linear, x, group_sizes=SIZES, row=ROW, place=PLACE, precision="highest")
    return product(gates, activation="silu") * product(w)


def plain_gathered(x, gates, w):
    rows = jnp.where((ROW >= 0)[:, None], x[ROW], 0)
    return jax.nn.silu(plain_ragged(rows, gates[:, :, 0], SIZES)) * plain_ragged(rows, gates[:, :, 1], SIZES) * plain_ragged(rows, w, SIZES)


LAYER = [random(shape, np.float32, i) for i, shape in enumerate(((40, 9), (4, 9, 2, 6), (4, 6, 7), (4, 7), (40,)))]
GATHERED = tuple(random(shape, np.float32, i) for i, shape in enumerate(((25, 9), (4, 9, 2, 6), (4, 9, 6))))
RAGGED = {
    "ragged_dot": Operation(jaxext.ragged_dot, plain_ragged, (*several((40, 9), (4, 9, 7)), SIZES), fixed=1),
    "ragged_dot, even": Operation(jaxext.ragged_dot, plain_ragged, (*several((40, 9), (4, 9, 8)), SIZES), fixed=1),
    "ragged layer": Operation(layer, plain_layer, tuple(LAYER), 0, 1e-3, ("ragged_gated_linear_unit", "ragged_linear")),
    "gathered rows": Operation(gathered, plain_gathered, GATHERED, 0, 1e-3, ("ragged_gather_gated_linear_unit", "ragged_gather_nn")),
}


# Scaled products.  Gradients in x, whose product has a scaled result, and in both scales; that in w is of a narrow dtype.
SCALED = numbers(5, 64, dtype=jnp.bfloat16), powers(5, 2), powers(2, 6, seed=1), numbers(64, 6, seed=1, dtype=jnp.int8)
scaled_dot = functools.partial(jaxext.scaled_dot, preferred_element_type=jnp.float32)


def scaled(x, s, t, w):
    return scaled_dot(x, w, lhs_scale=s, rhs_scale=t)


def plain_scaled(x, s, t, w):
    with jaxext.use_implementation("xla"):
        wide = [x.astype(jnp.float32) * jnp.repeat(s, 32, 1), w.astype(jnp.float32) * jnp.repeat(t, 32, 0)]
        return jnp.matmul(*wide, precision="highest")


OPERATIONS = FUSED | CAUSAL | RAGGED | {"scaled_dot": Operation(scaled, plain_scaled, SCALED, fixed=1)}


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients(name):
    """Every product is a kernel, and those with an epilogue are launched once."""
    op = OPERATIONS[name]
    op.judge(jax.jit(op.both(op.ours))(*op.args), op.both(op.plain)(*op.args))
    rows = jaxext.explain(op.both(op.ours))(*op.args).rows
    assert {row.chosen for row in rows} == {"triton"}
    assert {row.op for row in rows} == {*op.ops} or "causal" not in name
    assert [row.op for row in rows][: len(op.ops)] == [*op.ops]


def test_the_gradient_of_ragged_matrices_in_chunks(monkeypatch):
    """Two kernels, of which one takes what the other makes."""
    monkeypatch.setattr(ragged, "candidates", lambda problem: [ragged.Config(tile_m=16, tile_n=16, tile_k=16, chunk=16)])
    x, y, w = several((41, 9), (41, 7), (4, 9, 7))

    def gradient(x, y):
        return jax.linear_transpose(lambda w: jaxext.ragged_dot(x, w, SIZES), w)(y)[0]

    (row,) = jaxext.explain(gradient)(x, y).rows
    assert (row.op, row.how) == ("ragged_tn", "ragged_chunked")
    np.testing.assert_array_equal(jax.jit(gradient)(x, y), [x[:13].T @ y[:13], 0 * w[1], x[13:33].T @ y[13:33], x[33:36].T @ y[33:36]])


@pytest.mark.parametrize("name", ["ragged_dot", "causal, bias"])
def test_a_derivative_of_a_derivative(name):
    op = OPERATIONS[name]
    count = len(op.args) - op.fixed
    gradients = lambda f: lambda *args: jax.grad(lambda *args: jnp.sum(f(*args, *op.args[count:]) ** 2), range(count))(*args)
    along = lambda f: jax.jvp(gradients(f), op.args[:count], op.others[:count])
    op.judge(along(op.ours), along(op.plain))


MAPPED = [
    *(("ragged_dot", axes) for axes in [(0, 0, 0), (0, None, None), (None, 0, 0)]),
    ("gathered rows", (0, 0, 1)),
    *(("causal, bias", axes) for axes in [(0, 0, 0), (None, 0, None)]),
    *(("linear", axes) for axes in [(None, 1, 0, None), (1, 0, 0, 2)]),
    *(("scaled_dot", axes) for axes in [(0, 0, 0, 0), (None, None, 0, None)]),
]


@pytest.mark.parametrize(("name", "axes"), MAPPED, ids=str)
def test_vmap(name, axes):
    """The value and all gradients, mapped, are those of the plain function."""
    op = OPERATIONS[name]
    args = [one if d is None else jnp.stack([one, other], d) for one, other, d in zip(op.args, op.others, axes, strict=True)]
    got, want = (jax.jit(jax.vmap(op.both(f), axes))(*args) for f in (op.ours, op.plain))
    op.judge(got, want)


@pytest.mark.parametrize(
    ("name", "specs", "out"),
    [
        ("causal", (P("d"), P()), P("d")),
        ("ragged_dot, even", (P(), P(None, None, "d"), P()), P(None, "d")),
        ("scaled_dot", (P(), P(), P(None, "d"), P(None, "d")), P(None, "d")),
    ],
)
def test_shard_map(name, specs, out):
    """Each device has the kernels of its part; gradients of what all have are added over devices."""
    op = OPERATIONS[name]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.shard_map(op.ours, mesh=mesh, in_specs=specs, out_specs=out)
    op.judge(jax.jit(op.both(split))(*op.args), op.both(op.plain)(*op.args))


def test_a_sum_over_devices_comes_before_the_epilogue():
    mesh = jax.make_mesh((2,), ("k",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    args = several((5, 8), (8, 7), (7,), (5, 7))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, (P(None, "k"), P("k"), P(), P()), strict=True)]
        got = jax.jit(functools.partial(linear, out_sharding=P()))(*placed)
    np.testing.assert_array_equal(got, plain_linear(*args))


def test_an_empty_sum_leaves_the_epilogue():
    x, w, b, r = LINEAR
    np.testing.assert_array_equal(linear(x[:, :0], w[:0], b, r), plain_linear(x[:, :0], w[:0], b, r))


def test_a_function_of_the_user_follows_the_kernel():
    x, w, b, r = LINEAR
    got = jaxext.linear(x, w, b, activation=jnp.sin, residual=r)
    np.testing.assert_allclose(got, jnp.sin(x @ w + b[None]) + r, rtol=1e-5, atol=1e-5)


def test_partial_sums():
    """Parts of weight and bias, by several programs, are added; other results have none."""
    op = causal(random((2, 200, 6), np.float32, 5), WEIGHT, BIAS)
    gradients = lambda f: lambda *args: op.both(f)(*args)[1]
    assert [row.how for row in jaxext.explain(gradients(op.ours))(*op.args).rows] == ["causal", "causal in 4 parts"]
    op.judge(gradients(op.ours)(*op.args), gradients(op.plain)(*op.args))


def test_pieces_and_packed_sequences_are_the_whole_bit_for_bit():
    whole, last = by_triton(X, WEIGHT, BIAS, return_final_states=True)
    first, state = by_triton(X[:, :5], WEIGHT, BIAS, return_final_states=True)
    second, end = by_triton(X[:, 5:], WEIGHT, BIAS, initial_states=state, return_final_states=True)
    np.testing.assert_array_equal(np.concatenate([first, second], 1), whole)
    np.testing.assert_array_equal(end, last)
    packed = by_triton(X, WEIGHT, BIAS, seq_idx=np.broadcast_to(np.repeat([0, 1], (5, 8)), (2, 13)).astype(np.int32))
    separate = [by_triton(part, WEIGHT, BIAS) for part in (X[:, :5], X[:, 5:])]
    np.testing.assert_array_equal(packed, np.concatenate(separate, 1))


@pytest.mark.parametrize("wanted", range(3))
def test_some_of_the_gradients(wanted):
    """A result that nobody asked for is dropped."""
    op = OPERATIONS["causal, bias"]
    gradient = lambda f: jax.jit(lambda *args: op.both(f)(*args)[1][wanted])
    op.judge(gradient(op.ours)(*op.args), gradient(op.plain)(*op.args))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_weights_in_float32(dtype):
    op = causal(jnp.asarray(X, dtype), WEIGHT, BIAS)
    for f in (op.ours, op.plain):
        with jax.numpy_dtype_promotion("standard"):
            y, gradients = op.both(f)(*op.args)
        assert [of.dtype for of in (y, *gradients)] == [dtype, dtype, np.float32, np.float32]


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_layouts_of_scaled_products(layout):
    x, s, t, w = SCALED
    turn = lambda of, which: of.T if which == "t" else of
    contract = (((int(layout[0] == "n"),), (int(layout[1] == "t"),)), ((), ()))
    scales = dict(lhs_scale=turn(s, layout[0]), rhs_scale=turn(t, layout[1]))
    got = scaled_dot(turn(x, layout[0]), turn(w, layout[1]), **scales, dimension_numbers=contract)
    np.testing.assert_array_equal(got, plain_scaled(*SCALED))


def test_8_bit_gradients_are_rounded_by_xla():
    *others, w = SCALED
    gradient = lambda f: jax.grad(lambda w: f(*others, w).sum())(w.astype(jnp.float8_e4m3fn))
    OPERATIONS["scaled_dot"].judge(gradient(scaled), gradient(plain_scaled))


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.int8], ids=lambda dtype: dtype.dtype.name)
def test_quantized(dtype):
    """Forward, and the gradient of x, with int4 as they lie in memory."""
    q = jaxext.quantization.Quantized(numbers(64, 32, dtype=dtype), powers(2, 32))
    wide = q.qvalue.astype(jnp.float32) * jnp.repeat(q.scale, 32, 0)
    f = lambda x: jaxext.quantized_matmul(x, q, preferred_element_type=jnp.float32)
    op = Operation(f, lambda x: x.astype(jnp.float32) @ wide, SCALED[:1])
    op.judge(jax.jit(op.both(op.ours))(*op.args), op.both(op.plain)(*op.args))


REFUSED = {
    "32 taps, its forward takes 31 at most": lambda: by_triton(X, np.ones((32, 6), np.float32)),
    "9 taps, its backward takes 8 at most": lambda: jax.grad(lambda x: by_triton(x, np.ones((9, 6), np.float32)).sum())(X),
    "x is int4": lambda: scaled_dot(SCALED[0].astype(jnp.int4), SCALED[3], lhs_scale=SCALED[1]),
    "packed rows of 5": lambda: jaxext.quantized_matmul(
        SCALED[0], jaxext.quantization.Quantized(numbers(64, 5, dtype=jnp.int4), powers(1, 5))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    with pytest.raises(NotImplementedError, match=reason):
        REFUSED[reason]()
