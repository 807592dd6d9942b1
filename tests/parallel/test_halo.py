"""Split images: eight devices compute what one computes, bit for bit, and send each other the halo and nothing else.

Cases share programs: what costs here is the number of compilations.
"""

import doctest
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import NCHW, NDHWC, NHWC, NWC, integers, same
from cases import equations
from collectives import COLLECTIVE
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.parallel import halo

LINE = jax.make_mesh((8,), ("h",), axis_types=(AxisType.Auto,))
PLANE = jax.make_mesh((4, 2), ("h", "w"), axis_types=(AxisType.Auto,) * 2)
CUBE = jax.make_mesh((2, 2, 2), ("d", "h", "w"), axis_types=(AxisType.Auto,) * 3)


class Case:
    """A convolution of shapes `x` and `w` whose spatial axes lie on the mesh axes `names`; the rest is as in lax."""

    def __init__(self, x, w, names, strides, padding, layout, **more):
        self.x, self.w, self.names = x, w, names
        self.lax = functools.partial(lax.conv_general_dilated, window_strides=strides, padding=padding, dimension_numbers=layout, **more)
        self.ours = functools.partial(halo.halo_conv, axis_names=names, **self.lax.keywords)
        spatial = iter(names)
        self.spec = P(*(next(spatial) if letter in "DHW" else None for letter in layout[0]))

    @property
    def operands(self):
        return integers(self.x), integers(self.w, 1)


def line(rows, taps, stride, padding, input_dilation=1, filter_dilation=1):
    dilations = dict(lhs_dilation=(input_dilation,), rhs_dilation=(filter_dilation,))
    return Case((2, rows, 3), (taps, 3, 2), ("h",), (stride,), padding, NWC, **dilations)


LINES = {
    "same": line(16, 5, 1, "SAME"),  # the halo is a whole part
    "further": line(16, 7, 1, "SAME"),  # one and a half
    "all": line(8, 31, 2, [(15, 15)], input_dilation=2),  # from every device
    "same_lower": line(24, 4, 1, "SAME_LOWER", filter_dilation=2),
    "causal": line(16, 3, 1, [(2, 0)]),
    "stride_skips_rows": line(48, 2, 3, [(1, 0)]),
    "valid": line(56, 9, 1, "VALID"),
    "cropped": line(56, 2, 1, [(-3, -4)]),
    "transposed": line(16, 3, 1, [(1, 2)], input_dilation=2),
    "transposed_with_gaps": line(16, 4, 1, [(4, 4)], input_dilation=3, filter_dilation=2),
    "transposed_and_strided": line(24, 5, 2, [(6, 7)], input_dilation=3),
    "transposed_and_cropped": line(40, 3, 1, [(-2, -3)], input_dilation=2),
    "transposed_and_longer": line(40, 3, 2, [(9, 9)], input_dilation=2),
}
PLANE_CASE = Case((2, 16, 8, 3), (3, 5, 3, 4), ("h", "w"), (2, 1), "SAME", NHWC)
PLANES = {
    "channels_first": Case((2, 3, 16, 8), (4, 3, 3, 3), ("h", "w"), (1, 2), [(2, 0), (1, 2)], NCHW, rhs_dilation=(1, 2)),
    "one_axis": Case((2, 5, 16, 3), (2, 3, 3, 4), (None, "h"), (2, 1), [(0, 0), (1, 1)], NHWC, lhs_dilation=(2, 1)),
    "axes_as_one": Case((2, 5, 16, 3), (2, 4, 3, 4), (None, ("h", "w")), (1, 1), [(0, 1), (2, 1)], NHWC),
    "batch_groups": Case((4, 8, 8, 3), (3, 3, 3, 4), ("h", "w"), (1, 1), "SAME", NHWC, batch_group_count=2),
    "transposed": Case((2, 8, 6, 3), (3, 3, 3, 4), ("h", "w"), (1, 1), [(1, 2), (2, 1)], NHWC, lhs_dilation=(2, 2)),
}
CUBES = {"volume": Case((1, 8, 4, 6, 2), (3, 2, 3, 2, 3), ("d", "h", "w"), (2, 1, 1), "SAME", NDHWC)}


def split(cases, mesh, check_vma):
    """Ours of every case, in one shard_map."""
    run = lambda operands: [case.ours(*xw) for case, xw in zip(cases, operands, strict=True)]
    specs = [case.spec for case in cases]
    return jax.shard_map(run, mesh=mesh, in_specs=([(s, P()) for s in specs],), out_specs=specs, check_vma=check_vma)


def one_device(cases):
    return lambda operands: [case.lax(*xw) for case, xw in zip(cases, operands, strict=True)]


def with_gradients(f):
    """The results and, of the sum of their squares, both gradients."""

    def loss(operands):
        results = f(operands)
        return sum(jnp.sum(y**2) for y in results), results

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(("cases", "mesh", "check_vma"), [(LINES, LINE, True), (PLANES, PLANE, True), (CUBES, CUBE, False)])
def test_eight_devices_compute_what_one_computes(cases, mesh, check_vma):
    cases = list(cases.values())
    operands = [case.operands for case in cases]
    same(with_gradients(split(cases, mesh, check_vma))(operands), with_gradients(one_device(cases))(operands))


def test_an_output_without_rows():
    """Its gradient beside another one crashes jaxlib 0.11.2's compiler, with lax in a shard_map as with ours, so it is not asked here."""
    case = line(8, 3, 1, [(-4, -4)])
    same(jax.jit(split([case], LINE, True))([case.operands]), one_device([case])([case.operands]))


def derivatives(conv, x, w):
    """A gradient and a Hessian's product with a vector, of an image and a filter."""
    gradient = jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 3), (0, 1))
    return jax.jvp(gradient, (x, w), (w[0, 0, 0, 0] * x, 1 - w))


def test_derivatives_and_vmap_inside():
    """Two batches have a filter each.  The parts of a filter's gradient are added where the types say that the filter is the same
    everywhere; without them that is the caller's."""
    x, w = (np.stack([v, v[::-1]]).astype(np.float64) for v in PLANE_CASE.operands)  # in which integers stay exact
    spec = P(None, *PLANE_CASE.spec)
    want = jax.jit(jax.vmap(functools.partial(derivatives, PLANE_CASE.lax)))(x, w)
    for check_vma in (True, False):

        def part(x, w, check_vma=check_vma):
            add = (lambda dw: dw) if check_vma else functools.partial(lax.psum, axis_name=("h", "w"))
            return tuple((dx, add(dw)) for dx, dw in jax.vmap(functools.partial(derivatives, PLANE_CASE.ours))(x, w))

        f = jax.shard_map(part, mesh=PLANE, in_specs=(spec, P()), out_specs=((spec, P()), (spec, P())), check_vma=check_vma)
        same(jax.jit(f)(x, w), want)


def test_vmap_of_the_split_convolution():
    case = PLANES["channels_first"]
    x, w = (np.stack([v, v + 1, -v]) for v in case.operands)
    f = jax.shard_map(case.ours, mesh=PLANE, in_specs=(case.spec, P()), out_specs=case.spec)
    run = lambda f: jax.jit(lambda x, w: (jax.vmap(f)(x, w), jax.vmap(f, (0, None))(x, w[0]), jax.vmap(f, (None, 0), 1)(x[0], w)))(x, w)
    same(run(f), run(case.lax))


def test_pmap_and_one_manual_axis_beside_an_automatic_one():
    """Rows lie on "h" in both; the batch lies on the automatic axis."""
    case = Case((2, 16, 5, 3), (3, 3, 3, 4), ("h", None), (2, 1), "SAME", NHWC)
    x, w = case.operands
    loss = lambda conv, x, w: jnp.sum(conv(x, w) ** 2)
    want = jax.jit(jax.grad(functools.partial(loss, case.lax), (0, 1)))(x, w)
    gradient = jax.grad(functools.partial(loss, case.ours), (0, 1))

    dx, dw = jax.pmap(gradient, axis_name="h", in_axes=(1, None), out_axes=(1, 0))(x.reshape(2, 8, 2, 5, 3), w)
    same((np.asarray(dx).reshape(x.shape), np.asarray(dw).sum(0)), want)

    some = jax.shard_map(gradient, mesh=PLANE, in_specs=(P(None, "h"), P()), out_specs=(P(None, "h"), P()), axis_names={"h"})
    same(jax.jit(some)(jax.device_put(x, NamedSharding(PLANE, P("w", "h"))), w), want)


def test_bfloat16():
    """Sums stay below 256, up to which bfloat16 has the integers."""
    case = PLANE_CASE
    x, w = (v.astype(jnp.bfloat16) for v in case.operands)
    f = jax.shard_map(case.ours, mesh=PLANE, in_specs=(case.spec, P()), out_specs=case.spec)
    run = lambda f: jax.jit(lambda x, w: (f(x, w), jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1))(x, w)))(x, w)
    same(run(f), run(case.lax))


def sent(compiled):
    """Kind and number of elements of each collective, in order of size."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S*" + COLLECTIVE.pattern, compiled.as_text())
    return sorted((kind, math.prod(map(int, shape.split(",")))) for shape, kind in shapes)


@pytest.mark.parametrize(
    ("mesh", "case", "rows"),
    [
        (PLANE, Case((2, 16, 8, 3), (5, 3, 3, 4), ("h", "w"), (1, 1), "SAME", NHWC), [2 * 4, 2 * 4, 8, 8]),
        (PLANE, Case((2, 16, 8, 3), (3, 3, 3, 4), ("h", "w"), (2, 2), "SAME", NHWC), [4, 5]),
        (LINE, LINES["causal"], [2]),
        (LINE, LINES["further"], [2, 2, 1, 1]),
        (LINE, LINES["transposed"], [1]),
        (LINE, line(24, 3, 3, "VALID"), []),
    ],
    ids=["same", "stride", "causal", "further", "transposed", "none"],
)
def test_neighbours_send_the_halo_and_nothing_else(mesh, case, rows):
    """Pixels of 2 images and 3 channels, for the whole height and width of a part with its halo so far; as many come back in the backward
    pass, in which the filter's gradient is added too.
    """
    permutes = sorted(("collective-permute", 2 * 3 * n) for n in rows)
    f = jax.shard_map(case.ours, mesh=mesh, in_specs=(case.spec, P()), out_specs=case.spec)
    x, w = (jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(case.operands, (case.spec, P()), strict=True))
    assert sent(jax.jit(f).lower(x, w).compile()) == permutes
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))).lower(x, w).compile()
    assert sent(gradient) == [("all-reduce", w.size), *sorted(permutes * 2)]


def test_the_implementation_is_the_callers_also_where_ours_stand_in_for_lax():
    case = LINES["same"]
    f = jax.shard_map(functools.partial(case.ours, implementation="xla"), mesh=LINE, in_specs=(case.spec, P()), out_specs=case.spec)
    with jaxext.in_place_of_lax():
        (conv,) = (eqn for eqn in equations(f, *case.operands) if eqn.primitive.name == "conv1d_fprop")
    assert conv.params["static"].implementation == "xla"


NEEDS_MORE = (
    r"output has 14 rows along spatial axis 0, want a multiple of 8, the devices of 'h': add 2 rows to the padding, which is \(0, 0\)"
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(padding="VALID"), ValueError, NEEDS_MORE),
        (dict(axis_names=("h",)), ValueError, r"axis_names is \('h',\), want one entry for each of 2 spatial axes"),
        (dict(axis_names="hw"), ValueError, r"axis_names is 'hw', want one entry for each of 2 spatial axes"),
        (dict(axis_names=(("h",), "h")), ValueError, r"axis_names is \(\('h',\), 'h'\), want no mesh axis twice"),
        (dict(axis_names=(["h"], None)), TypeError, r"axis_names\[0\] is \['h'\], want a name or a tuple of names"),
        (dict(axis_names=(None, "rows")), NameError, r"axis_names\[1\] is 'rows', want an axis of a shard_map or pmap"),
        (dict(filter=(3, 3, 2, 4)), ValueError, "feature dimension size"),
        (dict(padding=[(1, 1)]), TypeError, "Wrong number of explicit pads"),
        (dict(implementation="fast"), ValueError, "implementation is 'fast', want one of"),
    ],
    ids=["output", "length", "string", "twice", "list", "unbound", "channels", "padding", "implementation"],
)
def test_what_is_refused_and_how(change, error, message):
    given = dict(filter=(3, 3, 3, 4), window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC, axis_names=("h", None)) | change
    w = np.ones(given.pop("filter"), np.float32)
    f = jax.shard_map(functools.partial(halo.halo_conv, **given), mesh=LINE, in_specs=(P(None, "h"), P()), out_specs=P(None, "h"))
    with pytest.raises(error, match=message):
        jax.eval_shape(f, integers((2, 16, 8, 3)), w)


def test_the_examples():
    assert doctest.testmod(halo) == doctest.TestResults(failed=0, attempted=13)
