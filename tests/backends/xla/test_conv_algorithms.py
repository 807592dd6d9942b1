"""The `xla` implementation of convolution, called directly: every algorithm against the definition, in float64 or exact integers."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import equations
from direct_sum import Convolution
from jax import export
from jax.sharding import PartitionSpec as P
from lowered import NHWC

import jaxext
from jaxext.core.call import Partitioner
from jaxext.core.implementation import Algorithm
from jaxext.core.static import Static
from jaxext.core.window import Window, dilate
from jaxext.ops.conv import xla, xla_dots, xla_elementwise, xla_plan
from jaxext.ops.conv.form import conv_form
from jaxext.ops.conv.xla_lax import Lax

SPLITTER = {False: Partitioner.NOBODY, True: Partitioner.XLA}


def definition(open, operands, sizes, window):
    """The trilinear form with one slot left open, in float64: a sum over taps for each member of the batch."""
    B, N, G, C, K = sizes.values()
    shapes = {"x": (N, *window.input, G * C), "w": (G * K, *window.filter, C), "y": (N, *window.output, G * K)}
    layout = (0, window.rank + 1, *range(1, window.rank + 1))
    geometry = window.stride, window.padding, window.input_dilation, window.filter_dilation
    direct = Convolution(shapes["x"], shapes["w"], *geometry, feature_groups=G, layouts=(layout, layout, layout))
    arrays = {slot: np.real(np.asarray(a)).astype(np.float64).reshape(B, *shapes[slot]) for slot, a in operands.items()}
    role = {"y": direct.y, "x": direct.dx, "w": direct.dw}[open]
    given = [arrays[slot] for slot in {"y": "xw", "x": "yw", "w": "xy"}[open]]
    return np.stack([role(*(a[b] for a in given)) for b in range(B)]).reshape(shapes_of(sizes, window)[open])


def shapes_of(sizes, window):
    B, N, G, C, K = (sizes[label] for label in "BNGCK")
    return {"x": (B, N, *window.input, G, C), "w": (B, G, K, *window.filter, C), "y": (B, N, *window.output, G, K)}


def window(input, filter, **given):
    rank = len(input)
    ones: dict[str, Any] = dict.fromkeys(("stride", "input_dilation", "filter_dilation"), (1,) * rank)
    return Window(**({"input": input, "filter": filter, "padding": ((0, 0),) * rank} | ones | given))


def operands_of(open, sizes, window, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {slot: jnp.asarray(rng.integers(-3, 4, shape), dtype) for slot, shape in shapes_of(sizes, window).items() if slot != open}


def labels(B=1, N: Any = 2, G=1, C=1, K=1):
    return dict(B=B, N=N, G=G, C=C, K=K)


def planned(open, operands, window, dtype="float32", partitioner=Partitioner.NOBODY, platform="cpu"):
    """The plan of a call of operands, which need only shapes and dtypes."""
    form = conv_form(window.rank)
    static = Static(ranks=(1,) * len(form.free), dtypes=(np.dtype(dtype),), window=window)
    avals = [operands[slot] for slot in form.operands(open)]
    call = form.call(open, avals, static=static, platform=platform, arch=None, partitioner=partitioner)
    return xla.XlaConv().plan(call)


def conv(open, operands, window, *, dtype="float32", partitioned=False, algorithm=None, platform="cpu"):
    plan = planned(open, operands, window, dtype, SPLITTER[partitioned], platform)
    return plan.run(Algorithm(algorithm) if algorithm else plan.configs[0], operands)


def program(open, sizes, window, dtype="float32", **how):
    """A function of operands, and these."""
    return functools.partial(conv, open, window=window, dtype=dtype, **how), operands_of(open, sizes, window, dtype)


def lowered(*args, **how) -> Any:
    function, operands = program(*args, **how)
    return jax.jit(function).lower(operands)


def plans(open, sizes, window, dtype="float32", partitioner=Partitioner.NOBODY):
    """The names of all, the one that is taken first."""
    return [*costs(open, sizes, window, dtype, partitioner)]


def costs(open, sizes, window, dtype="float32", partitioner=Partitioner.NOBODY) -> dict[str, Any]:
    """The costs of all algorithms, in the order of preference."""
    return {name: plan.cost for name, plan in found(open, sizes, window, dtype, partitioner).items()}


def found(open, sizes, window, dtype="float32", partitioner=Partitioner.NOBODY, platform="cpu"):
    """The plans of all algorithms, in the order of preference."""
    operands = {slot: jax.ShapeDtypeStruct(shape, dtype) for slot, shape in shapes_of(sizes, window).items()}
    return planned(open, operands, window, dtype, partitioner, platform).found


def rewrite(open, sizes, window, dtype: Any = "float32"):
    """An algorithm that is not lax's own, if there is one: small convolutions alone would be planned as lax's."""
    names = plans(open, sizes, window, dtype)
    return next((name for name in ("folded", "phases", "shifts", "rows", "loop", "dots", "padded") if name in names), names[0])


def check(sizes, window, opens="yxw", partitioned=(False, True), algorithm=None, dtypes=("float32",) * 3):
    """Exact in the roles `opens`, by this algorithm or a rewrite, in one program: compiling is what takes the time."""
    *of_operands, result = dtypes
    operands = {open: operands_of(open, sizes, window) for open in opens}
    operands = {open: {slot: a.astype(d) for (slot, a), d in zip(of.items(), of_operands, strict=True)} for open, of in operands.items()}
    names = {open: algorithm or rewrite(open, sizes, window, xla_plan.promote(*map(np.dtype, of_operands))) for open in opens}

    @jax.jit
    def run(operands) -> list[Any]:
        def of(open, split):
            return conv(open, operands[open], window, dtype=result, partitioned=split, algorithm=algorithm if split else names[open])

        return [{open: of(open, split) for open in opens} for split in partitioned]

    for open, results in itertools.product(opens, list(run(operands))):
        got, want = results[open], definition(open, operands[open], sizes, window)
        assert got.shape == want.shape and got.dtype == result
        np.testing.assert_array_equal(got, want.astype(np.int64).astype(result), err_msg=open)


GEOMETRIES = {
    "plain": window((5, 6), (3, 2)),
    "same": window((7, 5), (3, 3), padding=((1, 1), (1, 1))),
    "strided": window((9, 8), (3, 2), stride=(2, 3), padding=((1, 0), (0, 2))),
    "cropped": window((9, 7), (2, 3), padding=((-1, -2), (2, -1))),
    "dilated": window((8, 7), (3, 2), filter_dilation=(2, 3), padding=((1, 2), (0, 0))),
    "transposed": window((4, 3), (4, 3), input_dilation=(2, 3), padding=((2, 2), (1, 0))),
    "everything": window((4, 5), (3, 2), stride=(2, 3), input_dilation=(3, 2), filter_dilation=(2, 1), padding=((3, 1), (-1, 4))),
    "one element": window((1, 1), (1, 1)),
    "all padding": window((1, 2), (2, 2), padding=((3, 3), (0, 1)), stride=(2, 1)),
    "filter too big": window((3, 3), (5, 2)),
    "no input": window((0, 4), (2, 2), padding=((2, 2), (0, 0))),
    "no input, one tap": window((0, 2), (1, 2), padding=((1, 0), (-2, 3))),
    "causal": window((11,), (4,), padding=((3, 0),)),
    "long": window((150,), (3,), padding=((1, 1),)),
    "scalar": window((), ()),
    "four axes": window((3, 2, 3, 2), (2, 2, 1, 2)),
    "volume": window((4, 3, 5), (2, 3, 2), stride=(1, 2, 1), padding=((1, 0), (1, 1), (0, 1)), input_dilation=(1, 1, 2)),
}
SIZES = {
    "dense": labels(N=3, C=3, K=2),
    "depthwise": labels(G=5),
    "multiplier": labels(G=3, K=2),
    "grouped": labels(G=2, C=5, K=4),
    "batched": labels(B=3, N=1, C=2, K=3),
    "batched groups": labels(B=2, G=3, C=2, K=2),
    "empty": labels(N=0, G=2, C=2, K=2),
    "no channels": labels(G=2, C=0, K=2),
}


def check_every_plan(sizes, window, dtypes=("float32",) * 3):
    for open in "yxw":
        for name in plans(open, sizes, window, dtypes[0]):
            check(sizes, window, open, (False,), name, dtypes)


EVERY = [("dense", "same"), ("depthwise", "dilated"), ("batched", "scalar"), ("batched groups", "causal")]
EVERY += [("batched groups", "strided"), ("grouped", "transposed")]


@pytest.mark.parametrize(("sizes", "geometry"), EVERY)
def test_every_algorithm_that_a_table_may_name(sizes, geometry):
    """The result is exact, whichever algorithm runs."""
    assert all(len(plans(open, SIZES[sizes], GEOMETRIES[geometry])) > 1 for open in "yxw")
    check_every_plan(SIZES[sizes], GEOMETRIES[geometry])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometries_are_exact_in_every_role(geometry):
    check(SIZES["batched groups"], GEOMETRIES[geometry])
    if geometry in ("same", "strided", "everything", "long"):
        check(SIZES["depthwise"], GEOMETRIES[geometry], partitioned=(False,))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_are_exact_in_every_role(sizes):
    check(SIZES[sizes], GEOMETRIES["plain"])


# Rows of depthwise filters along one axis: a loop over the positions that need no mask, and the others.
LINES = {
    "causal": window((40,), (4,), padding=((3, 0),)),
    "same": window((40,), (5,), padding=((2, 2),)),
    "cropped": window((40,), (3,), padding=((-2, -3),)),
    "cropped and padded": window((40,), (3,), padding=((-2, 4),)),
    "dilated": window((60,), (4,), filter_dilation=(3,), padding=((9, 1),)),
    "strided": window((90,), (3,), stride=(2,), padding=((1, 1),)),
    "strided beyond the filter": window((90,), (2,), stride=(5,), filter_dilation=(2,), padding=((3, 6),)),
    "all beyond": window((40,), (3,), padding=((6, 7),)),
    "long": window((70,), (31,), padding=((30, 0),)),
    "whole blocks": window((32,), (1,)),
    "thousands": window((20_000,), (8,), padding=((7, 0),)),
}
SAME = window((6, 5), (3, 2), padding=((1, 1), (1, 0)))
STRIDED = window((7, 6), (3, 2), stride=(2, 2))
TRANSPOSED = window((4, 3), (3, 4), input_dilation=(2, 2), padding=((1, 1), (2, 1)))
CUBE = window((4, 5, 4), (3, 2, 3), padding=((1, 1), (1, 0), (1, 1)))
# The algorithm, the role, the problem, and whether XLA may split it: not if nothing is said.
PLANS = [
    ("rows", "w", labels(G=16, N=3), LINES["causal"]),
    ("rows", "w", labels(G=16, B=2), LINES["whole blocks"]),
    ("lax", "x", labels(N=1, C=2, K=5), window((8, 4, 4), (4, 4, 4), stride=(4, 4, 4))),
    ("lax", "y", labels(C=2, K=3), window((3, 3), (5, 8), input_dilation=(2, 4), padding=((2, 2), (5, 6)))),
    ("phases", "y", labels(N=48, C=40, K=96), window((2, 2), (3, 3), input_dilation=(2, 2), padding=((2, 2), (2, 2)))),
    ("lax", "y", labels(B=2, C=5, K=1), window((4, 3, 3), (2, 2, 1), padding=((1, 1),) * 3, filter_dilation=(2, 1, 1))),
    ("phases", "x", labels(G=3), STRIDED),
    ("folded", "w", labels(G=2), window((3, 3), (9, 18), input_dilation=(9, 9), padding=((8, 8), (9, 17)))),
    ("folded", "w", labels(C=2, K=3), window((3, 3, 3), (3, 4, 3), input_dilation=(3, 3, 3), padding=((2, 2),) * 3)),  # many residues
    ("phases", "x", labels(C=2, K=5), window((4, 4, 4), (4, 4, 4), stride=(4, 4, 4))),
    ("phases", "w", labels(C=2, K=3), window((4,), (5,), input_dilation=(4,), stride=(2,), padding=((4, 3),))),
    ("phases", "w", labels(C=2, K=3), window((2, 2), (3, 5), input_dilation=(2, 2), padding=((2, 2), (2, 4)))),  # two of each axis
    ("folded", "w", labels(C=2, K=3), window((6, 6), (8, 8), input_dilation=(4, 4), padding=((5, 6), (5, 6)))),  # larger than the input
    ("slices", "w", labels(C=3, K=4), CUBE),
    ("slices", "w", labels(N=1, G=2, C=2, K=3), CUBE),  # a convolution for each tap, and each of the others
    ("slices", "y", labels(B=2, C=25, K=3), window((5, 4, 4), (3, 2, 2), stride=(2, 1, 2), padding=((3, 2), (1, 0), (0, 1)))),
    ("slices", "y", labels(C=2), window((3, 2, 3, 3), (2, 2, 1, 2), stride=(1, 2, 1, 1), padding=((0, 1), (1, 0), (0, 0), (0, 0)))),
    ("padded", "y", labels(C=3, K=2), window((4, 3), (5, 4), padding=((2, 2), (2, 1)))),
    ("padded", "w", labels(C=3, K=2), window((4, 3), (2, 2), stride=(1, 2), padding=((1, 1), (1, 2)))),
    ("shifts", "x", labels(B=2, G=5, K=2), SAME),
    ("shifts", "y", labels(G=16, C=2), window((80,), (66,), padding=((9, 0),), stride=(2,))),  # 11 taps at a time
    ("shifts", "y", labels(B=2, N=1, G=3), window((70,), (68,), filter_dilation=(1,))),  # 17 taps at a time
    ("shifts", "y", labels(G=8, C=5), window((60,), (31,), padding=((30, 0),))),  # 5 times 6 taps, and one
    ("shifts", "y", labels(G=4, C=2), window((99,), (47,), filter_dilation=(2,), stride=(2,))),  # twice 16 taps, and 15
    ("loop", "x", labels(N=9, G=3, K=8), window((12, 12), (5, 5))),
    ("rows", "w", labels(G=16), window((9, 9), (8, 7), padding=((4, 4), (3, 3)))),  # some taps at a time
    ("loop", "y", labels(N=2, G=2, C=80, K=80), window((5, 6), (1, 1))),
    ("loop", "w", labels(B=2, N=1, C=9, K=24), window((40, 30), (3, 3))),
    ("loop", "w", labels(B=2, C=48, K=16), window((16, 12), (3, 3), stride=(2, 1), padding=((1, 0), (1, 1)))),
    ("loop", "w", labels(N=1, G=3, K=8), window((20, 20, 20), (5, 2, 1), padding=((0, 0), (0, 1), (1, 0)))),
    ("zeros", "w", labels(N=0, C=3, K=4), SAME),
    ("zeros", "y", labels(C=3, K=4), window((3, 4), (2, 2), padding=((-1, -2), (5, 5)))),  # a crop that leaves nothing
    ("lax", "y", labels(B=2, C=16, K=8), window((5, 6, 7), (2, 3, 2))),
    ("lax", "y", labels(B=2, C=40, K=3), window((5, 6, 7), (2, 3, 2))),  # batch groups
    ("lax", "w", labels(G=2, C=4, K=4), window((5, 6, 7), (5, 5, 5), padding=((2, 2),) * 3)),
    ("dots", "x", labels(B=2, G=2, C=3, K=2), STRIDED, True),
    ("dots", "w", labels(B=2, C=3, K=2), TRANSPOSED, True),
    ("dots", "y", labels(B=2, G=2, C=3, K=2), STRIDED),
    ("dots", "w", labels(B=2, C=3, K=2), STRIDED),
]


PLANS = [(*plan, False)[:5] for plan in PLANS]
# One problem for each algorithm, and for each of its roles: compiling is what takes the time.
ALGORITHMS = list({plan[0]: plan for plan in PLANS}.values())
ALGORITHMS_AND_ROLES = list({(plan[0], plan[1] == "w"): plan for plan in PLANS}.values())
over = functools.partial(pytest.mark.parametrize, ("name", "open", "sizes", "window", "partitioned"))


@over(PLANS)
def test_each_algorithm_is_exact(name, open, sizes, window, partitioned):
    assert name in plans(open, sizes, window, partitioner=SPLITTER[partitioned])
    check(sizes, window, open, (partitioned,), name)


def test_every_plan_of_the_docstring_is_tested():
    documented = {line.split()[0] for line in str(xla.__doc__).split("\n\n")[1].splitlines() if line.strip()}
    assert documented == {plan[0] for plan in PLANS}


def test_lines_that_fit():
    """Windows with too few positions, too many taps, or channels of other kinds do not fit: they take the loop with masks."""
    assert all(xla_elementwise.fits_line(1, 1, line.cropped[1]) for line in LINES.values())
    for of in (window((5,), (3,)), window((200,), (128,)), window((40,), (3,), input_dilation=(2,))):
        assert not xla_elementwise.fits_line(1, 1, of)
    assert not xla_elementwise.fits_line(2, 1, LINES["same"]) and not xla_elementwise.fits_line(1, 2, LINES["same"])


def test_rows_of_two_blocks(monkeypatch):
    """The output has six rows, four in the first block; the second overhangs."""
    monkeypatch.setattr(xla_elementwise, "BLOCK", 4 * 5 * 16)
    assert SAME.output == (6, 5)
    check(labels(G=16), SAME, "w", (False,), "rows")


@pytest.mark.parametrize("geometry", ["strided", "everything", "causal"])
def test_many_taps_are_a_loop(geometry, monkeypatch):
    monkeypatch.setattr(xla_dots, "WRITTEN_OUT", 3)
    check(labels(B=2, G=3, C=2, K=2), GEOMETRIES[geometry], partitioned=(True,))


SHORT = window((5,), (2,), padding=((1, 0),))  # two taps: quick to compile


@pytest.mark.parametrize(("dtypes", "sizes"), [
    (("float64",) * 3, "dense"),
    (("uint8",) * 3, "dense"),
    (("float8_e4m3fn", "float8_e5m2", "bfloat16"), "dense"),
    (("int8",) * 3, "depthwise"),
    (("bfloat16", "bfloat16", "float32"), "depthwise"),
    (("bool",) * 3, "batched groups"),
], ids=str)  # fmt: skip
def test_dtypes(dtypes, sizes):
    """Both operands and the result have them; integers wrap."""
    check(SIZES[sizes], SHORT, dtypes=dtypes)


@over(ALGORITHMS)
def test_error_is_of_the_order_of_lax(name, open, sizes, window, partitioned):
    dtype, rng = "bfloat16", np.random.default_rng(0)
    shapes = shapes_of(sizes, window)
    operands = {slot: jnp.asarray(rng.standard_normal(shapes[slot]), dtype) for slot in "xwy" if slot != open}
    want = definition(open, operands, sizes, window)
    scale = definition(open, {k: abs(v) for k, v in operands.items()}, sizes, window)
    run = jax.jit(functools.partial(conv, open, window=window, dtype=dtype, partitioned=partitioned, algorithm=name))
    got = np.asarray(run(operands), np.float64)
    assert np.isfinite(got).all()
    # float32 accumulation of n terms in any order, then one rounding, is within this of the sum of magnitudes.
    bound = 2 * float(jnp.finfo(dtype).eps) * abs(want) + 32 * float(jnp.finfo(np.float32).eps) * scale
    assert (abs(got - want) <= bound).all(), (abs(got - want) / np.maximum(bound, 1e-30)).max()


# XLA refuses every shard_map of empty arrays alone, as the operands of "zeros" are here.
@pytest.mark.sampled(5)
@over([plan for plan in ALGORITHMS_AND_ROLES if plan[0] != "zeros"])
def test_under_shard_map(name, open, sizes, window, partitioned):
    """Each device does one of two problems; a carry of a loop that forgets its varying axes is an error here."""
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    each = [operands_of(open, sizes, window, seed=seed) for seed in (1, 2)]
    both = jax.tree.map(lambda *a: jnp.stack(a), *each)

    def local(operands):
        return conv(open, jax.tree.map(lambda a: a[0], operands), window, partitioned=partitioned, algorithm=name)[None]

    want = [definition(open, operands, sizes, window) for operands in each]
    for check_vma in (True, False):
        got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma))(both)
        np.testing.assert_array_equal(got, want)


# What is planned

IMAGE = window((28, 28), (3, 3), padding=((1, 1),) * 2)
LARGE = window((56, 56), (3, 3), padding=((1, 1),) * 2)
LONG = window((100_000,), (128,), padding=((63, 64),))
SPACE = window((8, 8, 8), (4, 4, 4), input_dilation=(2, 2, 2), padding=((2, 2),) * 3)
VIDEO = window((8, 56, 56), (3, 3, 3), padding=((1, 1),) * 3)
TRANSPOSED_VIDEO = window((8, 32, 32), (3, 3, 3), padding=((2, 2),) * 3, input_dilation=(2, 2, 2))
DILATED = window((40, 40), (3, 3), input_dilation=(2, 2), padding=((1, 1),) * 2)
CHOICES = [
    *(("lax", open, labels(N=8, C=64, K=64), IMAGE) for open in "yxw"),
    ("lax", "y", labels(N=1, G=2), window((5, 5), (3, 3))),  # it takes longer to build anything else
    ("shifts", "y", labels(N=8, G=64), LARGE),
    ("shifts", "x", labels(N=8, G=64), LARGE),
    ("rows", "w", labels(N=8, G=64), LARGE),
    ("rows", "w", labels(G=64), LINES["thousands"]),
    ("loop", "y", labels(N=4, G=4, C=32, K=32), IMAGE),
    ("loop", "w", labels(N=4, G=4, C=32, K=32), IMAGE),
    ("shifts", "y", labels(N=1, G=2), LONG),
    ("loop", "w", labels(N=1, G=2), LONG),
    ("dots", "w", labels(N=32, C=64, K=64), window((28, 28), (1, 1))),
    ("dots", "x", labels(N=512, C=256, K=256), window((), ())),
    ("phases", "y", labels(N=8, C=32, K=16), SPACE),
    ("phases", "y", labels(N=1, C=32, K=16), TRANSPOSED_VIDEO),  # whose parts as slices would take too much memory
    ("slices", "y", labels(N=1, C=3, K=64), VIDEO),
    ("slices", "w", labels(N=1, C=3, K=64), VIDEO),
    ("shifts", "y", labels(N=1, G=64), VIDEO),
    ("dots", "w", labels(N=1, C=64, K=64), VIDEO),
    ("folded", "w", labels(N=8, C=32, K=16), SPACE),
    *(("phases", "y", labels(C=8, K=64), DILATED, dtype) for dtype in ("float64", "complex64")),  # lax's is fast for 32 bits at most
]


@pytest.mark.parametrize("choice", CHOICES, ids=[f"{choice[0]}-{i}" for i, choice in enumerate(CHOICES)])
def test_the_plan_is_the_least_cost(choice):
    """The next one costs so much more that no fit of the rates turns the choice."""
    name, *problem = choice
    assert plans(*problem)[0] == name


def test_nothing_is_to_be_chosen():
    """XLA may still partition, the batch size is traced, or a dense convolution has 64 bits: the rates are those of 32 bits."""
    for partitioner, sizes in itertools.product((Partitioner.XLA, Partitioner.LATER), SIZES.values()):
        assert len(plans("y", sizes, GEOMETRIES["same"], partitioner=partitioner)) == 1
    traced = labels(N=export.symbolic_shape("n")[0], G=3)
    assert plans("y", traced, SAME) == plans("w", traced, SAME) == ["lax"]
    for open, dtype in itertools.product("yxw", ("float64", "complex64")):
        assert plans(open, labels(N=8, C=32, K=32), LARGE, dtype) == ["lax"]


@pytest.mark.parametrize("sizes", [labels(C=8, K=8), labels(G=4, C=8, K=8), labels(G=16)], ids=["dense", "grouped", "depthwise"])
def test_an_infinity_meets_no_zeros_between_the_elements_of_a_dilated_image(sizes):
    """The sums and products over views, which contain them, do not compute these."""
    for taps, open in itertools.product((1, 3), "yw"):
        names = plans(open, sizes, window((24,), (taps,), input_dilation=(2,)))
        assert "lax" in names and not {"dots", "shifts", "rows"} & {*names}


def test_rates_are_of_what_algorithms_do():
    run, build = xla_plan.rates()
    assert {*run, *build, "bytes"} == {field.name for field in dataclasses.fields(xla_plan.Work)}
    assert min(*run.values(), *build.values()) > 0


def test_memory_and_time_to_build_are_limited():
    """An image of 16x16 is 28x28 when it is padded; phases of 64 convolutions build for seconds."""
    small = costs("w", labels(N=8, C=8), window((16, 16), (7, 7), padding=((6, 6),) * 2))
    lax, padded = small["lax"], small["padded"]
    assert padded.bytes > 5 * lax.bytes and padded.run_ms < lax.run_ms / 10 and list(small)[-1] == "padded"
    strided = window((40, 40, 40), (4, 4, 4), input_dilation=(4, 4, 4), filter_dilation=(3, 3, 3), padding=((9, 9),) * 3)
    large = costs("y", labels(N=8, C=8, K=8), strided)
    lax, phases = large["lax"], large["phases"]
    assert phases.build_ms > lax.build_ms + 1500 and phases.run_ms < lax.run_ms and list(large)[0] != "phases"


def test_parts_without_a_cost_take_nothing_away():
    """Dense convolutions of 64 bits, which are parts of phases here, have none."""
    phases = found("y", labels(C=8, K=64), DILATED, "float64")["phases"]
    assert len(phases.parts) > 1 and {part.cost for part in phases.parts} == {None}
    assert phases.cost and min(phases.cost.run_ms, phases.cost.build_ms) > 0


def test_one_output_of_a_transposed_convolution_is_a_sixteenth_of_sixteen():
    """All taps are columns of one product, so that one output channel fills a vector's lanes, too."""
    dilated = window((32,), (16,), padding=((15, 15),), input_dilation=(4,))
    one, sixteen = (Lax.work(found("y", labels(C=8, K=K), dilated)["lax"].conv).matrix for K in (1, 16))
    assert 0 < 16 * one == sixteen


def test_parts_are_planned_once_and_told(monkeypatch):
    """A plan is a tree that is made before it runs.  Each part is by the algorithm that is expected to be the fastest for its size."""
    dilated = window((40, 40), (7, 5), input_dilation=(3, 2), padding=((2, 2), (2, 2)))
    operands = operands_of("w", labels(G=16, C=8), dilated)
    plan = planned("w", operands, dilated)
    assert len(plan.found["phases"].parts) == 6 and len(plan.found["folded"].parts) == 4
    for name in ("phases", "folded"):
        parts = plan.found[name].parts
        names = ", ".join(dict.fromkeys(part.name for part in parts))
        assert plan.describe(Algorithm(name)) == f"{name} of {names}" and {part.parts for part in parts} == {()}
        assert [part.name for part in parts] == [xla.plans(part.conv)[0].name for part in parts]

    def again(*_):
        raise AssertionError("planned again")

    monkeypatch.setattr(xla, "plans", again)
    for config in plan.configs:
        jax.eval_shape(functools.partial(plan.run, config), operands)


# What is in a program


@pytest.mark.parametrize("open", "yxw")
@pytest.mark.parametrize("algorithm", ["padded", "loop"])
def test_no_filter_is_larger_than_its_image(algorithm, open):
    """XLA would exchange them, and be slow; in wgrad the filter is y."""
    sizes = labels(C=3, K=2) if algorithm == "padded" else labels(B=2, C=3, K=2)
    same = window((4, 3), (5, 4), padding=((2, 2), (2, 1))) if open != "w" else window((4, 3), (2, 2), padding=((1, 1), (1, 2)))
    (found,) = convolutions(open, sizes, same, algorithm=algorithm)
    *specs, _ = found.params["dimension_numbers"]
    image, filters = (math.prod(var.aval.shape[i] for i in spec[2:]) for var, spec in zip(found.invars, specs, strict=True))
    assert image >= filters
    check(sizes, same, open, (False,), algorithm)


def convolutions(*args, **how):
    return [eqn for eqn in equations(*program(*args, **how)) if eqn.primitive.name == "conv_general_dilated"]


def test_a_partitioned_convolution_is_never_grouped():
    def grouped(*args, **how):
        return any(eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1 for eqn in convolutions(*args, **how))

    for open, sizes, geometry in itertools.product("yxw", SIZES.values(), ("causal", "everything")):
        assert not grouped(open, sizes, GEOMETRIES[geometry], partitioned=True)
    assert grouped("y", labels(N=8, G=2, C=16, K=16), window((9, 9), (1, 1)), algorithm="lax"), "the check can fail"


@pytest.mark.parametrize("open", "yw")
def test_a_loop_of_bfloat16_keeps_float32(open):
    """XLA's CPU backend has no update of bfloat16 in place: it converts the whole result, and back, in each step."""
    function, operands = program(open, labels(N=4, G=3, C=9, K=9), GEOMETRIES["same"], "bfloat16", algorithm="loop")
    (loop,) = [eqn for eqn in equations(function, operands) if eqn.primitive.name in ("while", "scan")]
    assert {str(var.aval.dtype) for var in loop.outvars if var.aval.ndim} == {"float32"}
    assert jax.eval_shape(function, operands).dtype == jnp.bfloat16


# 961 taps, unrolled, were more than 5000 lines; a convolution for each of 64 residues 900 to 9000, which XLA compiled for seconds.
TAPS = window((31, 31), (31, 31), padding=((15, 15),) * 2)
SMALL = [(None, open, labels(G=4), TAPS, partitioned, 2000) for open in "yxw" for partitioned in (False, True)]
RESIDUES = window((6, 6, 6), (8, 8, 8), input_dilation=(4, 4, 4), padding=((4, 4),) * 3)
OF_RESIDUES = [("phases", "y", labels(C=8, K=8)), ("phases", "y", labels(G=21)), ("folded", "w", labels(C=8, K=8))]
SMALL += [(*plan, RESIDUES, False, 400) for plan in OF_RESIDUES]


@pytest.mark.parametrize(("name", "open", "sizes", "window", "partitioned", "lines"), SMALL)
def test_a_program_is_small(name, open, sizes, window, partitioned, lines):
    assert name in (None, rewrite(open, sizes, window))
    text = lowered(open, sizes, window, partitioned=partitioned, algorithm=name).as_text()
    assert len(text.splitlines()) < lines


@pytest.mark.parametrize("open", "yxw")
def test_dots_have_one_view_in_memory(open):
    """All 27 views of the input took 14 times as much."""
    cube = window((16, 16, 16), (3, 3, 3), padding=((1, 1),) * 3)
    compiled = lowered(open, labels(N=1, C=8, K=8), cube, algorithm="dots").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * (4 * 8 * 16**3)


@pytest.mark.parametrize(("channels", "loops"), [(16, 0), (1024, 1)])
def test_images_are_padded_one_at_a_time_if_that_takes_much_memory(channels, loops):
    """Images of 6x6 that become 12x12."""
    text = lowered("y", labels(N=4, G=channels), window((6, 6), (7, 7), padding=((3, 3),) * 2), algorithm="shifts").as_text()
    assert text.count("stablehlo.while") == loops


def test_a_sum_of_shifts_is_computed_once():
    """XLA would compute it in each fusion that reads it: twice to normalise it, as XLA before jax 0.12 does all the same."""
    function, operands = program("y", labels(G=16), window((12, 12), (5, 5), padding=((2, 2),) * 2), algorithm="shifts")

    def normalised(operands):
        y = function(operands)
        return (y - y.mean((2, 3), keepdims=True)) / jnp.sqrt(jnp.square(y).mean((2, 3), keepdims=True))

    compiled: Any = jax.jit(normalised).lower(operands).compile()
    assert 25 <= compiled.as_text().count(" multiply(") < (40 if jax.__version_info__ >= (0, 12) else 60)


@pytest.mark.parametrize("taps", [1, 3])
def test_an_input_gradient_copies_its_filter_once(taps):
    """A reversal copies it once more.  An axis of size 1 between transpositions would make each of them a copy."""

    def gradient(x, w, y):
        return jax.vjp(lambda x: jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC), x)[1](y)[0]

    shapes = (4, 6, 6, 8), (taps, taps, 8, 16), (4, 6, 6, 16)
    compiled: Any = jax.jit(gradient).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    assert compiled.as_text().count(" copy(") <= (1 if taps == 1 else 2)


@pytest.mark.parametrize("role", ["forward", "gradients"])
def test_many_taps_of_symbolic_images(role):
    """A program for images of any size, with groups: their axes are not merged, since their product would not be known to be positive."""
    n, h, w = export.symbolic_shape("n, h, w", constraints=["h >= 20", "w >= 20"])

    def grouped(x, w):
        return jaxext.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC, feature_group_count=2)

    function = grouped if role == "forward" else jax.grad(lambda x, w: grouped(x, w).sum(), (0, 1))
    arguments = jax.ShapeDtypeStruct((n, h, w, 4), jnp.float32), jax.ShapeDtypeStruct((9, 9, 2, 6), jnp.float32)
    exported = export.export(jax.jit(function))(*arguments)
    operands = [jnp.ones(shape, jnp.float32) for shape in ((2, 21, 20, 4), (9, 9, 2, 6))]
    for got, want in zip(*map(jax.tree.leaves, (exported.call(*operands), function(*operands))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


# Calls that were wrong, read out of bounds or ended the process: cropped to nothing by a phase, or by lax itself; and a folded gradient
# whose parts were by different algorithms, one of them summed in float32.
CROPPED = {
    "strided gradient": (labels(N=1, C=136, K=136), window((2, 2), (2, 2), stride=(2, 2), padding=((1, 0), (1, 0)))),
    "dilated input": (labels(N=1, C=8, K=32), window((1, 2), (2, 1), stride=(5, 3), padding=((3, 2), (2, 0)), input_dilation=(2, 2))),
    "dilated": (
        labels(N=1, G=17, C=2, K=4),
        window((1, 8), (1, 3), padding=((-2, 5), (0, -3)), input_dilation=(5, 2), filter_dilation=(2, 3)),
    ),
    "lax ends the process": (labels(N=1, G=17, C=8, K=16), window((1, 2), (1, 1), stride=(5, 3), padding=((1, -1), (1, -2)))),
    "padding alone": (labels(N=3, G=2, K=3), window((3, 2), (3, 3), stride=(3, 3), padding=((8, -2), (4, 2)), filter_dilation=(3, 3))),
    "parts of a folded gradient": (labels(G=4), window((10, 17), (5, 3), padding=((-3, 6), (-31, 3)), input_dilation=(2, 3))),
}


OTHER_DTYPES = {"parts of a folded gradient": ("float16", "float16", "float32"), "lax ends the process": ("bfloat16",) * 3}


@pytest.mark.parametrize("name", CROPPED)
@pytest.mark.usefixtures("long_run")
def test_crops_that_leave_nothing(name):
    check_every_plan(*CROPPED[name], OTHER_DTYPES.get(name, ("float32",) * 3))


GROUPS = {
    "4 groups": (labels(N=1, G=4, C=8, K=8), window((8, 8), (3, 3), padding=((1, 1),) * 2)),
    "depthwise 13x13": (labels(N=1, G=16), window((14, 14), (13, 13), padding=((6, 6),) * 2)),
    "32 groups": (labels(N=1, G=32, C=4, K=4), window((6, 6), (3, 3), padding=((1, 1),) * 2)),
    "a loop": (labels(N=1, G=4, C=12, K=12), window((8, 8), (3, 3), padding=((1, 1),) * 2)),
}
LINE, ROWS = (labels(G=16), window((40,), (3,), padding=((1, 1),))), (labels(G=16), window((6, 5), (3, 3), padding=((1, 1),) * 2))
FOLDED = labels(N=1, C=2, K=3), window((5,), (15,), input_dilation=(8,), padding=((7, 7),))  # zeros fill up the last period of y
SLICES = window((5, 4, 4), (3, 2, 2), stride=(2, 1, 1), padding=((3, 2), (0, 0), (0, 0)))  # output 1 does not meet tap 0
CORNER = np.s_[0, 0, 0, 0, 0, 0]
# The algorithm (None: that of a long run), the open slot, the one with the infinity, sizes, window, and where it is.
INFINITE = {
    **{f"{name}, {o}": (None, o, of, *case, np.s_[0, 0, 5, 5, 0, 0]) for name, case in GROUPS.items() for o, of in ("yx", "xy")},
    "beside the image, a loop": (None, "w", "y", labels(N=3, G=2, C=9, K=60), window((12, 13), (3, 3), padding=((2, 2),) * 2), CORNER),
    "beside the image, one tap": (None, "w", "y", labels(N=2, G=2, C=9, K=15), window((6, 5), (1, 1), padding=((1, 1),) * 2), CORNER),
    **{f"beside a line, {row}": ("rows", "w", "y", *LINE, np.s_[:, :, row]) for row in (0, -1)},
    **{f"beside rows, {row}": ("rows", "w", "y", *ROWS, np.s_[:, :, row]) for row in (0, -1)},
    "beside the slices": ("slices", "w", "y", labels(N=1, G=2, C=2, K=3), SLICES, np.s_[:, :, 1, 2, 2]),
    **{f"folded, {i}": ("folded", "w", "x", *FOLDED, np.s_[0, 0, i, 0, 0]) for i in range(5)},
}


@pytest.mark.sampled(10, "slices")
@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.usefixtures("long_run")
def test_an_infinity_reaches_what_meets_it(name):
    """It stays in its group, and the padding beside an image is left out, not multiplied: zero times an infinity would be NaN."""
    algorithm, open, slot, sizes, window, where = INFINITE[name]
    ones = {s: np.ones(shape, np.float32) for s, shape in shapes_of(sizes, window).items() if s != open}
    alone = np.zeros_like(ones[slot])
    alone[where] = 1
    operands = jax.tree.map(jnp.asarray, ones | {slot: np.where(alone, np.inf, ones[slot])})
    got = jax.jit(functools.partial(conv, open, window=window, algorithm=algorithm))(operands)
    np.testing.assert_array_equal(~np.isfinite(got), definition(open, ones | {slot: alone}, sizes, window) > 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dots_of_short_floats_that_lie_in_another_order(dtype):
    """XLA's CPU backend (jax 0.10.2) has no code for such a product of bfloat16 with a float32 result: lax.dot_general fails of it."""
    sizes, same = labels(B=4, N=1, C=4, K=17), window((16,), (3,), padding=((1, 1),))
    operands = operands_of("y", sizes, same, dtype)

    @jax.jit
    def run(x, w):
        return conv("y", {"x": jnp.swapaxes(x, 1, 2).reshape(4, 1, 16, 1, 4), "w": w}, same, algorithm="dots")

    y = run(jnp.swapaxes(operands["x"].reshape(4, 16, 4), 1, 2), operands["w"])
    np.testing.assert_array_equal(y, definition("y", operands, sizes, same))


def test_windows():
    """Transposing twice is the identity up to what stride and padding cut off, and the phases cover every tap and output once."""
    for w in GEOMETRIES.values():
        t = w.transposed
        assert t.output == w.input or 0 in w.input + w.output or not w.rank
        if 0 in w.output:
            continue
        pairs = [pair for outputs, taps, _ in w.phases for pair in itertools.product(itertools.product(*outputs), itertools.product(*taps))]
        assert len(pairs) == len(set(pairs))
        for outputs, taps, sub in w.phases:
            assert sub.output == tuple(map(len, outputs)) and sub.filter == tuple(map(len, taps))
            assert dataclasses.replace(sub, input_dilation=(1,) * w.rank) == sub
            assert all(dilate(i, 1) + low + high >= 1 for i, (low, high) in zip(sub.input, sub.padding, strict=True))
    for low, high in itertools.product(range(-6, 2), repeat=2):  # crops, of which some leave a hole of the dilation at an end
        left, rest = window((4,), (1,), padding=((low, high),), input_dilation=(3,)).cropped
        assert min(rest.padding[0]) >= 0 and rest.output == (max(0, 10 + low + high),)
        assert rest.input == (len(range(4)[left[0]]),)
