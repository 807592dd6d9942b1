"""All-gather and matmul, matmul and reduce-scatter: right under every transformation; on GPUs each permute has a product beside it, and on
CPUs the program is that of the plain collective.

Truth is the product of the whole arrays on one device, or the plain collective.  Operands are small integers: comparisons are bit for bit.
"""

import collections
import doctest
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import integers, same
from collectives import collectives
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import operations, struct

import jaxext
from jaxext import checkpoint_policies
from jaxext.parallel import by_platform, collective_matmul
from jaxext.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter

BOTH = (all_gather_matmul, matmul_reduce_scatter)
each = pytest.mark.parametrize("function", BOTH, ids=lambda f: f.__name__)


@pytest.fixture
def ring():
    """Run the program of the other platforms; this CPU's own is the plain collective."""
    mlir.register_lowering(by_platform.by_platform, by_platform.lowered_elsewhere, platform="cpu")
    yield
    mlir.register_lowering(by_platform.by_platform, by_platform.lowered_on_cpus, platform="cpu")


def mesh_of(**axes):
    shape = tuple(axes.values())
    return jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[: math.prod(shape)])


RING = mesh_of(x=3)
GRID = mesh_of(data=4, model=2)


def plain(function):
    """Return the same product in lax, not overlapped."""

    def gathered(x, w, axis_name):
        return jnp.matmul(lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True), w)

    def scattered(x, w, axis_name):
        y = jnp.matmul(x, w)
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
    "unchecked": (RING, "x", (), False),
    "batch over the other axis": (GRID, "model", ("data",), True),
    "one device": (mesh_of(x=1), "x", (), True),
}


@pytest.mark.parametrize("case", CASES)
def test_derivatives(case, ring):
    """Derivatives are of both modes and of second order; the gradient of the matrix is added up over an axis that splits the batch."""
    mesh, axis, lead, check_vma = CASES[case]
    a, b = integers((4, 4, 2) if lead else (12, 12)), integers((2, 6) if lead else (12, 12), 1)
    operands, tangents = (a, b), (integers(a.shape, 2), integers(b.shape, 3))
    want = jax.jit(functools.partial(derivatives, jnp.matmul))(operands, tangents)
    products = [split(function, mesh, axis, lead, shard_map=dict(check_vma=check_vma)) for function in BOTH]
    for got in jax.jit(lambda *args: [derivatives(product, *args) for product in products])(operands, tangents):
        same(got, want)


@each
def test_one_operand_replicated(function, ring):
    """Gradients inside, with the varying axes in the types: that of the replicated one is added up, once and not per step."""
    x, y = integers((3, 6, 2)), integers((3, 2, 6), 1)
    own = lambda f, a, b: f(a.reshape(6, 2), b.reshape(2, 6), axis_name="x")
    for a, b, specs in ((x, y[0], (P("x"), P())), (x[0], y, (P(), P("x")))):
        got, want = (
            jax.jit(jax.shard_map(gradients(functools.partial(own, f)), mesh=RING, in_specs=specs, out_specs=specs))
            for f in (function, plain(function))
        )
        same(got(a, b), want(a, b))
        # of the program as it was written: XLA can make one of several
        assert sum(op.name == "stablehlo.all_reduce" for op in operations(got.lower(a, b))) == 1


@each
def test_vmap_and_batches(function, ring):
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
def test_axes_that_are_of_no_mesh(function, ring):
    """pmap, and vmap with a name, for which one device is enough; alone in a tuple, a name has any order."""
    x, y = integers((3, 6, 2)), integers((3, 2, 6), 1)

    def step(f, a, b):
        return f(a, b, axis_name="i"), gradients(functools.partial(f, axis_name="i"))(a, b)

    got = jax.pmap(functools.partial(step, function), axis_name="i", devices=jax.devices()[:3])(x, y)
    same(got, jax.jit(jax.vmap(functools.partial(step, plain(function)), axis_name="i"))(x, y))
    same(got, jax.jit(jax.vmap(functools.partial(step, function), axis_name="i"))(x, y))
    assert jax.eval_shape(jax.vmap(lambda a, b: function(a, b, axis_name=("i",)), axis_name="i"), x, y).shape == got[0].shape


@each
def test_axes_of_a_grid(function, ring):
    """The ring is one axis with the other automatic, or both axes of an explicit mesh."""
    a, b = integers((8, 4)), integers((4, 12), 1)
    want = jax.jit(gradients(jnp.matmul))(a, b)
    one = split(function, GRID, "model", shard_map=dict(axis_names={"model"}))
    same(jax.jit(gradients(one))(*(jax.device_put(x, jax.NamedSharding(GRID, P("data"))) for x in (a, b))), want)
    axes = "data", "model"
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    places = (P(axes), P(None, axes))[:: 1 if function is all_gather_matmul else -1]
    with jax.set_mesh(mesh):
        same(jax.jit(gradients(split(function, mesh, axes)))(*map(jax.device_put, (a, b), places)), want)


def inlined(lowered):
    """Yield for each shard_map of a program its operations, with the values before and after them; calls are inlined."""
    functions = {op.attributes["sym_name"].value: op for op in operations(lowered) if op.name == "func.func"}
    fresh = itertools.count()

    def of(block, values):
        for op in block.operations:
            before = [values.get(value) for value in op.operands]
            if op.name.endswith(".return"):
                return before
            if op.name == "func.call":
                body = functions[op.attributes["callee"].value].regions[0].blocks[0]
                after = yield from of(body, dict(zip(body.arguments, before, strict=True)))
            else:
                after = [next(fresh) for _ in op.results]
                yield op, before, after
            values |= dict(zip(op.results, after, strict=True))
        raise AssertionError("a block ends with a return")

    return [list(of(whole.regions[0].blocks[0], {})) for whole in operations(lowered) if whole.name == "sdy.manual_computation"]


def beside_permutes(lowered, product):
    """Yield for each shard_map of a program how many products could run while a permute does, since neither waits for the other, in
    ascending order.  If the k-th number is at least k, all permutes can have one beside them at once, no two the same."""
    for whole in inlined(lowered):
        behind, permutes, products = {}, {}, {}  # behind: value -> the operations that it waits for
        for i, (op, values_before, values_after) in enumerate(whole):
            before = set().union(*(behind.get(value, ()) for value in values_before))
            behind |= dict.fromkeys(values_after, before | {i})
            if op.name == "stablehlo.collective_permute":
                permutes[i] = before
            elif product(op):
                products[i] = before
        yield sorted(sum(i not in before and j not in permutes[i] for j, before in products.items()) for i in permutes)


def for_gpus(f, *args):
    with jaxext.use_implementation("xla"):
        return jaxext.export.lower_for(f, arch="sm_90a")(*args)


is_dot = lambda op: op.name == "stablehlo.dot_general"
OPERANDS = struct(48, 24, dtype=np.float32), struct(24, 24, dtype=np.float32)


@each
def test_permutes_are_beside_products(function):
    """n products and n - 1 permutes, in turn, n - 1 more in the gradients; not what they replace, and nothing larger than all the rows."""
    product = split(function, mesh_of(x=8))
    forward, backward = for_gpus(product, *OPERANDS), for_gpus(gradients(product), *OPERANDS)
    marks = {"stablehlo.collective_permute": ">", "stablehlo.dot_general": "*"}
    in_turn = "".join(marks.get(op.name, "") for (whole,) in [inlined(forward)] for op, _, _ in whole)
    assert in_turn == (">*" * 7 + "*" if function is all_gather_matmul else "*>" * 7 + "*")
    assert list(beside_permutes(forward, is_dot)) == [[1, 2, 3, 4, 5, 6, 7]]
    # The gathered rows are there already, for the gradient of w in one product; scattered ones are gathered for both gradients.
    of_gradients = [1 + k for k in range(1, 8)] if function is all_gather_matmul else [2 * k for k in range(1, 8)]
    assert list(beside_permutes(backward, is_dot)) == [[1, 2, 3, 4, 5, 6, 7], of_gradients]
    joined = [math.prod(op.results[0].type.shape) for op in operations(forward) if op.name == "stablehlo.concatenate"]
    assert max(joined, default=0) <= 48 * 3
    kinds = {op.name for lowered in (forward, backward) for whole in inlined(lowered) for op, _, _ in whole}
    assert kinds.isdisjoint({"stablehlo.all_gather", "stablehlo.reduce_scatter", "stablehlo.all_reduce", "stablehlo.case"})


@each
def test_on_cpus_it_is_the_plain_collective(function):
    """The compiled program has the same instructions, its gradients' and that of a batch too."""
    kinds = lambda compiled: collections.Counter(re.findall(r" ([a-z][a-z-]*)\(", compiled.as_text()))
    batch = struct(2, 48, 24, dtype=np.float32), OPERANDS[1]
    for transformed, operands in ((gradients, OPERANDS), (lambda product: jax.vmap(product, (0, None)), batch)):
        ours, theirs = (jax.jit(transformed(split(f, mesh_of(x=8)))).lower(*operands).compile() for f in (function, plain(function)))
        assert kinds(ours) == kinds(theirs)
        assert set(collectives(ours)) <= {"all-gather", "reduce-scatter"} and collectives(ours)


def test_what_is_beside_permutes_is_counted():
    """A ring in which every product waits for the permute before it, and the next permute for the product."""

    def waiting(x):
        for _ in range(3):
            x = lax.ppermute(x @ x, "x", [(0, 1), (1, 2), (2, 0)])
        return x

    lowered = jax.jit(jax.shard_map(waiting, mesh=RING, in_specs=P("x"), out_specs=P("x"))).lower(struct(12, 4, dtype=np.float32))
    assert list(beside_permutes(lowered, is_dot)) == [[0, 0, 0]]


def test_each_is_the_transpose_of_the_other():
    """The transpose has as many products and permutes as the other, the same way around the ring."""

    def ring(function, transposed):
        product = split(function)
        backwards = lambda y, w: jax.linear_transpose(lambda x: product(x, w), OPERANDS[0])(y)
        lowered = for_gpus(backwards if transposed else product, *OPERANDS)  # x and the result have one shape
        all_of_it = [op for whole in inlined(lowered) for op, _, _ in whole]
        pairs = [np.array(op.attributes["source_target_pairs"]) for op in all_of_it if op.name == "stablehlo.collective_permute"]
        return [{int(shift) for shift in (p[:, 1] - p[:, 0]) % 3} for p in pairs], sum(map(is_dot, all_of_it))

    assert ring(all_gather_matmul, False) == ring(matmul_reduce_scatter, True) == ([{2}] * 2, 3)
    assert ring(matmul_reduce_scatter, False) == ring(all_gather_matmul, True) == ([{1}] * 2, 3)


@each
def test_what_the_gradient_keeps(function):
    """The gathered rows or both operands are kept, as by the plain collective; `jax.checkpoint` keeps the operands alone."""
    specs = (P("x"), P(None, "x")) if function is all_gather_matmul else (P(None, "x"), P("x"))
    kept = []

    def inside(f, x, w):
        _, pullback = jax.vjp(f, x, w)
        kept.append(sorted(each.size for each in jax.tree.leaves(pullback) if each.dtype == x.dtype))
        return x, w

    inside_axis = [functools.partial(f, axis_name="x") for f in (function, plain(function))]
    for f in (*inside_axis, jax.checkpoint(inside_axis[0])):
        jax.eval_shape(jax.shard_map(functools.partial(inside, f), mesh=RING, in_specs=specs, out_specs=specs), *OPERANDS)
    x, w = 48 * 24 // 3, 24 * 24 // 3
    ours, theirs, again = kept
    assert ours == theirs == [w, 3 * x if function is all_gather_matmul else x]
    assert again == [w, x]


@each
def test_under_checkpoint(function):
    """The rows travel once more in the backward pass, beside the products; what a policy saves of the products is not computed again."""
    permutes = {}
    for policy in (None, checkpoint_policies.dots_saveable):
        again = jax.checkpoint(lambda a, b: jnp.sin(split(function)(a, b)), policy=policy)
        beside = list(beside_permutes(for_gpus(gradients(again), *OPERANDS), is_dot))
        assert all(count > k for each in beside for k, count in enumerate(each))
        permutes[policy is None] = [len(each) for each in beside]
    assert permutes[True] == [2, 2, 2]  # forward, forward again, backward
    assert permutes[False] == ([2, 2, 2] if function is all_gather_matmul else [2, 2])
    saved = [lambda product: jax.checkpoint(product, policy=checkpoint_policies.dots_saveable), jax.checkpoint]
    a, b = integers((12, 12)), integers((12, 12), 1)
    for wrapped in saved:
        same(jax.jit(gradients(wrapped(split(function))))(a, b), jax.jit(gradients(jnp.matmul))(a, b))


@each
def test_dtypes(function, ring):
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
    for m, n in ((0, 6), (6, 0)):  # of gradients jaxlib 0.11.2 dies
        same(jax.jit(split(function))(np.zeros((m, 6)), np.zeros((6, n))), np.zeros((m, n)))


@each
def test_bfloat16_beside_an_automatic_axis(function):
    """XLA aborts in the plain collective on CPUs, so the ring is the program there."""
    a, b = jnp.asarray(integers((8, 4)), jnp.bfloat16), jnp.asarray(integers((4, 12), 1), jnp.bfloat16)
    product = split(function, GRID, "model", shard_map=dict(axis_names={"model"}))
    for f, want in ((product, a @ b), (gradients(product), gradients(jnp.matmul)(a, b))):
        lowered = jax.jit(f).lower(a, b)
        sums = {"stablehlo.all_reduce", "stablehlo.reduce_scatter"}
        assert not any(op.name in sums and "bf16" in str(op.results[0].type) for op in operations(lowered))
        same(lowered.compile()(a, b), want)


@each
def test_kernels_are_beside_permutes(function):
    """The products are our calls in a program for GPUs."""
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton", exc_type=ImportError)
    lowered = jaxext.export.lower_for(split(function, implementation="triton"), arch="sm_90a")(struct(768, 96), struct(96, 768))
    assert list(beside_permutes(lowered, lambda op: op.name == "stablehlo.custom_call")) == [[1, 2]]


REFUSED = [
    (all_gather_matmul, (8, 4), (5, 6), "x", TypeError, r"all_gather_matmul: w has 5 rows \(shape \(5, 6\)\), want 4, the columns of"),
    (matmul_reduce_scatter, (8, 4), (5, 6), "x", TypeError, "matmul_reduce_scatter: w has 5 rows .*, want 4, the columns of x"),
    (matmul_reduce_scatter, (8, 4), (4, 6), "x", ValueError, r"x has 8 rows \(shape \(8, 4\)\), want a multiple of the 3 devices"),
    (all_gather_matmul, (4,), (4, 6), "x", ValueError, r"all_gather_matmul: x has shape \(4,\), want at least two axes"),
    (matmul_reduce_scatter, (8, 4), (4,), "x", ValueError, r"matmul_reduce_scatter: w has shape \(4,\), want at least two axes"),
    (all_gather_matmul, (8, 4), (4, 6), "y", NameError, "all_gather_matmul: axis_name is 'y', want an axis of a shard_map or pmap around"),
    (matmul_reduce_scatter, (8, 4), (4, 6), ["x"], TypeError, r"matmul_reduce_scatter: axis_name is \['x'\], want a name or a tuple of"),
]


@pytest.mark.parametrize(("function", "x", "w", "axis", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused(function, x, w, axis, error, words):
    """The error comes at trace time, names the argument and has lax's class."""
    call = jax.shard_map(functools.partial(function, axis_name=axis), mesh=RING, in_specs=(P(), P()), out_specs=P())
    with pytest.raises(error, match=words):
        jax.eval_shape(call, struct(*x), struct(*w))


@each
def test_where_it_is_refused(function):
    """The call is outside of any shard_map, along an automatic axis, or around a ring of axes in another order than the mesh's."""
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
    assert doctest.testmod(collective_matmul) == doctest.TestResults(failed=0, attempted=10)
