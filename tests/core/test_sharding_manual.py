"""shard_map, with and without tracking of varying axes, pmap, and shard_maps over some axes of the mesh only."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import CONV1D, CONV2D, DEPTHWISE, DOT, DOT_BATCHED, GROUPED, NHWC, OURS, ROLES, conv, integers, same, truth
from collectives import collectives
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import MESH, place, spec

checked = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


@pytest.mark.parametrize(
    ("problem", "labels", "check_vma"), [(CONV2D, "NCK", True), (DOT_BATCHED, "BCK", False), (GROUPED, "N", True)], ids=str
)
def test_every_role_with_every_label_split(problem, labels, check_vma):
    """The local product, around which nothing is: no collective but the psum written here, none hidden in a reference's transpose."""
    for role, label in itertools.product(ROLES, labels):
        slots = problem.slots(role)
        specs = [spec(problem, slot, {label: "data"}) for slot in slots]
        contracted = label not in problem.labels(slots[2])
        shape = {
            slot: tuple(n // 4 if axis == label else n for axis, n in zip(problem.labels(slot), getattr(problem, slot), strict=True))
            for slot in "xw"
        }

        def part(a, b, role=role, contracted=contracted, shape=shape):
            vary = lambda v: v + 0 * lax.axis_index("data").astype(v.dtype)
            a, b = vary(a), vary(b)
            if role == "fprop":
                c = problem.call(OURS, a, b)
            elif role == "dgrad":
                c = jax.vjp(lambda x: problem.call(OURS, x, b), vary(jnp.zeros(shape["x"], a.dtype)))[1](a)[0]
            else:
                c = jax.vjp(lambda w: problem.call(OURS, a, w), vary(jnp.zeros(shape["w"], a.dtype)))[1](b)[0]
            return lax.psum(c, "data") if contracted else c

        f = jax.shard_map(part, mesh=MESH, in_specs=tuple(specs[:2]), out_specs=specs[2], check_vma=check_vma)
        a, b = problem.operands(role)
        placed = place(a, specs[0]), place(b, specs[1])
        compiled = jax.jit(f).lower(*placed).compile()
        same(compiled(*placed), truth(problem, role, a, b))
        assert collectives(compiled) == ({"all-reduce": 1} if contracted else {})


def total(problem, w, x):
    return jnp.sum(problem.call(OURS, x, w) ** 2)


@checked
def test_gradient_of_a_replicated_filter(check_vma):
    """The forward is right without the varying axes in the types, but this gradient is silently wrong: the parts are not added."""
    problem = CONV1D
    x, w = problem.operands("fprop")
    want = jax.jit(jax.grad(functools.partial(total, problem), (0, 1)))(w, x)
    split = functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), check_vma=check_vma)

    def inside(w, x):
        """grad inside: the transpose of what replicates the filter adds the parts where it is known that it was replicated."""
        dw, dx = jax.grad(functools.partial(total, problem), (0, 1))(w, x)
        return (dw if check_vma else lax.psum(dw, "data")), dx

    def across(w, x):
        """grad outside, through shard_map and a psum."""
        return lax.psum(total(problem, w, x), "data")

    same(jax.jit(split(inside, out_specs=(P(), P("data"))))(w, x), want)
    same(jax.jit(jax.grad(split(across, out_specs=P()), (0, 1)))(w, x), want)


@checked
def test_second_derivatives_and_vmap_inside(check_vma):
    x, w = DEPTHWISE.operands("fprop", 2)
    dw = integers(w.shape, 5)
    hvp = jax.vmap(lambda w, x, dw: jax.jvp(jax.grad(functools.partial(total, DEPTHWISE)), (w, x), (dw, x))[1])

    def part(w, x, dw):
        return hvp(w, x, dw) if check_vma else lax.psum(hvp(w, x, dw), "data")

    f = jax.shard_map(part, mesh=MESH, in_specs=(P(), P(None, "data"), P()), out_specs=P(), check_vma=check_vma)
    same(jax.jit(f)(w, x, dw), jax.jit(hvp)(w, x, dw))


def test_types_vary_over_the_axes_of_either_operand():
    """A replicated and a varying operand, in both places, and two that vary over different axes."""
    x, w = CONV2D.operands("fprop")
    varying = {}

    def f(x, w):
        xs = {"none": x, "data": lax.pcast(x, "data", to="varying"), "model": lax.pcast(x, "model", to="varying")}
        for a, xa in xs.items():
            for b in xs:
                wb = w if b == "none" else lax.pcast(w, b, to="varying")
                y = CONV2D.role("fprop")(xa, wb)
                varying[a, b] = set(jax.typeof(y).vma) if hasattr(jax.typeof(y), "vma") else set(jax.typeof(y).manual_axis_type.varying)
        return x

    jax.jit(jax.shard_map(f, mesh=MESH, in_specs=(P(), P()), out_specs=P())).trace(x, w)
    assert len(varying) == 9
    for (a, b), axes in varying.items():
        assert axes == {a, b} - {"none"}


@pytest.mark.parametrize("problem", [DOT, GROUPED], ids=str)
def test_pmap(problem):
    """A batch per device, filters replicated or one each; gradients with a psum."""
    x, w = problem.operands("fprop")
    x = x.reshape(8, 1, *x.shape[1:])

    def step(w, x):
        value, gradient = jax.value_and_grad(functools.partial(total, problem))(w, x)
        return lax.psum(value, "i"), lax.psum(gradient, "i"), problem.call(OURS, x, w)

    value, gradient, y = jax.pmap(step, axis_name="i", in_axes=(None, 0))(w, x)
    flat = x.reshape(problem.x)
    want = jax.jit(jax.value_and_grad(functools.partial(total, problem)))(w, flat)
    same((value[0], gradient[0]), want)
    same(np.asarray(y).reshape(problem.y), truth(problem, "fprop", flat, w))
    each = jax.pmap(problem.role("fprop"))(x, np.stack([w] * 8))
    same(np.asarray(each), np.asarray(y))


def test_shard_map_over_one_axis_with_the_other_automatic():
    """The batch is split by hand over one axis; over the other XLA splits channels.  custom_partitioning aborts the process here."""
    x, w = CONV2D.operands("fprop")
    want = jax.jit(jax.value_and_grad(functools.partial(total, CONV2D), (0, 1)))(w, x)

    def step(w, x):
        value, (dw, dx) = jax.value_and_grad(functools.partial(total, CONV2D), (0, 1))(w, x)
        return CONV2D.call(OURS, x, w), lax.psum(value, "data"), dw, dx

    out_specs = P("data"), P(), P(), P("data")
    f = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=out_specs, axis_names={"data"}))
    got = f(place(w, spec(CONV2D, "w", {"K": "model"})), place(x, P("data")))
    same(got, (truth(CONV2D, "fprop", x, w), want[0], *want[1]))


def test_nested_partial_shard_maps():
    """One axis in each of two shard_maps: inside both nothing is left to the partitioner."""
    x, w = DEPTHWISE.operands("fprop")
    gradient = jax.grad(functools.partial(total, DEPTHWISE))

    def split(w, x):
        return jax.shard_map(gradient, in_specs=(P(), P("model")), out_specs=P(), axis_names={"model"})(w, x)

    got = jax.jit(jax.shard_map(split, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}))(w, x)
    same(got, jax.jit(gradient)(w, x))


def test_groups_split_by_hand():
    """Channels of a grouped convolution over "model": each device has its own groups, as many fewer."""
    x, w = integers((4, 5, 6, 16)), integers((3, 3, 2, 32), 1)
    whole = functools.partial(conv((1, 1), "SAME", NHWC, feature_group_count=8), OURS)
    half = functools.partial(conv((1, 1), "SAME", NHWC, feature_group_count=4), OURS)
    last = P(None, None, None, "model")
    f = jax.shard_map(half, mesh=MESH, in_specs=(last, last), out_specs=last)
    same(jax.jit(f)(x, w), np.asarray(jax.jit(whole)(x, w)))
    loss = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))
    same(loss(f)(x, w), loss(whole)(x, w))
    assert collectives(jax.jit(f).lower(place(x, last), place(w, last)).compile()) == {}


def test_vmap_of_shard_map_with_an_axis_name():
    """`spmd_axis_name`: the mapped axis is split by a mesh axis that the shard_map inside does not name."""
    x, w = CONV2D.operands("fprop", 4)
    f = jax.shard_map(CONV2D.role("fprop"), mesh=MESH, in_specs=(P("model"), P()), out_specs=P("model"))
    got = jax.jit(jax.vmap(f, spmd_axis_name="data"))(x, w)
    same(got, np.stack([truth(CONV2D, "fprop", *xw) for xw in zip(x, w, strict=True)]))
    assert got.sharding.is_equivalent_to(NamedSharding(MESH, P("data", "model")), got.ndim)


@pytest.mark.parametrize("problem", [CONV2D, GROUPED], ids=str)
def test_two_automatic_axes_beside_a_manual_one(problem):
    """The filter gradient of lax, of groups and of filters that vmap made into groups, is multiplied by the size of the idle axis here: XLA
    must never be given a grouped convolution to partition.
    """
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "idle"), axis_types=(AxisType.Auto,) * 3)
    gradient = jax.grad(functools.partial(total, problem))
    x, w = problem.operands("fprop")
    batch = P("data")
    if problem is CONV2D:  # more filters than are worth a convolution each, and small ones
        x, w = (np.stack([v] * 20) for v in (x[..., :2], w[..., :2, :2]))
        gradient, batch = jax.vmap(gradient), P(None, "data")
    f = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), batch), out_specs=P(), axis_names={"data"}))
    placed = place(x, P(*batch[:-1], ("data", "model")), mesh)
    same(f(w, placed), jax.jit(gradient)(w, x))
    assert set(re.findall(r"(?:feature|batch)_group_count = (\d+)", f.lower(w, placed).as_text())) <= {"1"}


def test_space_split_over_an_automatic_axis_beside_an_idle_one():
    """The filter gradient of lax is multiplied by the size of the idle axis here, of dense convolutions too."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "idle"), axis_types=(AxisType.Auto,) * 3)
    x, w = integers((4, 8, 8, 3)), integers((3, 3, 3, 4), 1)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(conv((1, 1), "SAME", NHWC)(OURS, x, w) ** 2)))
    f = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}))
    same(f(w, place(x, P("data", "model"), mesh)), gradient(w, x))
    exported = jax.export.export(gradient)(w, x)
    same(jax.jit(exported.call)(w, place(x, P(None, "model"), mesh)), gradient(w, x))
