"""The checks on several devices: pmap, shard_map, automatic and explicit meshes, and the collectives of compiled programs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext.testing.conformance import QUICKLY, Case, Check, Mismatch, Tree, each
from jaxext.testing.layouts import (
    COLLECTIVES,
    Layout,
    axes_of,
    by_hand,
    declared,
    downhill,
    examples,
    gradients,
    half_by_hand,
    mesh_of,
    replicating,
    specs_of_gradients,
    unsplit,
    values,
)

COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
# Collectives and their transposes in a gradient.
TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}


# By hand.


def manual(of, make: Callable[[Layout, Callable], Callable], **options) -> Callable[[Case], Tree]:
    """One program of all layouts.  `make` returns the function for a layout, given shard_map over its mesh."""

    def run(case):
        split = functools.partial(jax.shard_map, mesh=mesh_of(case.devices), **options)
        return jax.jit(
            lambda case: each({name: lambda at=at: make(at, split)(*at.args) for name, at in of(case).items()}), compiler_options=QUICKLY
        )(case)

    return run


def parts(layout, split):
    return split(layout.part, in_specs=layout.specs, out_specs=layout.result)


def gradient_across(layout, split):
    return downhill(parts(layout, split), layout)


def gradient_inside(layout, split):
    """The gradient of a replicated argument is the sum over all devices."""

    def inside(weights, *args):
        return downhill(layout.part, dataclasses.replace(layout, weights=weights))(*args)

    whole = split(inside, in_specs=(layout.result, *layout.specs), out_specs=specs_of_gradients(layout))
    return functools.partial(whole, layout.weights)


def half_manual(of, make):
    """Return a function as `manual` does, over one axis of the mesh.  XLA splits the operands over the other."""

    def run(case):
        mesh = mesh_of(case.devices)

        def one(layout):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(layout.args, layout.specs, strict=True)]
            axis = min(axes_of(layout.specs))  # "x" if both are split
            specs, result = jax.tree.map(
                lambda spec: P(*(axis if e and axis in e else None for e in spec)), (layout.specs, layout.result), is_leaf=_is_spec
            )
            at = dataclasses.replace(layout, specs=specs, result=result)
            return jax.jit(make(at, functools.partial(jax.shard_map, mesh=mesh, axis_names={axis})), compiler_options=QUICKLY)(*placed)

        return each({name: functools.partial(one, layout) for name, layout in of(case).items()})

    return run


def _is_spec(x) -> bool:
    return isinstance(x, P)


def by_pmap(case: Case) -> Tree:
    def one(layout):
        in_axes = tuple(0 if len(spec) else None for spec in layout.specs)
        return jax.pmap(case.fn, in_axes=in_axes, devices=case.devices)(*layout.args)

    return each({name: functools.partial(one, layout) for name, layout in examples(case).items()})


# By the partitioner.


def automatic(of) -> Callable[[Case], Tree]:
    """A program for each layout, which must contain exactly the layout's collectives."""

    def one(mesh, layout):
        compiled, placed = _compiled(mesh, layout.whole, layout.args, layout.specs, layout.result)
        found, wanted = collectives(compiled), collections.Counter(layout.collectives)
        if found != wanted:
            raise Mismatch(f"the compiled program sends {_counted(found)}, want {_counted(wanted)}")
        return compiled(*placed)

    return lambda case: each({name: functools.partial(one, mesh_of(case.devices), layout) for name, layout in of(case).items()})


def automatic_gradients(of) -> Callable[[Case], Tree]:
    """The only collectives allowed are all-reduces, the declared collectives and their transposes."""

    def one(mesh, layout):
        compiled, placed = _compiled(mesh, downhill(layout.whole, layout), layout.args, layout.specs, specs_of_gradients(layout))
        allowed = {"all-reduce", *layout.collectives, *(TRANSPOSED.get(name, name) for name in layout.collectives)}
        if not allowed.issuperset(found := collectives(compiled)):
            raise Mismatch(f"the compiled program sends {_counted(found)}, want no more than {', '.join(sorted(allowed))}")
        return compiled(*placed)

    return lambda case: each({name: functools.partial(one, mesh_of(case.devices), layout) for name, layout in of(case).items()})


def collectives(compiled) -> collections.Counter:
    """The number of times that each collective occurs in a compiled program."""
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(found.items())) or "nothing"


def _compiled(mesh, f, args, specs, result):
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), result, is_leaf=_is_spec)
    return jax.jit(f, out_shardings=out).lower(*placed).compile(QUICKLY), placed


# By the types.


def explicit(of, make: Callable[[Layout], tuple[Callable, Any]]) -> Callable[[Case], Tree]:
    """`make` returns the function for a layout, and the specs that its result must have in its type.

    Splits with collectives are left out: the sharding of a sum over a split axis is ambiguous, so lax requires `out_sharding`.
    """

    def run(case):
        mesh = mesh_of(case.devices, AxisType.Explicit)

        def one(layout):
            f, wanted = make(layout)
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(layout.args, layout.specs, strict=True)]
            return jax.jit(lambda *args: with_types(f(*args), wanted), compiler_options=QUICKLY)(*placed)

        with jax.set_mesh(mesh):
            return each({name: functools.partial(one, layout) for name, layout in of(case).items() if not layout.collectives})

    return run


def with_types(result: Tree, wanted) -> Tree:
    specs = jax.tree.leaves(jax.tree.broadcast(wanted, result, is_leaf=_is_spec), is_leaf=_is_spec)
    for y, spec in zip(jax.tree.leaves(result), specs, strict=True):
        if (got := _trimmed(jax.typeof(y).sharding.spec)) != _trimmed(spec):
            raise Mismatch(f"the type of the result is split as {got}, want {_trimmed(spec)}")
    return result


def _trimmed(spec) -> P:
    """The spec without trailing Nones."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


VARYING = (
    "the abstract eval drops the varying manual axes (jax.typeof(x).manual_axis_type), so a replicated operand's gradient is not added up:"
    " keep them in the result's type, and give all operands the same by lax.pcast(x, axes, to='varying') before p.bind"
)
PARTITION = (
    "the rule by which XLA splits the operation is wrong, or there is none: jax.experimental.custom_partitioning with a sharding_rule, or"
    " jax.shard_map around the kernel"
)
TYPES = "the sharding rule of the types is missing or wrong: the abstract eval must set the result's sharding (jax.typeof(x).sharding)"
PART = "a device's part gives another result: the collectives of Split.part, or the lowering inside of shard_map"
LOCAL = "the lowering inside of shard_map must be that of one device"
BACKWARD = "the transpose rule inside of shard_map: it must not add up, or must not keep, what the types say is replicated"
HALF = "the lowering where XLA splits what shard_map leaves: custom_partitioning cannot be called back there, plain operations can"


def by_partitioner(what: str, of: Callable[[Case], dict[str, Layout]], needs: tuple[str, ...]) -> list[Check]:
    half = half_by_hand(of)
    mixed = f"{what}shard_map over one axis of two"
    return [
        Check(f"{what}automatic mesh", values, PARTITION, needs, run=automatic(of)),
        Check(f"gradient, {what}automatic mesh", gradients, PARTITION, (f"{what}automatic mesh", "vjp"),
            run=automatic_gradients(replicating(of))),
        Check(f"{what}explicit mesh", values, TYPES, needs, run=explicit(of, lambda at: (at.whole, at.result))),
        Check(f"gradient, {what}explicit mesh", gradients, TYPES, (f"{what}explicit mesh", "vjp"),
            run=explicit(replicating(of), lambda at: (downhill(at.whole, at), specs_of_gradients(at)))),
        Check(mixed, values, HALF, (*needs, "wide", "shard_map"), run=half_manual(half, parts)),
        Check(f"gradient, {mixed}", gradients, HALF, (mixed, "gradient inside shard_map"),
            run=half_manual(replicating(half), gradient_inside)),
    ]  # fmt: skip


SHARDED = tuple(dataclasses.replace(check, partial=True) for check in (
    Check("pmap", values, LOCAL, ("devices", "jit"), run=by_pmap),
    Check("shard_map", values, PART, ("devices", "jit"), run=manual(by_hand, parts)),
    Check("shard_map without check_vma", values, LOCAL, ("devices", "jit"), run=manual(by_hand, parts, check_vma=False)),
    Check("gradient inside shard_map", gradients, VARYING, ("shard_map", "vjp"), run=manual(replicating(by_hand), gradient_inside)),
    Check("gradient of shard_map", gradients, VARYING, ("shard_map", "vjp"), run=manual(replicating(by_hand), gradient_across)),
    Check("gradient of shard_map without check_vma", gradients, BACKWARD, ("shard_map without check_vma", "vjp"),
        run=manual(replicating(by_hand), gradient_across, check_vma=False)),
    *by_partitioner("", examples, ("devices", "vmap")),
    *(dataclasses.replace(check, note=unsplit) for check in by_partitioner("splits, ", declared, ("devices", "splits", "jit"))),
))  # fmt: skip
