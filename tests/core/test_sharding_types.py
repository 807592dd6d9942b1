"""Meshes of explicit axes: shardings are in the types, the result's follows from the labels, also where lax raises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import (
    BATCH_GROUPS,
    CONV1D,
    CONV2D,
    DEPTHWISE,
    DOT,
    GROUPED,
    LAX,
    OURS,
    ROLES,
    Problem,
    close,
    dot,
    integers,
    same,
    truth,
)
from collectives import collectives
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from lowered import operations
from test_sharding import place, spec

import jaxext
from jaxext._compat import ShardingTypeError

EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))


def trim(spec) -> P:
    """Remove the Nones at the end."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)


def of(x) -> P:
    """The spec in the type."""
    return trim(jax.typeof(x).sharding.spec)


SPLITS = ((DOT, {"N": "model", "C": "data"}), (CONV2D, {"N": "data", "K": "model"}), (DEPTHWISE, {"N": "data", "G": "model"}))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("problem", "split"), SPLITS, ids=lambda v: str(v) if isinstance(v, Problem) else "-".join(v))
def test_types_follow_from_labels(problem, split, role):
    """The type of each role's result, its value, and one all-reduce where the sum runs over a split label."""
    slots = problem.slots(role)
    specs = [spec(problem, slot, split) for slot in slots]
    operands = problem.operands(role)
    with jax.set_mesh(EXPLICIT):
        args = [place(v, p, EXPLICIT) for v, p in zip(operands, specs, strict=False)]
        more = {}
        if "C" in split:  # the forward product's sum
            if role == "fprop":
                with pytest.raises(ShardingTypeError, match=r"sum runs over axis \w+, .* `out_sharding`"):
                    problem.role(role)(*args)
            more = {"out_sharding": P(*spec(problem, "y", split))}
        compiled = jax.jit(sharded_role(problem, role, specs[2], **more)).lower(*args).compile()
        got = compiled(*args)
        same(got, truth(problem, role, *operands))
        assert of(got) == trim(specs[2])
        contracted = any(label not in problem.labels(slots[2]) for label in split)
        assert collectives(compiled) == ({"all-reduce": 1} if contracted else {})


def sharded_role(problem, role, result, **more):
    """The role; the linear operand of a transpose has the sharding `result` in its type, and so must its gradient."""
    call = functools.partial(problem.call, OURS, **more)
    linear = lambda slot: jax.ShapeDtypeStruct(getattr(problem, slot), np.float32, sharding=NamedSharding(EXPLICIT, result))
    return {
        "fprop": call,
        "dgrad": lambda y, w: jax.linear_transpose(lambda x: call(x, w), linear("x"))(y)[0],
        "wgrad": lambda x, y: jax.linear_transpose(lambda w: call(x, w), linear("w"))(y)[0],
    }[role]


def test_vmap_with_batched_filters():
    """lax raises: it would merge a sharded axis with another."""
    problem = CONV2D
    x, w = problem.operands("fprop", 8)
    want = np.stack([truth(problem, "fprop", *xw) for xw in zip(x, w, strict=True)])
    with jax.set_mesh(EXPLICIT):
        x, w = place(x, P("data"), EXPLICIT), place(w, P("data"), EXPLICIT)
        compiled = jax.jit(jax.vmap(problem.role("fprop"))).lower(x, w).compile()
        got = compiled(x, w)
        same(got, want)
        assert of(got) == P("data") and collectives(compiled) == {}
        gradients = jax.jit(jax.grad(lambda w, x: jnp.sum(jax.vmap(problem.role("fprop"))(x, w) ** 2)))(w, x)
        assert of(gradients) == P("data")
        with pytest.raises(ShardingTypeError):
            jax.jit(jax.vmap(problem.role("fprop", LAX)))(x, w)
    x, w = problem.operands("fprop", 8)
    same(gradients, jax.jit(jax.grad(lambda w, x: jnp.sum(jax.vmap(problem.role("fprop"))(x, w) ** 2)))(w, x))


def test_vmap_over_groups_alone():
    """Their sizes, or the number of the first one, are split over the mapped axis, and nothing else is.  A gather has no sharding there."""
    x, w = jnp.asarray(integers((6, 4))), jnp.asarray(integers((3, 4, 5), 1))
    sizes, offset = np.array([2, 1, 3], np.int32), np.array([0], np.int32)
    product = lambda sizes, offset: jaxext.ragged_dot(x, w, sizes, group_offset=offset)
    for axes, args in (((None, 0), (sizes, np.arange(-1, 3, dtype=np.int32)[:, None])), ((0, None), (np.stack([sizes] * 4), offset))):
        want = jax.jit(jax.vmap(product, axes))(*args)
        with jax.set_mesh(EXPLICIT):
            args = [arg if axis is None else place(arg, P("data"), EXPLICIT) for axis, arg in zip(axes, args, strict=True)]
            got = jax.jit(jax.vmap(product, axes))(*args)
        assert of(got) == P("data")
        same(got, want)


@pytest.mark.parametrize("problem", [CONV2D, GROUPED], ids=str)
def test_gradients_per_example(problem):
    """lax raises for convolutions; a filter's gradient here has the batch in front, sharded as it was, and nothing is sent."""
    x, w = problem.operands("fprop")
    gradients = jax.vmap(jax.grad(lambda w, x: jnp.sum(problem.call(OURS, x[None], w) ** 2)), (None, 0))
    want = jax.jit(gradients)(w, x)
    with jax.set_mesh(EXPLICIT):
        w, x = place(w, P(), EXPLICIT), place(x, P("data"), EXPLICIT)
        compiled = jax.jit(gradients).lower(w, x).compile()
        got = compiled(w, x)
        same(got, want)
        assert of(got) == P("data") and collectives(compiled) == {}


def test_gradient_of_a_replicated_filter():
    """Data parallel over the second axis: the gradient is whole everywhere, right, and not multiplied by the size of the first."""
    problem = GROUPED
    x, w = problem.operands("fprop")
    step = jax.value_and_grad(lambda w, x: jnp.sum(problem.call(OURS, x, w) ** 2), (0, 1))
    want = jax.jit(step)(w, x)
    with jax.set_mesh(EXPLICIT):
        got = jax.jit(step)(place(w, P(), EXPLICIT), place(x, P("model"), EXPLICIT))
        assert of(got[1][0]) == P() and of(got[1][1]) == P("model")
    same(got, want)


def test_second_order():
    """The transposes of transposes keep their shardings too."""
    x, w = DEPTHWISE.operands("fprop")
    dw = integers(w.shape, 5)
    gradient = jax.grad(lambda w, x: jnp.sum(DEPTHWISE.call(OURS, x, w) ** 2))

    @jax.jit
    def both(w, x, dw):
        return jax.jvp(gradient, (w, x), (dw, x))[1], jax.grad(lambda w: jnp.sum(gradient(w, x) * dw))(w)

    want = both(w, x, dw)
    split = {"N": "data", "G": "model"}
    of_w = spec(DEPTHWISE, "w", split)
    with jax.set_mesh(EXPLICIT):
        got = both(place(w, of_w, EXPLICIT), place(x, spec(DEPTHWISE, "x", split), EXPLICIT), place(dw, of_w, EXPLICIT))
        assert [of(g) for g in got] == [of_w] * 2
    same(got, want)


def test_batch_and_filter_split_over_the_same_axis():
    """FSDP: two labels want the axis "data", `out_sharding` gives it to the batch, the filter is gathered and its gradient split again."""
    problem = CONV2D
    x, w = problem.operands("fprop")
    last = (None,) * (w.ndim - 1)

    def loss(w, x, **more):
        return jnp.sum(problem.call(OURS, x, w, **more) ** 2)

    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(w, x)
    with jax.set_mesh(EXPLICIT):
        args = place(w, P(*last, "data"), EXPLICIT), place(x, P("data"), EXPLICIT)
        batch = P("data", *(None,) * (x.ndim - 1))
        for out in (batch, NamedSharding(EXPLICIT, batch)):  # a bare spec is of the mesh in scope
            got = jax.jit(jax.value_and_grad(functools.partial(loss, out_sharding=out), (0, 1)))(*args)
            assert of(got[1][0]) == P(*last, "data") and of(got[1][1]) == P("data")
            same(got, want)


@pytest.mark.parametrize("out", [P(None, "model"), P(("data", "model"))])
def test_a_split_sum_goes_where_out_sharding_says(out):
    x, w = DOT.operands("fprop")
    want = truth(DOT, "fprop", x, w)
    step = lambda x, w, out_sharding=None: jaxext.matmul(x, w, out_sharding=out_sharding)
    with jax.set_mesh(EXPLICIT):
        args = place(x, P(None, "data"), EXPLICIT), place(w, P("data"), EXPLICIT)
        got = jax.jit(functools.partial(step, out_sharding=NamedSharding(EXPLICIT, out)))(*args)
        assert of(got) == out
        gradients = jax.jit(jax.grad(lambda x, w: jnp.sum(step(x, w, NamedSharding(EXPLICIT, out)) ** 2), (0, 1)))(*args)
        assert [of(g) for g in gradients] == [P(None, "data"), P("data")]
    same(got, want)
    same(gradients, (2 * want @ w.T, 2 * x.T @ want))


def test_vmap_with_out_sharding():
    """The mapped axis joins the wanted sharding."""
    x, w = DOT.operands("fprop", 4)
    want = np.stack([truth(DOT, "fprop", *xw) for xw in zip(x, w, strict=True)])
    with jax.set_mesh(EXPLICIT):
        f = lambda x, w: jaxext.matmul(x, w, out_sharding=P(None, "model"))
        got = jax.jit(jax.vmap(f))(place(x, P("data"), EXPLICIT), place(w, P("data", None, "model"), EXPLICIT))
        assert of(got) == P("data", None, "model")
    same(got, want)


@pytest.mark.parametrize(
    ("problem", "x", "w", "named"),
    [
        (CONV2D, P(None, "data"), P(), "axis H of x"),
        (CONV2D, P(None, None, "model"), P(), "axis W of x"),
        (CONV1D, P(), P("model"), "axis S of w"),
        (DOT, P(None, "data"), P("model"), "axis"),
        (DOT, P(None, "data"), P("data"), "the sum runs over axis K0, .* ambiguous"),
    ],
    ids=str,
)
def test_refusals_name_the_axis(problem, x, w, named):
    """Sharded window axes, and an axis that lies in two ways, are refused by name and in lax's class of error."""
    shapes = {"x": tuple(8 * n for n in problem.x), "w": tuple(8 * n for n in problem.w)}
    if problem is DOT:
        shapes = {"x": problem.x, "w": problem.w}
    with jax.set_mesh(EXPLICIT), pytest.raises(ShardingTypeError, match=named):
        operands = (jax.ShapeDtypeStruct(shapes[slot], np.float32, sharding=NamedSharding(EXPLICIT, p)) for slot, p in (("x", x), ("w", w)))
        jax.eval_shape(problem.role("fprop"), *operands)


@pytest.mark.parametrize("problem", [DOT, CONV2D], ids=str)
def test_parts_that_are_not_added_up_are_refused(problem):
    """lax, asked for the bare shapes, blamed the contracted axis, or asked for an issue."""
    x, w = problem.operands("fprop")
    name = "dot_general" if problem is DOT else "conv_general_dilated"
    with jax.set_mesh(EXPLICIT):
        x, w = place(x, spec(problem, "x", {"C": "data"}), EXPLICIT), place(w, spec(problem, "w", {"C": "data"}), EXPLICIT)
        for kind in ("unreduced", "reduced"):
            out = P(*(None,) * x.ndim, **{kind: frozenset({"data"})})
            for given in (out, NamedSharding(EXPLICIT, out)):
                with pytest.raises(NotImplementedError, match=rf"{name}: out_sharding is P\(None, .*, want no {kind} axes, which jaxext"):
                    jax.eval_shape(functools.partial(problem.call, OURS, out_sharding=given), x, w)
        other = jax.device_put(w, P(*(None,) * w.ndim, reduced=frozenset({"data"})))
        with pytest.raises(NotImplementedError, match=r"the sharding of an operand is P\(None, .*, want no reduced axes, which jaxext"):
            jax.eval_shape(problem.role("fprop"), place(x, P("data"), EXPLICIT), other)


def test_many_axes_per_label():
    """Labels of several axes, of which some are split; the contracted one wants an `out_sharding`."""
    problem = Problem("", (4, 2, 3, 8), (8, 5, 4, 2), ("a b . c", "c d a b", ". d"), dot((3, 1, 0), (0, 3, 2)))
    x, w = problem.operands("fprop")
    with jax.set_mesh(EXPLICIT):
        split = {"a": "data", "b": "model"}
        args = place(x, spec(problem, "x", split), EXPLICIT), place(w, spec(problem, "w", split), EXPLICIT)
        same(jax.jit(functools.partial(problem.call, OURS, out_sharding=P(None, None)))(*args), truth(problem, "fprop", x, w))


def test_mesh_of_explicit_and_automatic_axes():
    """The batch lies in the types over "data"; XLA splits the filters, or nothing, over "model"."""
    problem = GROUPED
    x, w = problem.operands("fprop")
    step = jax.value_and_grad(lambda w, x: jnp.sum(problem.call(OURS, x, w) ** 2), (0, 1))
    want = jax.jit(step)(w, x)
    with jax.set_mesh(MIXED):
        for of_w in (P(), spec(problem, "w", {"G": "model"})):
            x_placed = place(x, P("data"), MIXED)
            w_placed = jax.device_put(w, NamedSharding(MIXED, of_w))
            got = jax.jit(step)(w_placed, x_placed)
            assert of(got[1][1]) == P("data")
            same(got, want)
            same(jax.jit(problem.role("fprop"))(x_placed, w_placed), truth(problem, "fprop", x, w))


def summed_in(lowered) -> set[str]:
    return {str(op.results[0].type.element_type) for op in operations(lowered) if op.name == "stablehlo.all_reduce"}


IDLE = jax.make_mesh((8, 1), ("data", "model"), axis_types=MIXED.axis_types)


@pytest.mark.parametrize(("problem", "mesh"), [(DOT, MIXED), (DOT, IDLE), (GROUPED, MIXED)], ids=["dot", "one device automatic", "grouped"])
def test_bfloat16_parts_of_a_sum_beside_an_automatic_axis(problem, mesh):
    """XLA aborted the process on CPUs, where it sums bfloat16 in float32: the program asks for that itself.  On GPUs bfloat16 is sent."""
    x, w = problem.operands("fprop")
    x, w = x.clip(0, 1).astype(jnp.bfloat16), w.astype(jnp.bfloat16)  # sums up to 256 are exact
    step = lambda w, x: jax.grad(lambda w: jnp.sum(problem.call(OURS, x, w).astype(jnp.float32)))(w)
    want = jax.jit(step)(w, x)
    with jax.set_mesh(mesh):
        traced = jax.jit(step).trace(place(w, P(), mesh), place(x, P("data"), mesh))
        lowered = traced.lower()
        assert summed_in(lowered) == {"f32"}  # or it aborts now
        same(lowered.compile()(place(w, P(), mesh), place(x, P("data"), mesh)), want)
        with jaxext.use_implementation("xla"):
            assert summed_in(traced.lower(lowering_platforms=("cuda",))) == {"bf16"}


def test_shard_map_on_an_explicit_mesh():
    """The types inside have no shardings any more, or only those of the other axes."""
    x, w = DEPTHWISE.operands("fprop")
    grad = jax.grad(lambda w, x: jnp.sum(DEPTHWISE.call(OURS, x, w) ** 2))
    want = jax.jit(grad)(w, x)
    with jax.set_mesh(EXPLICIT):
        w, x = place(w, P(), EXPLICIT), place(x, P("data"), EXPLICIT)
        same(jax.jit(jax.shard_map(grad, in_specs=(P(), P("data")), out_specs=P()))(w, x), want)
        same(jax.jit(jax.shard_map(grad, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}))(w, x), want)


def test_eager_and_batched_matmul():
    """The product runs without jit and broadcasts as `jnp.matmul` does."""
    a, b = integers((8, 4, 16)), integers((16, 8), 1)
    with jax.set_mesh(EXPLICIT):
        got = jaxext.matmul(place(a, P("data"), EXPLICIT), place(b, P(None, "model"), EXPLICIT))
        assert of(got) == P("data", None, "model")
    same(got, a @ b)


@pytest.mark.parametrize("problem", [GROUPED, BATCH_GROUPS], ids=str)
def test_out_sharding_of_groups(problem):
    """lax's axis of channels is two of ours: it is split at the end, as it was asked."""
    x, w = problem.operands("fprop")
    out = P("data", None, None, "model")
    with jax.set_mesh(EXPLICIT):
        args = place(x, P("data"), EXPLICIT), place(w, P(), EXPLICIT)
        if problem is BATCH_GROUPS:
            args = place(x, P(), EXPLICIT), args[1]
        f = functools.partial(problem.call, OURS, out_sharding=out)
        got = jax.jit(f)(*args)
        assert of(got) == out
        gradients = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))(*args)
        assert [of(g) for g in gradients] == [of(a) for a in args]
    same(got, truth(problem, "fprop", x, w))
    same(gradients, jax.jit(jax.grad(lambda x, w: jnp.sum(problem.call(OURS, x, w) ** 2), (0, 1)))(x, w))


def test_out_sharding_of_groups_that_devices_divide_moves_nothing():
    args = [place(x, out := P(None, None, None, "model"), EXPLICIT) for x in DEPTHWISE.operands("fprop")]
    with jax.set_mesh(EXPLICIT):
        compiled = jax.jit(functools.partial(DEPTHWISE.call, OURS, out_sharding=out)).lower(*args).compile()
    assert collectives(compiled) == {}


def test_gradient_of_an_operand_on_no_mesh():
    """An operand that was made before the mesh was set has no sharding of its own: its gradient is replicated, as jnp's is."""
    w = jnp.ones((8, 4), jnp.float32)
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(integers((16, 8)), P("data"))
        got, want = (jax.jit(jax.grad(lambda w, x, f=f: jnp.sum(f(x, w) ** 2)))(w, x) for f in (jaxext.matmul, jnp.matmul))
    same(got, want)
    assert jax.typeof(got).sharding.spec == jax.typeof(want).sharding.spec


def test_gradient_of_a_bias_gathers_no_rows():
    """It is a sum over them."""
    x, w, bias = integers((16, 8)), integers((8, 4), 1), integers((4,), 2)
    with jax.set_mesh(EXPLICIT):
        gradient = jax.jit(jax.grad(lambda bias, x, w: jnp.sum(jaxext.linear(x, w, bias, activation="silu")), 0))
        args = place(bias, P(), EXPLICIT), place(x, P("data"), EXPLICIT), place(w, P(), EXPLICIT)
        assert collectives(gradient.lower(*args).compile()) == {"all-reduce": 1}
        got = gradient(*args)
        each = jax.vmap(jax.grad(lambda bias, x: jnp.sum(jaxext.linear(x, w, bias, activation="silu"))), (None, 0))
        rows = jax.jit(each)(bias, args[1])  # the bias is on no mesh
    want = gradient(bias, x, w)
    close((got, rows.sum(0)), (want, want), 1e-6)


SCALED = lambda *args: jaxext.scaled_dot(*args[:2], lhs_scale=args[2], rhs_scale=args[3], preferred_element_type=jnp.float32)
SCALED_SHAPES = (4, 2, 8), (4, 8, 2), (4, 2, 2), (4, 2, 2)
RAGGED_SCALED = lambda x, w, s, t: jaxext.ragged_scaled_dot(x, w, np.array([3, 0, 4], np.int32), lhs_scale=s, rhs_scale=t)
RAGGED_SCALED_SHAPES = (8, 4), (3, 4, 4), (8, 2), (3, 4, 2)


@pytest.mark.parametrize(
    ("fn", "shapes", "specs"),
    [
        (SCALED, SCALED_SHAPES, (P(), P(), P(), P("data"))),
        (SCALED, SCALED_SHAPES, (None, P(), P("data"), None)),
        (RAGGED_SCALED, RAGGED_SCALED_SHAPES, (None, None, None, P(None, None, "model"))),
    ],
)
def test_second_derivatives_with_operands_on_no_mesh(fn, shapes, specs):
    """An operand had two cotangents of other types: whole, and split like the operand that alone is split."""
    args = [integers(shape, k) for k, shape in enumerate(shapes)]
    every = tuple(range(len(args)))
    gradients = jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), every)
    forward = jax.jit(lambda *args: jax.jvp(gradients, args, args)[1])
    reverse = jax.jit(jax.grad(lambda *args: sum(jnp.sum(g**2) for g in gradients(*args)), every))
    with jax.set_mesh(EXPLICIT):
        placed = [x if spec is None else place(x, spec, EXPLICIT) for x, spec in zip(args, specs, strict=True)]
        got = forward(*placed), reverse(*placed)
    close(got, (forward(*args), reverse(*args)), 1e-5)


def test_operands_on_no_mesh():
    """Parts under automatic axes are programs of one device, whatever mesh is set where they are compiled."""
    x, w, bias = (jnp.asarray(integers(shape, k)) for k, shape in enumerate([(8, 8), (8, 8), (8,)]))
    fun = jax.jit(jax.value_and_grad(lambda bias: jnp.sum(jaxext.linear(x, w, bias, activation="silu"))))
    with jax.set_mesh(EXPLICIT):
        got = fun(bias)
    close(got, fun(bias), 1e-6)


@pytest.mark.parametrize("mesh", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
def test_products_of_empty_arrays_alone(mesh):
    """XLA does not compile a shard_map whose operands are all empty."""
    x, w, scale = np.ones((3, 4), np.float32), np.ones((4, 0), np.float32), np.ones((3, 1), np.float32)
    with jax.set_mesh(mesh):
        left, right = reshard(x[:, :0], P()), reshard(x[:0], P(None, "data"))
        y = jax.jit(jaxext.matmul)(left, right)
        np.testing.assert_array_equal(y, np.zeros((3, 4)))
        gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(jaxext.scaled_dot(args[0], args[1], lhs_scale=args[2]))), (0, 1, 2))
        got = jax.jit(gradients)(reshard(x, P(None, "data")), w, scale)
    assert mesh is MIXED or of(y) == of(got[0]) == P(None, "data")  # on a mixed mesh XLA decides how zeros are split, lax's too
    for one, other in zip(got, (x, w, scale), strict=True):
        np.testing.assert_array_equal(one if one.size else np.zeros(one.shape), np.zeros_like(other))
