"""jit over eight devices with automatic axes: right values, the operands' own shardings, and no collective that the sum does not need.

Every label of a problem is split in turn, by either axis of a (4, 2) mesh, and the compiled HLO is read.
"""

import functools
import re
from typing import Any

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
    DOT_BATCHED,
    GROUPED,
    NHWC,
    OURS,
    ROLES,
    Problem,
    close,
    conv,
    dot,
    integers,
    same,
    truth,
)
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from public_operations import OF_ONE_MATRIX

import jaxext
from jaxext import _compat
from jaxext.ops.matmul.xla import XlaMatmul

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec(problem, slot, split):
    """`split` maps labels to mesh axes."""
    return P(*(split.get(label) for label in problem.labels(slot)))


def place(x, spec, mesh=MESH):
    return jax.device_put(x, NamedSharding(mesh, spec))


SPLITS = (
    (DOT_BATCHED, {"B": "model", "C": "data"}),
    (DOT, {"C": ("model", "data")}),
    (CONV2D, {"N": "data", "K": "model"}),
    (GROUPED, {"G": "model"}),
    (GROUPED, {"N": "data"}),  # lax's filter gradient is multiplied by the size of the other axis
    (DEPTHWISE, {"N": ("data", "model")}),
)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("problem", "split"), SPLITS, ids=lambda v: str(v) if isinstance(v, Problem) else "-".join(v))
def test_labels_are_split_as_they_lie(problem, split, role):
    """The result is right, its labels are split as the operands' are, and a split contracted label makes one all-reduce."""
    first, second, open = problem.slots(role)
    a, b = problem.operands(role)
    want = truth(problem, role, a, b)
    a, b = place(a, spec(problem, first, split)), place(b, spec(problem, second, split))
    compiled = jax.jit(problem.role(role)).lower(a, b).compile()
    got = compiled(a, b)
    same(got, want)
    assert got.sharding.is_equivalent_to(NamedSharding(MESH, spec(problem, open, split)), got.ndim)
    contracted = any(label not in problem.labels(open) for label in split)
    assert collectives(compiled) == ({"all-reduce": 1} if contracted else {})


@pytest.mark.parametrize("problem", [DOT, CONV2D, DEPTHWISE], ids=str)
def test_vmap_over_a_sharded_axis_needs_no_collective(problem):
    """lax gathers where both operands are mapped: it folds the mapped axis into the channels.  Here a label gets one axis more."""
    for in_axes in ((0, 0), (0, None)):
        a, b = problem.operands("fprop", 8)
        b = b if in_axes[1] == 0 else b[0]
        want = np.stack([truth(problem, "fprop", a[i], b[i] if in_axes[1] == 0 else b) for i in range(8)])
        a, b = place(a, P("data")), place(b, P("data") if in_axes[1] == 0 else P())
        compiled = jax.jit(jax.vmap(problem.role("fprop"), in_axes)).lower(a, b).compile()
        same(compiled(a, b), want)
        assert collectives(compiled) == {}
        assert compiled(a, b).sharding.is_equivalent_to(NamedSharding(MESH, P("data")), want.ndim)


@pytest.mark.parametrize("problem", [CONV2D, GROUPED], ids=str)
def test_gradients_per_example_of_a_sharded_batch_need_no_collective(problem):
    x, w = problem.operands("fprop")

    def gradients(x, w):
        one = lambda w, x: jnp.sum(problem.call(OURS, x[None], w) ** 2)
        return jax.vmap(jax.grad(one), (None, 0))(w, x)

    want = jax.jit(gradients)(x, w)
    y = problem.call(OURS, x[:1], w)
    same(want[0], truth(problem, "wgrad", x[:1], 2 * np.asarray(y)))
    x, w = place(x, P(("data", "model"))), place(w, P())
    compiled = jax.jit(gradients).lower(x, w).compile()
    same(compiled(x, w), want)
    assert collectives(compiled) == {}


def test_vmap_of_batch_groups_over_a_sharded_axis():
    """lax's aborts the process in XLA's partitioner."""
    a, b = BATCH_GROUPS.operands("fprop", 4)
    for role in ROLES:
        a, b = BATCH_GROUPS.operands(role, 4)
        want = np.stack([truth(BATCH_GROUPS, role, *ab) for ab in zip(a, b, strict=True)])
        same(jax.jit(jax.vmap(BATCH_GROUPS.role(role)))(place(a, P("data")), place(b, P("data"))), want)


@pytest.mark.parametrize("role", ROLES)
def test_a_batch_that_its_groups_split_unevenly(role):
    """A batch of 8 over 4 devices, reshaped to 2 groups of 4, lies 2 x 2 on an axis of 4: no name says so, and decoding raised."""
    problem = Problem("", (8, 4, 3, 4), (3, 3, 4, 4), BATCH_GROUPS.axes, conv((1, 1), "SAME", NHWC, batch_group_count=2))
    a, b = problem.operands(role)
    same(jax.jit(problem.role(role))(place(a, P("data")), place(b, P())), truth(problem, role, a, b))


def test_channels_that_their_groups_split_unevenly():
    """Two groups of channels over four devices, and the other operand's over two."""
    problem = Problem("", (2, 4, 3, 8), (3, 3, 4, 8), GROUPED.axes, conv((1, 1), "SAME", NHWC, feature_group_count=2))
    operands = {role: problem.operands(role) for role in ROLES}
    last = lambda x, axis: place(x, P(*(None,) * (x.ndim - 1), axis))
    placed = {role: (last(a, "data"), last(b, "model")) for role, (a, b) in operands.items()}
    got = jax.jit(lambda placed: {role: problem.role(role)(*ab) for role, ab in placed.items()})(placed)
    same(got, {role: truth(problem, role, *ab) for role, ab in operands.items()})


@pytest.mark.parametrize(
    ("lhs", "rhs", "out"),
    [
        (P("data", "model"), P("data", "model"), None),
        (P(None, "model"), P(None, "model"), None),
        (P(None, "model"), P(None, "model"), P("model")),
    ],
)
def test_a_label_that_is_kept_goes_before_one_that_is_summed(lhs, rhs, out):
    """Both want the same devices.  Then an operand is gathered; parts of a result that could be split itself would be more to send."""
    a, b = DOT.operands("fprop")
    x, w = place(a, lhs), place(b, rhs)
    compiled = jax.jit(DOT.role("fprop"), out_shardings=None if out is None else NamedSharding(MESH, out)).lower(x, w).compile()
    same(compiled(x, w), truth(DOT, "fprop", a, b))
    assert set(collectives(compiled)) - {"all-to-all"} == {"all-gather"}  # with which some versions of XLA move the result to its place


def test_parameters_that_are_split_over_the_devices_of_the_data():
    """A step gathers them, and adds up their gradient; activations stay where they are."""
    a, b = DOT.operands("fprop")
    loss = lambda a, b: jnp.sum(DOT.call(OURS, a, b) ** 2)
    x, w = place(a, P("data")), place(b, P("data"))
    step = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(x.sharding, w.sharding)).lower(x, w).compile()
    same(step(x, w), jax.jit(jax.grad(loss, (0, 1)))(a, b))
    assert set(re.findall(r"f32\[(\S+?)\]\S* (all-\w+|collective-permute|reduce-scatter)\(", step.as_text() or "")) == {
        ("16,24", "all-gather"),
        ("16,24", "all-reduce"),
    }


def test_sharded_windows_are_gathered():
    """Nobody asked for halos: the result is right, whatever it costs."""
    x, w = CONV2D.operands("fprop")
    same(jax.jit(CONV2D.role("fprop"))(place(x, P(None, "model")), place(w, P())), truth(CONV2D, "fprop", x, w))


def test_labels_of_many_axes_in_any_order():
    """Shardy wants its special factors in the order of their first use, which is not that of the dimension numbers."""
    problem = Problem("", (4, 2, 3, 8), (8, 5, 4, 2), ("a b . c", "c . a b", ". ."), dot((3, 1, 0), (0, 3, 2)))
    for role in ROLES:
        first, second, _ = problem.slots(role)
        a, b = problem.operands(role)
        split = {"a": "data", "b": "model"}
        x, w = place(a, spec(problem, first, split)), place(b, spec(problem, second, split))
        same(jax.jit(problem.role(role))(x, w), truth(problem, role, a, b))
    # Mapped twice, the contracted label of the filter gradient has three axes.
    a, b = CONV1D.operands("wgrad", 2, 4)
    f = jax.vmap(jax.vmap(CONV1D.role("wgrad")))
    want = np.stack([[truth(CONV1D, "wgrad", a[i, j], b[i, j]) for j in range(4)] for i in range(2)])
    same(jax.jit(f)(place(a, P("model", "data")), place(b, P("model", "data"))), want)
    g = jax.vmap(jax.vmap(CONV1D.role("fprop"), (0, None)), (0, None))
    x, w = CONV1D.operands("fprop", 2, 4)
    total = lambda w: jnp.sum(g(place(x, P("model", "data")), w) ** 2)
    same(jax.jit(jax.grad(total))(w[0, 0]), jax.jit(jax.grad(lambda w: jnp.sum(g(x, w) ** 2)))(w[0, 0]))


def test_vmap_with_an_axis_name_for_the_partitioner():
    """`spmd_axis_name` puts the mapped axis into the constraints inside, also those of the gradient."""
    problem, inner = CONV2D, NamedSharding(MESH, P("model"))

    def f(x, w):
        return jax.lax.with_sharding_constraint(problem.call(OURS, x, w), inner)

    x, w = problem.operands("fprop", 4)
    mapped = jax.jit(jax.vmap(f, spmd_axis_name="data"))
    y = mapped(x, w)
    same(y, np.stack([truth(problem, "fprop", *xw) for xw in zip(x, w, strict=True)]))
    assert y.sharding.is_equivalent_to(NamedSharding(MESH, P("data", "model")), y.ndim)
    gradients = jax.jit(jax.grad(lambda x, w: jnp.sum(jax.vmap(f, spmd_axis_name="data")(x, w) ** 2), (0, 1)))(x, w)
    plain = jax.jit(jax.grad(lambda x, w: jnp.sum(jax.vmap(problem.role("fprop"))(x, w) ** 2), (0, 1)))(x, w)
    same(gradients, plain)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, jnp.bfloat16, np.complex64])
def test_parts_of_a_sum_in_every_kind_of_dtype(dtype):
    """The contracted axis is split: booleans are or-ed, and the sum of parts keeps the dtype."""
    for problem in (DOT, CONV2D):
        x, w = problem.operands("fprop", dtype=dtype)
        if dtype is jnp.bfloat16:
            x, w = (v.clip(0, 1) for v in (x, w))
        split = {"C": "data"}
        got = jax.jit(problem.role("fprop"))(place(x, spec(problem, "x", split)), place(w, spec(problem, "w", split)))
        same(got, truth(problem, "fprop", x, w))


def test_zero_sized_and_indivisible_axes_on_a_mesh():
    for shape in ((0, 16), (6, 16)):
        x, w = integers(shape), integers((16, 24), 1)
        same(jax.jit(DOT.role("fprop"))(place(x, P(None, "model")), place(w, P("model", "data"))), truth(DOT, "fprop", x, w))
    x, w = integers((6, 5, 3, 6)), integers((3, 3, 1, 6), 1)
    f = conv((1, 1), "SAME", NHWC, feature_group_count=6)
    y = jax.jit(functools.partial(f, OURS), out_shardings=NamedSharding(MESH, P()))(place(x, P("model")), place(w, P()))
    same(y, np.asarray(jax.jit(functools.partial(f, OURS))(x, w)))


def test_sums_over_devices_of_complex_zeros():
    """XLA aborts the process if their parts are constant: of empty products, also outside by the transpose of vmap, or of no group."""
    x, w, sizes = np.ones((8, 8), np.complex64), np.ones((4, 8, 2), np.complex64), np.full((2, 4), 2, np.int32)

    def gradients(x, w, sizes):
        mapped = lambda x, w: jax.vmap(lambda sizes: jaxext.ragged_dot(x, w, sizes))(sizes)
        return jax.vjp(mapped, x, w)[1](jnp.zeros((2, 8, 0), x.dtype))

    got = jax.jit(gradients)(place(x, P("data")), place(w[..., :0], P()), place(sizes, P("model")))
    same(got, (np.zeros_like(x), w[..., :0]))
    of_no_group = jax.jit(lambda x, w: jaxext.ragged_dot(x, w, jnp.zeros(4, jnp.int32)))
    same(of_no_group(place(x, P(None, "data")), place(w, P(None, "data"))), np.zeros((8, 2), x.dtype))


SETTINGS = {
    "jax_enable_x64": lambda: jax.enable_x64(False),
    "jax_default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "jax_numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "jax_numpy_rank_promotion": lambda: jax.numpy_rank_promotion("allow"),
    "slices_in_place": jaxext.slices_in_place,
    "use_implementation": lambda: jaxext.use_implementation("xla"),
    "use_invariant": jaxext.use_invariant,
    "use_table": lambda: jaxext.use_table(None),
    "use_target": lambda: jaxext.use_target("sm_90a"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_parts_have_the_settings_of_their_lowering(name, monkeypatch):
    """XLA asks for them when it compiles: in another thread, or outside of the context.  The persistent cache tells programs apart."""
    run, seen = XlaMatmul.run, []

    def recorded(self, *args):
        seen.append(dict(_compat.settings())[name])
        return run(self, *args)

    monkeypatch.setattr(XlaMatmul, "run", recorded)
    x = place(np.ones((8, 4), np.float32), P("data"))
    product = jax.jit(lambda x: jaxext.matmul(x, x.T))
    with SETTINGS[name]():
        inside, lowered = dict(_compat.settings())[name], product.lower(x)
    outside, elsewhere = dict(_compat.settings())[name], product.lower(x)
    lowered.compile()
    with SETTINGS[name]():
        elsewhere.compile()
    assert seen == [inside, outside] and inside != outside
    assert lowered.as_text() != elsewhere.as_text()


def test_float64_in_a_context_that_enables_it():
    """Loops, sums and activations read the setting where they are traced, and some where they are lowered."""

    def f(x, w, sizes):
        others = [operation(x) for operation in OF_ONE_MATRIX.values()]
        return jaxext.ragged_dot(x, jnp.stack([w] * 2), sizes), jaxext.linear(x, w, activation="gelu"), *others

    args = integers((8, 4), dtype=np.float64), integers((4, 6), 1, np.float64), np.array([5, 3], np.int32)
    want = f(*args)
    jax.config.update("jax_enable_x64", False)
    try:
        with jax.enable_x64(True):
            got = jax.jit(f)(*(place(x, P("data") if len(x) == 8 else P()) for x in args))
    finally:
        jax.config.update("jax_enable_x64", True)
    assert {y.dtype for y in got} == {np.dtype(np.float64)} and len(got) >= 3
    same(got, want)


def test_the_same_product_inside_and_outside_of_shard_map():
    """One lowering serves neither: lowering rules are cached, the one that is split by hand must not be taken for the other."""
    x, w = CONV2D.operands("fprop")
    f = CONV2D.role("fprop")
    manual = jax.shard_map(f, mesh=MESH, in_specs=(P(), P()), out_specs=P())
    for order in (lambda x, w: (f(x, w), manual(x, w)), lambda x, w: (manual(x, w), f(x, w))):
        got = jax.jit(order)(place(x, P("data")), place(w, P(None, None, None, "model")))
        same(got, (truth(CONV2D, "fprop", x, w),) * 2)


def test_donated_operands():
    """The buffer of the input becomes that of the result, and is gone."""
    f = Problem("", (8, 8, 6, 16), (3, 3, 1, 16), DEPTHWISE.axes, DEPTHWISE.call)
    x, w = f.operands("fprop")
    want = truth(f, "fprop", x, w)
    for put in (jnp.asarray, functools.partial(place, spec=P("data", None, None, "model"))):
        given = put(x)
        same(jax.jit(f.role("fprop"), donate_argnums=0)(given, w), want)
        assert given.is_deleted()
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(given)


def test_programs_of_one_operation_with_other_operands():
    """XLA's partitioner calls back by a name, which must tell operands and their shapes apart: the second program used the first one's."""
    x, w, bias, sizes = integers((16, 8)), integers((8, 8, 8), 1), integers((8,), 2), np.full(8, 2, np.int32)
    silu = functools.partial(jaxext.linear, activation="silu")
    calls: list[Any] = [
        (silu, (x, w[0], bias), P("data")),
        (silu, (x, w[0]), P("data")),
        (lambda x, w: silu(x, w, residual=x), (x, w[0]), P("data")),
        (jaxext.ragged_dot, (x, w, sizes), P()),
        (jaxext.ragged_dot, (x, w[::2], sizes[::2] * 2), P()),
    ]
    for fun, args, split in calls:
        groups = [P("data") if x.ndim == 3 else P() for x in args[1:]]
        got = jax.jit(fun)(*(place(x, spec) for x, spec in zip(args, (split, *groups), strict=True)))
        close(got, fun(*args), 1e-6)
