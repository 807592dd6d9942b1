"""A mixture of experts: against a loop over the choices in float64, with choices of no expert, a capacity, and several devices."""

import doctest
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations, random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import mixture
from jaxext.mixture.routed_rows import combine, dispatch
from jaxext.quantization import Quantized, quantize

T, K, E, D, F = 12, 2, 4, 4, 8
X, WEIGHTS = random((T, D), np.float32, 1), random((T, K), np.float32, 2)
GATE, UP, DOWN = (random(shape, np.float32, seed) for seed, shape in enumerate([(E, D, F), (E, D, F), (E, F, D)], 3))
# Expert 2 has no row, row 1 chooses no expert, row 5 one expert twice.
INDICES = np.array([[0, 1], [-1, 4], [3, 0], [1, 3], [0, 9], [1, 1], [3, -7], [0, 3], [0, 1], [1, 0], [3, 1], [0, 3]], np.int32)
ALL = X, INDICES, WEIGHTS, GATE, UP, DOWN
NOBODY = (INDICES < 0) | (INDICES >= E)
OPERANDS = (0, 2, 3, 4, 5)  # those that are differentiated


def silu(z):
    return z / (1 + np.exp(-z))


def loop(x, indices, weights, gate, up, down, capacity=None):
    """The definition, and which choices are dropped."""
    x, weights, up, down = (np.asarray(each, np.float64) for each in (x, weights, up, down))
    y, dropped, taken = np.zeros_like(x), np.ones(indices.shape, bool), np.zeros(len(up), int)
    for (t, j), e in np.ndenumerate(indices):
        if not 0 <= e < len(up) or capacity is not None and taken[e] >= capacity:
            continue
        taken[e] += 1
        dropped[t, j] = False
        hidden = silu(x[t] @ up[e]) if gate is None else silu(x[t] @ np.asarray(gate[e], np.float64)) * (x[t] @ up[e])
        y[t] += weights[t, j] * hidden @ down[e]
    return y, dropped


def plain(x, indices, weights, gate, up, down, capacity=None, activation=jax.nn.silu):
    """The same in jnp, by all experts on all rows."""
    member = jax.nn.one_hot(indices, up.shape[0], dtype=x.dtype)
    if capacity is not None:
        kept = jnp.cumsum(member.reshape(-1, up.shape[0]), 0) <= capacity
        member = jnp.where(kept.reshape(member.shape), member, 0)
    hidden = activation(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
    return jnp.einsum("tef,efd,tke,tk->td", hidden, down, member, weights)


def close(got, want, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max(initial=0)), rtol=0)


def gradients(f):
    return jax.jit(jax.grad(lambda *args: jnp.sin(f(*args)).sum(), OPERANDS))


@functools.cache
def truth():
    """The values and gradients of all experts on all rows."""
    return jax.jit(lambda *args: (plain(*args), gradients(plain)(*args)))(*ALL)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"), [("gate", jnp.float64, 1e-14), ("beside", jnp.float32, 1e-5), ("none", jnp.bfloat16, 3e-2)]
)
def test_values(kind, dtype, tolerance):
    x, weights, gate, up, down = (each.astype(dtype) for each in (X, WEIGHTS, GATE, UP, DOWN))
    matrices = {"gate": (gate, up), "beside": (None, np.stack([gate, up], 2)), "none": (None, up)}[kind]
    y = jaxext.moe(x, INDICES, weights.astype(np.float32), matrices[0], matrices[1], down)
    assert y.dtype == dtype
    close(y, loop(x, INDICES, weights, None if kind == "none" else gate, up, down)[0], tolerance)


@pytest.mark.parametrize("capacity", [0, np.uint8(64), 2**40])
def test_capacities(capacity):
    """The first choices are kept."""
    y, dropped = loop(*ALL, capacity)
    got, found = jaxext.moe(*ALL, capacity=capacity, return_dropped=True)
    close(got, y)
    np.testing.assert_array_equal(found, dropped)


@pytest.mark.parametrize("capacity", [None, 3])
def test_capacity_and_nan_that_is_not_read(capacity):
    """The weights of dropped choices, and the row that has no other, are NaN, and their gradients zero."""
    y, dropped = loop(*ALL, capacity)
    weights, x = np.where(dropped, np.nan, WEIGHTS), np.where(dropped.all(1)[:, None], np.nan, X).astype(np.float32)

    def with_gradients(f, x, weights):
        return jax.jit(lambda *args: (f(*args), gradients(lambda *args: f(*args)[0])(*args)))(x, INDICES, weights, GATE, UP, DOWN)

    (got, found), derivatives = with_gradients(functools.partial(jaxext.moe, capacity=capacity, return_dropped=True), x, weights)
    close(got, y)
    np.testing.assert_array_equal(found, dropped)
    assert found.dtype == bool and (capacity is not None or (dropped == NOBODY).all())
    close(derivatives, gradients(functools.partial(plain, capacity=capacity))(*ALL) if capacity else truth()[1])


def test_nan_of_an_expert_without_rows_and_of_a_cotangent():
    """An expert that no row chose is not read, and a row of the cotangent reaches its own row and experts alone."""
    matrices = [w.copy() for w in (GATE, UP, DOWN)]
    for w in matrices:
        w[2] = np.nan
    ct = jnp.ones_like(X).at[1].set(jnp.nan)  # row 1 chose no expert

    @jax.jit
    def with_gradients(*args):
        y, pull = jax.vjp(lambda x, weights, *matrices: jaxext.moe(x, INDICES, weights, *matrices), *args)
        return y, *pull(ct)

    y, dx, *others = with_gradients(X, WEIGHTS, *matrices)
    close(y, loop(*ALL)[0])
    assert all(np.isfinite(each).all() for each in (dx, *others)) and not dx[1].any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint64])
def test_indices_of_any_integers(dtype):
    close(jaxext.moe(X, INDICES.astype(dtype), *ALL[2:]), loop(*ALL)[0])


@pytest.mark.parametrize(("lead", "k", "experts"), [((), 2, 4), ((5,), 0, 4), ((0,), 2, 4), ((5,), 1, 0)], ids=str)
def test_shapes(lead, k, experts):
    """One row, no choices, no rows, and no experts, with gradients of their shapes."""
    x, weights = random((*lead, D), np.float32, 1), random((*lead, k), np.float32, 2)
    indices, matrices = random((*lead, k), np.int32, 3), [w[:experts] for w in (GATE, UP, DOWN)]
    rows = math.prod(lead)
    y, _ = loop(x.reshape(rows, D), indices.reshape(rows, k), weights.reshape(rows, k), *matrices)
    close(jaxext.moe(x, indices, weights, *matrices), y.reshape(x.shape))
    dots = gradients(jaxext.moe)(x, indices, weights, *matrices)
    assert [dot.shape for dot in dots] == [of.shape for of in (x, weights, *matrices)] and all(np.isfinite(dot).all() for dot in dots)
    if not (k and rows and experts):
        assert not any(dot.any() for dot in dots)


def test_gradients_of_rows_of_several_axes():
    ours = lambda x, i, s, *w: jaxext.moe(x.reshape(3, 4, D), i.reshape(3, 4, K), s.reshape(3, 4, K), *w)
    got = jax.jit(lambda *args: (ours(*args), gradients(lambda *args: ours(*args).reshape(T, D))(*args)))(*ALL)
    y, derivatives = truth()
    close(got, (y.reshape(3, 4, D), derivatives))


@pytest.mark.parametrize(
    "axes",
    [(0, *[None] * 5), (None, 1, *[None] * 4)],
)
def test_vmap(axes):
    args = [x if axis is None else np.stack([x, np.roll(x, 1, 0), x[::-1]], axis) for x, axis in zip(ALL, axes, strict=True)]
    mapped = lambda f: jax.jit(jax.vmap(lambda *args: (f(*args, capacity=3), gradients(f)(*args)), axes))
    close(mapped(jaxext.moe)(*args), mapped(plain)(*args), 1e-4)


@pytest.mark.parametrize(
    ("of_gate", "of_down", "activation"),
    [(dict(bits=4, group=2), dict(bits=8), jnp.sin), (dict(axis=None), dict(dtype=jnp.float8_e4m3fn), None)],
    ids=["int4 and int8", "one scale and fp8"],
)
def test_quantised_experts(of_gate, of_down, activation):
    """The values of what was quantised, and gradients, also in scales, beside a matrix that is not; dropped weights are not read."""
    x, weights, gate, up, down = (each.astype(np.float64) for each in (X, WEIGHTS, GATE, UP, DOWN))
    gate, down = quantize(gate, **of_gate), quantize(down, **of_down)
    scales = gate.scale, down.scale

    def layer(wide, x, weights, up, scales):
        each = [Quantized(w.qvalue, scale) for w, scale in zip((gate, down), scales, strict=True)]
        first, last = [w.dequantize() for w in each] if wide else each
        return jaxext.moe(x, INDICES, weights, first, up, last, activation=activation)

    def with_gradients(wide):
        of = lambda *args: layer(wide, *args)
        return jax.jit(lambda *args: (of(*args), jax.grad(lambda *args: jnp.sin(of(*args)).sum(), (0, 1, 2, 3))(*args)))

    dropped = np.where(NOBODY, np.nan, weights)
    close(with_gradients(False)(x, dropped, up, scales), with_gradients(True)(x, weights, up, scales), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_quantised_experts_of_16_and_8_bits(dtype):
    """The result is bfloat16, whatever dtype the scales have, and is as near as that of wide matrices."""
    x, matrices = X.astype(dtype), [quantize(w) for w in (GATE, UP, DOWN)]
    y = jaxext.moe(x, INDICES, WEIGHTS, *matrices)
    assert y.dtype == jnp.bfloat16
    close(y, loop(x.astype(np.float64), INDICES, WEIGHTS, *(w.dequantize() for w in matrices))[0], 3e-2)


def test_rows_of_quantised_experts_are_copied_once():
    """Both first products read one copy, and the gradient of the rows is one sum over their places."""
    matrices = [quantize(w) for w in (GATE, UP, DOWN)]
    found = [e.primitive.name for e in equations(jax.grad(lambda x: jaxext.moe(x, INDICES, WEIGHTS, *matrices).sum()), X)]
    assert found.count("combine_rows") == found.count("dispatch_rows") - 1 == 2  # the weights of rows go to their places too


def test_second_derivative():
    args = tuple(x.astype(np.float64) for x in (X, WEIGHTS, GATE, UP, DOWN))

    def along(f):
        total = lambda x, weights, *matrices: jnp.sin(f(x, INDICES, weights, *matrices)).sum()
        return jax.jit(lambda *args: jax.jvp(jax.grad(total, range(5)), args, tuple(x[::-1] for x in args)))(*args)

    close(along(jaxext.moe), along(plain), 1e-12)


def test_an_activation_that_closes_over_a_traced_number():
    slope = lambda f: jax.jit(jax.value_and_grad(lambda s: jnp.sin(f(*ALL, activation=lambda z: jnp.where(z > 0, z, s * z))).sum()))
    for s in (np.float32(0.25), np.float32(0.5)):
        close(slope(jaxext.moe)(s), slope(plain)(s))


def test_any_number_of_rows():
    (t,) = jax.export.symbolic_shape("t")
    types = [jax.ShapeDtypeStruct((t, x.shape[1]), x.dtype) for x in ALL[:3]]
    exported = jax.export.export(jax.jit(lambda x, i, s: jaxext.moe(x, i, s, GATE, UP, DOWN, capacity=3)))(*types)
    close(exported.call(*ALL[:3]), loop(*ALL, 3)[0])


def test_rows_are_gathered_and_added_in_float32():
    """No row is scattered, forwards or backwards, and no copy is made of gates that lie beside each other."""
    beside = np.stack([GATE, UP], 2)
    found = list(equations(jax.grad(lambda x, w: jaxext.moe(x, INDICES, WEIGHTS, None, w, DOWN).sum(), (0, 1)), X, beside))
    assert [e for e in found if e.primitive.name.startswith("scatter") and e.outvars[0].aval.ndim > 1] == []
    assert [e.invars[1].aval.shape for e in found if e.primitive.name == "ragged_gather_gated_linear_unit"] == [beside.shape]
    row, place = jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)[None]
    parts = jnp.array([256, 1, 1, 1], jnp.bfloat16)[:, None]
    assert combine(parts, row, place).item() == jax.linear_transpose(lambda x: dispatch(x, row, place), parts[:1])(parts)[0].item() == 260


SPLITS = {
    "rows": [P("x"), P("x"), P("x"), P(), P(), P()],
    "hidden": [P("y"), P("y"), P(), P(None, None, "x"), P(None, None, "x"), P(None, "x")],
    "experts and columns": [P(None, "y"), P(), P(), P("x", "y"), P("x"), P("x", None, "y")],
}


@pytest.mark.parametrize(
    ("name", "kind"), [("rows", AxisType.Explicit), ("hidden", AxisType.Explicit), ("experts and columns", AxisType.Auto)], ids=str
)
def test_devices(name, kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(ALL, SPLITS[name], strict=True)]
    y, dots = jax.jit(lambda *args: (jaxext.moe(*args), gradients(jaxext.moe)(*args)))(*args)
    close((y, dots), truth())
    if kind is AxisType.Explicit:
        assert [jax.typeof(a).sharding for a in (y, *dots)] == [jax.typeof(args[i]).sharding for i in (0, *OPERANDS)]


def split(rows, **how):
    """The layer with experts split over two devices, and operands of that many rows for each."""
    rng = np.random.default_rng(0)
    args = [random((2 * rows, D), np.float64, 1), rng.integers(-1, E + 1, (2 * rows, K)), random((2 * rows, K), np.float64, 2)]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    ours = lambda *args: jaxext.moe(*args, axis_name="x", return_dropped=True, **how)
    f = jax.shard_map(ours, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return f, (*args, *(w.astype(np.float64) for w in (GATE, UP, DOWN)))


def test_quantised_experts_on_several_devices():
    """Scales go with their experts; a scale may be that of several."""
    f, (x, indices, weights, *matrices) = split(7)
    quantised = [quantize(w, bits=4, group=2) for w in matrices[:2]]
    one = quantize(matrices[2], axis=None)
    of_pairs = one.scale * jnp.arange(1.0, E // 2 + 1).reshape(E // 2, 1, 1)
    y, _ = jax.jit(f)(x, indices, weights, *quantised, Quantized(one.qvalue, jnp.repeat(of_pairs, 2, 0)))
    close(y, jaxext.moe(x, indices, weights, quantised[0], quantised[1], Quantized(one.qvalue, of_pairs)), 1e-12)


@pytest.mark.parametrize(("rows", "capacity"), [(3, None), (257, 70)])
def test_experts_on_several_devices(rows, capacity):
    """One exchange or two; a capacity counts the rows of each device."""
    f, args = split(rows, capacity=capacity)
    x, indices, weights, *matrices = args
    parts = zip(*(np.split(a, 2) for a in (x, indices, weights)), strict=True)
    y, dropped = (np.concatenate(of) for of in zip(*(loop(*part, *matrices, capacity=capacity) for part in parts), strict=True))
    derivatives = gradients(lambda *args: f(*args)[0]) if rows < 100 else lambda *args: None
    (got, found), dots = jax.jit(lambda *args: (f(*args), derivatives(*args)))(*args)
    close(got, y, 1e-12)
    np.testing.assert_array_equal(found, dropped)
    if dots:
        close(dots, gradients(plain)(x, np.where(dropped, -1, indices), weights, *matrices), 1e-12)


def test_neither_half_waits_for_the_other():
    """Each of two exchanges, there and back, follows from operands without the other.  Few rows have one exchange."""

    def exchanges(rows):
        f, args = split(rows)
        jaxpr: Any = jax.make_jaxpr(f)(*args)
        while all(e.primitive.name != "by_platform" for e in jaxpr.eqns):  # it is in the shard_map, or in a jit in there
            (jaxpr,) = (e.params["jaxpr"] for e in jaxpr.eqns if "jaxpr" in e.params)
        before, found = {}, []  # the exchanges of which a value is made
        for eqn in jaxpr.eqns:
            needs = frozenset().union(*(before.get(v, ()) for v in eqn.invars if not hasattr(v, "val")))
            if eqn.primitive.name == "by_platform":
                found.append(needs)
                needs |= {len(found) - 1}
            before |= dict.fromkeys(eqn.outvars, needs)
        return found

    assert exchanges(255) == [set(), {0}]
    assert exchanges(256) == [set(), {0}, set(), {2}]


def test_the_examples_of_the_docstring():
    assert doctest.testmod(mixture) == doctest.TestResults(failed=0, attempted=4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=[[1.0]]), TypeError, "x is .*, want an array"),
        (dict(x=X.astype(int)), TypeError, "x is int64, want floating-point"),
        (dict(x=X[0, 0]), TypeError, r"x has the shape \(\), want \(..., D\)"),
        (dict(indices=WEIGHTS), TypeError, r"indices is float32\[12, 2\], want integers of the shape \(12, k\), since x is \(12, 4\)"),
        (dict(indices=INDICES[0]), TypeError, r"indices is int32\[2\], want integers of the shape \(12, k\)"),
        (dict(indices=NOBODY), TypeError, r"indices is bool\[12, 2\], want integers"),
        (dict(weights=WEIGHTS[:, :1]), TypeError, r"weights has the shape \(12, 1\), want \(12, 2\): an element for each of the indices"),
        (dict(weights=WEIGHTS.astype(complex)), TypeError, "weights is complex128, want a dtype that converts to float32"),
        (dict(w_gate=DOWN), TypeError, r"w_gate has the shape \(4, 8, 4\), want \(4, 4, 8\): that of w_up"),
        (dict(w_up=UP[:, :3]), TypeError, r"w_up has the shape \(4, 3, 8\), want \(E, 4, F\), since x has the shape \(12, 4\)"),
        (dict(w_up=np.stack([UP] * 2, 2)), TypeError, r"w_up has the shape \(4, 4, 2, 8\), want \(E, 4, F\), since"),
        (dict(w_gate=None, w_up=np.stack([UP] * 3, 2)), TypeError, r"w_up .*, want \(E, 4, F\), or \(E, 4, 2, F\): gate and up, since"),
        (dict(w_down=UP), TypeError, r"w_down has the shape \(4, 4, 8\), want \(4, 8, 4\): \(E, F, D\)"),
        (dict(w_down=DOWN.astype(int)), TypeError, "w_down is int64, want floating-point numbers, or a Quantized of them"),
        (dict(w_up=UP.astype(jnp.float8_e4m3fn)), TypeError,
            "w_up is float8_e4m3fn and x is float32, want the same dtype, dtypes of 16 bits or more, or a Q"),
        (dict(w_up=quantize(np.stack([UP] * 2, 2))), TypeError, r"w_up has the shape \(4, 4, 2, 8\), want \(E, 4, F\), since"),
        (dict(w_gate=None, w_up=quantize(np.stack([UP] * 2, 2))), TypeError, r"w_up has the shape \(4, 4, 2, 8\), want \(E, 4, F\), since"),
        (dict(w_down=quantize(DOWN, symmetric=False)), TypeError,
            "w_down has a zero_point, want None: numbers quantised with symmetric=True"),
        (dict(w_gate=Quantized(UP.astype(int), UP)), TypeError,
            "w_gate.qvalue is int64, want floating-point numbers, or integers of at most 8"),
        (dict(w_gate=Quantized(UP, UP[:, :, :3])), TypeError,
            r"w_gate.scale has the shape \(4, 4, 3\), want as many axes as w_gate.qvalue"),
        (dict(capacity=2.5), TypeError, "capacity is 2.5, want an int or None"),
        (dict(capacity=-1), ValueError, "capacity is -1, want 0 or more"),
        (dict(activation="swoosh"), ValueError, "activation is 'swoosh', want one of"),
        (dict(implementation="none"), ValueError, "implementation is 'none', want one of"),
        (dict(axis_name="z"), NameError, "axis_name is 'z', want an axis of a shard_map or pmap around the call"),
        (dict(axis_name=["x"]), TypeError, r"axis_name is \['x'\], want a name or a tuple of names"),
        (dict(axis_name=()), TypeError, r"axis_name is \(\), want a name or a tuple of names"),
        (dict(w_gate=None, w_up=np.concatenate([GATE, UP], 2)), TypeError, r"w_up .* gate and up: w_up.reshape\(4, 4, 2, 8\)"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    arguments: dict[str, Any] = dict(zip(("x", "indices", "weights", "w_gate", "w_up", "w_down"), ALL, strict=True)) | change
    with pytest.raises(error, match=f"^moe: {message}"):
        jaxext.moe(**arguments)
