"""`doctor`: what it sees through, what it says, that it agrees with `explain`, and no false alarm on models of flax and equinox."""

import functools
import json
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import _compat
from jaxext._messages import PAGES
from jaxext.cli import command

pytestmark = pytest.mark.usefixtures("long_runs")  # what is small here stands for what is large


GRID = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
NHWC = ("NHWC", "HWIO", "NHWC")
DEPTHWISE, GROUPED = "depthwise convolution", "all-reduce over a replicated axis"


def struct(*shape, dtype: Any = np.float32, mesh=None, spec: Any = None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))


def depthwise(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=8)


X, W = struct(8, 16, 16, 8), struct(3, 3, 1, 8)
SPLIT = struct(8, 16, 16, 8, mesh=GRID, spec=P("data"))


def found(fun, *args, **how):
    return [(f.issue, f.where, f.times) for f in jaxext.doctor(fun, platform="cpu", **how)(*args).findings]


def scanned(x, w):
    return lax.scan(lambda y, _: (depthwise(y, w), None), x, length=3)[0]


def stacked(x, w):
    return lax.scan(lambda _, y: (None, depthwise(y, w)), None, jnp.stack([x] * 3))[1][0]


def looped(x, w):
    return lax.while_loop(lambda c: c[0, 0, 0, 0] < 3, lambda c: depthwise(c, w), x)


def branched(x, w):
    return lax.cond(x[0, 0, 0, 0] > 0, depthwise, lambda x, w: x, x, w)


@jax.custom_vjp
def custom(x, w):
    return depthwise(x, w)


custom.defvjp(lambda x, w: (depthwise(x, w), (x, w)), lambda saved, ct: jax.vjp(depthwise, *saved)[1](ct))


@jax.custom_jvp
def custom_forward(x, w):
    return depthwise(x, w)


custom_forward.defjvp(
    lambda primals, tangents: (depthwise(*primals), depthwise(tangents[0], primals[1]) + depthwise(primals[0], tangents[1]))
)

INSIDE = dict(
    jit=jax.jit(depthwise),
    scan=scanned,
    xs=stacked,
    loop=looped,
    cond=branched,
    remat=jax.checkpoint(depthwise),
    vjp=custom,
    jvp=custom_forward,
)


@pytest.mark.parametrize("name", INSIDE)
def test_it_sees_through(name):
    times = 3 if name in ("scan", "xs") else 1
    assert (DEPTHWISE, "forward", times) in found(INSIDE[name], X, W)


@pytest.mark.parametrize("name", sorted(INSIDE.keys() - {"loop"}))
def test_it_follows_the_mesh_through(name):
    def loss(w, x):
        y = INSIDE[name](jnp.tanh(x).transpose(0, 2, 1, 3).reshape(8, 256, 8).reshape(8, 16, 16, 8), w)
        return (y * 2).mean()

    hazards = {(hazard, where) for hazard, where, _ in found(loss, W, SPLIT)}
    assert (GROUPED, "backward") in hazards
    assert GROUPED not in {hazard for hazard, *_ in found(loss, W, X)}


def test_it_follows_constraints_and_shard_maps():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(w, x, spec):
        return (depthwise(lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), w) ** 2).mean()

    constrained = [found(functools.partial(loss, spec=spec), W, X) for spec in (P("data"), P(("data", "model")))]
    assert [GROUPED in {hazard for hazard, *_ in each} for each in constrained] == [True, False]

    def by_hand(w, x, names):
        local = jax.grad(lambda w, x: (depthwise(x, w) ** 2).mean())
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names=names)(w, x)

    # Where all axes are manual nobody partitions; where one is left, it splits nothing.
    assert GROUPED not in {hazard for hazard, *_ in found(functools.partial(by_hand, names={"data", "model"}), W, X)}
    beside = struct(8, 16, 16, 8, mesh=GRID, spec=P(("data", "model")))
    assert GROUPED not in {hazard for hazard, *_ in found(functools.partial(by_hand, names={"data"}), W, beside)}


def test_a_function_that_is_called_twice_is_split_twice():
    dense = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC))
    w = struct(3, 3, 8, 8, mesh=GRID, spec=P(None, None, None, "data"))
    rows, whole = (struct(8, 16, 16, 8, mesh=GRID, spec=spec) for spec in (P(None, "model"), P()))
    report = jaxext.doctor(lambda w, x, y: (dense(x, w), dense(y, w)), platform="cpu")(w, rows, whole)
    (finding,) = (each for each in report.findings if each.issue == GROUPED)
    assert finding.times == 1 and "f32[8,16@model,16,8]" in finding.operation and report.operations == 2


@pytest.fixture
def without_shardy():
    before = _compat.config.use_shardy_partitioner.value
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def test_the_report_says_that_xla_could_not_be_asked(without_shardy):
    report = jaxext.doctor(lambda w, x: (depthwise(x, w) ** 2).mean(), platform="cpu")(W, SPLIT)
    assert report.ok and report.devices.startswith("a mesh of data 4, model 2") and report.remarks[-1].startswith("XLA could not be asked")


def doubled_by_pallas(x, **how):
    return pl.pallas_call(lambda x, y: y.__setitem__(..., 2 * x[...]), jax.ShapeDtypeStruct(x.shape, x.dtype), **how)(x)


@pytest.mark.parametrize(
    "use",
    [
        doubled_by_pallas,
        lambda y: jax.ffi.ffi_call("of_a_user", jax.ShapeDtypeStruct(y.shape, y.dtype))(y),
        lambda y: jax.debug.callback(lambda y: None, y),
        lambda y: jax.debug.inspect_array_sharding(y, callback=print),
        lambda y: jaxext.linear(y, np.ones((8, 8), np.float32), implementation="triton"),
    ],
)
def test_what_xla_does_not_look_into(use):
    """It splits what is beside it as ever, also where the result of a convolution goes nowhere else, on every platform."""
    pointwise = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=2)
    x, w = struct(8, 8, 8, 8, mesh=GRID, spec=P("data", None, None, "model")), struct(1, 1, 4, 8)
    for platform in ("cpu", "cuda"):
        report = jaxext.doctor(lambda x, w: use(pointwise(x, w)), platform=platform)(x, w)
        assert "WRONG: pointwise groups split over devices" in str(report)


@pytest.mark.parametrize(
    ("same", "ok"),
    [
        (doubled_by_pallas, True),
        (functools.partial(doubled_by_pallas, interpret=True), False),
        (lambda x: jax.pure_callback(lambda x: x, x, x), True),
    ],
    ids=["kernel", "interpreted", "callback"],
)
def test_gradients_beside_what_xla_does_not_look_into(same, ok):
    """XLA has the results of kernels and callbacks whole, also of images that are split: filters behind them have right gradients."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w = struct(8, 4, 4, 8, mesh=mesh, spec=P("data")), struct(3, 3, 1, 8, mesh=mesh, spec=P())
    report = jaxext.doctor(lambda w, x: (depthwise(same(x), w) ** 2).mean(), platform="cpu", gradients=False)(w, x)
    assert report.ok
    images = jax.custom_vjp(same)
    images.defvjp(lambda x: (same(x), None), lambda _, ct: (ct,))
    for platform in ("cpu", "cuda"):
        assert jaxext.doctor(lambda w, x: (depthwise(images(x), w) ** 2).mean(), platform=platform)(w, x).ok == ok


def test_the_report_says_which_mesh_was_assumed():
    report = jaxext.doctor(lambda w, x: (depthwise(x, w) ** 2).mean(), platform="cpu")(W, SPLIT)
    assert report.devices == "a mesh of data 4, model 2 (1 of 2 arguments without a sharding, taken as replicated)"
    assert f" of lax on cpu, {report.devices}, forward and backward, jax " in str(report).partition("\n")[0]
    assert jaxext.doctor(depthwise, platform="cpu")(SPLIT, struct(3, 3, 1, 8, mesh=GRID, spec=P())).devices == "a mesh of data 4, model 2"
    assert jaxext.doctor(depthwise, platform="cpu")(X, W).devices == "one device"


def test_arrays_that_the_function_closes_over():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    images = jax.device_put(jnp.ones((8, 16, 16, 8), np.float32), NamedSharding(mesh, P("data")))
    assert GROUPED in {hazard for hazard, *_ in found(lambda w: (depthwise(images, w) ** 2).mean(), W)}
    assert GROUPED in {hazard for hazard, *_ in found(jax.jit(lambda w: (depthwise(images, w) ** 2).mean()), W)}


def test_what_lax_computes_wrongly_and_jaxext_refuses():
    """An explicit mesh that splits space: what is wrong is found even so."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        images = jax.device_put(jnp.ones((8, 16, 16, 8), np.float32), NamedSharding(mesh, P(None, "data")))
        report = jaxext.doctor(lambda w, x: (depthwise(x, w) ** 2).mean(), platform="cpu")(jnp.ones((3, 3, 1, 8), np.float32), images)
    assert not report.ok and "ShardingTypeError" in str(report.refusal) and "slow operations are not known" in str(report)


def test_products_of_a_pallas_kernel_are_not_of_xla():
    def kernel(x, y, z):
        z[...] = x[...] @ y[...]

    call = pl.pallas_call(kernel, out_shape=struct(8, 8), interpret=True)
    report = jaxext.doctor(call, platform="cuda")(struct(8, 8), struct(8, 8))
    assert report.findings == () and report.operations == 0


def test_explicit_meshes_say_in_types_how_devices_split():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    loss = lambda w, x: (depthwise(x, w) ** 2).mean()
    with jax.set_mesh(mesh):
        for spec, wrong in ((P("data"), True), (P(("data", "model")), False)):
            operands = jnp.ones((3, 3, 1, 8), np.float32), jax.device_put(jnp.ones((8, 16, 16, 8), np.float32), NamedSharding(mesh, spec))
            assert (GROUPED in {hazard for hazard, *_ in found(loss, *operands)}) == wrong


def test_operations_in_between():
    """Some have a jaxpr inside that is no part of the program's flow; others drop, add, cut or move axes."""
    ways = {
        "reduce": lambda x: lax.reduce(x[None], np.float32(0), lambda a, b: a + b, (0,)),
        "sum": lambda x: jnp.stack([x, x], 2).sum(2),
        "argmax": lambda x: x + jnp.argmax(x[..., None] * np.float32(2), -1).astype(np.float32),
        "scatter": lambda x: x.at[0].add(np.float32(1)),
        "sort": lambda x: jnp.sort(x, 1),
        "window": lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        "concatenate": lambda x: jnp.concatenate([x[:, :8], x[:, 8:]], 1),
        "precision": lambda x: lax.reduce_precision(x, 8, 10),
        "reverse": lambda x: x[:, ::-1],
        "dot": lambda x: jnp.einsum("bhwc,cd->bhwd", x, np.ones((8, 8), np.float32)),
        "einsum": lambda x: jnp.einsum("bhwc,bhwd->bhwd", x, x),
        "conv": lambda x: depthwise(x, np.ones((3, 3, 1, 8), np.float32)),
        "key": lambda x: x + jax.random.normal(jax.random.key(0), x.shape, x.dtype),
        "vmap": jax.vmap(lambda x: jnp.linalg.norm(x) * x),
        "solve": lambda x: x + lax.custom_linear_solve(lambda v: 2 * v, x, lambda matvec, b: b / 2, symmetric=True),
        "unknown": lambda x: jnp.fft.fft(x.astype(np.complex64)).real + x,
    }
    for name, way in ways.items():
        hazards = found(lambda w, x, way=way: (depthwise(way(x), w) ** 2).mean(), W, SPLIT)
        assert (GROUPED, "backward") in {(hazard, where) for hazard, where, _ in hazards}, name


def test_the_gradient_of_a_loss_and_of_nothing_else():
    loss = lambda x, w: depthwise(x, w).sum()
    assert {where for _, where, _ in found(loss, X, W)} == {"forward", "backward"}
    assert {where for _, where, _ in found(loss, X, W, gradients=False)} == {"forward"}
    assert {where for _, where, _ in found(depthwise, X, W)} == {"forward"}
    assert {where for _, where, _ in found(depthwise, X, W, gradients=True)} == {"forward", "backward"}
    assert {where for _, where, _ in found(jax.grad(loss), X, W)} == {"forward", "backward"}
    assert jaxext.doctor(loss)(X, W).read == "forward and backward" and jaxext.doctor(depthwise)(X, W).read == "forward"


def test_constants_among_the_operands():
    """A function that closes over its parameters has fewer gradients, and the report says so."""
    images, filters = np.ones(X.shape, np.float32), np.ones(W.shape, np.float32)
    report = jaxext.doctor(lambda x: (depthwise(x, filters) ** 2).sum(), platform="cpu")(SPLIT)
    (remark,) = report.remarks
    assert remark.startswith("1 operation has an operand made of arrays that the function closes over (f32[3,3,1,8]). These are constants")
    assert "No gradient in them is read" in remark and "pass them as arguments" in remark and "pass them as arguments" in str(report)
    whole = jaxext.doctor(lambda x, w: (depthwise(x, w) ** 2).sum(), platform="cpu")(SPLIT, W)
    assert whole.remarks == () and report.ok and not whole.ok  # the gradient of the filter is wrong
    none = jaxext.doctor(lambda i: depthwise(images, filters)[i].sum(), platform="cpu")(struct(dtype=np.int32))
    assert none.read == "forward" and none.remarks[0] == "No gradient is read, because no argument is a floating-point array."
    assert "(f32[3,3,1,8], f32[8,16,16,8])" in none.remarks[1]
    ours = jaxext.doctor(jaxext.in_place_of_lax()(lambda x: (depthwise(x, filters) ** 2).sum()), platform="cpu")(X)
    assert len(ours.remarks) == 1 and "closes over (f32[3,3,1,8])" in ours.remarks[0]


FILTERS = np.ones((3, 3, 1, 8), np.float32)
CLOSING = dict(
    jit=jax.jit(lambda x: depthwise(x, FILTERS)),
    scan=lambda x: lax.scan(lambda y, _: (depthwise(y, FILTERS * 2), None), x, length=3)[0],
    loop=lambda x: lax.while_loop(lambda c: c[0, 0, 0, 0] < 3, lambda c: depthwise(c, FILTERS), x),
    cond=lambda x: lax.cond(x[0, 0, 0, 0] > 0, lambda x: depthwise(x, FILTERS), lambda x: x, x),
    remat=jax.checkpoint(lambda x: depthwise(x, FILTERS)),
    vjp=lambda x: custom(x, FILTERS),
)


@pytest.mark.parametrize("name", CLOSING)
def test_constants_are_seen_through(name):
    assert "1 operation has an operand" in jaxext.doctor(CLOSING[name], platform="cpu")(X).remarks[-1]


def test_constants_of_any_kind():
    """Tracers of a program around, and arrays on an explicit mesh."""
    reports = []
    jax.jit(lambda w: reports.append(jaxext.doctor(lambda x: depthwise(x, w), platform="cpu")(X)))(FILTERS)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        split = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, P("data")))
        reports.append(jaxext.doctor(lambda x: x @ split, platform="cpu")(struct(8, 64)))
    assert all("1 operation has an operand" in report.remarks[-1] for report in reports)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: depthwise(x, w * FILTERS),  # of arguments too
        lambda x, w: lax.scan(lambda c, _: (c + w, depthwise(x, c)), FILTERS, length=2)[1],  # after the first step
        lambda x, w: depthwise(x, w) @ jnp.eye(8, dtype=np.float32),  # made inside
        lambda x, w: depthwise(x, w) * np.float32(2),
    ],
)
def test_what_is_no_constant(fun):
    (remark,) = jaxext.doctor(fun, platform="cpu")(X, W).remarks
    assert remark.startswith("No gradient is read, because the function does not return one real number. gradients=True (--backward)")


def test_a_training_step_is_read_as_it_stands():
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: (depthwise(x, w) ** 2).mean())(w)
        return w - gradient, loss

    report = jaxext.doctor(step, platform="cpu")(W, SPLIT)
    assert report.read == "as it stands" and report.operations == 2 and "as it stands, jax" in str(report)
    assert str(jaxext.doctor(jnp.dot, platform="cpu")(struct(8, 4), struct(4, 8))).startswith(
        "1 operation of lax on cpu, one device, forward, "
    )
    assert report.remarks[0].startswith("The function computes gradients itself, as a training step does.")
    assert (GROUPED, "backward") in {(finding.issue, finding.where) for finding in report.findings}
    twice = jaxext.doctor(step, platform="cpu", gradients=True)(W, SPLIT)
    assert twice.read == "forward and backward" and twice.operations > 2 and twice.remarks[0].endswith("second derivatives.")
    penalty = jaxext.doctor(lambda w, x: (step(w, x)[0] ** 2).sum(), platform="cpu")(W, SPLIT)
    assert penalty.read == "forward and backward" and "gradients=False (--no-backward) reads it as it stands" in penalty.remarks[0]
    assert jaxext.doctor(depthwise, platform="cpu", gradients=False)(X, W).remarks == ()


def test_a_finding_says_where_and_what():
    first, *_ = jaxext.doctor(depthwise, platform="cpu")(X, W).findings
    assert first.what == "slow" and first.operation == "conv2d_fprop x:f32[8,16,16,8] w:f32[3,3,1,8] -> y:f32[8,16,16,8]"
    assert "test_doctor.py:" in first.source and first.source.endswith("(depthwise)")
    assert "MFLOP" in first.cost and "in_place_of_lax" in first.fix and first.page.startswith(f"{PAGES}doctor.md#")


def test_equal_products_are_counted():
    line = lambda x, w: depthwise(x, w)  # one line for both
    assert found(lambda x, w: line(line(x, w), w), X, W) == [(DEPTHWISE, "forward", 2)]


def test_jaxexts_own_products_are_no_hazards():
    ours = lambda x, w: jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=8)
    both = lambda x, w: (ours(x, w) + depthwise(x, w)).sum()
    assert found(lambda x, w: ours(x, w).sum(), X, W) == []
    assert jaxext.doctor(both)(X, W).operations == 3
    with jaxext.in_place_of_lax():
        assert {hazard for hazard, *_ in found(depthwise, X, W)} == {DEPTHWISE}  # the function by itself is lax's
    assert found(jaxext.in_place_of_lax()(depthwise), SPLIT, W, gradients=True) == []


def test_it_agrees_with_explain():
    """A product is slow exactly where `explain` has another algorithm than lax's."""

    def loss(x, w, v, h):
        y = jnp.tanh(lax.conv_general_dilated(depthwise(x, w), v, (2, 2), "SAME", dimension_numbers=NHWC))
        return (y.mean((1, 2)) @ h).sum()

    types = X, W, struct(3, 3, 8, 16), struct(16, 4)
    report = jaxext.doctor(loss, platform="cpu")(*types)
    with jaxext.in_place_of_lax():
        rows = jaxext.explain(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)), platform="cpu")(*types).rows
    others = [f"{row.chosen} {row.how}" for row in rows if row.how not in ("lax", "dot_general")]
    assert sorted(f.cost.partition("by ")[2].removesuffix(" in jaxext") for f in report.findings) == sorted(others) and others
    assert report.operations == sum(row.times for row in rows)


def test_it_measures():
    report = jaxext.doctor(depthwise, measure=True)(X, W)
    (measured,) = (finding.measured for finding in report.findings)
    assert measured is not None and min(*measured.lax_ms, *measured.jaxext_ms) > 0 and "measured here: lax" in str(report)
    ragged = jaxext.doctor(lax.ragged_dot, measure=True)(struct(256, 32), struct(8, 32, 32), struct(8, dtype=np.int32))
    assert ragged.findings[0].measured is not None


def test_it_measures_in_a_loop():
    """The call is one that lax is slow at in a loop alone."""
    x, w = struct(2, 4, 8, 8), struct(3, 4, 4, 3, 3)
    layers = lambda x, w: lax.scan(lambda x, w: (lax.conv(x, w, (1, 1), "SAME"), None), x, w)[0]
    (finding,) = jaxext.doctor(layers, measure=True)(x, w).findings
    assert finding.issue == "convolution in a loop" and finding.measured is not None
    assert min(*finding.measured.lax_ms, *finding.measured.jaxext_ms) > 0


def test_products_that_devices_split_are_not_measured():
    """One device is no measure of them."""
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=2)
    findings = {finding.issue: finding for finding in jaxext.doctor(conv, measure=True)(SPLIT, struct(3, 3, 4, 8)).findings}
    assert findings["batch of grouped convolutions"].measured is None


def test_the_report_lists_few_notes():
    types = struct(8, 8), *(struct(8, n) for n in range(8, 16))
    report = jaxext.doctor(lambda x, *ws: [x @ w for w in ws], platform="cuda")(*types)
    assert report.ok and {finding.what for finding in report.findings} == {"note"} and "and 3 more" in str(report)
    assert "no issue" in str(jaxext.doctor(jnp.matmul, platform="cpu")(struct(8, 8), struct(8, 8)))


def test_bad_input():
    with pytest.raises(TypeError, match="doctor: fun is 3, want the function itself"):
        jaxext.doctor(3)()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="doctor: platform is 'npu', want one of"):
        jaxext.doctor(depthwise, platform="npu")(X, W)
    with pytest.raises(TypeError, match=r"doctor: gradients is \(0,\), want True, False or None"):
        jaxext.doctor(jnp.sin, gradients=(0,))(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="doctor: measure is set and platform is 'tpu', want"):
        jaxext.doctor(depthwise, platform="tpu", measure=True)(X, W)
    line = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="doctor: the arguments are split over the meshes .* want one"):
        jaxext.doctor(depthwise)(SPLIT, struct(3, 3, 1, 8, mesh=line, spec=P()))
    with pytest.raises(ValueError, match="8 // 8 != 3"):
        jaxext.doctor(depthwise)(X, struct(3, 3, 3, 8))


def test_a_loss_that_has_no_gradient():
    loss = lambda x: lax.while_loop(lambda c: c < 3, lambda c: c * 2, x.sum())
    with pytest.raises(ValueError) as error:
        jaxext.doctor(loss)(X)
    assert "with gradients=False (--no-backward) the function alone is read" in error.value.__notes__[-1]
    assert jaxext.doctor(loss, gradients=False)(X).ok


def test_the_default_precision_may_be_set_outside():
    how: Any = dict(platform="cuda")
    with jax.default_matmul_precision("highest"):
        assert jaxext.doctor(jnp.matmul, **how)(struct(8, 8), struct(8, 8)).findings == ()
    with jax.default_matmul_precision("high"):  # TF32 on GPUs too, and three products of bfloat16 on TPUs
        (found,) = {finding.issue for finding in jaxext.doctor(jnp.matmul, **how)(struct(8, 8), struct(8, 8)).findings}
        assert found == "float32 multiplied as TF32"
        assert jaxext.doctor(jnp.matmul, platform="tpu")(struct(8, 8), struct(8, 8)).findings == ()


class Linen(linen.Module):
    """The example of flax's documentation, with a block of ConvNeXt."""

    @linen.compact
    def __call__(self, x):
        for features in (8, 16):
            x = linen.avg_pool(linen.relu(linen.Conv(features, (3, 3), strides=(1, 1))(x)), (2, 2), strides=(2, 2))
        x = x + linen.Conv(16, (7, 7), feature_group_count=16)(x)
        x = linen.ConvTranspose(8, (2, 2), strides=(2, 2))(linen.BatchNorm(use_running_average=True)(x))
        return linen.Dense(10)(linen.relu(linen.Dense(32)(x.reshape((x.shape[0], -1)))))


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv, self.strided = nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.norm, self.out = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.strided(nnx.relu(self.conv(x))))).mean((1, 2)))


def of_linen():
    model = Linen()
    images, labels = struct(16, 28, 28, 1), struct(16, dtype=np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, x, labels):
        logits = model.apply(params, x)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(jnp.asarray(logits)), labels[:, None], 1))

    return loss, params, images, labels


def of_nnx():
    graph, state = nnx.split(Nnx())
    return lambda state, x: (nnx.merge(graph, state)(x) ** 2).mean(), state, struct(16, 28, 28, 1)


def of_equinox(model, *shape):
    arrays, static = eqx.partition(model, eqx.is_array)
    return lambda arrays, x: (jax.vmap(eqx.combine(arrays, static))(x) ** 2).mean(), arrays, struct(16, *shape)


def equinox_cnn():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [
        eqx.nn.Conv2d(1, 3, 4, key=keys[0]),
        eqx.nn.MaxPool2d(2, 2),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(3, 8, 3, 2, key=keys[1]),
    ]
    return eqx.nn.Sequential([*layers, eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(8 * 5 * 5, 10, key=keys[2])])


MODELS = {
    "flax.linen": of_linen,
    "flax.nnx": of_nnx,
    "equinox conv net": lambda: of_equinox(equinox_cnn(), 1, 28, 28),
    "equinox MLP": lambda: of_equinox(eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0)), 8),
}


@pytest.mark.parametrize(
    ("model", "platform"), [("flax.linen", "cpu"), ("flax.nnx", "cpu"), ("equinox conv net", "cuda"), ("equinox MLP", "cpu")]
)
def test_no_false_alarm_on_models(model, platform):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fun, *args = MODELS[model]()
        report = jaxext.doctor(fun, platform=platform)(*args)
    assert report.ok and report.operations > 4
    slow = {finding.issue for finding in report.findings if finding.what == "slow"} - {"another implementation is faster"}
    assert platform == "cuda" or slow == ({"dilated input", DEPTHWISE} if model == "flax.linen" else set())
    if model == "flax.linen":
        first = next(finding for finding in report.findings if finding.issue == DEPTHWISE)
        assert "Conv_2" in first.scope and "test_doctor.py" in first.source


MODULE = """
from jax import lax
from jax.experimental import pallas as pl

def loss(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8).sum()
"""
CALL = ["doctor", "users_doctor:loss", "f32[3,3,1,8]"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "users_doctor.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["f32[8,16,16,8]"], 0),
        (["f32[8@data,16,16,8]", "--mesh", "4,2"], 1),
        (["f32[8@data+model,16,16,8]", "--mesh", "data=4,model=2"], 0),
        (["f32[8@data,16,16,8]", "--mesh", "data=8"], 0),
        (["f32[8@data,16,16,8]", "--mesh", "4,2", "--no-backward"], 0),
        (["f32[8@data,16,16,8]", "--mesh", "4,2", "--in-place-of-lax"], 0),
        (["f32[8,16,16,8]", "--arch", "sm_90a"], 0),
    ],
)
def test_command(arguments, status, module, capsys):
    assert command.main([*CALL, *arguments, "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    assert (GROUPED in {finding["issue"] for finding in report["findings"]}) == (status == 1)
    assert command.main([*CALL, *arguments]) == status
    assert re.match(r"\d+ operations? of lax on ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "missing a required argument"),
        (["f32[8@data,16,16,8]"], "a SHAPE is split by data, want --mesh with it"),
        (["f32[8@rows,16,16,8]", "--mesh", "4,2"], "a SHAPE is split by rows, want --mesh with it"),
        (["f32[8,16,16,8]", "--mesh", "4,2"], "no SHAPE is split, want one such as f32[64@data,32,32,3]"),
        (["f32[8@data,16,16,8]", "--mesh", "3,2"], "--mesh does not fit a SHAPE"),
        (["f32[8@data,16@data,16,8]", "--mesh", "4,2"], "names an axis of the mesh twice"),
        (["f32[8@data@model,16,16,8]", "--mesh", "4,2"], "is not a shape"),
        (["f32[8,16,16,8]", "--mesh", "2,2,2"], "'2,2,2' is not a mesh, want one such as 4,2 or data=4,model=2"),
        (["f32[8,16,16,8]", "--mesh", "data=four"], "'data=four' is not a mesh, want one such as 4,2 or data=4,model=2"),
        (["f32[8,16,16,8]", "--mesh", "0,2"], "'0,2' is not a mesh, want one such as 4,2 or data=4,model=2"),
        (["f32[8,16,16,8]", "--platform", "tpu", "--measure"], "--measure runs on this machine, whose platform is not tpu"),
    ],
)
def test_command_refuses(arguments, sentence, module, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([*CALL, *arguments])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
