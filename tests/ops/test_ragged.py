"""Ragged products: each group's product in float64 is the truth, for every role, kind of ragged axis, transformation and split."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import check_second_derivatives, random
from collectives import collectives
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.core.form import owner
from jaxext.ops.ragged.xla import Ways, XlaRagged

M, K, N, G = 12, 3, 4, 4
SIZES = {
    "even": (3, 3, 3, 3),
    "zeros": (0, 5, 0, 7),
    "all in one": (0, 0, 12, 0),
    "none": (0, 0, 0, 0),
    "short": (2, 0, 4, 1),
    "one row": (0, 0, 0, 1),
    "negative": (3, -2, 4, 1),
    "beyond the rows": (5, 9, 3, 2),
    "huge": (2**31 - 1, 2**31 - 1, 2, 2**31 - 1),
}
CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def numbers(lhs, rhs, ragged, groups=(), lhs_batch=(), rhs_batch=()):
    return lax.RaggedDotDimensionNumbers(((lhs, rhs), (lhs_batch, rhs_batch)), [ragged], groups)


def owners(sizes, rows):
    """The group of each row, -1 for none: what the docstring says of sizes."""
    each = [g for g, size in enumerate(sizes) for _ in range(min(max(int(size), 0), rows))][:rows]
    return np.array([*each, *[-1] * (rows - len(each))], int)


def of_rows(x, w, sizes) -> Any:
    """y in float64, row by row."""
    y = np.zeros((x.shape[0], w.shape[2]), np.result_type(x, w, np.float64))
    for m, g in enumerate(owners(sizes, len(x))):
        if g >= 0:
            y[m] = x[m].astype(y.dtype) @ w[g].astype(y.dtype)
    return y


def of_groups(x, y, sizes) -> Any:
    """w in float64, group by group."""
    of = owners(sizes, len(x))
    return np.stack([x[of == g].astype(np.float64).T @ y[of == g].astype(np.float64) for g in range(len(sizes))])


def operands(dtype: Any = np.float32, rows=M, groups=G, k=K, n=N) -> list[Any]:
    return [random(shape, dtype, seed, integers=True) for seed, shape in enumerate([(rows, k), (groups, k, n), (rows, n)])]


X, W, Y = operands()


def ints(*sizes) -> Any:
    return np.array(sizes, np.int32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_role(sizes):
    """The gradients are the other two roles.  Rows in no group hold NaN, and so do their cotangents."""
    sizes = ints(*sizes)
    tail = owners(sizes, M)[:, None] < 0
    x, y = (jnp.where(tail, jnp.nan, of) for of in (X, Y))
    got, pull = jax.vjp(lambda x, w: jaxext.ragged_dot(x, w, sizes), x, W)
    dx, dw = pull(y)
    np.testing.assert_array_equal(got, of_rows(X, W, sizes))
    np.testing.assert_array_equal(dx, of_rows(Y, W.swapaxes(1, 2), sizes))
    np.testing.assert_array_equal(dw, of_groups(X, Y, sizes))
    np.testing.assert_array_equal(jaxext.ragged_dot_general(x, y, sizes, CONTRACTION), of_groups(X, Y, sizes))
    nt = numbers((1,), (2,), 0, [0])
    np.testing.assert_array_equal(jaxext.ragged_dot_general(x, W.swapaxes(1, 2), sizes, nt), of_rows(X, W, sizes))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex64"])
def test_dtypes(dtype):
    x, w, y = operands(jnp.dtype(dtype))
    sizes = ints(5, 0, 4, 1)
    got = jaxext.ragged_dot(x, w, sizes)
    assert got.dtype == lax.ragged_dot(x, w, sizes).dtype == x.dtype
    np.testing.assert_array_equal(got.astype(np.complex128), of_rows(x, w, sizes).astype(x.dtype).astype(np.complex128))
    wide = jaxext.ragged_dot(x, w, sizes, preferred_element_type=np.complex64 if dtype == "complex64" else np.float64)
    np.testing.assert_array_equal(wide, of_rows(x, w, sizes))
    if jnp.issubdtype(dtype, jnp.floating):
        grad = jax.grad(lambda w: (jaxext.ragged_dot(x, w, sizes) * y).sum())(w)
        np.testing.assert_array_equal(grad.astype(np.float64), of_groups(x, y, sizes).astype(x.dtype).astype(np.float64))


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_sizes_of_any_integer(dtype):
    """The rows are 300, which no 8-bit integer can count."""
    x, w, _ = operands(rows=300)
    sizes: Any = np.array([100, 0, 120, 77], dtype)
    np.testing.assert_array_equal(jaxext.ragged_dot(x, w, sizes), of_rows(x, w, sizes))
    np.testing.assert_array_equal(lax.ragged_dot(x, w, sizes.astype(np.int32)), of_rows(x, w, sizes))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-2, 9), min_size=4, max_size=4), st.integers(-2, 5))
def test_sizes(sizes, offset):
    """The groups may begin at any one, by an offset."""
    sizes = ints(*sizes)
    np.testing.assert_array_equal(jaxext.ragged_dot(X, W, sizes), of_rows(X, W, sizes))
    of = owners(sizes, M) - offset
    want = [X[m].astype(np.float64) @ W[g] if owners(sizes, M)[m] >= 0 and 0 <= g < G else np.zeros(N) for m, g in enumerate(of)]
    np.testing.assert_array_equal(jaxext.ragged_dot(X, W, sizes, group_offset=ints(offset)), want)


def test_a_part_of_the_groups():
    """rhs holds two groups of five."""
    sizes, w = ints(2, 3, 1, 4, 1), W[:2]
    all_of_them = np.zeros((5, K, N), np.float32)
    all_of_them[2:4] = w
    np.testing.assert_array_equal(jaxext.ragged_dot(X, w, sizes, group_offset=ints(2)), of_rows(X, all_of_them, sizes))
    grads = jax.jit(jax.jacrev(lambda w: jaxext.ragged_dot(X, w, sizes, group_offset=ints(2))))(w)
    whole = jax.jit(jax.jacrev(lambda w: jaxext.ragged_dot(X, w, sizes)))(all_of_them)
    np.testing.assert_array_equal(grads, whole[:, :, 2:4])


@pytest.mark.parametrize("shape", [(0, K, N, G), (M, 0, N, G), (M, K, 0, G), (M, K, N, 0), (1, 1, 1, 1), (M, K, N, 1)])
def test_sizes_of_axes(shape):
    m, k, n, g = shape
    x, w, y = operands(rows=m, groups=g, k=k, n=n)
    sizes: Any = np.full(g, 2, np.int32)
    got, pull = jax.vjp(lambda x, w: jaxext.ragged_dot(x, w, sizes), x, w)
    np.testing.assert_array_equal(got, of_rows(x, w, sizes))
    for of, ct in zip((x, w), pull(y), strict=True):
        assert ct.shape == of.shape and np.isfinite(ct).all()


@pytest.mark.parametrize(("dtype", "way"), [("float32", Ways("groups", 2, 4)), ("bfloat16", Ways("listed", M))], ids=str)
def test_every_way_to_compute(way, dtype, monkeypatch):
    """A scan of the groups, and tiles that are listed, as on GPUs, with a batch, rows of other groups and rows of the same."""
    monkeypatch.setattr(XlaRagged, "candidates", lambda self, call: (way,))
    shapes = (2, 3, 2, M, K), (2, G, K, N), (2, 3, 2, M, N)
    x, w, y = (random(shape, jnp.dtype(dtype), seed, integers=True) for seed, shape in enumerate(shapes))
    sizes: Any = np.random.default_rng(0).integers(0, M // G + 2, (2, 3, G)).astype(np.int32)
    sizes[0, 1], sizes[1, 2] = 0, [0, M, 0, 0]
    tail = np.array([[owners(s, M) < 0 for s in of] for of in sizes])[:, :, None, :, None]
    x, y = (np.where(tail, np.array(np.nan, a.dtype), a) for a in (x, y))
    over = jax.vmap(jax.vmap(jaxext.ragged_dot, (0, None, 0)), (0, 0, 0))
    product = lambda x, w: jax.vmap(over, (2, None, None), 2)(x, w, sizes)
    got, pull = jax.vjp(product, x, w)
    dx, dw = pull(y)
    for b, p, r in itertools.product(range(2), range(3), range(2)):
        np.testing.assert_array_equal(got[b, p, r], of_rows(x[b, p, r], w[b], sizes[b, p]))
        np.testing.assert_array_equal(dx[b, p, r], of_rows(y[b, p, r], w[b].swapaxes(1, 2), sizes[b, p]))
    of_parts = [[of_groups(x[b, p, r], y[b, p, r], sizes[b, p]) for p in range(3) for r in range(2)] for b in range(2)]
    want = np.sum(of_parts, 1)
    np.testing.assert_allclose(dw.astype(np.float64), want, rtol=0 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("rows", [128, 256])
def test_no_block_of_a_loop_has_all_rows(rows, monkeypatch):
    """XLA would multiply it before the loop, for each group, since all turns of the loop have the same."""
    ways, candidates = [], XlaRagged.candidates

    def recorded(self, call):
        ways.extend(found := candidates(self, call))
        return found

    monkeypatch.setattr(XlaRagged, "candidates", recorded)
    x, w, _ = operands(rows=rows, groups=8, k=64, n=64)
    step = jax.grad(lambda x, w: jaxext.ragged_dot(x, w, ints(*[rows // 8] * 8)).sum(), (0, 1))
    jax.jit(step).lower(x, w)
    assert ways and all(max(way.rows, way.more) < rows for way in ways)


def test_a_filter_of_another_group_is_not_met():
    """Infinities in it, or in the rows of another group, are not met either."""
    x, w, y = operands()
    sizes = ints(4, 0, 5, 0)
    w[[1, 3]], x[:4], y[:4] = np.inf, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        rows, sums = of_rows(x, w, sizes)[4:], of_groups(x, y, sizes)[1:]
    np.testing.assert_array_equal(jaxext.ragged_dot(x, w, sizes)[4:], rows)
    np.testing.assert_array_equal(jaxext.ragged_dot_general(x, y, sizes, CONTRACTION)[1:], sums)


def test_memory():
    """Each role takes at most 1.5 times the memory of operands and result."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("XLA of jax 0.10 converts whole arrays to float32")
    x, w, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 64), (8, 64, 64), (2048, 64)))
    sizes = jax.ShapeDtypeStruct((8,), np.int32)
    nt = lambda y, w, sizes: jax.linear_transpose(lambda x: jaxext.ragged_dot(x, w, sizes), x)(y)
    tn = lambda x, y, sizes: jaxext.ragged_dot_general(x, y, sizes, CONTRACTION)
    for role, args in ((jaxext.ragged_dot, (x, w, sizes)), (nt, (y, w, sizes)), (tn, (x, y, sizes))):
        used: Any = jax.jit(role).lower(*args).compile().memory_analysis()
        arrays = used.argument_size_in_bytes + used.output_size_in_bytes
        assert arrays + used.temp_size_in_bytes <= 1.5 * arrays


# lax's dimension numbers, with axes in every order: shapes of lhs, rhs and sizes
GENERAL = {
    "batched with more": ((5, M, K, 2), (G, N, K, 2), [(G,), (2, 5, G)], numbers((2,), (2,), 1, [0], (3,), (3,))),
    "no columns": ((M, K), (G, K), [(G,)], numbers((1,), (1,), 0, [0])),
    "contraction last": ((K, M), (N, M), [(G,)], numbers((1,), (1,), 1)),
    "more contracted": ((2, K, M), (M, N, 2), [(G,), (2, G)], numbers((0, 2), (2, 0), 2)),
    "batch in a batch": ((2, 3, M, K), (M, 2, K, N), [(G,), (2, G)], numbers((3,), (2,), 2, (), (0, 2), (1, 0))),
}


@pytest.mark.parametrize("name", GENERAL)
def test_dimension_numbers(name):
    """Shapes and values are lax's, which is right wherever sizes are defined, except that it ignores the sizes of a ragged batch."""
    lhs, rhs, of_sizes, dims = GENERAL[name]
    lhs, rhs = random(lhs, np.float32, 1, integers=True), random(rhs, np.float32, 2, integers=True)
    for shape in of_sizes:
        sizes = np.random.default_rng(0).integers(0, M // G + 1, shape).astype(np.int32)
        x = lhs
        if name.startswith("batch") and dims.lhs_ragged_dimensions[0] in dims.dot_dimension_numbers[1][0]:
            rows = np.arange(M) < sizes.sum(-1)[..., None]  # ([2], M)
            x = lhs * rows.reshape((-1, 1, M, 1) if lhs.ndim == 4 else (M, 1, 1))
        args = (jaxext.ragged_dot_general, lhs), (lax.ragged_dot_general, x)
        got, want = (product(a, rhs, sizes, ragged_dot_dimension_numbers=dims) for product, a in args)
        np.testing.assert_array_equal(got, want)
        with jaxext.in_place_of_lax():
            np.testing.assert_array_equal(lax.ragged_dot_general(lhs, rhs, sizes, ragged_dot_dimension_numbers=dims), want)


def test_nothing_is_read_of_a_ragged_batch_beyond_the_groups():
    lhs, rhs = random((M, 2, K), np.float32, integers=True), random((M, K, N), np.float32, integers=True)
    lhs[7:], rhs[7:] = np.nan, np.inf
    dims = numbers((2,), (1,), 0, (), (0,), (0,))
    y, pull = jax.vjp(lambda lhs, rhs: jaxext.ragged_dot_general(lhs, rhs, ints(4, 3, 0), dims), lhs, rhs)
    np.testing.assert_array_equal(y[:7], lhs[:7] @ rhs[:7])
    for of_tail in (y[7:], *(ct[7:] for ct in pull(np.where(np.arange(M)[:, None, None] < 7, y, np.nan)))):
        np.testing.assert_array_equal(of_tail, 0)


def test_in_place_of_lax():
    def loss(x, w):
        return jnp.sin(lax.ragged_dot(x, w, ints(5, 0, 4, 1))).sum()

    want = jax.grad(loss, (0, 1))(X, W)
    with jaxext.in_place_of_lax():
        jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W))
        got = jax.jit(jax.grad(loss, (0, 1)))(X, W)
        np.testing.assert_array_equal(lax.ragged_dot(X, W[:2], ints(3, 2, 4), group_offset=ints(1))[:3], 0)
    assert all(f"ragged_{role}" in jaxpr for role in ("nn", "nt", "tn")) and "ragged_dot_general[" not in jaxpr
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_layer_as_maxtext_writes_it():
    """Tokens sorted by expert, padded to tiles of rows, three products with lax's keywords, and back, in bfloat16."""
    tokens, experts, top, tile = 10, 4, 2, 16

    def layer(x, gate, up, down, router):
        weight, chosen = lax.top_k(jax.nn.softmax(x @ router), top)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=experts)
        rows = jnp.pad(jnp.take(x, order // top, axis=0), ((0, -(tokens * top) % tile), (0, 0)))
        product = functools.partial(lax.ragged_dot, preferred_element_type=x.dtype)
        hidden = jax.nn.silu(product(lhs=rows, rhs=gate, group_sizes=sizes)) * product(lhs=rows, rhs=up, group_sizes=sizes)
        y = product(lhs=hidden, rhs=down, group_sizes=sizes)[: tokens * top]
        y = jnp.take(y, jnp.argsort(order), axis=0).reshape(tokens, top, -1)
        return jnp.einsum("tke,tk->te", y.astype(jnp.float32), weight.astype(jnp.float32))

    shapes = ((tokens, 8), (experts, 8, 16), (experts, 8, 16), (experts, 16, 8), (8, experts))
    args = [jnp.asarray(random(shape, np.float32, i), jnp.bfloat16) for i, shape in enumerate(shapes)]
    loss = lambda *args: (layer(*args) ** 2).mean()
    want = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))(*args)
    with jaxext.in_place_of_lax():
        got = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))(*args)
        names = {row.op for row in jaxext.explain(jax.grad(loss, (0, 1, 2, 3)))(*args).rows}
    assert {"ragged_nn", "ragged_nt", "ragged_tn"} <= names
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), atol=0.02 * scale, rtol=0.05)


# --- errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(lhs=[[1.0]]), TypeError, "ragged_dot: lhs is .*, want an array"),
        (dict(group_sizes=np.ones(G, np.float32)), TypeError, "group_sizes.dtype is subtype of np.integer"),
        (dict(group_sizes=ints(1, 2)), TypeError, "expected rhs group dimension size to be 2, got 4"),
        (dict(group_sizes=np.int32(3)), TypeError, "expected rank of group_sizes to be >=1"),
        (dict(group_sizes=np.ones((2, G), np.int32)), TypeError, "expected group_sizes to have shape"),
        (dict(rhs=W[:, :2]), TypeError, "contracting dimensions to have the same shape"),
        (dict(lhs=X[None]), TypeError, "contracting dimensions to have the same shape"),
        (dict(group_offset=np.int32(1)), TypeError, r"ragged_dot: group_offset is int32\[\], want an integer array of the shape \(1,\)"),
        (dict(group_offset=np.ones(1, np.float32)), TypeError, r"group_offset is float32\[1\], want an integer array"),
        (dict(implementation="none"), ValueError, "ragged_dot: implementation is 'none', want one of"),
    ],
)
def test_errors(change, error, message):
    given = dict(lhs=X, rhs=W, group_sizes=ints(3, 3, 3, 3)) | change
    with pytest.raises(error, match=message):
        jaxext.ragged_dot(**given)
    if not {"implementation", "group_offset"} & {*change} and not isinstance(given["lhs"], list):
        with pytest.raises(error):
            lax.ragged_dot(**given)


def test_errors_of_dimension_numbers():
    with pytest.raises(TypeError, match="ragged_dot_general: ragged_dot_dimension_numbers is .*, want a jax.lax.RaggedDotDimensionNumbers"):
        pair: Any = (((1,), (1,)), ((), ()))
        jaxext.ragged_dot_general(X, W, ints(3, 3, 3, 3), pair)
    with pytest.raises(TypeError, match="exactly one lhs ragged dimension"):
        dims = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [], [0])
        jaxext.ragged_dot_general(X, W, ints(3, 3, 3, 3), dims)
    with pytest.raises(TypeError, match="zero group dimensions in the rhs"):
        jaxext.ragged_dot_general(X, Y, ints(3, 3, 3, 3), numbers((0,), (0,), 0, [1]))


# --- transformations


SHORT = ints(2, 0, 5, 1)


def reference(x, w, sizes):
    """Compute the product in jnp, with each row's own filter."""
    end = jnp.cumsum(sizes, dtype=sizes.dtype)
    row = jnp.arange(x.shape[0], dtype=sizes.dtype)[:, None]
    inside = (row < end[None]) & (row >= (end - sizes)[None])
    return jnp.einsum("mk,mg,gkn->mn", x, inside.astype(x.dtype), w)


@pytest.mark.parametrize("mapped", [(False, False, True), (False, True, False), (True, True, True)])
def test_vmap_over_any_operands(mapped):
    """One product with another axis computes each role, without a loop over what is mapped."""
    args = [np.stack([a, np.roll(a, 1, 0), np.flip(a, 0)], 1) if m else a for a, m in zip((X, W, SHORT), mapped, strict=True)]
    axes: Any = *(1 if m else None for m in mapped), 0
    cotangents = np.stack([Y, 2 * Y, -Y])

    def products(x, w, sizes, ct):
        y, pull = jax.vjp(lambda x, w: jaxext.ragged_dot(x, w, sizes), x, w)
        return y, *pull(ct)

    over: Any = jax.vmap(products, axes, 1)
    got = over(*args, cotangents)
    for i in range(3):
        x, w, sizes = (a[:, i] if m else a for a, m in zip(args, mapped, strict=True))
        want = of_rows(x, w, sizes), of_rows(cotangents[i], w.swapaxes(1, 2), sizes), of_groups(x, cotangents[i], sizes)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one[:, i], other)
    names = [e.primitive.name for e in _equations(jax.make_jaxpr(over)(*args, cotangents))]
    assert "while" not in names and "scan" not in names and sum(name.startswith("ragged_") for name in names) == 3


def test_sizes_alone_do_not_copy_the_filters():
    """vmap of sizes, and of rows and sizes, has one copy of the filters; that of rows alone has one set of sizes too."""
    for mapped, rank in (((0, None, 0), "P"), ((None, None, 0), "P"), ((0, None, None), "R")):
        args = [np.stack([a, a]) if m == 0 else a for a, m in zip((X, W, SHORT), mapped, strict=True)]
        eqn: Any
        (eqn,) = (e for e in _equations(jax.make_jaxpr(jax.vmap(jaxext.ragged_dot, mapped))(*args)) if e.primitive.name == "ragged_nn")
        assert eqn.invars[1].aval.shape == W.shape
        assert owner[eqn.primitive][0].unpack(eqn.params["static"].ranks)[rank] == 1


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)


def test_derivatives_of_the_second_and_third_order():
    ours, plain = (functools.partial(lambda of, x, w: of(x, w, ints(2, 2)), of) for of in (jaxext.ragged_dot, reference))
    x, w = random((5, 2), np.float64, 1), random((2, 2, 3), np.float64, 2)
    check_second_derivatives(ours, plain, x, w)
    third = lambda of: jax.jit(jax.jacfwd(jax.hessian(lambda x: jnp.sin(of(x, w)).sum())))(x)
    np.testing.assert_allclose(third(ours), third(plain), rtol=1e-10, atol=1e-12)


def test_remat():
    """Policies see lax's primitive, with the axes of each role.  jax's own do not know it, and neither do ours."""
    seen = []

    def policy(primitive, *avals, **params):
        if primitive.name == "ragged_dot_general":
            seen.append((params["ragged_dot_dimension_numbers"], [aval.shape for aval in avals]))
        return primitive.name == "ragged_dot_general"

    def loss(x, w):
        return jnp.sin(jaxext.ragged_dot(jnp.sin(x), w, SHORT)).sum()

    for asked, products in ((jaxext.checkpoint_policies.seeing_products(policy), 1), (jaxext.checkpoint_policies.dots_saveable, 2)):
        jaxpr = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=asked)))(X, W))
        assert jaxpr.count(" ragged_nn[") == products and jaxpr.count(" ragged_nt[") == 1
    assert seen[0] == (numbers((1,), (1,), 0, [0]), [(M, K), (G, K, N), (G,)])
    x, w, ct = (jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in (X, W, Y))
    for form, open in {(form, open) for form, open in owner.values() if form.name == "ragged"}:
        ranks = tuple(0 if label in "PR" else 1 for label in form.free)
        shapes = [form.axes(slot, ranks) for slot in form.factors(open)]
        dimension_numbers = form.family.lax_call(form, open, ranks)[1]["ragged_dot_dimension_numbers"]
        lhs, rhs = (dict(x=x, w=w.update(shape=(2, G, K, N)), y=ct)[slot] for slot in ({"y": "xw", "x": "yw", "w": "xy"}[open]))
        got = jax.eval_shape(
            functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=dimension_numbers), lhs, rhs, SHORT
        ).shape
        assert got == {"y": (2, M, N), "x": (2, M, K), "w": (G, 2, K, N)}[open], shapes


def test_export():
    """A program is exported for several platforms, with a symbolic number of rows."""
    (rows,) = jax.export.symbolic_shape("m")
    types = [jax.ShapeDtypeStruct(s, np.float32) for s in ((rows, K), W.shape)] + [jax.ShapeDtypeStruct((G,), np.int32)]
    exported = jax.export.export(jax.jit(jaxext.ragged_dot), platforms=("cpu", "cuda"))(*types)
    np.testing.assert_array_equal(exported.call(X, W, SHORT), of_rows(X, W, SHORT))
    fixed = jax.export.export(jax.jit(jaxext.ragged_dot))(X, W, SHORT)
    np.testing.assert_array_equal(jax.export.deserialize(fixed.serialize()).call(X, W, SHORT), of_rows(X, W, SHORT))


# --- several devices

# Shardings of rows and filters, and the collectives of the product and of its two gradients together.
SPLITS = {
    "rows": (P("x"), P(), {}, {"all-reduce": 1}),
    "columns": (P(), P(None, None, "x"), {}, {"all-reduce": 1}),
    "rows and groups": (P("x"), P("y"), {"all-reduce": 1}, {"all-reduce": 2}),
    "contraction": (P(None, "x"), P(None, "x"), {"all-reduce": 1}, {}),
}


def many_operands():
    x, w, y = operands(rows=32, groups=8, k=8, n=8)
    return x, w, y, ints(3, 0, 9, 5, 0, 7, 2, 1)


@pytest.mark.parametrize(("name", "kind"), [*zip(SPLITS, (AxisType.Auto, AxisType.Explicit) * 2, strict=True)], ids=str)
def test_devices(name, kind):
    """The rows of a device meet the groups that they belong to, and its groups the rows that belong to them."""
    x, w, y, sizes = many_operands()
    px, pw, forward, of_gradients = SPLITS[name]
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        xs, ws = jax.device_put(x, NamedSharding(mesh, px)), jax.device_put(w, NamedSharding(mesh, pw))
        columns = P(*(px[:1] or (None,)), *pw[2:])
        ys = jax.device_put(y, NamedSharding(mesh, columns))
        static: Any = dict(out_sharding=columns) if kind is AxisType.Explicit and name == "contraction" else {}
        product = jax.jit(functools.partial(jaxext.ragged_dot, **static))
        np.testing.assert_array_equal(product(xs, ws, sizes), of_rows(x, w, sizes))
        assert dict(collectives(product.lower(xs, ws, sizes).compile())) == forward
        gradients = jax.jit(
            lambda x, w, y: jax.vjp(lambda x, w: jaxext.ragged_dot(x, w, sizes, **static), x, w)[1](y),
            out_shardings=(xs.sharding, ws.sharding) if kind is AxisType.Auto else None,
        )
        dx, dw = gradients(xs, ws, ys)
        assert dict(collectives(gradients.lower(xs, ws, ys).compile())) == of_gradients
    np.testing.assert_array_equal(dx, of_rows(y, w.swapaxes(1, 2), sizes))
    np.testing.assert_array_equal(dw, of_groups(x, y, sizes))
    assert dx.sharding.is_equivalent_to(xs.sharding, 2) and dw.sharding.is_equivalent_to(ws.sharding, 3)


def test_shard_map():
    """Each device has some columns; and each some rows with sizes of its own, which is how tokens are split."""
    x, w, _, sizes = many_operands()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    over = functools.partial(jax.shard_map, mesh=mesh)
    columns = over(jaxext.ragged_dot, in_specs=(P(), P(None, None, "x"), P()), out_specs=P(None, "x"))
    np.testing.assert_array_equal(columns(x, w, sizes), of_rows(x, w, sizes))
    own = np.random.default_rng(0).integers(0, 2, (8, 8)).astype(np.int32)
    split = over(lambda x, w, sizes: jaxext.ragged_dot(x, w, sizes[0]), in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    want = np.concatenate([of_rows(part, w, s) for part, s in zip(np.split(x, 8), own, strict=True)])
    np.testing.assert_array_equal(jax.jit(split)(x, w, own), want)
    got = jax.jit(jax.grad(lambda w: (split(x, w, own) ** 2).sum() / 2))(w)
    want = sum(of_groups(part, of_rows(part, w, s), s) for part, s in zip(np.split(x, 8), own, strict=True))
    np.testing.assert_array_equal(got, want)


def test_a_partial_manual_shard_map():
    """XLA's partitioner splits the rows of each device: right, with the work of the dense way."""
    x, w, _, sizes = many_operands()
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(jaxext.ragged_dot, mesh=mesh, in_specs=(P(), P(None, None, "x"), P()), out_specs=P(None, "x"), axis_names={"x"})
    xs = jax.device_put(x, NamedSharding(mesh, P("y")))
    np.testing.assert_array_equal(jax.jit(f)(xs, w, sizes), of_rows(x, w, sizes))
