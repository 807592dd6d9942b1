"""All-gather and matmul, matmul and reduce-scatter: right under every transformation, and each permute has a product beside it.

Truth is the product of the whole arrays on one device, or the plain collective.  Operands are small integers: comparisons are bit for bit.
"""

import doctest
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import integers, same
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import operations, struct
from test_sharding import collectives

import jaxext
from jaxext import _collective_matmul
from jaxext._collective_matmul import all_gather_matmul, matmul_reduce_scatter

BOTH = (all_gather_matmul, matmul_reduce_scatter)
each = pytest.mark.parametrize("function", BOTH, ids=lambda f: f.__name__)


def mesh_of(**axes):
    shape = tuple(axes.values())
    return jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[: math.prod(shape)])


RING = mesh_of(x=3)
GRID = mesh_of(data=4, model=2)


def plain(function):
    """What it does, in the words of lax, not overlapped."""

    def gathered(lhs, rhs, axis_name):
        return jnp.matmul(lax.all_gather(lhs, axis_name, axis=lhs.ndim - 2, tiled=True), rhs)

    def scattered(lhs, rhs, axis_name):
        y = jnp.matmul(lhs, rhs)
        return lax.psum_scatter(y, axis_name, scatter_dimension=y.ndim - 2, tiled=True)

    return gathered if function is all_gather_matmul else scattered


def split(function, mesh=RING, axis: str | tuple[str, ...] = "x", lead=(), *, shard_map=None, **keywords):
    """The function as a product of whole matrices: rows of the one are split over `axis`, columns of the other, or K."""
    rows, columns = P(*lead, axis, None), P(*lead, None, axis)
    specs = (rows, P(None, axis), columns) if function is all_gather_matmul else (columns, P(axis, None), rows)
    local = functools.partial(function, axis_name=axis, **keywords)
    return jax.shard_map(local, mesh=mesh, in_specs=specs[:2], out_specs=specs[2], **(shard_map or {}))


def loss(product, *operands):
    return jnp.sum(product(*operands) ** 2)


def gradients(product):
    return jax.grad(functools.partial(loss, product), (0, 1))


def derivatives(product, operands, tangents):
    """The value and its tangent, both gradients and, forward over reverse, second derivatives."""
    return jax.jvp(product, operands, tangents), jax.jvp(gradients(product), operands, tangents)


CASES = {
    "ring": (RING, "x", (), True),
    "ring, unchecked": (RING, "x", (), False),
    "batch over the other axis": (GRID, "model", ("data",), True),
    "one device": (mesh_of(x=1), "x", (), True),
}


@pytest.mark.parametrize("case", CASES)
def test_derivatives(case):
    """In both modes and of second order; with a batch over the other axis, the gradient of the matrix is added up over that axis."""
    mesh, axis, lead, check_vma = CASES[case]
    a, b = integers((4, 4, 2) if lead else (12, 12)), integers((2, 6) if lead else (12, 12), 1)
    operands, tangents = (a, b), (integers(a.shape, 2), integers(b.shape, 3))
    want = jax.jit(functools.partial(derivatives, jnp.matmul))(operands, tangents)
    products = [split(function, mesh, axis, lead, shard_map=dict(check_vma=check_vma)) for function in BOTH]
    for got in jax.jit(lambda *args: [derivatives(product, *args) for product in products])(operands, tangents):
        same(got, want)


@each
def test_one_operand_replicated(function):
    """Gradients inside, with the varying axes in the types: that of the replicated one is added up, once and not per step."""
    x, y = integers((3, 6, 2)), integers((3, 2, 6), 1)
    own = lambda f, a, b: f(a.reshape(6, 2), b.reshape(2, 6), "x")
    for a, b, specs in ((x, y[0], (P("x"), P())), (x[0], y, (P(), P("x")))):
        got, want = (
            jax.jit(jax.shard_map(gradients(functools.partial(own, f)), mesh=RING, in_specs=specs, out_specs=specs))
            for f in (function, plain(function))
        )
        same(got(a, b), want(a, b))
        # of the program as it was written: XLA can make one of several
        assert sum(op.name == "stablehlo.all_reduce" for op in operations(got.lower(a, b))) == 1


@each
def test_vmap_and_batches(function):
    """vmap over either operand or both, inside and around; batches as matmul has them, in both operands, in one or broadcast."""
    x, y = integers((2, 3, 6, 2)), integers((2, 3, 2, 6), 1)

    def inside(f, x, y):
        x, y = x[:, 0], y[:, 0]
        call = functools.partial(f, axis_name="x")
        mapped = [jax.vmap(call, axes)(*args) for axes, args in (((0, 0), (x, y)), ((0, None), (x, y[0])), ((None, 0), (x[0], y)))]
        return [z[:, None] for z in (*mapped, call(x, y[0]), call(x[:1], y), call(x[0], y))]

    def around(f, x, y):
        whole = jax.shard_map(functools.partial(inside, f), mesh=RING, in_specs=(P(None, "x"), P(None, "x")), out_specs=P(None, "x"))
        return jax.vmap(whole)(jnp.stack([x, -x]), jnp.stack([y, y + 1]))

    got, want = (jax.jit(functools.partial(around, f))(x, y) for f in (function, plain(function)))
    same(got, want)


@each
def test_axes_that_are_of_no_mesh(function):
    """pmap, and vmap with a name, for which one device is enough; alone in a tuple, a name has any order."""
    x, y = integers((3, 6, 2)), integers((3, 2, 6), 1)

    def step(f, a, b):
        return f(a, b, "i"), gradients(lambda a, b: f(a, b, "i"))(a, b)

    got = jax.pmap(functools.partial(step, function), axis_name="i", devices=jax.devices()[:3])(x, y)
    same(got, jax.jit(jax.vmap(functools.partial(step, plain(function)), axis_name="i"))(x, y))
    same(got, jax.jit(jax.vmap(functools.partial(step, function), axis_name="i"))(x, y))
    assert jax.eval_shape(jax.vmap(lambda a, b: function(a, b, ("i",)), axis_name="i"), x, y).shape == got[0].shape


@each
def test_axes_of_a_grid(function):
    """Over one axis with the other automatic, and over both as one ring, on an explicit mesh."""
    a, b = integers((8, 4)), integers((4, 12), 1)
    want = jax.jit(gradients(jnp.matmul))(a, b)
    one = split(function, GRID, "model", shard_map=dict(axis_names={"model"}))
    same(jax.jit(gradients(one))(*(jax.device_put(x, jax.NamedSharding(GRID, P("data"))) for x in (a, b))), want)
    axes = "data", "model"
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    places = (P(axes), P(None, axes))[:: 1 if function is all_gather_matmul else -1]
    with jax.set_mesh(mesh):
        same(jax.jit(gradients(split(function, mesh, axes)))(*map(jax.device_put, (a, b), places)), want)


def beside_permutes(lowered, product):
    """For each shard_map of a program: how many products could run while a permute does, since neither waits for the other, in ascending
    order.  Where the k-th number is at least k, all permutes can have one beside them at once, no two the same.
    """
    for whole in operations(lowered):
        if whole.name != "sdy.manual_computation":
            continue
        behind, permutes, products = {}, {}, {}  # behind: value -> the operations that it waits for
        for i, op in enumerate(whole.regions[0].blocks[0].operations):
            before = set().union(*(behind.get(value, ()) for value in op.operands))
            behind |= dict.fromkeys(op.results, before | {i})
            if op.name == "stablehlo.collective_permute":
                permutes[i] = before
            elif product(op):
                products[i] = before
        yield sorted(sum(i not in before and j not in permutes[i] for j, before in products.items()) for i in permutes)


is_dot = lambda op: op.name == "stablehlo.dot_general"
OPERANDS = struct(48, 24, dtype=np.float32), struct(24, 24, dtype=np.float32)


@each
def test_permutes_are_beside_products(function):
    """n products and n - 1 permutes, in turn, n - 1 more in the gradients; not what they replace, and nothing larger than all the rows."""
    product = split(function, mesh_of(x=8))
    forward, backward = jax.jit(product).lower(*OPERANDS), jax.jit(gradients(product)).lower(*OPERANDS)
    marks = {"stablehlo.collective_permute": ">", "stablehlo.dot_general": "*"}
    in_turn = "".join(marks.get(op.name, "") for op in operations(forward))
    assert in_turn == (">*" * 7 + "*" if function is all_gather_matmul else "*>" * 7 + "*")
    assert list(beside_permutes(forward, is_dot)) == [[1, 2, 3, 4, 5, 6, 7]]
    # The gathered rows are there already, so that the gradient of rhs never waits; scattered ones are gathered for both gradients.
    of_gradients = [8 + k for k in range(1, 8)] if function is all_gather_matmul else [2 * k for k in range(1, 8)]
    assert list(beside_permutes(backward, is_dot)) == [[1, 2, 3, 4, 5, 6, 7], of_gradients]
    joined = [math.prod(op.results[0].type.shape) for op in operations(forward) if op.name == "stablehlo.concatenate"]
    assert max(joined, default=0) <= 48 * 3
    assert collectives(forward.compile()) == {"collective-permute": 7}
    assert collectives(backward.compile()) == {"collective-permute": 14}


def test_what_is_beside_permutes_is_counted():
    """A ring in which every product waits for the permute before it, and the next permute for the product."""

    def waiting(x):
        for _ in range(3):
            x = lax.ppermute(x @ x, "x", [(0, 1), (1, 2), (2, 0)])
        return x

    lowered = jax.jit(jax.shard_map(waiting, mesh=RING, in_specs=P("x"), out_specs=P("x"))).lower(struct(12, 4, dtype=np.float32))
    assert list(beside_permutes(lowered, is_dot)) == [[0, 0, 0]]


def test_each_is_the_transpose_of_the_other():
    """As many products and permutes, the same way around the ring."""

    def steps(function, transposed):
        product = split(function)
        backwards = lambda y, rhs: jax.linear_transpose(lambda lhs: product(lhs, rhs), OPERANDS[0])(y)
        lowered = jax.jit(backwards if transposed else product).lower(*OPERANDS)  # lhs and the result have one shape
        pairs = [np.array(op.attributes["source_target_pairs"]) for op in operations(lowered) if op.name == "stablehlo.collective_permute"]
        return [{int(shift) for shift in (p[:, 1] - p[:, 0]) % 3} for p in pairs], sum(map(is_dot, operations(lowered)))

    assert steps(all_gather_matmul, False) == steps(matmul_reduce_scatter, True) == ([{2}] * 2, 3)
    assert steps(matmul_reduce_scatter, False) == steps(all_gather_matmul, True) == ([{1}] * 2, 3)


def test_what_the_gradient_keeps():
    """The gathered rows, as after an all-gather; under `jax.checkpoint` the operands alone, and the rows travel once more."""
    again = jax.checkpoint(all_gather_matmul, static_argnums=2)
    specs = P("x"), P(None, "x")
    kept, beside = [], []

    def inside(f, lhs, rhs):
        _, pullback = jax.vjp(lambda a, b: f(a, b, "x"), lhs, rhs)
        kept.append(sum(x.size for x in jax.tree.leaves(pullback) if x.dtype == lhs.dtype))
        return gradients(lambda a, b: f(a, b, "x"))(lhs, rhs)

    for f in (all_gather_matmul, plain(all_gather_matmul), again):
        lowered = jax.jit(jax.shard_map(functools.partial(inside, f), mesh=RING, in_specs=specs, out_specs=specs)).lower(*OPERANDS)
        beside += beside_permutes(lowered, is_dot)
    rows, rhs = 48 * 24, 24 * 24 // 3
    assert kept == [rows + rhs, rows + rhs, rows // 3 + rhs]
    assert beside == [[1, 2, 4, 5], [], [1, 2, 4, 4, 5, 5]]


@each
def test_dtypes(function):
    """Sums of parts are in the dtype of the result: in float32 for bfloat16 operands, if that is asked for."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((6, 96), (96, 6)))
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    wide = split(function, preferred_element_type=jnp.float32)
    for product, dtype, bound in ((split(function), jnp.bfloat16, 2**-6), (wide, jnp.float32, 2**-20)):
        y, slopes = jax.jit(lambda a, b, product=product: (product(a, b), gradients(product)(a, b)))(a, b)
        assert (y.dtype, *(slope.dtype for slope in slopes)) == (dtype, a.dtype, b.dtype)
        assert np.abs(np.asarray(y, np.float64) - want).max() < bound * np.abs(want).max()
    i, j = integers((6, 6), dtype=np.int8), integers((6, 6), 1, np.int8)
    same(jax.jit(split(function, preferred_element_type=jnp.int32))(i, j), i.astype(np.int32) @ j.astype(np.int32))
    assert jax.jit(split(function))(np.zeros((0, 6), np.float32), np.zeros((6, 6), np.float32)).shape == (0, 6)


@each
def test_kernels_are_beside_permutes(function):
    """In a program for GPUs the products are our calls."""
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton", exc_type=ImportError)
    lowered = jaxext.lower_for(split(function, implementation="triton"), struct(768, 96), struct(96, 768), arch="sm_90a")
    assert list(beside_permutes(lowered, lambda op: op.name == "stablehlo.custom_call")) == [[1, 2]]


REFUSED = [
    (all_gather_matmul, (8, 4), (5, 6), "x", TypeError, r"all_gather_matmul: rhs has 5 rows \(shape \(5, 6\)\), want 4, the columns of"),
    (matmul_reduce_scatter, (8, 4), (5, 6), "x", TypeError, "matmul_reduce_scatter: rhs has 5 rows .*, want 4, the columns of lhs"),
    (matmul_reduce_scatter, (8, 4), (4, 6), "x", ValueError, r"lhs has 8 rows \(shape \(8, 4\)\), want a multiple of the 3 devices"),
    (all_gather_matmul, (4,), (4, 6), "x", ValueError, r"all_gather_matmul: lhs has shape \(4,\), want at least two axes"),
    (matmul_reduce_scatter, (8, 4), (4,), "x", ValueError, r"matmul_reduce_scatter: rhs has shape \(4,\), want at least two axes"),
    (all_gather_matmul, (8, 4), (4, 6), "y", NameError, "all_gather_matmul: axis_name is 'y', want an axis of a shard_map or pmap around"),
    (matmul_reduce_scatter, (8, 4), (4, 6), ["x"], TypeError, r"matmul_reduce_scatter: axis_name is \['x'\], want a name or a tuple of"),
]


@pytest.mark.parametrize(("function", "lhs", "rhs", "axis", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused(function, lhs, rhs, axis, error, words):
    """When it is traced, by the name of the argument, in lax's class of error."""
    call = jax.shard_map(functools.partial(function, axis_name=axis), mesh=RING, in_specs=(P(), P()), out_specs=P())
    with pytest.raises(error, match=words):
        jax.eval_shape(call, struct(*lhs), struct(*rhs))


@each
def test_where_it_is_refused(function):
    """Outside of any shard_map, along an axis that is automatic, and around a ring of axes in another order than the mesh's."""
    operands = struct(24, 24), struct(24, 24)
    with pytest.raises(NameError, match="want an axis of a shard_map or pmap around the call"):
        jax.eval_shape(functools.partial(function, axis_name="x"), *operands)
    beside = jax.shard_map(functools.partial(function, axis_name="data"), mesh=GRID, in_specs=P(), out_specs=P(), axis_names={"model"})
    with pytest.raises(NameError, match="axis_name is 'data', want an axis of"):
        jax.eval_shape(beside, *operands)
    with pytest.raises(ValueError, match=r"axis_name is \('model', 'data'\), want .* in the order of their mesh, \('data', 'model'\)"):
        jax.eval_shape(split(function, GRID, ("model", "data")), *operands)
    with pytest.raises(ValueError, match="implementation is 'none'"):
        jax.eval_shape(split(function, implementation="none"), *operands)


def test_examples_in_the_docstrings():
    assert doctest.testmod(_collective_matmul) == doctest.TestResults(failed=0, attempted=8)
