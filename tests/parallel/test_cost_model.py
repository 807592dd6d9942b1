"""`jaxext.parallel.cost` against what XLA compiles for eight devices: kind, group and bytes of every collective, bytes of operands and of
the result on a device, and operations.

Labels are split alone and in pairs, each over an axis of the mesh that has its name.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import extend, linear, parallel
from jaxext.core.static import Static
from jaxext.core.window import Window
from jaxext.ops.matmul import matmul
from jaxext.ops.ragged import ragged_dot
from jaxext.parallel.cost_model import Collective, forms

COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\((.*)")
INPUTS = {"O": "D", "P": "H", "Q": "W"}  # output's label -> input's label, which names both


def mesh_of(split):
    """An axis for each split label, and one for the devices that are left."""
    rest = 8 // math.prod(split.values())
    return jax.make_mesh((*split.values(), rest), (*split, "rest"), axis_types=(AxisType.Auto,) * (len(split) + 1))


def spec(labels, split):
    names = [INPUTS.get(label, label) for label in labels]
    return P(*(name if name in split else None for name in names))


def compiled(function, mesh, shapes, specs):
    arrays = zip(shapes, specs, strict=True)
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arrays]
    return jax.jit(function).lower(*structs).compile()


def in_hlo(program):
    """(kind, devices of a group, bytes of its result on one of them) of each collective of real numbers."""
    found = []
    for result, kind, attributes in COLLECTIVE.findall(program.as_text()):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)  # an all-to-all has one for each device
        if shapes:
            found.append((kind, group(kind, attributes), sum(4 * math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)))
    return sorted(found)


def group(kind, attributes):
    """Return a group's size from HLO, which writes pairs of devices along a line or a ring, lists, a list's shape, or axes of a mesh."""
    if kind == "collective-permute":
        pairs = attributes.partition("source_target_pairs={")[2].partition("}}")[0].count("{")
        return 8 // (8 - pairs) if pairs < 8 else "ring"
    groups = attributes.partition("replica_groups=")[2]
    if listed := re.match(r"\{\{([\d,]*)\}", groups):
        return listed[1].count(",") + 1
    if shape := re.match(r"\[\d+,(\d+)\]", groups):
        return int(shape[1])
    mesh, _, used = groups.partition("}")[0].partition(" {")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", used))


def predicted(role):
    return sorted((c.kind, c.devices, c.bytes) for c in role.collectives)


def held(program):
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes


def operations(program):
    return program.cost_analysis()["flops"]


def roles_of(form, function, shapes):
    """Open slot -> the function of its two operands, of which `function` is the first one."""
    zeros = {slot: jnp.zeros(shape, jnp.float32) for slot, shape in shapes.items()}
    first, second, result = form.slots
    return {
        result: function,
        first: lambda w, y: jax.vjp(lambda x: function(x, w), zeros[first])[1](y),
        second: lambda x, y: jax.vjp(lambda w: function(x, w), zeros[second])[1](y),
    }


MATMUL = dict(B=8, M=16, K=32, N=24)
CONV1D = dict(B=2, N=4, W=16, G=8, C=8, K=4, S=3)
CONV2D = dict(N=8, H=16, W=8, C=8, K=16, R=3, S=3)
extend.define("channelwise_of_cost", x="B N K C", w="B K M C", y="B N M C")

SPLITS = (
    ("matmul", MATMUL, {"N": 4, "K": 2}),
    ("matmul", MATMUL, {"M": 2, "K": 2, "N": 2}),
    ("conv1d", CONV1D, {"B": 2, "G": 4}),
    ("conv2d", CONV2D, {"H": 4, "W": 2}),
    ("conv2d", CONV2D, {"N": 4, "H": 2}),
    ("channelwise_of_cost", dict(B=1, N=4, K=8, M=2, C=6), {"K": 4, "C": 2}),
)


@pytest.mark.parametrize(("form", "sizes", "split"), SPLITS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_every_role_under_jit(form, sizes, split):
    """The form's own primitives, on arrays of one axis per label."""
    costs, form = parallel.cost(form, split, sizes=sizes, spatial="gather"), forms()[form]
    window = None
    rank = len(form.window) // 3
    if rank:
        input, filter = (tuple(sizes[label] for label in form.window[i : i + rank]) for i in (0, rank))
        ones, same = (1,) * rank, tuple((r // 2, r // 2) for r in filter)
        window = Window(input=input, filter=filter, stride=ones, padding=same, input_dilation=ones, filter_dilation=ones)
        sizes = dict(B=1, G=1) | sizes | window.sizes
    static = Static(ranks=(1,) * len(form.free), window=window, dtypes=(jnp.dtype("float32"),))
    for open, role in form.roles.items():
        slots = form.operands(open)
        product = lambda a, b, open=open, slots=slots: form.bind(open, {slots[0]: a, slots[1]: b}, static)
        shapes = [tuple(sizes[label] for label in form.slots[slot]) for slot in slots]
        program = compiled(product, mesh_of(split), shapes, [spec(form.slots[slot], split) for slot in slots])
        assert in_hlo(program) == predicted(costs[role])
        assert held(program) == sum(costs[role].held.values())
        if sizes["B"] == sizes.get("G", 1) == 1:  # others are rewritten
            additions = sum(c.bytes // 4 for c in costs[role].collectives if c.kind == "all-reduce")
            assert operations(program) == costs[role].flops + additions


GEOMETRIES = (
    ({"H": 4, "W": 2}, dict(N=2, H=32, W=8, C=2, K=4, R=5, S=3), {}),
    ({"N": 2, "H": 4}, dict(N=2, H=32, W=8, C=2, K=4, R=4, S=3), {"window_strides": (2, 1)}),
    ({"W": 4, "N": 2}, dict(N=2, H=4, W=32, C=2, K=4, R=1, S=3), {"rhs_dilation": (1, 3), "padding": ((0, 0), (6, 0))}),
    ({"H": 8}, dict(N=2, H=16, W=4, C=2, K=4, R=4, S=1), {"lhs_dilation": (2, 1), "padding": ((2, 2), (0, 0))}),
)


@pytest.mark.parametrize(("split", "sizes", "geometry"), GEOMETRIES)
def test_every_role_with_halos(split, sizes, geometry):
    costs, form, mesh = parallel.cost("conv2d", split, sizes=sizes, **geometry), forms()["conv2d"], mesh_of(split)
    labels = {"x": "NHWC", "w": "RSCK", "y": "NPQK"}
    specs = {slot: spec(names, split) for slot, names in labels.items()}
    conv = functools.partial(
        parallel.halo_conv,
        **dict(window_strides=(1, 1), padding="SAME") | geometry,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        axis_names=[axis if axis in split else None for axis in "HW"],
    )
    fprop = jax.shard_map(conv, mesh=mesh, in_specs=(specs["x"], specs["w"]), out_specs=specs["y"])
    shapes = {slot: tuple(sizes[label] for label in labels[slot]) for slot in "xw"}
    shapes["y"] = jax.eval_shape(fprop, *(jax.ShapeDtypeStruct(shapes[slot], jnp.float32) for slot in "xw")).shape
    for open, product in roles_of(form, fprop, shapes).items():
        slots, role = form.operands(open), costs[form.roles[open]]
        program = compiled(product, mesh, [shapes[slot] for slot in slots], [specs[slot] for slot in slots])
        assert in_hlo(program) == predicted(role)
        assert held(program) == sum(role.held.values())


def test_a_halo_that_one_neighbour_does_not_hold():
    """The next device sends the two rows that it holds of three on either side, and the one behind it the third."""
    costs, row = parallel.cost("conv2d", {"H": 8}, sizes=dict(N=2, H=16, W=4, C=2, K=4, R=7, S=1)), 2 * 4 * 2 * 4
    assert [(c.kind, c.devices, c.bytes) for c in costs["fprop"].collectives] == [("collective-permute", 8, n * row) for n in (2, 1, 2, 1)]


def gathers_columns(a, b, axis_name):
    return matmul(a, lax.all_gather(b, axis_name, axis=0, tiled=True))


def gathers_rows(a, b, axis_name):
    return matmul(lax.all_gather(a, axis_name, axis=0, tiled=True), b)


def adds_rows(a, b, axis_name):
    return lax.psum_scatter(matmul(a, b), axis_name, tiled=True)


SCATTERED = (
    ({"M": 8}, {"b": "K"}, gathers_columns),
    ({"N": 8}, {"a": "M"}, gathers_rows),
    ({"N": 8}, {"a": "M"}, parallel.all_gather_matmul),  # on CPUs the collective itself; for the ring see test_collective_matmul
    ({"K": 4, "N": 2}, {"c": "M"}, adds_rows),
    ({"K": 4, "N": 2}, {"c": "M"}, parallel.matmul_reduce_scatter),
)


@pytest.mark.parametrize(("split", "scattered", "function"), SCATTERED)
def test_every_role_with_a_scattered_slot(split, scattered, function):
    sizes, form, mesh = dict(M=16, K=32, N=24), forms()["matmul"], mesh_of(split)
    costs, axis = parallel.cost("matmul", split, sizes=sizes, scattered=scattered), next(iter(split))
    labels = {slot: names.removeprefix("B") for slot, names in zip("abc", map("".join, form.slots.values()), strict=True)}
    specs = {slot: spec(names, split) for slot, names in labels.items()}
    for slot, label in scattered.items():
        specs[slot] = P(*(axis if other == label else name for other, name in zip(labels[slot], specs[slot], strict=True)))
    nn = jax.shard_map(functools.partial(function, axis_name=axis), mesh=mesh, in_specs=(specs["a"], specs["b"]), out_specs=specs["c"])
    shapes = {slot: tuple(sizes[label] for label in names) for slot, names in labels.items()}
    for open, product in roles_of(form, nn, shapes).items():
        slots, role = form.operands(open), costs[form.roles[open]]
        program = compiled(product, mesh, [shapes[slot] for slot in slots], [specs[slot] for slot in slots])
        assert in_hlo(program) == predicted(role)
        assert held(program) == sum(role.held.values())


def test_rows_that_are_sent_to_experts():
    """`expert_parallel` sends them, and each expert gets 8 rows of each device."""
    n, rows, K, N = 8, 64, 32, 24
    costs = parallel.cost("matmul", {"B": n}, sizes=dict(B=n, M=rows, K=K, N=N), sent={"a": ("M", "B"), "c": ("M", "B")})
    sizes, mesh = jnp.full(n, rows // n, jnp.int32), mesh_of({"B": n})
    product = lambda a, b: parallel.expert_parallel(ragged_dot, a, b, sizes, axis_name="B", capacity=rows // n)
    nn = jax.shard_map(product, mesh=mesh, in_specs=P("B"), out_specs=P("B"))
    shapes = {"a": (n * rows, K), "b": (n, K, N), "c": (n * rows, N)}
    for open, function in roles_of(forms()["matmul"], nn, shapes).items():
        slots, role = forms()["matmul"].operands(open), costs[forms()["matmul"].roles[open]]
        program = compiled(function, mesh, [shapes[slot] for slot in slots], [P("B")] * 2)
        assert in_hlo(program) == predicted(role)
        assert held(program) == sum(role.held.values())


def test_dtype_is_that_of_every_byte():
    wide, narrow = (parallel.cost("conv2d", {"N": 2, "H": 4}, sizes=CONV2D, dtype=dtype) for dtype in ("float32", jnp.bfloat16))
    for role in wide:
        assert wide[role].wire == 2 * narrow[role].wire > 0
        assert sum(wide[role].held.values()) == 2 * sum(narrow[role].held.values())
        assert wide[role].flops == narrow[role].flops


def test_integers_of_numpy_and_a_million_rows():
    one = np.int64(1)
    geometry = dict(window_strides=[2 * one], padding=[(one, one)])
    role = parallel.cost("conv1d", {"W": 8 * one}, sizes=CONV1D | {"W": one << 20}, **geometry)["fprop"]  # pyright: ignore
    assert 8 * role.flops == 2 * math.prod(CONV1D[label] for label in "BNGCK") * (3 * 2**19 - 1)
    assert type(role.collectives[0].bytes) is int


REFUSED = (
    ("gemm", {}, MATMUL, {}, "form is 'gemm', want one of .*matmul"),
    ("matmul", {"C": 1}, MATMUL, {}, "sharding splits 'C', want labels of B, M, K, N"),
    ("conv2d", {"P": 2}, CONV2D, {}, "sharding splits 'P', want labels of B, N, G, C, K, H, W"),
    ("matmul", {"M": 0}, MATMUL, {}, "sharding of M is 0, want a positive integer"),
    ("matmul", {"M": 3}, MATMUL, {}, "splits M into 3, want a divisor of M=16"),
    ("conv2d", {"H": 8}, CONV2D, {"padding": "VALID"}, "splits H, and P with it, into 8, want a divisor of P=14"),
    ("matmul", {}, dict(M=16, K=32), {}, "sizes has M, K; want B, M, K, N, of which B may be left out"),
    ("conv2d", {}, CONV2D | {"P": 16}, {}, "sizes has .*P; want"),
    ("matmul", {}, MATMUL | {"K": 2.0}, {}, "size of K is 2.0, want a positive integer"),
    ("conv2d", {}, CONV2D, {"padding": "FULL"}, "padding is 'FULL', want 'SAME'"),
    ("conv2d", {}, CONV2D, {"padding": ((1, 1),)}, r"padding is \(\(1, 1\),\), want one entry for each of 2 spatial axes"),
    ("conv2d", {}, CONV2D, {"window_strides": 2}, "window_strides is 2, want one entry for each of 2 spatial axes"),
    ("conv2d", {}, CONV2D, {"lhs_dilation": (0, 1)}, "lhs_dilation is 0, want a positive integer"),
    ("conv2d", {}, CONV2D | {"R": 17}, {"padding": "VALID"}, r"has sizes \(0, 6\), want a filter that fits"),
    ("conv2d", {"H": 2}, CONV2D, {"spatial": "halos"}, "spatial is 'halos', want 'halo' or 'gather'"),
    ("matmul", {"M": 8}, MATMUL, {"scattered": {"b": "M"}}, "scattered is 'M' of 'b', want a slot and one of its labels"),
    ("matmul", {"M": 8}, MATMUL, {"scattered": {"a": "K"}}, "scattered has 'a', which has only one copy"),
    ("matmul", {"B": 8}, MATMUL, {"sent": {"a": ("N", "B")}}, r"sent is \('N', 'B'\) of 'a', want two labels of a slot, .*a: B M K"),
    ("matmul", {"M": 8}, MATMUL, {"sent": {"a": ("M", "B")}}, "want two labels of a slot, of which the first is not split"),
    ("matmul", {"B": 8}, MATMUL | {"M": 12}, {"sent": {"a": ("M", "B")}}, "sent splits 'a' along M, want 8 parts of M=12"),
    ("matmul", {"M": 16}, MATMUL, {"scattered": {"b": "N"}}, "'b' has N=24 in 1 parts and 16 copies, want their product to divide it"),
)


@pytest.mark.parametrize(("form", "split", "sizes", "how", "message"), REFUSED)
def test_what_is_refused(form, split, sizes, how, message):
    with pytest.raises(ValueError, match=f"cost: .*{message}"):
        parallel.cost(form, split, sizes=sizes, **how)


def test_an_operation_that_was_called_is_no_form():
    jax.eval_shape(functools.partial(linear, activation="relu"), *(jax.ShapeDtypeStruct((8, 8), np.float32),) * 2)
    with pytest.raises(ValueError, match="form is 'linear', want one of .*matmul"):
        parallel.cost("linear", {}, sizes=MATMUL)


def test_padding_is_of_whole_rows():
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        parallel.cost("conv2d", {}, sizes=CONV2D, padding=((1.5, 1), (1, 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("all-gather", 7 / 8), ("reduce-scatter", 7), ("all-to-all", 7 / 8), ("all-reduce", 7 / 4), ("collective-permute", 1)],
)
def test_bytes_on_the_wire(kind, shares):
    """Seven eighths of a result arrive at each of eight devices in a ring; what is scattered is eight times as much."""
    assert Collective(kind=kind, slot="a", over=("M",), devices=8, bytes=800).wire == pytest.approx(800 * shares)
