"""A bilinear operation as a trilinear form with one open slot, and all the rules that JAX needs for its primitives.

    y = conv(x, w)  is  ∂⟨x, w, y⟩/∂y.  With y open the form is fprop, with x open dgrad, with w open wgrad.

Each slot has axis labels.  A *batch* label is in all three slots.  A *pair* label is in exactly two: it is contracted if both are operands,
and kept if one is open.  A *window* label is in one slot; the geometry ties it to the others.  A label stands for `ranks` neighbouring
axes: none for the batch of a plain matmul, one more for each vmap.  So vmap never merges axes, and a sharded axis keeps its sharding.

The two operands of a product are its *factors*.  A form may have further operands, *companions* such as scales or group sizes, with labels
of their own.  For every fixed companion the form is trilinear, so the roles are the same, and each role takes the companions as operands.

Shape, JVP, transpose, batching and sharding follow from the labels.  They are below, in the order in which `define` registers them.  The
parameters of a primitive are static and hashable.  `dtype` and `out_sharding` describe the result; no rule changes the others:

    ranks           axes per pair and batch label, in the order of `Form.free`
    window          the geometry (`Window`), or None
    dtype           of the result
    precision       as lax canonicalises it
    implementation  the name that the user asked for, or None
    out_sharding    of the result, on explicit meshes, if the user or a transpose sets it
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding

from jaxext import _compat
from jaxext.forms import flops, partition
from jaxext.forms.call import Call
from jaxext.forms.choose import run
from jaxext.forms.family import Family
from jaxext.tables import in_force

# The form and the open slot of each primitive, to interpret jaxprs.
owner: dict[Primitive, tuple[Form, str]] = {}

# True inside `in_place_of_lax`, part of jit's cache key.  False while an implementation is lowered, since these are written in lax.
replacing_lax = jax.make_user_context(False)


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
class Form:
    """A trilinear form.  `slots` are the labels of each slot, `roles` the role in which it is open, `companions` further operands."""

    name: str
    slots: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, str]
    window: tuple[str, ...]
    family: Family
    companions: Mapping[str, Companion] = dataclasses.field(default_factory=dict)
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
    def free(self) -> tuple[str, ...]:
        """Every label except the window's, in order of first use."""
        return tuple(dict.fromkeys(label for labels in self.slots.values() for label in labels if label not in self.window))

    def shared(self, *slots: str) -> str:
        """The first label that is in exactly these slots."""
        return next(label for label in self.free if {s for s in self.slots if label in self.slots[s]} == set(slots))

    def axes(self, slot: str, ranks: Sequence[int]) -> tuple[str, ...]:
        """A name for each axis of a slot: the axes of label N are "N0", "N1" and so on; a window label names its only axis."""
        rank = dict(zip(self.free, ranks, strict=True))
        numbered = ([label] if label in self.window else [f"{label}{i}" for i in range(rank[label])] for label in self.labels[slot])
        return tuple(axis for axes in numbered for axis in axes)

    def position(self, slot: str, label: str, ranks: Sequence[int]) -> int:
        """The position of the first axis of `label` in a slot."""
        rank = dict(zip(self.free, ranks, strict=True))
        before = self.labels[slot][: self.labels[slot].index(label)]
        return sum(1 if other in self.window else rank[other] for other in before)

    def bind(self, open: str, operands: Mapping[str, jax.Array], **params) -> jax.Array:
        flops.tell(owner)
        args = _compat.align_varying(*(operands[slot] for slot in self.operands(open)))
        return self.primitives[open].bind(*args, **params)


def define(form: Form) -> Form:
    """Create the form's three primitives and register all their rules."""
    for name, companion in form.companions.items():
        assert {form.shared(*form.slots)} <= {*companion.labels} <= {*form.free}, f"{form.name}: {name} has the labels {companion.labels}"
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


def _sizes(form, open, shapes, ranks, window):
    """The size of every axis, by name."""
    sizes = {} if window is None else window.sizes
    for slot, shape in zip(form.operands(open), shapes, strict=True):
        for axis, n in zip(form.axes(slot, ranks), shape, strict=True):
            assert sizes.setdefault(axis, n) == n, f"{form.name}: axis {axis} of {slot} is {n}, elsewhere {sizes[axis]}"
    return sizes


def _shape_rule(form, open, *avals, ranks, window, **_):
    sizes = _sizes(form, open, [aval.shape for aval in avals], ranks, window)
    return tuple(sizes[axis] for axis in form.axes(open, ranks))


def _dtype_rule(*_, dtype, **__):
    return dtype


def _sharding_rule(form, open, *avals, ranks, out_sharding, **_):
    """Sharding in types: each axis of the result is sharded as in the operands.  Called only on explicit meshes."""
    name = form.op(open)
    sharded: dict[str, list] = {}
    for slot, aval in zip(form.operands(open), avals, strict=True):
        for axis, spec in zip(form.axes(slot, ranks), aval.sharding.spec.partitions, strict=True):
            if spec is not None and axis in form.window:
                raise _compat.ShardingTypeError(f"{name}: window axis {axis} of {slot} is sharded over {spec!r}, want it whole")
            if spec is not None:
                sharded.setdefault(axis, []).append((slot, spec))
    if out_sharding is not None:
        return out_sharding
    kept = form.axes(open, ranks)
    for axis, by_slot in sharded.items():
        specs = list(dict.fromkeys(spec for _, spec in by_slot))
        if len(specs) > 1:
            raise _compat.ShardingTypeError(f"{name}: axis {axis} is sharded over {specs[0]!r} and over {specs[1]!r}, want one sharding")
        if axis not in kept and {slot for slot, _ in by_slot} >= {*form.factors(open)}:
            raise _compat.ShardingTypeError(
                f"{name}: the sum runs over axis {axis}, which is sharded over {specs[0]!r}, so it is ambiguous how the output should be"
                " sharded: say so by `out_sharding`"
            )
    mesh = next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty), avals[0].sharding.mesh)
    return NamedSharding(mesh, jax.P(*(sharded[axis][0][1] if axis in sharded else None for axis in kept)))


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
        raise TypeError(f"{form.op(open)}: not linear in {slot}, which no transpose can be taken in")
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


def _batch_rule(form, open, args, dims, *, ranks, out_sharding, **params):
    """The mapped axis becomes the first axis of the label that is in exactly the mapped slots and the open one.

    If a companion is mapped, it is the label that all slots share.  Unmapped operands that have the label are broadcast.
    """
    names = form.operands(open)
    operands = dict(zip(names, args, strict=True))
    mapped = {name: d for name, d in zip(names, dims, strict=True) if d is not None}
    label = form.shared(*form.slots) if mapped.keys() & form.companions.keys() else form.shared(*mapped, open)
    specs = [jax.typeof(operands[name]).sharding.spec.partitions[d] for name, d in mapped.items()] if out_sharding is not None else []
    size = next(operands[name].shape[d] for name, d in mapped.items())
    for name in names:
        if label in form.labels[name]:
            x, at = operands[name], form.position(name, label, ranks)
            operands[name] = jnp.moveaxis(x, mapped[name], at) if name in mapped else _repeated(x, at, size)
    out = form.position(open, label, ranks)
    if out_sharding is not None:
        out_sharding = partition.insert(out_sharding, out, next((spec for spec in specs if spec is not None), None))
    ranks = tuple(n + (free == label) for free, n in zip(form.free, ranks, strict=True))
    return form.bind(open, operands, ranks=ranks, out_sharding=out_sharding, **params), out


def _repeated(x, axis, size):
    """x broadcast along a new axis."""
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))


def asked(form, open, avals, *, platform, arch, splitter, ranks, window, dtype, precision, **_) -> Call:
    """The `Call` of one device, from the shapes and dtypes of its operands."""
    names = form.operands(open)
    sizes = _sizes(form, open, [aval.shape for aval in avals], ranks, window)
    total = {label: math.prod(sizes[f"{label}{i}"] for i in range(n)) for label, n in zip(form.free, ranks, strict=True)}
    return Call(
        op=form.op(open),
        open=open,
        labels=form.labels,
        axes={name: form.axes(name, ranks) for name in form.labels},
        sizes=total if window is None else total | window.sizes,
        extents=sizes,
        dtypes={name: aval.dtype for name, aval in zip(names, avals, strict=True)},
        dtype=dtype,
        window=window,
        precision=precision,
        platform=platform,
        arch=arch,
        splitter=splitter,
    )


def _lower(form, open, platform, arch, splitter, *args, ranks, implementation, out_sharding, **params):
    """Lower to the chosen implementation on one device's part of the operands, inside a program that splits them over devices."""
    slots = form.operands(open)
    table = in_force.current()  # read now: XLA may call `local` later, outside this context

    def local(splitter, *args):
        args = _compat.align_varying(*args)  # an explicit mesh becomes a shard_map, in which replicated operands vary over no axis
        call = asked(form, open, args, platform=platform, arch=arch, splitter=splitter, ranks=ranks, **params)
        with replacing_lax(False):
            measured = in_force.measured(call, table)
            return run(call, form.family.implementations, implementation, measured, dict(zip(slots, args, strict=True)))

    itself = functools.partial(form.primitives[open].bind, ranks=ranks, implementation=implementation, out_sharding=out_sharding, **params)
    names = partition.Names(operands=tuple(form.axes(slot, ranks) for slot in slots), result=form.axes(open, ranks), whole=form.window)
    known_as = {}
    if splitter is _compat.Splitter.LABELS:
        implementations = form.family.implementations
        product = f"{itself!r} {in_force.known_as(platform, [each.name for each in implementations], table)}"
        # If `version` is None, a user's implementation is identified only by a hash of its class's file.
        known_as = partition.known(product, by_version=all(each.version is not None for each in implementations))
    return partition.lower(itself, known_as, local, names, splitter, platform, out_sharding, *args)
