"""Ragged products of gathered rows: a loop over groups in float64 is the truth, for every role, transformation and split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations, random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.core.static import Static
from jaxext.ops.ragged_gather import ragged_gather_linear
from jaxext.ops.ragged_gather.form import RAGGED_GATHER

S, M, G, K, N = 8, 16, 4, 4, 8
SIZES = np.array([5, 0, 7, 2], np.int32)  # of 14 places
# The row of each place.  Row 2 has no place, row 7 only one of no group, row 0 three; four numbers are of no row.
ROW = np.array([0, 3, S, 1, 5, 0, -1, 6, 4, 2**31 - 1, 6, 0, 1, -(2**31), 7, 5], np.int32)
FUNCTIONS: dict[Any, Any] = {None: lambda z: z, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid, jnp.cos: jnp.cos}


def places(row, rows=S, most=3) -> Any:
    """The places of each row, and for none their number or a larger one."""
    place = np.full((rows, most), len(row), np.int32)
    place[:, 1:] += 5
    for m, s in enumerate(row):
        if 0 <= s < rows:
            place[s, (place[s] < len(row)).sum()] = m
    return place


PLACE = places(ROW)


def operands(dtype: Any = np.float32, gated=False, integers=False, s=S, m=M, g=G, k=K, n=N) -> list[Any]:
    shapes = (s, k), (g, k, 2, n) if gated else (g, k, n), (m, n)
    return [random(shape, jnp.dtype(dtype), seed, integers) for seed, shape in enumerate(shapes)]


def plain(x, w, sizes, row, place=None, activation=None) -> jax.Array:
    """The definition in jnp; `place` follows from `row`."""
    end, at = jnp.cumsum(sizes, dtype=jnp.int32), jnp.arange(len(row), dtype=jnp.int32)
    there = (row >= 0) & (row < len(x))
    rows = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])[jnp.where(there, row, len(x))]
    y = jnp.zeros((len(row), w.shape[-1]), x.dtype)
    for g in range(len(w)):
        z = jnp.einsum("mk,k...->m...", rows, w[g])
        of = FUNCTIONS[activation](z) if w.ndim == 3 else FUNCTIONS[activation](z[:, 0]) * z[:, 1]
        y = jnp.where(((at >= end[g] - sizes[g]) & (at < end[g]))[:, None], of, y)
    return y


def both(function: Any, *args: Any, **static) -> tuple:
    """The result, and the gradients of both factors, of x, w, sizes, row, place and a cotangent."""
    x, w, sizes, row, place, ct = args
    y, pull = jax.vjp(lambda x, w: function(x, w, sizes, row, place, **static), x, w)
    return y, *pull(ct.astype(y.dtype))


def truth(*args: Any, **static) -> tuple:
    x, w, sizes, row, place, ct = args
    return both(plain, *(jnp.asarray(of, np.float64) for of in (x, w)), sizes, row, place, jnp.asarray(ct, np.float64), **static)


def close(got, want, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max(initial=0)), rtol=0)


def poisoned(x, ct) -> list[Any]:
    """NaN in rows that no place of a group has, and in cotangents of no group."""
    read = np.isin(np.arange(S), ROW[: SIZES.sum()])
    nan = lambda of, keep: np.where(keep[:, None], of, np.array(np.nan, of.dtype))
    return [nan(x, read), nan(ct, np.arange(M) < SIZES.sum())]


@pytest.mark.parametrize(
    ("activation", "gated", "dtype"),
    [(None, False, "float32"), ("sigmoid", True, "bfloat16"), (jnp.cos, False, "bfloat16")],
    ids=["none", "sigmoid", "function"],
)
def test_every_role(activation, gated, dtype):
    """Neither sigmoid nor a function that is one at zero makes anything of a place of no group, which a place of no row is not."""
    x, w, ct = operands(dtype, gated)
    hidden, hidden_ct = poisoned(x, ct)
    program = jax.jit(functools.partial(both, ragged_gather_linear, activation=activation))
    got, want = program(hidden, w, SIZES, ROW, PLACE, hidden_ct), truth(x, w, SIZES, ROW, PLACE, ct, activation=activation)
    assert {of.dtype for of in got} == {jnp.dtype(dtype)}
    close(got, want, 1e-5 if dtype == "float32" else 0.02)
    assert not got[0][SIZES.sum() :].any() and not got[1][jnp.array([2, 7])].any() and not got[2][1].any()


def test_sizes():
    """Groups that are empty, all in one, none, and more rows than there are places."""
    x, w, ct = operands(integers=True)
    program = jax.jit(functools.partial(both, ragged_gather_linear))
    for sizes in ((0, 0, 16, 0), (0, 0, 0, 0), (9, 0, 9, 3), (4, 4, 4, 4)):
        sizes: Any = np.array(sizes, np.int32)
        kept = np.clip(np.diff(np.minimum(np.cumsum([0, *sizes]), M)), 0, None).astype(np.int32)
        close(program(x, w, sizes, ROW, PLACE, ct), truth(x, w, kept, ROW, PLACE, ct), 0)


@pytest.mark.parametrize("axis", "smgknj")
def test_empty_axes(axis):
    """No rows, places, groups, columns on either side, or places of a row."""
    sizes: dict[str, Any] = {axis: 0} if axis != "j" else {}
    x, w, ct = operands(**sizes)
    row = np.full(len(ct), -1, np.int32) if axis in "sj" else ROW[: len(ct)]
    place, groups = places(row, len(x), 0 if axis == "j" else 3), SIZES[: len(w)] if axis != "m" else 0 * SIZES
    ours = functools.partial(both, ragged_gather_linear)
    got, want = (jax.jit(functools.partial(of, activation="sigmoid"))(x, w, groups, row, place, ct) for of in (ours, truth))
    close(got, want)


def test_rows_of_16_bits_are_added_in_float32():
    """A row's gradient over three places: in bfloat16 256 + 1 is 256."""
    x, w, ct = np.ones((1, 1)), np.ones((1, 1, 1)), np.array([[256], [1], [1]])
    row, place = np.zeros(3, np.int32), np.arange(3, dtype=np.int32)[None]
    bf16 = [jnp.asarray(of, jnp.bfloat16) for of in (x, w, ct)]
    assert both(ragged_gather_linear, *bf16[:2], np.array([3], np.int32), row, place, bf16[2])[1].item() == 258


# --- transformations


@pytest.mark.parametrize(("mapped", "gated"), [("row-place", False), ("x-row-place-sizes", False), ("x-w-row-place-sizes", True)])
def test_vmap(mapped, gated):
    """Three of each mapped operand, along the last axis.  No factor that is not mapped is copied, but for x if the rows are others."""
    x, w, ct = operands(gated=gated)
    rolled = [np.roll(ROW, i) for i in range(3)]
    of_each = dict(
        x=[x, -x, x[::-1]], w=[w, 2 * w, w[::-1]], sizes=[SIZES, SIZES[::-1], np.roll(SIZES, 1)], row=rolled, place=[*map(places, rolled)]
    )
    args = [np.stack(of_each[name], -1) if name in mapped.split("-") else of_each[name][0] for name in of_each]
    axes = [-1 if name in mapped.split("-") else None for name in of_each]
    static = dict(activation="silu") if gated else {}
    over = jax.vmap(functools.partial(both, ragged_gather_linear, **static), (*axes, None))
    got = jax.jit(over)(*args, ct)
    for i in range(3):
        one = [a if axis is None else a[..., i] for a, axis in zip(args, axes, strict=True)]
        close([of[i] for of in got], truth(*one, ct, **static))


def test_derivatives_of_second_order():
    args = operands(np.float64, gated=True)[:2]

    def second(function):
        loss = lambda x, w: jnp.sin(function(x, w, SIZES, ROW, PLACE, activation="silu")).sum()
        return jax.jit(lambda *args: jax.jvp(jax.grad(loss, (0, 1)), args, args)[1])

    close(second(ragged_gather_linear)(*args), second(plain)(*args), 1e-12)


def test_export():
    """The numbers of rows and of places are symbols."""
    rows, count = jax.export.symbolic_shape("s, m")
    x, w, ct = operands(gated=True)
    shapes = ((rows, K), x.dtype), (w.shape, w.dtype), (SIZES.shape, SIZES.dtype), ((count,), ROW.dtype), ((rows, 3), PLACE.dtype)
    types = [jax.ShapeDtypeStruct(*of) for of in (*shapes, ((count, N), ct.dtype))]
    program = jax.jit(functools.partial(both, ragged_gather_linear, activation="silu"))
    exported = jax.export.export(program, platforms=("cpu", "cuda"))(*types)
    close(exported.call(x, w, SIZES, ROW, PLACE, ct), truth(x, w, SIZES, ROW, PLACE, ct, activation="silu"))


def test_policies_save_the_product():
    """Policies see lax's ragged product, which jax's own `dots_saveable` does not know."""
    x, w, _ = operands()
    loss = lambda x: jnp.sin(ragged_gather_linear(jnp.sin(x), w, SIZES, ROW, PLACE)).sum()
    ragged = jaxext.checkpoint_policies.seeing_products(lambda primitive, *_, **__: primitive.name == "ragged_dot_general")
    for policy, products in ((ragged, 1), (jaxext.checkpoint_policies.dots_saveable, 2)):
        names = [e.primitive.name for e in equations(jax.grad(jax.checkpoint(loss, policy=policy)), x)]
        assert names.count("ragged_gather_nn") == products and names.count("ragged_gather_nt") == 1


# --- several devices

# Of x, w and y, and how often the three roles gather rows, and sum over devices.
SPLITS: dict[str, Any] = {
    "rows": (P("x"), P(), P(), 1, 0),
    "places": (P(), P(), P("x"), 0, 1),
    "rows and places": (P("x"), P(), P("y"), 1, 1),
    "contraction": (P(None, "x"), P(None, "x"), P(), 0, 1),
}


@pytest.mark.parametrize(("name", "kind"), [(name, AxisType.Explicit if name == "places" else AxisType.Auto) for name in SPLITS], ids=str)
def test_devices(name, kind):
    """The three roles.  A device counts places from the first one that it has, and has all rows: types must not split them."""
    *specs, gathers, sums = SPLITS[name]
    x, w, ct = args = operands(integers=True)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [NamedSharding(mesh, spec) for spec in specs]

        def roles(*arrays):
            end = np.cumsum(SIZES, dtype=np.int32)
            of = dict(zip("xwy", arrays, strict=True)) | dict(begin=end - SIZES, end=end, row=ROW, place=PLACE)
            of = {name: jnp.asarray(each) for name, each in of.items()}
            static = Static(ranks=RAGGED_GATHER.pack(dict(B=0, P=0, R=0)), dtypes=(jnp.dtype("float32"),))
            out = {slot: NamedSharding(mesh.abstract_mesh, spec) for slot, spec in zip("xwy", specs, strict=True)}
            wanted = lambda open: out[open] if kind is AxisType.Explicit else None
            return tuple(RAGGED_GATHER.bind(open, of, static.replace(out_sharding=wanted(open))) for open in "yxw")

        order = placed[2], placed[0], placed[1]
        program = jax.jit(roles, out_shardings=order if kind is AxisType.Auto else None)
        arrays = [jax.device_put(of, each) for of, each in zip(args, placed, strict=True)]
        got = program(*arrays)
        found = collectives(program.lower(*arrays).compile())
        assert (found.pop("all-gather", 0), found.pop("all-reduce", 0), {**found}) == (gathers, sums, {})
    close(got, truth(x, w, SIZES, ROW, PLACE, ct), 0)
    for of, like in zip(got, order, strict=True):
        assert of.sharding.is_equivalent_to(like, of.ndim)


# Of x, w and y, which in a batch have one more axis in front.
FUSED_SPLITS: dict[str, Any] = {
    "rows, groups and places": (P("x"), P("y"), P("x")),
    "batch": (P("x"), P("x"), P("x")),
}


@pytest.mark.parametrize(("name", "kind"), [*zip(FUSED_SPLITS, (AxisType.Auto, AxisType.Explicit), strict=True)], ids=str)
def test_devices_with_an_epilogue(name, kind):
    """A sum over devices comes before the epilogue.  Places of no group, and those of no row, are as on one device."""
    (x, w, ct), at = operands(np.float64, gated=True), (SIZES, ROW, PLACE)
    if batch := name == "batch":
        x, w, ct = (np.stack([a, -2 * a]) for a in (x, w, ct))
        rows = np.stack([ROW, np.roll(ROW, 1)])
        at = np.stack([SIZES, SIZES[::-1]]), rows, np.stack([*map(places, rows)])

    def program(function):
        step = functools.partial(both, function, activation="sigmoid")
        return jax.vmap(step) if batch else step

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        one, other, last = (NamedSharding(mesh, spec) for spec in FUSED_SPLITS[name])
        put = lambda of, spec: jax.device_put(of, NamedSharding(mesh, spec))
        given = *(put(of, P("x") if batch else P()) for of in at), jax.device_put(ct, last)
        args = jax.device_put(x, one), jax.device_put(w, other), *given
        order = last, one, other
        got = jax.jit(program(ragged_gather_linear), out_shardings=order if kind is AxisType.Auto else None)(*args)
    close(got, jax.jit(program(plain))(x, w, *at, ct), 1e-12)
    for of, like in zip(got, order, strict=True):
        assert of.sharding.is_equivalent_to(like, of.ndim)


def test_shard_map():
    """Each device has some rows, and places and groups of its own."""
    x, w, ct = operands(integers=True)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    row = np.array([0, 2, 4, 1, 3, 3, 0, 2, -1, 1, 0, 0, 3, 4, 2, 1], np.int32)
    sizes, place = np.stack([SIZES, SIZES[::-1]]) // 2, np.concatenate([places(of, 4) for of in np.split(row, 2)])
    step = lambda x, w, sizes, row, place, ct: both(ragged_gather_linear, x, w, sizes[0], row, place, ct)
    split: Any = jax.shard_map(step, mesh=mesh, in_specs=(P("x"), P(), *[P("x")] * 4), out_specs=(P("x"), P("x"), P()))
    halves = zip(np.split(x, 2), sizes, np.split(row, 2), np.split(ct, 2), strict=True)
    y, dx, dw = zip(*(truth(x, w, sizes, row, None, ct) for x, sizes, row, ct in halves), strict=True)
    close(jax.jit(split)(x, w, sizes, row, place, ct), (np.concatenate(y), np.concatenate(dx), sum(dw)), 0)
