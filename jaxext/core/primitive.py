"""The builder of primitives, of forms and of operations: the rules that follow from labels in the same way for both.

A primitive has the parameter `static` (`Static`).  One with several results also has `wanted`, the names of those that are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching

from jaxext import _compat
from jaxext._target import compute_capability
from jaxext.core import entry_points, flops, partition
from jaxext.core.choose import chosen, replacing_lax
from jaxext.core.family import in_use
from jaxext.core.labelled import Labelled
from jaxext.core.static import Static, slices_in_place
from jaxext.tables import active, record

# The form and the open slot of each primitive, or the operation and its first result, to interpret jaxprs.
owner: dict[Primitive, tuple[Any, str]] = {}


def make(labelled: Labelled, open: str, batch_rule: Callable, *, multiple_results: bool) -> Primitive:
    """Create the primitive that computes `open`, with its types, its batching rule and its lowering; derivatives are the caller's."""
    constructor = _compat.operation_primitive if multiple_results else _compat.product_primitive
    rules = (functools.partial(rule, labelled, open) for rule in (_shape_rule, _dtype_rule, sharding_rule))
    primitive = constructor(labelled.op(open), *rules)
    batching.primitive_batchers[primitive] = functools.partial(batch_rule, labelled, open)
    _compat.register_lowering(primitive, functools.partial(_lower, labelled, open), multiple_results=multiple_results)
    owner[primitive] = labelled, open
    return primitive


def prepare(labelled: Labelled, *args: Any) -> list[Any]:
    """The operands of a primitive that is bound next."""
    entry_points.load()
    flops.register(owner)
    in_use.add(labelled.family)
    return list(_compat.align_varying(*args))


def _shape_rule(labelled, open, *avals, static: Static, result=None, **_):
    _compat.refuse_parts(labelled.op(open), "the sharding of an operand", *(aval.sharding for aval in avals))
    _compat.refuse_parts(labelled.op(open), "out_sharding", static.out_sharding)
    sizes = labelled.sizes(open, [aval.shape for aval in avals], static.ranks, static.window)
    return tuple(sizes[axis] for axis in labelled.axes(result or open, static.ranks))


def _dtype_rule(labelled, open, *_, static: Static, result=None, **__):
    return static.dtype if result is None else dict(zip(labelled.results, static.dtypes, strict=True))[result]


def sharding_rule(labelled, open, *avals, static: Static, result=None, **_):
    """Called only on explicit meshes.  An axis of a result of an operation is sharded as in `out_sharding`, if it is given."""
    ranks = static.ranks
    if static.out_sharding is not None and result is not None:
        return partition.renamed(static.out_sharding, labelled.axes(open, ranks), labelled.axes(result, ranks))
    return labelled.sharding(result or open, avals, ranks, static.out_sharding, labelled.unsplit_axes(ranks), labelled.gathered)


def _lower(labelled, open, platform, arch, partitioner, *args, static: Static, wanted: tuple[str, ...] | None = None):
    """Lower to the chosen implementation on one device's part of the operands, inside a program that splits them over devices."""
    names, results, primitive = labelled.operands(open), wanted or (open,), labelled.primitives[open]
    sizes = labelled.sizes(open, [x.shape for x in args], static.ranks, static.window)
    params = dict(static=static) if wanted is None else dict(static=static, wanted=wanted)

    def local(partitioner, summed, part, *args):
        operands = labelled.local_operands(dict(zip(names, args, strict=True)), part, sizes)
        split = {axis for axis in sizes if part(axis, sizes[axis]) is not None}
        unfused = labelled.unfused(static.options, split, summed)
        if unfused is None or not labelled.factors(open):  # else the sum varies over fewer manual axes than its factors, as a bias may
            operands = dict(zip(names, _compat.align_varying(*operands.values()), strict=True))
        device = dict(platform=platform, arch=arch, partitioner=partitioner)
        of_part = static if unfused is None else static.replace(options=unfused)
        call = labelled.call(open, list(operands.values()), static=of_part, wanted=results, **device)
        if unfused is not None:
            return labelled.lower_unfused(call, operands, summed)
        choice = chosen(call, labelled.family.implementations, static.implementation)
        with replacing_lax(False), slices_in_place(static.in_place):  # also for the calls of a reference
            ys = call.checked(choice.implementation, choice.compute(operands))
        ys = ys if call.further else (ys,)
        return ys if summed is None else tuple(summed(y, labelled.axes(name, static.ranks)) for name, y in zip(results, ys, strict=True))

    axes = partition.Names(
        operands=tuple(labelled.axes_to_split(name, labelled.axes(name, static.ranks)) for name in names),
        results=tuple(labelled.axes(name, static.ranks) for name in results),
        unsharded=(*labelled.unsplit_axes(static.ranks), *labelled.uncut.values()),
    )
    metadata = _metadata(partitioner, platform, primitive, dict(zip(names, args, strict=True)), params, labelled.family)

    def itself(*args):
        ys = primitive.bind(*args, **params)
        return tuple(ys) if wanted else (ys,)

    ys = partition.split(itself, metadata, local, axes, partitioner, platform, static.out_sharding, *args)(*args)
    return ys if wanted else ys[0]


def _metadata(partitioner, platform, primitive, operands, params, family) -> dict[str, str]:
    """Return metadata that identify an operation on these operands to XLA's partitioner: those with equal metadata share a callback."""
    if partitioner is not _compat.Partitioner.LABELS:
        return {}
    implementations = family.implementations
    code = active.known_as(platform, [each.coded_as or each.name for each in implementations]) + record.known_as(
        compute_capability(platform)
    )
    arrays = ", ".join(f"{name} {x.dtype}{[*x.shape]}" for name, x in operands.items())
    operation = f"{primitive} of {arrays} {params} {code}"
    # If `version` is None, a user's implementation is identified only by a hash of its class's file.
    return partition.known(operation, by_version=all(each.version is not None for each in implementations))
