"""Ragged products of scaled numbers: each group's product in float64 is the truth, for every dtype, cut, way, transformation and split."""

import doctest
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import check_second_derivatives, equations, random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_quantized import small
from test_ragged import owners

import jaxext
from jaxext.core.implementation import Algorithm
from jaxext.ops import ragged_scaled
from jaxext.ops.ragged.xla import ScaledFilters, Ways, XlaRagged
from jaxext.ops.ragged_scaled.form import form
from jaxext.ops.ragged_scaled.xla import XlaRaggedScaled

M, K, N, G = 12, 12, 6, 4
SHORT = np.array([5, 0, 4, 1], np.int32)  # of 10 rows
SIZES = {
    "zeros": (0, 5, 0, 7),
    "all in one": (0, 0, 12, 0),
    "none": (0, 0, 0, 0),
    "short": (2, 0, 4, 1),
    "negative": (3, -2, 4, 1),
    "beyond the rows": (5, 9, 3, 2),
    "huge": (2**31 - 1, 2**31 - 1, 2, 2**31 - 1),
}
SCALES = {  # of lhs and of rhs, and None
    "none": (None, None),
    "numbers": ((), ()),
    "rows and columns": ((M, 1), (G, 1, N)),
    "blocks": ((M, 4), (G, 4, 2)),
    "blocks of other sizes": ((M, 4), (G, 6, 3)),  # of the sum
    "each element": ((M, K), (G, K, N)),
    "of several rows, of several groups": ((6, 2), (2, 4, 1)),
    "groups": (None, (G, 1, 1)),
    "lhs": ((1, 3), None),
}
ROLES = [  # dtypes, scales, and whether the axes of matrices are swapped
    (("float32", "int8"), "rows and columns", False),
    (("bfloat16", "int8"), "groups", False),
    (("float16", "int4"), "blocks of other sizes", False),
    (("bfloat16", "float8_e4m3fn"), "of several rows, of several groups", False),
    (("float8_e5m2", "float8_e4m3fn"), "blocks", False),
    (("int8", "int8"), "numbers", False),
    (("int8", "bfloat16"), "lhs", False),
    (("float64", "float32"), "each element", True),
]


def powers(shape, seed, dtype: Any = jnp.float32) -> Any:
    """Scales whose products are exact."""
    return None if shape is None else jnp.exp2(small(shape, jnp.float32, seed)).astype(dtype)


def repeated(scale, shape) -> Any:
    """An element in float64 for each one of an array of this shape."""
    scale = np.ones((1,) * len(shape)) if scale is None else np.asarray(scale).astype(np.float64)
    scale = scale.reshape(scale.shape or (1,) * len(shape))
    for axis, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // max(count, 1), axis)
    return scale


def of_blocks(x, shape) -> Any:
    """The sums over blocks of an array, in the shape of a scale: the inverse of `repeated`, transposed."""
    cut = [part for size, count in zip(x.shape, shape or (1,) * x.ndim, strict=True) for part in (count, size // max(count, 1))]
    return x.reshape(cut).sum(tuple(range(1, len(cut), 2))).reshape(shape)


def truth(x, w, sizes, s, t, ct) -> list:
    """y and the gradients of x, w and both scales in float64.  What is of no group is zero."""
    of = owners(sizes, len(x))
    inside = np.eye(max(len(w), 1))[of][:, : len(w)] * (of >= 0)[:, None]  # (M, G)
    clean = lambda x: np.where((of >= 0)[:, None], np.asarray(x).astype(np.float64), 0)
    x, ct, w = clean(x), clean(ct), np.asarray(w).astype(np.float64)
    by_x, by_w = clean(repeated(s, x.shape)), repeated(t, w.shape)
    y = np.einsum("mg,mk,gkn->mn", inside, x * by_x, w * by_w)
    dx, dw = np.einsum("mg,mn,gkn->mk", inside, ct, w * by_w), np.einsum("mg,mk,mn->gkn", inside, x * by_x, ct)
    of_scales = (None if scale is None else of_blocks(x * dx, scale.shape) for x, dx, scale in ((x, dx, s), (w, dw, t)))
    return [y, dx * by_x, dw * by_w, *of_scales]


def call(x, w, sizes, s=None, t=None, *, turned=False, **static):
    """The operation, whose matrices are given as (G, K, N)."""
    if turned:
        w, t = jnp.swapaxes(w, 1, 2), t if t is None or not t.ndim else jnp.swapaxes(t, 1, 2)
    return jaxext.ragged_scaled_dot(x, w, sizes, lhs_scale=s, rhs_scale=t, transpose_rhs=turned, **static)


def both(x, w, sizes, s, t, ct, **static) -> list:
    """y and the gradients of all that has some, as `truth`, and None elsewhere."""
    given = [x, w, s, t]
    dtypes = [None if of is None else of.dtype for of in given]
    moved = [i for i, of in enumerate(dtypes) if of is not None and jnp.issubdtype(of, jnp.floating) and of != jnp.float8_e8m0fnu]

    def f(*some):
        x, w, s, t = (dict(zip(moved, some, strict=True)).get(i, of) for i, of in enumerate(given))
        return call(x, w, sizes, s, t, **static)

    y, pull = jax.vjp(f, *(given[i] for i in moved))
    found = dict(zip(moved, pull(ct.astype(y.dtype)), strict=True))
    return [y, *(found.get(i) for i in range(4))]


def of_sizes(function: Any, sizes, **static) -> Any:
    """The function of other operands than the sizes."""
    return lambda x, w, *more: function(x, w, sizes, *more, **static)


def same(got, want, **near: Any):
    """Equal to what float64 has, rounded to the dtype of each."""
    near = {"rtol": 0} | near
    for one, other in zip(got, want, strict=True):
        if one is not None:
            rounded = np.asarray(jnp.asarray(other).astype(one.dtype)).astype(np.float64)
            np.testing.assert_allclose(np.asarray(one).astype(np.float64), rounded, **near)


def poisoned(x, sizes):
    """NaN in rows of no group, of what has NaN and a row for each."""
    if x is None or x.ndim != 2 or len(x) != M or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(jnp.asarray(owners(sizes, M) < 0)[:, None], jnp.full((), jnp.nan, x.dtype), x)


def operands(dtypes=("float32", "int8"), scales="blocks", of_scales: Any = jnp.float32):
    x, w, ct = small((M, K), dtypes[0], 0), small((G, K, N), dtypes[1], 1), small((M, N), jnp.float32, 2)
    s, t = (powers(shape, 3 + i, of_scales) for i, shape in enumerate(SCALES[scales]))
    return x, w, s, t, ct


@pytest.mark.parametrize(("dtypes", "scales", "turned"), ROLES, ids=str)
def test_every_role(dtypes, scales, turned):
    """Matrices have their axes in either order.  Rows of no group hold NaN, and so do their scales and cotangents."""
    x, w, s, t, ct = operands(dtypes, scales, jnp.bfloat16 if scales == "groups" else jnp.float32)
    result = "float64" if dtypes[0] == "float64" else "float32"
    program = jax.jit(functools.partial(both, turned=turned, preferred_element_type=result))
    got = program(poisoned(x, SHORT), w, SHORT, poisoned(s, SHORT), t, poisoned(ct, SHORT))
    assert got[0].dtype == result
    same(got, truth(x, w, SHORT, s, t, ct))


def test_sizes():
    """Sizes have any integer dtype, which may hold fewer than the rows; the parts of groups beyond the rows are not there."""
    x, w, s, t, ct = operands(("float32", "float8_e4m3fn"))
    program = jax.jit(lambda sizes, x, s, ct: both(x, w, sizes, s, t, ct))
    for sizes in SIZES.values():
        got = program(np.array(sizes, np.int32), *(poisoned(of, sizes) for of in (x, s, ct)))
        same(got, truth(x, w, sizes, s, t, ct))
    rows, s = small((300, K), jnp.float32, 0), powers((300, 1), 1)
    for dtype in ("uint8", "int64"):
        sizes = np.array([100, 0, 120, 77], dtype)
        same([call(rows, w, sizes, s, t)], truth(rows, w, sizes, s, t, np.zeros((300, N)))[:1])


@pytest.mark.parametrize("shape", [(0, K, N, G), (M, 0, N, G), (M, K, 0, G), (M, K, N, 0), (1, 1, 1, 1)], ids=str)
def test_sizes_of_axes(shape):
    m, k, n, g = shape
    x, w, ct = small((m, k), jnp.float32, 0), small((g, k, n), jnp.float32, 1), small((m, n), jnp.float32, 2)
    s, t = powers((m, k), 3), powers((g, 1, n), 4)
    sizes = np.full(g, 2, np.int32)
    same(jax.jit(of_sizes(both, sizes))(x, w, s, t, ct), truth(x, w, sizes, s, t, ct))


@pytest.mark.parametrize(
    ("way", "dtypes"),
    [
        (Ways("groups", 2, 4), ("bfloat16", "int8")),
        (Ways("listed", 4), ("float32", "float8_e4m3fn")),
        (Ways("expanded"), ("bfloat16", "int8")),
        (Ways("gathered"), ("bfloat16", "int8")),
    ],
    ids=str,
)
def test_every_way_to_compute(way, dtypes, monkeypatch):
    """There are a batch and rows of other groups; a loop makes wide the matrix of one group at a time."""
    one_term, wide = way.algorithm == "gathered", []
    widened = ScaledFilters.widened
    monkeypatch.setattr(ScaledFilters, "widened", lambda self, part: wide.append(widened(self, part)) or wide[-1])
    monkeypatch.setattr(XlaRagged, "candidates", lambda self, call: (Ways("dense") if one_term and call.open == "w" else way,))
    k = n = 1 if one_term else 4
    x, w, ct = small((2, 3, M, k), dtypes[0], 0), small((2, G, k, n), dtypes[1], 1), small((2, 3, M, n), jnp.float32, 2)
    s, t = powers((2, 3, M, k), 3), powers((2, G, 1, n), 4)
    sizes = np.random.default_rng(0).integers(0, M // G + 2, (2, 3, G)).astype(np.int32)
    sizes[0, 1], sizes[1, 2] = 0, [0, M, 0, 0]

    def products(x, w, sizes, s, t, ct):
        y, pull = jax.vjp(lambda x, s: call(x, w, sizes, s, t, preferred_element_type=jnp.float32), x, s)
        return y, *pull(ct)

    got = jax.jit(jax.vmap(jax.vmap(products, (0, None, 0, 0, None, 0))))(x, w, sizes, s, t, ct)
    for b, p in itertools.product(range(2), range(3)):
        y, dx, _, ds, _ = truth(x[b, p], w[b], sizes[b, p], s[b, p], t[b], ct[b, p])
        same([each[b, p] for each in got], [y, dx, ds])
    loops = way.algorithm in ("groups", "listed")
    assert wide and all((x.ndim == 2) == loops for x in wide)


def test_what_is_not_of_a_group_is_not_met():
    """Neither the matrix of another group nor its scale, also not by the gradients of scales."""
    x, w, s, t, ct = operands(("float32", "float8_e4m3fn"))
    w, t = w.at[1].set(jnp.nan), t.at[1].set(jnp.inf)
    got = jax.jit(of_sizes(both, SHORT))(x, w, s, t, ct)
    want = truth(x, w.at[1].set(0), SHORT, s, t.at[1].set(0), ct)
    same([got[0], got[1], got[3]], [want[0], want[1], want[3]])
    same([got[4][jnp.array([0, 2, 3])]], [want[4][[0, 2, 3]]])


def test_numbers_of_no_group_reach_no_derivative():
    """Neither they, their scales, nor the tangents and cotangents of these, in any order of derivatives."""
    x, w, s, t, ct = (jnp.asarray(of, jnp.float32) for of in operands())

    def f(x, w, s, t):
        return call(x, w, SHORT, s, t)

    def derivatives(x, w, s, t, dx, ds, ct):
        gradient = lambda *args: jax.vjp(f, *args)[1](ct)
        along = dx, w, ds, t
        y, pull = jax.vjp(lambda *args: jax.jvp(f, args, along)[1], x, w, s, t)
        return jax.jvp(gradient, (x, w, s, t), along), y, pull(ct), jax.vjp(gradient, x, w, s, t)[1](along)

    program = jax.jit(derivatives)
    clean = x, w, s, t, x, s, ct
    got = program(*(poisoned(of, SHORT) for of in clean))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(program(*clean)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert len(one) != M or not one[10:].any()


def test_second_derivatives():
    args = [jnp.asarray(random(shape, np.float64, i)) for i, shape in enumerate([(5, 2), (2, 2, 3), (5, 2), (1, 1, 3)])]
    sizes = np.array([3, 1], np.int32)
    check_second_derivatives(lambda x, w, s, t: call(x, w, sizes, s, t), functools.partial(plain, sizes=sizes), *args)


def plain(x, w, s, t, sizes):
    """Compute the product in jnp."""

    def scaled(x, scale):
        for axis, size in enumerate(x.shape):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis)
        return x * scale

    end = jnp.cumsum(jnp.asarray(sizes))
    row = jnp.arange(x.shape[0], dtype=end.dtype)[:, None]
    inside = (row < end[None]) & (row >= (end - sizes)[None])
    return jnp.einsum("mk,mg,gkn->mn", scaled(x, s), inside.astype(x.dtype), scaled(w, t))


@pytest.mark.parametrize("mapped", [(False, False, True, False, False), (False, False, False, False, True), (True,) * 5], ids=str)
def test_vmap_over_any_operands(mapped):
    """One product with another axis computes each role, without a loop over what is mapped."""
    x, w, s, t, _ = operands(("float32", "float32"))
    args = [np.asarray(of) for of in (x, w, SHORT, s, t)]
    args = [np.stack([of, np.roll(of, 1, 0), np.flip(of, 0)], 1) if is_mapped else of for of, is_mapped in zip(args, mapped, strict=True)]
    cts = small((3, M, N), jnp.float32, 2)
    over: Any = jax.vmap(lambda x, w, sizes, s, t, ct: both(x, w, sizes, s, t, ct), (*(1 if m else None for m in mapped), 0))
    got = jax.jit(over)(*args, cts)
    for i in range(3):
        own: Any = [of[:, i] if m else of for of, m in zip(args, mapped, strict=True)]
        same([of[i] for of in got], truth(*[*own, cts[i]]))
    names = [eqn.primitive.name for eqn in equations(over, *args, cts)]
    products = [name for name in names if name.startswith("ragged_")]
    assert "while" not in names and "scan" not in names and len(products) <= 6, products


# --- dtypes, errors, and what a call runs


def test_dtypes_of_results():
    """The default is that of lhs, or bfloat16."""
    sizes = jax.ShapeDtypeStruct((G,), np.int32)
    for (lhs, rhs), wanted in {
        ("float32", "int8"): "float32",
        ("float16", "int4"): "float16",
        ("bfloat16", "float32"): "bfloat16",
        ("float64", "int8"): "float64",
        ("int8", "float32"): "bfloat16",
        ("float8_e4m3fn", "float8_e5m2"): "bfloat16",
        ("int4", "int8"): "bfloat16",
    }.items():
        x, w = jax.ShapeDtypeStruct((M, K), lhs), jax.ShapeDtypeStruct((G, K, N), rhs)
        y = jax.eval_shape(jaxext.ragged_scaled_dot, x, w, sizes)
        assert (y.shape, y.dtype) == ((M, N), wanted)
        said = jax.eval_shape(functools.partial(jaxext.ragged_scaled_dot, preferred_element_type="float16"), x, w, sizes)
        assert said.dtype == "float16"


def test_gradients_have_the_dtypes_of_operands():
    x, w, s, t, ct = operands(("float8_e4m3fn", "float8_e5m2"), "blocks", jnp.bfloat16)
    _, *gradients = jax.eval_shape(functools.partial(both, sizes=SHORT), x, w, s=s, t=t, ct=ct)
    assert [of.dtype for of in gradients] == [x.dtype, w.dtype, s.dtype, t.dtype]


def test_scales_of_powers_of_two_alone():
    """They have no derivative, as in `scaled_dot`.  Rows of no group have NaN for a scale."""
    x, w, s, t, ct = operands(("float8_e4m3fn", "float8_e4m3fn"), "blocks", jnp.float8_e8m0fnu)
    got = jax.jit(of_sizes(both, SHORT, preferred_element_type=jnp.float32))(x, w, poisoned(s, SHORT), t, ct)
    same(got, truth(x, w, SHORT, s, t, ct))
    for name, argnum in (("lhs_scale", 2), ("rhs_scale", 3)):
        with pytest.raises(TypeError, match=f"ragged_scaled_dot: {name} is float8_e8m0fnu.*: want it constant"):
            jax.grad(lambda *args: of_sizes(call, SHORT)(*args).sum(), argnum)(x, w, s, t)


def test_float64_scales_of_integers():
    x, w, s = small((M, K), jnp.int8, 0), small((G, K, N), jnp.int8, 1), jnp.asarray(random((M, 3), np.float64, 2))
    y = call(x, w, SHORT, s, preferred_element_type=jnp.float64)
    np.testing.assert_allclose(y, truth(x, w, SHORT, s, None, np.zeros((M, N)))[0], rtol=1e-13)


def test_sums_are_rounded_once():
    """Scales of rows multiply sums before these have the dtype of the result."""
    x, w, s = 7 * small((M, K), jnp.bfloat16, 0), small((G, K, N), jnp.int8, 1), jnp.asarray(random((M, 1), np.float32, 2))
    y = call(x, w, SHORT, s)
    assert y.dtype == jnp.bfloat16
    same([y], truth(x, w, SHORT, s, None, np.zeros((M, N)))[:1])


@pytest.mark.parametrize("scales", ["rows and columns", "blocks of other sizes"])
def test_a_composition(scales, monkeypatch):
    """Elsewhere than on CPUs all matrices become wide before the ragged product."""
    monkeypatch.setattr(XlaRaggedScaled, "candidates", lambda self, call: (Algorithm("composition"),))
    x, w, s, t, ct = operands(("float32", "float8_e4m3fn"), scales)
    program = jax.jit(lambda x, s, ct: both(x, w, SHORT, s, t, ct))
    same(program(*(poisoned(of, SHORT) for of in (x, s, ct))), truth(x, w, SHORT, s, t, ct))
    assert "composition of dense" in str(jaxext.explain(of_sizes(call, SHORT))(x, w, s, t))


@pytest.mark.usefixtures("verified")
def test_the_product_inside_has_the_name_that_the_user_gave():
    """The target is a GPU, where kernels would compute the ragged product."""
    x, w = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16), jax.ShapeDtypeStruct((8, 512, 512), jnp.int8)
    t, sizes = jax.ShapeDtypeStruct((8, 1, 512), np.float32), jax.ShapeDtypeStruct((8,), np.int32)
    product = lambda x, w, t, sizes: jaxext.ragged_scaled_dot(x, w, sizes, rhs_scale=t, implementation="xla")
    with jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(product, platform="cuda")(x, w, t, sizes).rows
    assert str(row.how).startswith("composition of listed"), row.how


A, B = np.ones((M, K), np.float32), np.ones((G, K, N), np.int8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(lhs=[[1.0]]), TypeError, "lhs is .*, want an array"),
        (dict(rhs_scale=2.0), TypeError, "rhs_scale is .*, want an array"),
        (dict(lhs=A[0]), TypeError, r"lhs has the shape \(12,\), want \(M, K\)"),
        (dict(rhs=B[0]), TypeError, r"rhs has the shape \(12, 6\), want \(G, K, N\)"),
        (dict(rhs=B[0], transpose_rhs=True), TypeError, r"rhs has the shape \(12, 6\), want \(G, N, K\)"),
        (dict(rhs=B[:, :5]), TypeError, r"rhs has the shape \(4, 5, 6\), with 5 elements along the contracted axis, want 12, as in lhs"),
        (
            dict(transpose_rhs=True),
            TypeError,
            r"rhs has the shape \(4, 12, 6\), with 6 elements along the contracted axis, want 12, as in lhs",
        ),
        (dict(lhs=A.astype(np.int16)), TypeError, "lhs is int16, want floating-point numbers, or integers of at most 8 bits"),
        (dict(lhs=A.astype(np.complex64)), TypeError, "lhs is complex64, want floating-point numbers"),
        (dict(rhs=B.astype(bool)), TypeError, "rhs is bool, want floating-point numbers, or integers"),
        (dict(group_sizes=np.ones(G, np.float32)), TypeError, r"group_sizes is float32\[4\], want an integer for each of the 4 groups"),
        (dict(group_sizes=np.ones(3, np.int32)), TypeError, r"group_sizes is int32\[3\], want an integer for each of the 4 groups"),
        (dict(group_sizes=np.int32(3)), TypeError, r"group_sizes is int32\[\], want an integer for each of the 4 groups"),
        (dict(lhs_scale=np.ones((M, 5), np.float32)), TypeError, r"lhs_scale has the shape \(12, 5\), want as many axes as lhs, of"),
        (dict(rhs_scale=np.ones((G, N), np.float32)), TypeError, r"rhs_scale has the shape \(4, 6\), want as many axes as rhs, of"),
        (dict(rhs_scale=np.ones((G, 0, N), np.float32)), TypeError, r"rhs_scale has the shape \(4, 0, 6\), want"),
        (dict(lhs_scale=np.ones((M, 1), np.int32)), TypeError, "lhs_scale is int32, want floating-point numbers$"),
        (dict(preferred_element_type="int32"), TypeError, "preferred_element_type is int32, want a floating-point dtype"),
        (dict(preferred_element_type="floaty"), TypeError, "preferred_element_type is 'floaty', want a dtype"),
        (dict(transpose_rhs="no"), TypeError, "transpose_rhs is 'no', want True or False"),
        (dict(implementation="none"), ValueError, "implementation is 'none', want one of"),
        (dict(out_sharding=P("x")), ValueError, "out_sharding is .*, want one for 2 axes, on a mesh with explicit axes"),
    ],
    ids=str,
)
def test_errors(change, error, message):
    with pytest.raises(error, match=f"ragged_scaled_dot: {message}"):
        jaxext.ragged_scaled_dot(**dict(lhs=A, rhs=B, group_sizes=SHORT) | change)


def test_the_gradient_of_a_scale_of_16_bits_is_rounded_once():
    """Partial sums of 24,000 and more leave the range of float16, and of their difference bfloat16 keeps nothing."""
    lhs, rhs, sizes = np.full((2, 8), 100, np.float32), np.ones((1, 8, 4), np.float32), np.array([2])
    for dtype in (jnp.float16, jnp.bfloat16):
        dot = lambda s: jaxext.ragged_scaled_dot(lhs, rhs, sizes, lhs_scale=s, preferred_element_type=np.float32)
        _, pull = jax.vjp(dot, jnp.ones((1, 1), dtype))
        (gradient,) = pull(jnp.array([[30] * 4, [-29] * 4], jnp.float32))
        assert gradient.item() == 3200


def test_a_symbolic_number_of_groups():
    """It is refused, as lax refuses it."""
    (groups,) = jax.export.symbolic_shape("g")
    types = [
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((M, K), np.float32), ((groups, K, N), np.int8), ((groups,), np.int32))
    ]
    with pytest.raises(TypeError, match=r"ragged_scaled_dot: rhs has the shape \(g, 12, 6\), want a number of groups that is not symbolic"):
        jax.eval_shape(jaxext.ragged_scaled_dot, *types)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.F32_F32_F32], ids=str)
def test_the_precision_of_a_call(precision):
    wanted = {"highest": "precision=(Precision.HIGHEST, Precision.HIGHEST)", jax.lax.Precision.HIGH: "precision=(Precision.HIGH, Precision"}
    text = str(jax.make_jaxpr(lambda *args: call(*args, precision=precision))(A, B, SHORT, A))
    assert wanted.get(precision, "DotAlgorithmPreset.F32_F32_F32") in text


def test_what_runs():
    """It is traced once for the same types.  Without scales it is the ragged product of plain numbers."""
    x, w, s, t, _ = operands()
    traced = []

    @jax.jit
    def f(*args):
        traced.append(args)
        return call(*args)

    for sizes in (SHORT, SHORT[::-1]):
        same([f(x, w, sizes, s, t)], truth(x, w, sizes, s, t, np.zeros((M, N)))[:1])
    assert len(traced) == 1
    (row,) = jaxext.explain(f)(x, w, SHORT, s, t).rows
    assert (row.op, row.chosen) == ("ragged_scaled_xw_nn", "xla") and "dense" in str(row.how)
    (row,) = jaxext.explain(call)(x, w, SHORT).rows
    assert row.op == "ragged_nn"
    gradient = jax.grad(lambda x, w, s, t: call(x, w, SHORT, s, t).sum(), (0, 1, 2, 3))
    rows = jaxext.explain(gradient)(x, w.astype(jnp.float32), s, t).rows
    assert {row.op for row in rows} >= {"ragged_scaled_xw_nn", "ragged_scaled_xw_nt", "ragged_scaled_xw_tn"}


def test_only_given_arrays_are_kept_for_the_derivative():
    """They hold no wide copy of an operand, and of sizes ranges."""
    x, w, s, t, _ = operands(("float8_e4m3fn", "float8_e4m3fn"), "rows and columns")
    pullback = jax.vjp(lambda x, w: call(x, w, SHORT, s, t), x, w)[1]
    assert sum(of.nbytes for of in jax.tree.leaves(pullback)) == sum(of.nbytes for of in (x, w, s, t)) + 2 * SHORT.nbytes


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_memory(side):
    """Each role makes wide the matrix of one group at a time, whichever side has a scale."""
    x, w = jax.ShapeDtypeStruct((2048, 64), np.float32), jax.ShapeDtypeStruct((64, 64, 64), np.int8)
    scale, sizes = jax.ShapeDtypeStruct((2048, 1) if side == "lhs" else (64, 1, 64), np.float32), jax.ShapeDtypeStruct((64,), np.int32)

    def step(x, w, scale, sizes, ct):
        y, pull = jax.vjp(lambda x: call(x, w, sizes, *((scale, None) if side == "lhs" else (None, scale))), x)
        return y, *pull(ct)

    used: Any = jax.jit(step).lower(x, w, scale, sizes, x).compile().memory_analysis()
    arrays = used.argument_size_in_bytes + used.output_size_in_bytes
    assert used.temp_size_in_bytes <= 0.5 * arrays


def test_export():
    """A program is exported for several platforms, with a symbolic number of rows, which have scales of their own."""
    (rows,) = jax.export.symbolic_shape("m")
    x, w, s, t, _ = operands(("float32", "int8"))
    types = [jax.ShapeDtypeStruct((rows, *of.shape[1:]), of.dtype) for of in (x, s)]
    exported = jax.export.export(jax.jit(lambda x, s: call(x, w, SHORT, s, t)), platforms=("cpu", "cuda"))(*types)
    same([exported.call(x, s)], truth(x, w, SHORT, s, t, np.zeros((M, N)))[:1])


def test_examples_of_the_docstring():
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = doctest.testmod(ragged_scaled, extraglobs=dict(jnp=jnp))
    assert found.attempted == 3 and found.failed == 0


# --- several devices

SPLIT_SHAPES = (16, 8), (4, 8, 8), (16, 4), (4, 2, 4)  # of lhs, of rhs, and of their scales
SPLIT_SIZES = np.array([5, 0, 7, 2], np.int32)
# Axes of lhs, of rhs and of their scales, and the collectives of the product and of its four gradients together.
SPLITS: dict[str, Any] = {
    "rows": ((P("x"), P(), P("x"), P()), {}, {"all-reduce": 1}),
    "columns": ((P(), P(None, None, "x"), P(), P(None, None, "x")), {}, {"all-reduce": 1}),
    "contraction": ((P(None, "x"), P(None, "x"), P(None, "x"), P(None, "x")), {"all-reduce": 1}, {}),
    "rows and groups": ((P("x"), P("y"), P("x"), P("y")), {"all-reduce": 1}, {"all-reduce": 2}),
}


def split_operands():
    args = [small(shape, jnp.float32, i) for i, shape in enumerate(SPLIT_SHAPES[:2])]
    return *args, *(powers(shape, 2 + i) for i, shape in enumerate(SPLIT_SHAPES[2:])), small((16, 8), jnp.float32, 4)


@pytest.mark.parametrize(("name", "kind"), [*zip(SPLITS, (AxisType.Auto, AxisType.Explicit) * 2, strict=True)], ids=str)
def test_devices(name, kind):
    """Scales are split as their arrays.  The ranges of groups, which tie the rows, are whole, and cut to what a device has."""
    x, w, s, t, ct = split_operands()
    specs, forward, of_gradients = SPLITS[name]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    columns = P(*(specs[0][:1] or (None,)), *specs[1][2:])
    if name == "contraction":
        columns = P()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(of, NamedSharding(mesh, spec)) for of, spec in zip((x, w, s, t), specs, strict=True)]
        cts = jax.device_put(ct, NamedSharding(mesh, columns))
        product = jax.jit(lambda x, w, s, t: call(x, w, SPLIT_SIZES, s, t))
        gradients = jax.jit(
            lambda ct, *args: jax.vjp(lambda x, w, s, t: call(x, w, SPLIT_SIZES, s, t), *args)[1](ct),
            out_shardings=tuple(of.sharding for of in placed) if kind is AxisType.Auto else None,
        )
        got = product(*placed), *gradients(cts, *placed)
        counts = [dict(collectives(f.lower(*args).compile())) for f, args in ((product, placed), (gradients, (cts, *placed)))]
    same(got, truth(x, w, SPLIT_SIZES, s, t, ct))
    assert counts == [forward, of_gradients]
    for of, like in zip(got[1:], placed, strict=True):
        assert of.sharding.is_equivalent_to(like.sharding, of.ndim)


def test_the_companions_that_tie():
    """Ranges are gathered along rows and groups, and cut to the part of a device.  Scales are split along both, and are not cut."""
    f = form(("x", "w"))
    assert f.gathered == {(name, axis) for name in ("begin", "end") for axis in ("M0", "G0")}
    ranks = f.pack(dict(B=0, P=0, R=0, M=1, G=1, S=1, K=1, J=1, N=1))
    axes = {name: f.axes_to_split(name, f.axes(name, ranks)) for name in f.operands("y")}
    assert axes["x_scale"] == ("M0", "S0") and axes["w_scale"] == ("G0", "S0", "J0") and axes["begin"] == axes["end"] == ("Gwhole",)
    has = {"M0": (jnp.int32(6), 4), "G0": (jnp.int32(2), 2)}
    given: Any = dict(x=1, w=2, x_scale=3, w_scale=4, begin=np.array([0, 5, 5, 9], np.int32), end=np.array([5, 5, 9, 10], np.int32))
    local = f.local_operands(given, lambda axis, size: has.get(axis), dict(M0=12, G0=4))
    assert {name: local[name] for name in ("x", "w", "x_scale", "w_scale")} == dict(x=1, w=2, x_scale=3, w_scale=4)
    assert (local["begin"].tolist(), local["end"].tolist()) == ([0, 3], [3, 4])


def test_shard_map():
    """Each device has some rows, with scales and sizes of their own, which is how tokens are split."""
    x, w, s, t, _ = split_operands()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    own = np.random.default_rng(0).integers(0, 2, (4, 4)).astype(np.int32)
    split: Any = jax.shard_map(
        lambda x, w, sizes, s, t: call(x, w, sizes[0], s, t), mesh=mesh, in_specs=(P("x"), P(), P("x"), P("x"), P()), out_specs=P("x")
    )
    y, dt = jax.jit(lambda *args: (split(*args), jax.grad(lambda t: (split(*args[:4], t) ** 2).sum() / 2)(args[4])))(x, w, own, s, t)
    parts = [(a, w, sizes, b, t) for a, sizes, b in zip(np.split(x, 4), own, np.split(s, 4), strict=True)]
    want = [truth(*part, np.zeros((4, 8)))[0] for part in parts]
    same([y, dt], [np.concatenate(want), sum(truth(*part, of)[4] for part, of in zip(parts, want, strict=True))])
