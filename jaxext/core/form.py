"""A bilinear operation as a trilinear form with one open slot, and all the rules that JAX needs for its primitives.

    y = conv(x, w)  is  ∂⟨x, w, y⟩/∂y.  With y open the form is fprop, with x open dgrad, with w open wgrad.

Each slot has axis labels.  A *batch* label is in all three slots.  A *pair* label is in exactly two: it is contracted if both are operands,
and kept if one is open.  A *window* label is in one slot; the geometry ties it to the others.  A label stands for `ranks` neighbouring
axes: none for the batch of a plain matmul, one more for each vmap.  So vmap never merges axes, and a sharded axis keeps its sharding.

The two operands of a product are its *factors*.  A form may have further operands, *companions* such as scales or group sizes, with labels
of their own.  For every fixed companion the form is trilinear, so the roles are the same, and each role takes the companions as operands.

A companion can *tie* the elements of a label to each other, as group sizes tie the rows of a ragged product: which rows are a group depends
on the rows before.  A tied label has one axis, since no vmap joins it.  It may stand in one slot alone, which the companions then choose
from.  A device that has a part of a tied label computes with companions that are `cut` to its part.

Shape, JVP, transpose, batching and sharding follow from the labels.  They are below, in the order in which `define` registers them.  The
parameters of a primitive are static and hashable.  `dtype` and `out_sharding` describe the result; no rule changes the others:

    ranks           axes per pair and batch label, in the order of `Form.free`
    window          the geometry (`Window`), or None
    dtype           of the result
    precision       as lax canonicalises it
    implementation  the name that the user asked for, or None; or `Invariant` of that
    out_sharding    of the result, on explicit meshes, if the user or a transpose sets it
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxext import _compat
from jaxext._target import compute_capability
from jaxext.core import flops, partition
from jaxext.core.call import Call
from jaxext.core.choose import run
from jaxext.core.family import Family, in_use
from jaxext.core.labelled import Labelled
from jaxext.tables import in_force, record

# The form and the open slot of each primitive, or the operation and its first result, to interpret jaxprs.
owner: dict[Primitive, tuple[Any, str]] = {}


@dataclasses.dataclass(frozen=True)
class Companion:
    """An operand in which a form is not bilinear.

    Attributes:
      labels: of its axes: labels of the form, except its window's, and including the batch label that all slots share.
      tangent: `tangent(form, open, operands, dot, **params)` is the tangent of a product for the tangent `dot` of this operand.  It is
        written in forms and jnp, and linear in `dot`; `operands` maps the names of all operands to arrays.  None: not differentiable.
    """

    labels: tuple[str, ...]
    tangent: Callable[..., jax.Array] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Form(Labelled):
    """A trilinear form.

    Attributes:
      slots: the labels of each slot.
      roles: of each slot, the role in which it is open.
      companions: further operands.
      tied: the labels whose elements the companions tie to each other.
      cut: `cut(companions, label, first, size)` gives the companions of a device that has only the `size` elements of a tied label from
        `first` (an int32 scalar) on.  Companions themselves are not split along a tied label.
      examples: `examples(call)` gives companions with which a call can be measured, where random numbers would have no meaning.
    """

    name: str
    slots: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, str]
    window: tuple[str, ...]
    family: Family
    companions: Mapping[str, Companion] = dataclasses.field(default_factory=dict)
    tied: tuple[str, ...] = ()
    cut: Callable[[dict[str, jax.Array], str, jax.Array, int], dict[str, jax.Array]] | None = None
    examples: Callable[[Call], dict[str, jax.Array]] | None = None
    primitives: dict = dataclasses.field(default_factory=dict)  # open slot -> primitive, filled by `define`

    def op(self, open: str) -> str:
        """The name of the primitive, of its kernels, and in profiles."""
        return f"{self.name}_{self.roles[open]}"

    def factors(self, open: str) -> tuple[str, str]:
        first, second = (slot for slot in self.slots if slot != open)
        return first, second

    def operands(self, open: str) -> tuple[str, ...]:
        """The factors, then the companions."""
        return *self.factors(open), *self.companions

    @functools.cached_property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The labels of each slot and companion."""
        return {**self.slots, **{name: companion.labels for name, companion in self.companions.items()}}

    @functools.cached_property
    def chosen(self) -> tuple[str, ...]:
        """The labels of one slot alone that companions tie: each product of two numbers meets one element of them."""
        return tuple(label for label in self.tied if sum(label in labels for labels in self.slots.values()) == 1)

    def shared(self, *slots: str) -> str:
        """The first label that is in exactly these slots."""
        return next(label for label in self.free if {s for s in self.slots if label in self.slots[s]} == set(slots))

    def label_to_map(self, open: str, mapped: Sequence[str]) -> str:
        """The label that an axis joins which vmap maps in these operands, and so in the open slot.

        It is the first of those that the fewest other operands have, since these are broadcast.
        """
        having = {label: {name for name, labels in self.labels.items() if label in labels} for label in self.free if label not in self.tied}
        return min((label for label in having if having[label] >= {*mapped, open}), key=lambda label: len(having[label]))

    @functools.cached_property
    def uncut(self) -> dict[str, str]:
        """The axes of tied labels, as those of companions are called, which no device has a part of."""
        return {f"{label}0": f"{label}whole" for label in self.tied}

    def axes_to_split(self, name: str, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of an operand as devices may split them."""
        return tuple(self.uncut.get(axis, axis) for axis in axes) if name in self.companions else tuple(axes)

    @functools.cached_property
    def gathered(self) -> set[tuple[str, str]]:
        """The companions with their tied axes, whose sharding does not matter."""
        return {(name, axis) for name in self.companions for axis in self.uncut}

    def call(self, open, avals, *, platform, arch, splitter, ranks, window, dtype, precision, **_) -> Call:
        names = self.operands(open)
        sizes = self.sizes(open, [aval.shape for aval in avals], ranks, window)
        return Call(
            op=self.op(open),
            open=open,
            labels=self.labels,
            axes={name: self.axes(name, ranks) for name in self.labels},
            sizes=self.totals(sizes, ranks) if window is None else self.totals(sizes, ranks) | window.sizes,
            extents=sizes,
            dtypes={name: aval.dtype for name, aval in zip(names, avals, strict=True)},
            dtype=dtype,
            window=window,
            precision=precision,
            platform=platform,
            arch=arch,
            device=_compat.device_kind(platform),
            splitter=splitter,
            rows=self.rows(open),
        )

    def bind(self, open: str, operands: Mapping[str, jax.Array], **params) -> jax.Array:
        flops.tell(owner)
        in_use.add(self.family)
        args = _compat.align_varying(*(operands[slot] for slot in self.operands(open)))
        return self.primitives[open].bind(*args, **params)


def form_of(call: Call) -> Form | None:
    """The form of the call's product.  None if it is an operation without one."""
    if call.operation is not None:
        return call.operation.form
    return next(form for form, open in owner.values() if form.op(open) == call.op)


def define(form: Form) -> Form:
    """Create the form's three primitives and register all their rules."""
    for name, companion in form.companions.items():
        assert {form.shared(*form.slots)} <= {*companion.labels} <= {*form.free}, f"{form.name}: {name} has the labels {companion.labels}"
    assert {*form.tied} <= {*form.free}, f"{form.name}: the tied labels are {form.tied}"
    for open in form.roles:
        primitive = _compat.product_primitive(
            form.op(open),
            functools.partial(_shape_rule, form, open),
            _dtype_rule,
            functools.partial(_sharding_rule, form, open),
        )
        ad.defjvp(primitive, *(functools.partial(_tangent, form, open, name) for name in form.operands(open)))
        ad.primitive_transposes[primitive] = functools.partial(_transpose_rule, form, open)
        batching.primitive_batchers[primitive] = functools.partial(_batch_rule, form, open)
        _compat.register_lowering(primitive, functools.partial(_lower, form, open))
        form.primitives[open] = primitive
        owner[primitive] = form, open
    return form


def dimension_numbers(lhs: Sequence[str], rhs: Sequence[str], result: Sequence[str]):
    """`lax.dot_general`'s dimension numbers for operands and a result of named axes."""
    contract = [axis for axis in lhs if axis in rhs and axis not in result]
    batch = [axis for axis in lhs if axis in rhs and axis in result]
    (lc, rc), (lb, rb) = ([tuple(map(operand.index, axes)) for operand in (lhs, rhs)] for axes in (contract, batch))
    return (lc, rc), (lb, rb)


def rows_columns_depth(lhs: Sequence[int], rhs: Sequence[int], dims) -> tuple[int, int, int]:
    """The sizes of a product of these shapes, of which the rows are no fewer than the columns, and the batch is no part."""
    sides = zip((lhs, rhs), *dims, strict=True)
    free = [math.prod(n for i, n in enumerate(shape) if i not in (*c, *b)) for shape, c, b in sides]
    return max(free), min(free), math.prod(lhs[i] for i in dims[0][0])


def _shape_rule(form, open, *avals, ranks, window, **_):
    sizes = form.sizes(open, [aval.shape for aval in avals], ranks, window)
    return tuple(sizes[axis] for axis in form.axes(open, ranks))


def _dtype_rule(*_, dtype, **__):
    return dtype


def _sharding_rule(form, open, *avals, ranks, out_sharding, **_):
    """Called only on explicit meshes."""
    return form.sharding(open, avals, ranks, out_sharding, form.window, form.gathered)


def _tangent(form, open, name, dot, *args, **params):
    """The tangent of a product for the tangent of one operand.  The product is linear in each factor."""
    operands = dict(zip(form.operands(open), args, strict=True))
    if name not in form.companions:
        return form.primitives[open].bind(*(operands | {name: dot}).values(), **params)
    tangent = form.companions[name].tangent
    if tangent is None:
        raise TypeError(f"{form.op(open)}: {name} is not differentiable, want it constant: jax.lax.stop_gradient")
    return tangent(form, open, operands, dot, **params)


def _transpose_rule(form, open, ct, *args, dtype, out_sharding, **params):
    """Swap the open slot with the linear factor: ⟨x, w, y⟩ is linear in each of its slots."""
    operands = dict(zip(form.operands(open), args, strict=True))
    (slot,) = (name for name, x in operands.items() if ad.is_undefined_primal(x))
    if slot in form.companions:
        raise TypeError(f"{form.op(open)}: not linear in {slot}, so it has no transpose in {slot}")
    linear = operands.pop(slot).aval
    if type(ct) is ad.Zero:
        return [ad.Zero(linear) if name == slot else None for name in form.operands(open)]
    (factor,) = (x for name, x in operands.items() if name not in form.companions)
    cotangent = form.bind(
        slot,
        {open: ct, **operands},
        dtype=linear.dtype,
        out_sharding=partition.of_cotangent(linear, ct, factor),
        **params,
    )
    return [cotangent if name == slot else None for name in form.operands(open)]


def _batch_rule(form, open, args, dims, **params):
    """The mapped axis becomes the first axis of the label that is in exactly the mapped slots and the open one, or in few others."""
    names = form.operands(open)
    mapped = {name: d for name, d in zip(names, dims, strict=True) if d is not None}
    label = form.label_to_map(open, list(mapped))
    operands, joined = form.joined(label, open, dict(zip(names, args, strict=True)), mapped, params)
    return form.bind(open, operands, **joined), form.position(open, label, params["ranks"])


def _lower(form, open, platform, arch, splitter, *args, ranks, implementation, out_sharding, **params):
    """Lower to the chosen implementation on one device's part of the operands, inside a program that splits them over devices."""
    slots = form.operands(open)
    sizes = form.sizes(open, [x.shape for x in args], ranks, params["window"])

    def local(splitter, summed, part, *args):
        args = _compat.align_varying(*cut(form, slots, args, part, sizes))  # explicit: a shard_map, in which not all operands vary
        call = form.call(open, args, platform=platform, arch=arch, splitter=splitter, ranks=ranks, **params)
        y = run(call, form.family.implementations, implementation, dict(zip(slots, args, strict=True)))
        return (y if summed is None else summed(y, form.axes(open, ranks)),)

    params_of_all = dict(params, ranks=ranks, implementation=implementation, out_sharding=out_sharding)
    names = partition.Names(
        operands=tuple(form.axes_to_split(name, form.axes(name, ranks)) for name in slots),
        results=(form.axes(open, ranks),),
        whole=(*form.window, *form.uncut.values()),
    )
    known_as = known(splitter, platform, form.primitives[open], dict(zip(slots, args, strict=True)), params_of_all, form.family)
    (y,) = partition.lower(
        lambda *args: (form.primitives[open].bind(*args, **params_of_all),), known_as, local, names, splitter, platform, out_sharding, *args
    )
    return y


def cut(form: Form, names: Sequence[str], args: Sequence[jax.Array], part: Callable, sizes: Mapping[str, int]) -> tuple[jax.Array, ...]:
    """The operands of one device, whose companions are cut to the part that it has of each tied label."""
    companions = {name: x for name, x in zip(names, args, strict=True) if name in form.companions}
    for label in form.tied:
        if (has := part(f"{label}0", sizes[f"{label}0"])) is not None:
            assert form.cut is not None
            companions = form.cut(companions, label, *has)
    return tuple(companions.get(name, x) for name, x in zip(names, args, strict=True))


def known(splitter, platform, primitive, operands, params, family) -> dict[str, str]:
    """Return metadata that identify an operation on these operands to XLA's partitioner: those with equal metadata share a callback."""
    if splitter is not _compat.Splitter.LABELS:
        return {}
    implementations = family.implementations
    code = in_force.known_as(platform, [each.name for each in implementations]) + record.known_as(compute_capability(platform))
    arrays = ", ".join(f"{name} {x.dtype}{[*x.shape]}" for name, x in operands.items())
    operation = f"{primitive} of {arrays} {params} {code}"
    # If `version` is None, a user's implementation is identified only by a hash of its class's file.
    return partition.known(operation, by_version=all(each.version is not None for each in implementations))
