"""Experts split over devices are what they are on one device: under every transformation, whatever the sizes, by blocks and by rows.

Truth is the same experts on one device with all weights.  CPUs have no ragged all-to-all: a stand-in of an all-gather plays it.
"""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import operations

import jaxext
from jaxext.parallel import by_platform, expert_parallel

M, K, E = 12, 6, 8  # rows of each device, columns, experts


def mesh_of(n, axis="x"):
    return jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Compute lax's function by an all-gather, with its rule that both sides agree on the sizes."""
    if len(operand) == 0:
        return output
    me, n = lax.axis_index(axis_name), lax.axis_size(axis_name)
    rows, begin, count, to = (lax.all_gather(each, axis_name) for each in (operand, input_offsets, send_sizes, output_offsets))
    row = jnp.arange(len(output), dtype=jnp.int32)
    for device in range(n):
        within = row - to[device, me]
        here = (within >= 0) & (within < jnp.minimum(count[device, me], recv_sizes[device]))
        moved = jnp.take(rows[device], jnp.where(here, begin[device, me] + within, 0), axis=0)
        output = jnp.where(here.reshape(-1, *(1,) * (output.ndim - 1)), moved, output)
    return output


@pytest.fixture(params=["blocks", "rows"])
def how(request, monkeypatch):
    """Run this CPU's own program, or that of the other platforms."""
    if request.param == "rows":
        mlir.register_lowering(by_platform.by_platform, by_platform.lowered_elsewhere, platform="cpu")
        monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    jax.clear_caches()
    yield request.param
    mlir.register_lowering(by_platform.by_platform, by_platform.lowered_on_cpus, platform="cpu")
    jax.clear_caches()


def experts(x, weights, sizes):
    """Two products and an activation."""
    hidden = jnp.tanh(jaxext.ragged_dot(x, weights["up"], sizes))
    return jaxext.ragged_dot(hidden, weights["down"], sizes)


def some(n, sizes, seed=0, dtype: type = np.float64):
    """Rows of all devices, weights, and sizes [device, expert]; rows of no expert are NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, M, K)).astype(dtype)
    for rows, count in zip(x, np.minimum(np.sum(sizes, 1), M), strict=True):
        rows[count:] = np.nan
    weights = {"up": rng.standard_normal((E, K, 5)).astype(dtype), "down": rng.standard_normal((E, 5, K)).astype(dtype)}
    return x, weights, np.array(sizes, np.int32)


def split(n, of=experts, **how):
    """Split `expert_parallel` over n devices: rows [device, M, K], all weights, and sizes [device, expert]."""

    def local(x, weights, sizes):
        return expert_parallel(of, x[0], weights, sizes[0], axis_name="x", **how)[None]

    return jax.shard_map(local, mesh=mesh_of(n), in_specs=P("x"), out_specs=P("x"))


whole = jax.vmap(experts, (0, None, 0))


def random_sizes(n, seed):
    """Zeros among them, and sums below M and beyond."""
    return np.random.default_rng(seed).integers(0, 5, (n, E)) * np.random.default_rng(seed + 99).integers(0, 2, (n, E))


SIZES = {
    "all to one expert": [[0, 0, 0, 0, 0, 12, 0, 0]] * 4,
    "each device to another": np.roll(np.eye(4, dtype=int), 1, 1).repeat(2, 1) * 5,
    "nothing": [[0] * 8] * 4,
    "one device has all": [[2] * 6 + [0, 0]] + [[0] * 8] * 3,
    "more than there are": [[9] * 8] * 4,
    "random": random_sizes(4, 0),
}


def close(got, want, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def values_and_gradients(f):
    return jax.jit(lambda x, w, s: (f(x, w, s), jax.grad(lambda x, w: jnp.sum(f(x, w, s) ** 2), (0, 1))(x, w)))


@pytest.mark.parametrize("n", [1, 4])
def test_values_and_gradients(how, n):
    """NaN in rows of no expert reaches nothing.  One program runs with all sizes."""
    ours, definition = values_and_gradients(split(n)), values_and_gradients(whole)
    for sizes in SIZES.values():
        args = some(n, sizes[:n])
        got, want = ours(*args), definition(*args)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want))
        close(got, want)


def test_derivatives_of_derivatives(how):
    """A tangent of the gradients; one product is enough, for the loss is a cube."""
    x, weights, sizes = some(2, random_sizes(2, 5))
    x, w = np.nan_to_num(x), weights["up"]

    def along(f):
        gradient = jax.grad(lambda x, w: jnp.sum(f(x, w, sizes) ** 3), (0, 1))
        return jax.jit(lambda *args: jax.jvp(gradient, *args))((x, w), (x[..., ::-1], w[::-1]))

    close(along(split(2, of=jaxext.ragged_dot)), along(jax.vmap(jaxext.ragged_dot, (0, None, 0))), 1e-9)


def test_vmap_outside():
    x, weights, _ = some(2, random_sizes(2, 7))
    xs, sizes = np.stack([np.nan_to_num(x), np.nan_to_num(x)[:, ::-1]]), np.stack([random_sizes(2, 8), random_sizes(2, 9)]).astype(np.int32)
    close(jax.jit(jax.vmap(split(2), (0, None, 0)))(xs, weights, sizes), jax.vmap(whole, (0, None, 0))(xs, weights, sizes))


def test_pmap():
    x, weights, sizes = some(4, random_sizes(4, 11))
    parts = jax.tree.map(lambda w: w.reshape(4, E // 4, *w.shape[1:]), weights)
    close(jax.pmap(lambda x, w, s: expert_parallel(experts, x, w, s, axis_name="x"), "x")(x, parts, sizes), whole(x, weights, sizes))


def test_sizes_that_all_devices_share():
    """They do not vary over the axis; nor need the rows."""
    x, weights, sizes = some(4, [[1, 2, 0, 3, 1, 0, 2, 1]] * 4)
    f = lambda x, w, s: expert_parallel(experts, x[0], w, s, axis_name="x")[None]
    shared = jax.shard_map(f, mesh=mesh_of(4), in_specs=(P(), P("x"), P()), out_specs=P("x"))
    close(jax.jit(shared)(x, weights, sizes[0]), np.stack([whole(x, weights, sizes)[0]] * 4))


def kept(sizes, devices, capacity):
    """Return which rows of a device are sent, by a loop over them."""
    rows, room = [], [capacity] * devices
    for expert in np.repeat(np.arange(E), sizes)[:M]:
        device = expert // (E // devices)
        rows.append(room[device] > 0)
        room[device] -= 1
    return np.array(rows + [False] * (M - len(rows)))


@pytest.mark.parametrize("how", ["rows"], indirect=True)
@pytest.mark.parametrize("capacity", [0, 3])
def test_rows_beyond_the_capacity_are_dropped(capacity, how):
    """Their results and gradients are zero, and those of others are what they were."""
    sizes = random_sizes(4, 3)
    x, weights, _ = some(4, sizes)
    mask = np.stack([kept(row, 4, capacity) for row in sizes])[..., None]
    assert mask.any() == (capacity > 0) and not mask[~np.isnan(x[..., :1])].all()
    masked = lambda *args: jnp.where(mask, whole(*args), 0)
    run = lambda f: values_and_gradients(f)(x, weights, sizes)
    close(run(split(4, capacity=capacity)), run(masked))


@pytest.mark.parametrize("how", ["rows"], indirect=True)
def test_other_shapes_and_dtypes(how):
    """Rows have several axes and 16 bits, and the result is wider."""
    x, weights, sizes = some(2, random_sizes(2, 4), dtype=np.float32)
    x = np.nan_to_num(x).astype(jnp.bfloat16).reshape(2, M, 2, 3)

    def wider(x, weights, sizes):
        return jaxext.ragged_dot(x.reshape(-1, K), weights.astype(x.dtype), sizes, preferred_element_type=jnp.float32).reshape(-1, 5, 1)

    f = lambda x, w, s: expert_parallel(wider, x[0], w, s[0], axis_name="x")[None]
    got = jax.jit(jax.shard_map(f, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x")))(x, weights["up"], sizes)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, jax.vmap(wider, (0, None, 0))(x, weights["up"], sizes))


def test_what_is_sent():
    """Rows go and come back once, and their sizes go; in the backward pass cotangents do."""
    x, weights, sizes = some(4, random_sizes(4, 2))
    compiled = lambda f: jax.jit(f).lower(x, weights, sizes).compile()
    forward = collectives(compiled(split(4)))
    gradient = collectives(compiled(jax.grad(lambda *args: jnp.sum(split(4)(*args) ** 2), (0, 1))))
    assert forward == {"all-to-all": 3}
    assert gradient == {"all-to-all": 5}


def test_few_rows_are_sent_under_a_capacity():
    """A block is as long as the capacity."""
    x, weights, sizes = some(4, random_sizes(4, 2))
    sent = [
        op.operands[0].type.shape
        for op in operations(jax.jit(split(4, capacity=2)).lower(x, weights, sizes))
        if op.name == "stablehlo.all_to_all"
    ]
    assert [shape for shape in sent if len(shape) == 3] == [[4, 2, K], [4, 2, K]]


def test_rows_alone_are_sent_elsewhere():
    """The rows go by lax's own ragged all-to-all, forward and backward, which no CPU runs."""
    x, weights, sizes = some(4, random_sizes(4, 2))
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(split(4)(*args) ** 2), (0, 1)))
    lowered = gradient.trace(x, weights, sizes).lower(lowering_platforms=("cuda",))
    called = [str(op.attributes["call_target_name"]) for op in operations(lowered) if op.name == "stablehlo.custom_call"]
    assert sum("ragged_all_to_all" in name for name in called) == 4
    assert not any("4x12x6" in str(op.operands[0].type) for op in operations(lowered) if op.name == "stablehlo.all_to_all")


def inside(call, n=4):
    """Traces a call within the axis."""
    return jax.eval_shape(jax.shard_map(lambda: call() * 0.0, mesh=mesh_of(n), in_specs=(), out_specs=P("x")))


X, W, S = jnp.ones((M, K)), jnp.ones((2, K, 3)), jnp.ones(E, jnp.int32)
product = lambda x, w, sizes: jaxext.ragged_dot(x, w, sizes)
WRONG = {
    "no function": (dict(experts=3), TypeError, "experts is 3, want a function"),
    "no result": (dict(experts=lambda x, w, s: None), TypeError, "experts returned None, want an array of 48 rows"),
    "two results": (dict(experts=lambda x, w, s: (x, x)), TypeError, r"experts returned \(.*\), want an array of 48 rows"),
    "no x": (dict(x=None), TypeError, "x is None, want an array"),
    "sizes of text": (dict(group_sizes="1"), TypeError, "group_sizes is '1', want an array"),
    "a number for an axis": (dict(axis_name=0), TypeError, "axis_name is 0, want a name"),
    "no rows": (dict(x=jnp.float32(1)), TypeError, r"x has the shape \(\), want \(M"),
    "sizes of two axes": (dict(group_sizes=S[None]), TypeError, r"group_sizes is int32\[1, 8\], want one axis of integers"),
    "real sizes": (dict(group_sizes=S.astype(jnp.float32)), TypeError, r"group_sizes is float\d+\[8\], want one axis of integers"),
    "too few experts": (dict(group_sizes=S[:6]), ValueError, "group_sizes has 6 experts, want a multiple of the 4 devices"),
    "no experts": (dict(group_sizes=S[:0]), ValueError, "group_sizes has 0 experts, want a multiple of the 4 devices"),
    "weights of another number": (
        dict(w={"a": W[:1]}),
        ValueError,
        "has 1 experts, want 2 of 8 experts on 4 devices",
    ),
    "a number in the weights": (dict(w=[1.0]), TypeError, r"w\[0\] has shape \(\), want an axis of experts"),
    "a negative capacity": (dict(capacity=-1), ValueError, "capacity is -1, want 0 or more"),
    "half a row": (dict(capacity=2.5), TypeError, "capacity is 2.5, want an int or None"),
    "another axis": (dict(axis_name="z"), NameError, "axis_name is 'z', want an axis of a shard_map or pmap around the call"),
    "a list": (dict(axis_name=["x"]), TypeError, r"axis_name is \['x'\], want a name or a tuple of names"),
    "other rows": (
        dict(experts=lambda x, *_: x[1:]),
        ValueError,
        r"experts returned the shape \(47, 6\), want 48 rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    change, error, said = WRONG[name]
    arguments = dict(experts=product, x=X, w=W, group_sizes=S, axis_name="x") | change
    with pytest.raises(error, match=f"^expert_parallel: .*{said}"):
        inside(lambda: expert_parallel(**arguments))


def test_the_example_of_the_docstring():
    names = dict(jax=jax, jnp=jnp, expert_parallel=expert_parallel, ragged_dot=jaxext.ragged_dot)
    test = doctest.DocTestParser().get_doctest(expert_parallel.__doc__ or "", names, "expert_parallel", None, 0)
    with jax.enable_x64(False):
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_the_stand_in_is_as_lax_says():
    """The example of lax.ragged_all_to_all's docstring."""
    operand = np.array([[1, 2, 2], [3, 4, 0]], np.int32)
    output = np.zeros((2, 4), np.int32)
    places = [np.array(each, np.int32) for each in ([[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]])]
    mapped = jax.vmap(functools.partial(ragged_all_to_all, axis_name="x"), axis_name="x")
    np.testing.assert_array_equal(mapped(operand, output, *places), [[1, 3, 0, 0], [2, 2, 4, 0]])
