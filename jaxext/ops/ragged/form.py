"""Ragged products: labels, roles, implementations, and the translation of `lax.ragged_dot_general`.

    y[b,p,r,m,n] = Σ_g,k [begin[b,p,g] <= m < end[b,p,g]] x[b,p,r,m,k] w[b,g,k,n]

The rows M are cut into groups, and each group has a filter of its own.  With y open: the rows of each group times its filter; x open: times
its transposed filter; w open: for each group, the sum over its rows.  R are rows of the same groups, P rows of other groups with the same
filters.

The companions `begin` and `end` are what the sizes of the groups say: the first row of each, and the one after its last.  Ranges do not
overlap and lie in order.  A row in no range is never read, and its result is zero.  So a device that has a part of the groups, or of the
rows, needs nothing but the ranges `cut` to these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext.core import epilogue, partition
from jaxext.core.call import Call
from jaxext.core.checks import checked, given
from jaxext.core.composition import Composition
from jaxext.core.family import Family, declare
from jaxext.core.form import Companion, Form, define, dimension_numbers
from jaxext.core.labelled import Labelled
from jaxext.core.operation import Operation
from jaxext.core.static import Static
from jaxext.lax.dispatch import compiled, lax_params, sharding_in_types
from jaxext.lax.substitute import transpose
from jaxext.ops.matmul.form import read as read_dot_general
from jaxext.ops.ragged.cuda import CudaRagged
from jaxext.ops.ragged.triton import TritonRagged
from jaxext.ops.ragged.xla import XlaRagged

Axes = Sequence[int]
Cut = Callable[[dict[str, jax.Array], str, jax.Array, int], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TiedForm(Form):
    """A form some of whose companions tie the elements of a label to each other, as group sizes tie the rows of a ragged product.

    Which rows are a group depends on the rows before.  A tied label has one axis, since no vmap joins it.  It may stand in one slot alone,
    which the companions then choose from.  A device that has a part of a tied label computes with companions that are `cut` to its part.

    Attributes:
      tied: the labels whose elements are tied to each other.
      ties: the companions that tie them.
      cut: `cut(ties, label, first, size)` gives these companions for a device that has only the `size` elements of a tied label from
        `first` (an int32 scalar) on.  They themselves are not split along a tied label.
    """

    tied: tuple[str, ...]
    ties: tuple[str, ...]
    cut: Cut

    @functools.cached_property
    def chosen(self) -> tuple[str, ...]:
        return tuple(label for label in self.tied if sum(label in labels for labels in self.slots.values()) == 1)

    @property
    def unmapped(self) -> tuple[str, ...]:
        return self.tied

    @functools.cached_property
    def uncut(self) -> dict[str, str]:
        return {f"{label}0": f"{label}whole" for label in self.tied}

    @functools.cached_property
    def gathered(self) -> set[tuple[str, str]]:
        return {(name, axis) for name in self.ties for axis in self.uncut}

    def axes_to_split(self, name, axes):
        return tuple(self.uncut.get(axis, axis) for axis in axes) if name in self.ties else tuple(axes)

    def local_operands(self, operands, part, sizes):
        ties = {name: operands[name] for name in self.ties}
        for label in self.tied:
            if (has := part(f"{label}0", sizes[f"{label}0"])) is not None:
                ties = self.cut(ties, label, *has)
        return {**operands, **ties}


def ranges(sizes: jax.Array, rows: int, groups: int, offset: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The first row and the one after the last of each group (..., groups), from their sizes (..., all groups).

    A negative size counts as zero, and rows beyond the last are not there.  With an `offset` of shape (1,), the groups from it on; a group
    that `sizes` does not have is empty.
    """
    if isinstance(rows, int) and rows * sizes.shape[-1] <= jnp.iinfo(jnp.int32).max:
        sizes = _clipped(sizes, rows)
        total = jnp.cumsum(sizes, -1, dtype=jnp.int32)
        begin, end = jnp.minimum(total - sizes, rows), jnp.minimum(total, rows)  # one kernel of XLA
    else:  # the sum can exceed int32
        end = lax.associative_scan(lambda one, other: one + jnp.minimum(other, rows - one), _clipped(sizes, rows), axis=-1)
        begin = jnp.concatenate([jnp.zeros_like(end[..., :1]), end[..., :-1]], -1)
    if offset is None:
        return begin, end
    # Compared with all groups, of which there are some thousands at most: a gather has no sharding in types if vmap maps the offset alone.
    at = _clipped(offset, sizes.shape[-1], -groups) + jnp.arange(groups, dtype=jnp.int32)
    found = lax.expand_dims(at[:, None] == jnp.arange(sizes.shape[-1], dtype=jnp.int32)[None], range(sizes.ndim - 1))
    first, last = (jnp.where(found, of[..., None, :], 0).sum(-1, dtype=jnp.int32) for of in (begin, end))
    return first, last


def group_mask(begin: jax.Array, end: jax.Array, like: jax.Array, same: int) -> jax.Array:
    """Return which rows are in a group, with the shape and sharding of `like`, (..., rows), of which `same` axes before the last share
    ranges."""
    axis = like.ndim - 1
    row = lax.broadcasted_iota(jnp.int32, like.shape, axis, out_sharding=partition.explicit(jax.typeof(like)))[..., None]
    begin, end = (lax.expand_dims(of, range(axis - same, axis + 1)) for of in (begin, end))
    return ((begin <= row) & (row < end)).any(-1)


def masked_rows(sizes: jax.Array, y: jax.Array, row_scale: jax.Array | None = None) -> jax.Array:
    """y (rows, columns) times the scale of each row, and zeros in rows of no group, where neither is read."""
    inside = group_mask(*ranges(sizes, y.shape[0], sizes.shape[0]), y.sum(1), 0)[:, None]
    y = jnp.where(inside, y, 0)
    return y if row_scale is None else jnp.where(inside, y * row_scale.astype(y.dtype)[:, None], 0)


def _clipped(x: jax.Array, high: int, low: int = 0) -> jax.Array:
    """An array of integers of any dtype, clipped, as int32."""
    of_type = jnp.iinfo(x.dtype)
    if not isinstance(high, int):  # a symbolic size
        return jnp.minimum(jnp.maximum(x, x.dtype.type(max(low, of_type.min))).astype(jnp.int32), high)
    return jnp.clip(x, x.dtype.type(max(low, of_type.min)), x.dtype.type(min(high, of_type.max))).astype(jnp.int32)


def cut(bounds: dict[str, jax.Array], label: str, first: jax.Array, size: int) -> dict[str, jax.Array]:
    """The ranges of `size` groups from `first` on, or the ranges in as many rows."""
    if label == "G":
        return {name: lax.dynamic_slice_in_dim(row, first, size, row.ndim - 1) for name, row in bounds.items()}
    return {name: jnp.clip(row - first, 0, size) for name, row in bounds.items()}


def examples(call: Call) -> dict[str, jax.Array]:
    """Ranges that hold all rows, of groups whose sizes differ by up to a third, as those of a balanced router do, and fit no tile."""
    weights = np.cumsum([6 + i % 3 for i in range(call.sizes["G"])])
    end = call.sizes["M"] * weights // weights[-1]
    begin = np.concatenate([[0], end[:-1]])
    return {name: jnp.broadcast_to(jnp.asarray(of, jnp.int32), call.shape_of(name)) for name, of in (("begin", begin), ("end", end))}


def read(lhs, rhs, group_sizes, *, ragged_dot_dimension_numbers, dtype, group_offset=None, **params):
    """lax's ragged_dot_general, whose dimension numbers lax has checked."""
    numbers = ragged_dot_dimension_numbers
    (lc, _), (lb, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    offset = None if group_offset is None else jnp.asarray(group_offset)
    by_mode = _batches if ragged in lb else _contraction if ragged in lc else _rows
    return by_mode(lhs, rhs, group_sizes, numbers, ragged, offset, dtype=dtype, **params)


def _rows(lhs, rhs, sizes, numbers, ragged, offset, **params):
    """Ragged rows: by y open, or by x open if the contracted axes of rhs come last."""
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (group,) = numbers.rhs_group_dimensions
    lc, rc = _ordered(lc, rc)
    free = [axis for axis in range(lhs.ndim) if axis not in lb and axis not in lc]
    columns = [axis for axis in range(rhs.ndim) if axis not in (*rb, *rc, group)]
    others, same = _around(free, ragged, sizes)
    x = transpose(lhs, [*lb, *others, *same, ragged, *lc])
    transposed = bool(columns) and [*columns, *rc] == sorted((*columns, *rc))
    w = transpose(rhs, [*rb, group, *columns, *rc] if transposed else [*rb, group, *rc, *columns])
    open, given = ("x", "y") if transposed else ("y", "x")
    kept, summed = ("K", "N") if transposed else ("N", "K")
    ranks = dict(B=len(lb), P=len(others), R=len(same), M=1, G=1) | {kept: len(columns), summed: len(lc)}
    sizes = _spread(sizes, [lhs.shape[axis] for axis in (*lb, *others)])
    order = [*range(len(lb)), *(len(lb) + [*others, *same, ragged].index(axis) for axis in free)]
    order += range(len(order), len(order) + len(columns))
    return _bound(open, {given: x, "w": w}, ranges(sizes, lhs.shape[ragged], rhs.shape[group], offset), ranks, order, **params)


def _contraction(lhs, rhs, sizes, numbers, ragged, offset, **params):
    """Ragged contraction: by w open."""
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    others, same = _around(lc, ragged, sizes)
    at = [rc[lc.index(axis)] for axis in (*others, *same, ragged)]
    kept = [[axis for axis in range(x.ndim) if axis not in (*b, *c)] for x, b, c in ((lhs, lb, lc), (rhs, rb, rc))]
    x = transpose(lhs, [*lb, *others, *same, ragged, *kept[0]])
    y = transpose(rhs, [*rb, *at, *kept[1]])
    ranks = dict(B=len(lb), P=len(others), R=len(same), M=1, G=1, K=len(kept[0]), N=len(kept[1]))
    groups = sizes.shape[-1]
    sizes = _spread(sizes, [lhs.shape[axis] for axis in (*lb, *others)])
    order = [len(lb), *range(len(lb)), *range(len(lb) + 1, len(lb) + 1 + len(kept[0]) + len(kept[1]))]
    return _bound("w", {"x": x, "y": y}, ranges(sizes, lhs.shape[ragged], groups, offset), ranks, order, **params)


def _batches(lhs, rhs, sizes, numbers, ragged, offset, **params):
    """Ragged batch: a product of matrices, of which those beyond the groups are zero."""
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    before = lb[: lb.index(ragged)]
    sizes = _spread(sizes, [lhs.shape[axis] for axis in before])
    begin, end = ranges(sizes, lhs.shape[ragged], sizes.shape[-1], offset)
    batch = lax.broadcasted_iota(jnp.int32, (*begin.shape, lhs.shape[ragged]), begin.ndim)
    present = ((begin[..., None] <= batch) & (batch < end[..., None])).any(-2)  # (*before, ragged)

    def masked(x, axes):
        # the axes of the mask, in the order of those of x
        mask = transpose(present, sorted(range(present.ndim), key=lambda i: axes[i]))
        return jnp.where(lax.broadcast_in_dim(mask, x.shape, sorted(axes)), x, jnp.zeros((), x.dtype))

    lhs, rhs = masked(lhs, lb[: len(before) + 1]), masked(rhs, rb[: len(before) + 1])
    return read_dot_general(lhs, rhs, dimension_numbers=((lc, rc), (lb, rb)), **params)


def _ordered(lc: Axes, rc: Axes) -> tuple[list[int], list[int]]:
    """Pairs of contracted axes in the order of those of lhs."""
    pairs = sorted(zip(lc, rc, strict=True))
    return [left for left, _ in pairs], [right for _, right in pairs]


def _around(axes: Axes, ragged: int, sizes) -> tuple[list[int], list[int]]:
    """The axes with groups of their own, which are those before the ragged one if the sizes have them, and those with the same groups."""
    before = [*axes[: axes.index(ragged)]] if sizes.ndim > 1 else []
    return before, [axis for axis in axes if axis not in (*before, ragged)]


def _spread(sizes, leading: Axes):
    """Sizes (g,) or (*leading, g) as (*leading, g)."""
    return sizes if sizes.ndim > 1 else jnp.broadcast_to(sizes, (*leading, sizes.shape[0]))


def _bound(open, operands, between, ranks, order, *, precision, preferred_element_type, out_sharding, dtype, implementation):
    """The form with the axes of its result in another order, which `out_sharding` describes."""
    del preferred_element_type  # it has become dtype
    if out_sharding is not None:
        specs = dict(zip(order, out_sharding.spec, strict=False))
        out_sharding = NamedSharding(out_sharding.mesh, P(*(specs.get(axis) for axis in range(len(order)))))
    static = Static(
        ranks=RAGGED.pack(ranks), dtypes=(dtype,), precision=precision, implementation=implementation, out_sharding=out_sharding
    )
    y = RAGGED.bind(open, operands | dict(zip(("begin", "end"), between, strict=True)), static)
    return transpose(y, order)


def product(name: str, arrays: Mapping[str, Any], numbers, *, implementation, **static) -> jax.Array:
    """`arrays`: lhs, rhs, group_sizes, and group_offset if it is given; `numbers`: None for those of `lax.ragged_dot`."""
    return compiled(_product, (name, numbers), FAMILY, implementation, tuple(checked(name, arrays).values()), static, name=name)


def _product(name, numbers, *given, out_sharding, implementation, **static) -> jax.Array:
    lhs, rhs, sizes, *more = given
    (offset,) = more or (None,)
    namesake = functools.partial(lax.ragged_dot, **static)
    if numbers is not None:
        namesake = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, **static)
    said = sizes
    if offset is not None:
        if offset.shape != (1,) or not jnp.issubdtype(offset.dtype, jnp.integer):
            raise TypeError(f"{name}: group_offset is {offset.dtype}{list(offset.shape)}, want an integer array of the shape (1,)")
        said = _sizes_of_rhs(rhs, sizes, numbers)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # lax infers no sharding, the form does
        params, result = lax_params(namesake, lhs, rhs, said)
    params["out_sharding"] = sharding_in_types(name, out_sharding, result.ndim)
    params["group_offset"] = offset
    return read(lhs, rhs, sizes, dtype=result.dtype, implementation=implementation, **params)


def bind(lhs, rhs, group_sizes, *, ragged_dot_dimension_numbers, group_offset, **static) -> jax.Array:
    """A call of lax's primitive, which may hold an array as a parameter, and infers no sharding itself."""
    arrays = dict(lhs=lhs, rhs=rhs, group_sizes=group_sizes) | given(group_offset=group_offset)
    return product("ragged_dot_general", arrays, ragged_dot_dimension_numbers, implementation=None, **static)


def lax_call(form: Labelled, open: str, ranks: Sequence[int]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The operands of lax's primitive, and how it says which axes are what."""
    one, other = form.factors(open)
    lhs, rhs = (other, one) if one == "w" else (one, other)
    axes = {slot: form.axes(slot, ranks) for slot in (lhs, rhs, open)}
    groups = [axes[rhs].index("G0")] if "G0" in axes[rhs] else []
    numbers = lax.RaggedDotDimensionNumbers(dimension_numbers(*axes.values()), [axes[lhs].index("M0")], groups)
    return (lhs, rhs, "begin"), dict(ragged_dot_dimension_numbers=numbers, group_offset=None)


def _sizes_of_rhs(rhs, sizes, numbers):
    """The type of the sizes of the groups that rhs has, which with an offset are a part of all."""
    dims = (0,) if numbers is None else numbers.rhs_group_dimensions
    if len(dims) != 1 or not 0 <= dims[0] < rhs.ndim or sizes.ndim == 0:
        return sizes  # no such axis, or lax refuses
    return jax.ShapeDtypeStruct((*sizes.shape[:-1], rhs.shape[dims[0]]), sizes.dtype)


FAMILY = declare(
    Family("ragged", lax_primitive=_compat.ragged_dot_general_p, names="ragged", read=read, bind=bind, lax_call=lax_call),
    CudaRagged(),
    TritonRagged(),
    XlaRagged(),
)

RANGES = {"begin": Companion(("B", "P", "G")), "end": Companion(("B", "P", "G"))}
RAGGED = define(
    TiedForm(
        name="ragged",
        slots={"x": ("B", "P", "R", "M", "K"), "w": ("B", "G", "K", "N"), "y": ("B", "P", "R", "M", "N")},
        roles={"y": "nn", "x": "nt", "w": "tn"},
        window=(),
        family=FAMILY,
        companions=RANGES,
        tied=("M", "G"),
        ties=tuple(RANGES),
        cut=cut,
        examples=examples,
    )
)

_LINEAR, _GATED = (
    declare(Family(name, lax_primitive=FAMILY.lax_primitive, names=name, lax_call=lax_call), *FAMILY.implementations[:-1], Composition())
    for name in ("ragged_linear", "ragged_gated_linear_unit")
)


# A row of no group is zero, and not read: what is chosen for each row, which is the bias, and whether it has a group at all, is a ragged
# product itself.  So it is zero there, is split over devices as that is, and its transpose is a sum over the rows of each group.


def _spread_over_rows(operation, product, operands, values: jax.Array, like: jax.Array, result: str, static: Static) -> jax.Array:
    """Return for each row the values of its group, (B, G) or (B, G, N); `like` is the result of this name.  Ones, times the values."""
    rank = operation.unpack(static.ranks)
    rows = operation.position(result, "M", static.ranks) + 1
    ones = lax.full_like(like.sum(tuple(range(rows, like.ndim))), 1, values.dtype)
    inner = Static(
        ranks=RAGGED.pack(rank | {"K": 0, "N": values.ndim - rank["B"] - 1}),
        dtypes=(like.dtype,),
        precision=(lax.Precision.HIGHEST,) * 2,
        implementation=static.implementation,
        in_place=static.in_place,
    )
    return product(RAGGED, "y", operands | {"x": ones, "w": values}, inner)


def _masked_rows_of_no_group(operation: Operation, product, operands, y: jax.Array, static: Static) -> jax.Array:
    """The result, or its tangent, with zeros in the rows of no group."""
    if "scale" not in operands and static.options.activation != "sigmoid":
        return y  # zero there already
    lead = operation.position(operation.open, "M", static.ranks) + 1
    rank = operation.unpack(static.ranks)
    if product is Form.bind:
        inside = group_mask(operands["begin"], operands["end"], y.sum(tuple(range(lead, y.ndim))), rank["R"])
    else:  # a device may have a part of the groups, and the product is a sum over devices
        ones = jnp.ones(operands["w"].shape[: rank["B"] + 1], y.dtype)
        inside = _spread_over_rows(operation, product, operands, ones, y, operation.open, static) != 0
    return jnp.where(lax.expand_dims(inside, range(lead, y.ndim)), y, jnp.zeros((), y.dtype))


GROUPS = epilogue.Groups(_spread_over_rows, _masked_rows_of_no_group)


@functools.cache
def ragged_linear(bias: bool, scale: bool) -> Operation:
    """y[b,p,r,m,n] = scale[b,p,r,m] activation(Σ_k x[b,p,r,m,k] w[b,g,k,n] + bias[b,g,n]), where g is the group of the row."""
    labels, rows = ("B", "G", "N") if bias else None, RAGGED.slots["y"][:-1] if scale else None
    return epilogue.operation("ragged_linear", _LINEAR, RAGGED, "y", groups=GROUPS, bias=labels, scale=rows)


@functools.cache
def ragged_gated_linear_unit(scale: bool) -> Operation:
    """y[b,p,r,m,n] = scale[b,p,r,m] activation(Σ_k x[b,p,r,m,k] w[b,g,k,0,n]) Σ_k x[b,p,r,m,k] w[b,g,k,1,n]."""
    rows = RAGGED.slots["y"][:-1] if scale else None
    return epilogue.operation("ragged_gated_linear_unit", _GATED, RAGGED, "y", gated=True, groups=GROUPS, scale=rows)
