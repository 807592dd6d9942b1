"""A bilinear operation as a trilinear form with one open slot, and all the rules that JAX needs for its primitives.

    y = conv(x, w)  is  ∂⟨x, w, y⟩/∂y.  With y open the form is fprop, with x open dgrad, with w open wgrad.

Each slot has axis labels.  A *batch* label is in all three slots.  A *pair* label is in exactly two: it is contracted if both are operands,
and kept if one is open.  A *window* label is in one slot; the geometry ties it to the others.  A label stands for `ranks` neighbouring
axes: none for the batch of a plain matmul, one more for each vmap.  So vmap never merges axes, and a sharded axis keeps its sharding.

The two operands of a product are its *factors*.  A form may have further operands, *companions* such as scales or group sizes, with labels
of their own.  For every fixed companion the form is trilinear, so the roles are the same, and each role takes the companions as operands.

Shape, JVP, transpose, batching and sharding follow from the labels.  The rules of derivatives and batching are below, in the order in which
`define` registers them; those that operations share are in `primitive`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
from jax.interpreters import ad

from jaxext.core import partition, primitive
from jaxext.core.call import Call
from jaxext.core.family import Family
from jaxext.core.labelled import Labelled
from jaxext.core.primitive import owner
from jaxext.core.static import Static


@dataclasses.dataclass(frozen=True)
class Companion:
    """An operand in which a form is not bilinear.

    Attributes:
      labels: of its axes: labels of the form, except its window's, and including the batch label that all slots share.
      tangent: `tangent(form, open, operands, dot, static)` is the tangent of a product for the tangent `dot` of this operand.  It is
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
      examples: `examples(call)` gives companions with which a call can be measured, where random numbers would have no meaning.
    """

    name: str
    slots: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, str]
    window: tuple[str, ...]
    family: Family
    companions: Mapping[str, Companion] = dataclasses.field(default_factory=dict)
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

    def shared(self, *slots: str) -> str:
        """The first label that is in exactly these slots."""
        return next(label for label in self.free if {s for s in self.slots if label in self.slots[s]} == set(slots))

    def label_to_map(self, open: str, mapped: Sequence[str]) -> str:
        """The label that an axis joins which vmap maps in these operands, and so in the open slot.

        It is the first of those that the fewest other operands have, since these are broadcast.
        """
        free = [label for label in self.free if label not in self.unmapped]
        having = {label: {name for name, labels in self.labels.items() if label in labels} for label in free}
        return min((label for label in having if having[label] >= {*mapped, open}), key=lambda label: len(having[label]))

    def bind(self, open: str, operands: Mapping[str, jax.Array], static: Static) -> jax.Array:
        """The open slot, from the other two and the companions."""
        return self.primitives[open].bind(*primitive.prepare(self, *(operands[slot] for slot in self.operands(open))), static=static)


def form_of(call: Call) -> Form | None:
    """The form of the call's product.  None if it is an operation without one."""
    if call.operation is not None:
        return call.operation.form
    return next(form for form, open in owner.values() if form.op(open) == call.op)


AForm = TypeVar("AForm", bound=Form)


def define(form: AForm) -> AForm:
    """Create the form's three primitives and register all their rules."""
    for name, companion in form.companions.items():
        assert {form.shared(*form.slots)} <= {*companion.labels} <= {*form.free}, f"{form.name}: {name} has the labels {companion.labels}"
    for open in form.roles:
        made = primitive.make(form, open, _batch_rule, multiple_results=False)
        ad.defjvp(made, *(functools.partial(_tangent, form, open, name) for name in form.operands(open)))
        ad.primitive_transposes[made] = functools.partial(_transpose_rule, form, open)
        form.primitives[open] = made
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


def _tangent(form, open, name, dot, *args, static):
    """The tangent of a product for the tangent of one operand.  The product is linear in each factor."""
    operands = dict(zip(form.operands(open), args, strict=True))
    if name not in form.companions:
        return form.primitives[open].bind(*(operands | {name: dot}).values(), static=static)
    tangent = form.companions[name].tangent
    if tangent is None:
        raise TypeError(f"{form.op(open)}: {name} is not differentiable, want it constant: jax.lax.stop_gradient")
    avals = [jax.typeof(x) for x in args]
    if any(map(partition.explicit, avals)):  # it has the product's sharding, though its operands may be split otherwise
        static = static.replace(out_sharding=primitive.sharding_rule(form, open, *avals, static=static))
    return tangent(form, open, operands, dot, static)


def _transpose_rule(form, open, ct, *args, static):
    """Swap the open slot with the linear factor: ⟨x, w, y⟩ is linear in each of its slots."""
    operands = dict(zip(form.operands(open), args, strict=True))
    (slot,) = (name for name, x in operands.items() if ad.is_undefined_primal(x))
    if slot in form.companions:
        raise TypeError(f"{form.op(open)}: not linear in {slot}, so it has no transpose in {slot}")
    linear = operands.pop(slot).aval
    if type(ct) is ad.Zero:
        return [ad.Zero(linear) if name == slot else None for name in form.operands(open)]
    (factor,) = (x for name, x in operands.items() if name not in form.companions)
    static = static.replace(dtypes=(linear.dtype,), out_sharding=partition.cotangent_sharding(linear, ct, factor))
    cotangent = form.bind(slot, {open: ct, **operands}, static)
    return [cotangent if name == slot else None for name in form.operands(open)]


def _batch_rule(form, open, args, dims, *, static):
    """The mapped axis becomes the first axis of the label that is in exactly the mapped slots and the open one, or in few others."""
    names = form.operands(open)
    mapped = {name: d for name, d in zip(names, dims, strict=True) if d is not None}
    label = form.label_to_map(open, list(mapped))
    operands, joined = form.joined(label, open, dict(zip(names, args, strict=True)), mapped, static)
    return form.bind(open, operands, joined), form.position(open, label, static.ranks)
