"""The checks on several devices: pmap, shard_map, automatic and explicit meshes, and the collectives of compiled programs.

The mesh has the axes "x" and "y"; "y" has size 2 if the number of devices is even and above 2, else 1.  Every function is split along the
axis that vmap adds, with each argument in turn replicated; this needs no declaration and no collective.  Users declare further splits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext._messages import format_value, refuse_traced
from jaxext.testing.conformance import QUICKLY, Case, Check, Mismatch, Tree, each, is_float
from jaxext.testing.cuts import Cut
from jaxext.testing.derivatives import cotangent, square
from jaxext.testing.programs import one_by_one

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
# Collectives and their transposes in a gradient.
TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}


@dataclasses.dataclass(frozen=True)
class Split:
    """A way to split a function over the mesh axes "x" and "y".

    With n devices, "x" has size n / 2 and "y" has size 2 if n is even and above 2.  Otherwise "x" has all devices, and splits over "y" are
    skipped.

    Attributes:
      args: the `jax.P` of each argument.
      result: the `jax.P` of the result, or a pytree of them.
      collectives: those of the compiled program ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
        "collective-broadcast"), each repeated as often as it occurs.
      part: the function of one device's parts inside `jax.shard_map`.  None means the function itself if there are no collectives; with
        collectives, `shard_map` is not checked.
    """

    args: tuple[P, ...]
    result: Any
    collectives: tuple[str, ...] = ()
    part: Callable | None = None

    def __post_init__(self):
        refuse_traced("Split", args=self.args, collectives=self.collectives)
        if not isinstance(self.args, Iterable):
            raise TypeError(f"Split: args is {format_value(self.args)}, want a sequence of a jax.P for each argument")
        if self.part is not None and not callable(self.part):
            raise TypeError(f"Split: part is {format_value(self.part)}, want a function, or None")
        object.__setattr__(self, "args", tuple(self.args))
        if bad := [spec for spec in (*self.args, *jax.tree.leaves(self.result)) if not isinstance(spec, P)]:
            raise TypeError(f"Split: args and result have {format_value(bad)}, want a jax.P of each array")
        names = self.collectives if isinstance(self.collectives, Collection) and not isinstance(self.collectives, str) else [None]
        if not all(isinstance(name, str) and name in COLLECTIVES for name in names):
            raise ValueError(f"Split: collectives is {format_value(self.collectives)}, want a sequence of {', '.join(COLLECTIVES)}")

    def fit(self, args: tuple, result: Tree, mesh: Mesh) -> None:
        """Raise ValueError if arrays of these shapes cannot be split this way."""
        try:
            specs = jax.tree.leaves(jax.tree.broadcast(self.result, result))
            for x, spec in zip((*args, *jax.tree.leaves(result)), (*self.args, *specs), strict=True):
                NamedSharding(mesh, spec).shard_shape(x.shape)
        except (ValueError, IndexError) as error:
            shapes = ", ".join(str(x.shape) for x in args)
            want = "want one P for each argument, existing axes, and sizes that a mesh of"
            raise ValueError(f"check_op: {self} does not fit arguments of shapes {shapes}: {want} {dict(mesh.shape)} divides") from error

    def cuts(self, result: Tree) -> list[Cut]:
        """Return the split axes if each device applies the function itself to its part, without collectives, else nothing."""
        if self.collectives or self.part:
            return []
        specs = jax.tree.leaves(jax.tree.broadcast(self.result, result))
        found = []
        for mesh_axis in sorted(axes_of(self.args)):
            arg_axes, result_axes = ([_position(spec, mesh_axis) for spec in of] for of in (self.args, specs))
            if None not in result_axes:
                where = ", ".join(f"axis {axis} of argument {k}" for k, axis in enumerate(arg_axes) if axis is not None)
                found.append(Cut(where, tuple(arg_axes), tuple(result_axes)))
        return found


def splits_along(cuts: Sequence[Cut], result: Tree, mesh: Mesh, args: tuple) -> tuple[tuple[Split, ...], str]:
    """A split over "x" for each cut whose size the mesh divides, and a word about the others."""

    def spec(axis):
        return P() if axis is None else P(*[None] * axis, "x")

    fits = [cut for cut in cuts if cut.size(args) % mesh.shape["x"] == 0]
    left_out = ", ".join(f"{cut.name} (size {cut.size(args)})" for cut in cuts if cut not in fits)
    structure = jax.tree.structure(result)
    splits = (Split(tuple(map(spec, cut.args)), jax.tree.unflatten(structure, map(spec, cut.result))) for cut in fits)
    return tuple(splits), f"not over {left_out}: want a size that {mesh.shape['x']} divides" if left_out else ""


def _position(spec: P, mesh_axis: str) -> int | None:
    return next((i for i, entry in enumerate(spec) if entry == mesh_axis or isinstance(entry, tuple) and mesh_axis in entry), None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A split with its arguments: `unsplit` is the function of them, `meaning` the same without vmap, `part` that of a device's parts.

    `weights` are those of the result in a loss.
    """

    args: tuple
    specs: tuple[P, ...]
    result: Any
    collectives: tuple[str, ...]
    weights: Tree
    unsplit: Callable
    meaning: Callable
    part: Callable | None

    @property
    def floats(self) -> tuple[int, ...]:
        return tuple(k for k, x in enumerate(self.args) if is_float(x))

    @property
    def gradient_specs(self) -> tuple[P, ...]:
        return tuple(self.specs[k] for k in self.floats)


Layouts = Callable[[Case], dict[str, Layout]]


def mesh_of(devices: tuple, kind: AxisType = AxisType.Auto) -> Mesh:
    n = len(devices)
    shape = (n // 2, 2) if n % 2 == 0 and n > 2 else (n, 1)
    return jax.make_mesh(shape, ("x", "y"), axis_types=(kind, kind), devices=devices)


def mapped(case: Case, over: str | tuple[str, str]) -> dict[str, Layout]:
    """One example per device, split over mesh axes: with all arguments split, and with each argument in turn replicated."""
    args, n = range(len(case.args)), len(case.devices)
    weights = jax.tree.map(lambda ct: jnp.stack([ct] * n), cotangent(case))
    layouts = {}
    for replicated in (None, *args) if len(args) > 1 else (None,):
        split = tuple(k for k in args if k != replicated)

        def one(*parts, split=split):
            """The single example of a device, without vmap."""
            return jax.tree.map(lambda y: jnp.expand_dims(y, 0), case.fn(*(x[0] if k in split else x for k, x in enumerate(parts))))

        layouts["mapped" if replicated is None else f"mapped, argument {replicated} replicated"] = Layout(
            args=tuple(case.examples[k][:n] if k in split else case.args[k] for k in args),
            specs=tuple(P(over) if k in split else P() for k in args),
            result=P(over),
            collectives=(),
            weights=weights,
            unsplit=jax.vmap(case.fn, [0 if k in split else None for k in args]),
            meaning=lambda *args, split=split: one_by_one(case.fn, args, split),
            part=one,
        )
    return layouts


def left_out(case: Case) -> str:
    """Return which splits are left out, and why."""
    idle = sorted({axis for split in case.splits for axis in axes_of(split.args) if mesh_of(case.devices).shape[axis] == 1})
    return "; ".join(filter(None, [case.unsplit, f"no split over {', '.join(idle)} on {len(case.devices)} devices" if idle else ""]))


def declared(case: Case) -> dict[str, Layout]:
    """The splits that the user declares, if their mesh axes have more than one device."""
    mesh = mesh_of(case.devices)
    return {
        f"split {split.args} -> {split.result}": Layout(
            args=case.args,
            specs=split.args,
            result=split.result,
            collectives=split.collectives,
            weights=cotangent(case),
            unsplit=case.fn,
            meaning=case.fn,
            part=split.part or (None if split.collectives else case.fn),
        )
        for split in case.splits
        if all(mesh.shape[axis] > 1 for axis in axes_of(split.args))
    }


def examples(case: Case) -> dict[str, Layout]:
    """Map over "x" only, so that "y" is idle: its replicas must not be counted twice."""
    return mapped(case, "x")


def layouts(case: Case) -> dict[str, Layout]:
    return examples(case) | declared(case)


def by_hand(case: Case) -> dict[str, Layout]:
    """One example on each device."""
    return {name: layout for name, layout in (mapped(case, ("x", "y")) | declared(case)).items() if layout.part}


def replicating(of: Layouts) -> Layouts:
    """Return `of` for gradients: without the layout "mapped", since those with a replicated argument cover mapped ones too."""
    return lambda case: {name: at for name, at in of(case).items() if name != "mapped" or len(case.args) == 1}


def half_by_hand(of: Layouts) -> Layouts:
    """One axis by hand and the other left to XLA: mapped examples split over both axes, or declared splits over one axis."""
    if of is examples:
        return lambda case: {name: dataclasses.replace(at, part=at.unsplit) for name, at in mapped(case, ("x", "y")).items()}
    return lambda case: {name: at for name, at in of(case).items() if at.part and len(axes_of(at.specs)) == 1}


def axes_of(specs) -> set[str]:
    return {axis for spec in specs for axis in jax.tree.leaves(tuple(spec))}


def values(case: Case) -> Tree:
    return {name: layout.meaning(*layout.args) for name, layout in layouts(case).items()}


def gradients(case: Case) -> Tree:
    return {name: downhill(layout.meaning, layout)(*layout.args) for name, layout in replicating(layouts)(case).items()}


def downhill(f: Callable, layout: Layout) -> Callable:
    """The gradient of a loss with respect to all floating-point arguments."""
    return jax.grad(lambda *args: square(f(*args), layout.weights), layout.floats)


def on_each(of: Layouts, run: Callable[[Mesh, Layout], Tree], kind: AxisType = AxisType.Auto) -> Callable[[Case], Tree]:
    """A program for each layout, run by `run` on a mesh of this kind."""

    def run_all(case):
        mesh = mesh_of(case.devices, kind)
        with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
            return each({name: functools.partial(run, mesh, layout) for name, layout in of(case).items()})

    return run_all


def placed(mesh: Mesh, layout: Layout) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(layout.args, layout.specs, strict=True)]


# By hand.


def manual(of: Layouts, make: Callable[[Layout, Callable], Callable], **options) -> Callable[[Case], Tree]:
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

    across = split(inside, in_specs=(layout.result, *layout.specs), out_specs=layout.gradient_specs)
    return functools.partial(across, layout.weights)


def half_manual(of: Layouts, make: Callable[[Layout, Callable], Callable]) -> Callable[[Case], Tree]:
    """Return a function as `manual` does, over one axis of the mesh.  XLA splits the operands over the other."""

    def run(mesh, layout):
        axis = min(axes_of(layout.specs))  # "x" if both are split
        specs, result = jax.tree.map(lambda spec: P(*(axis if e and axis in e else None for e in spec)), (layout.specs, layout.result))
        split = functools.partial(jax.shard_map, mesh=mesh, axis_names={axis})
        function = make(dataclasses.replace(layout, specs=specs, result=result), split)
        return jax.jit(function, compiler_options=QUICKLY)(*placed(mesh, layout))

    return on_each(of, run)


def by_pmap(case: Case) -> Tree:
    def one(layout):
        in_axes = tuple(0 if len(spec) else None for spec in layout.specs)
        return jax.pmap(case.fn, in_axes=in_axes, devices=case.devices)(*layout.args)

    return each({name: functools.partial(one, layout) for name, layout in examples(case).items()})


# By XLA: by its partitioner, or by the types.  A function for a layout, and the specs of its result.


def value(layout: Layout) -> tuple[Callable, Any]:
    return layout.unsplit, layout.result


def gradient(layout: Layout) -> tuple[Callable, Any]:
    return downhill(layout.unsplit, layout), layout.gradient_specs


def automatic(of: Layouts, make: Callable[[Layout], tuple[Callable, Any]]) -> Callable[[Case], Tree]:
    """A program must contain exactly the layout's collectives; a gradient no others than these, their transposes, and all-reduces."""

    def run(mesh, layout):
        function, result = make(layout)
        out, operands = jax.tree.map(functools.partial(NamedSharding, mesh), result), placed(mesh, layout)
        compiled = jax.jit(function, out_shardings=out).lower(*operands).compile(QUICKLY)
        found, declared = collectives(compiled), collections.Counter(layout.collectives)
        if make is value and found != declared:
            raise Mismatch(f"the compiled program sends {_counted(found)}, want {_counted(declared)}")
        allowed = {"all-reduce", *declared, *(TRANSPOSED.get(name, name) for name in declared)}
        if not allowed.issuperset(found):
            raise Mismatch(f"the compiled program sends {_counted(found)}, want no more than {', '.join(sorted(allowed))}")
        return compiled(*operands)

    return on_each(of, run)


def collectives(compiled) -> collections.Counter:
    """The number of times that each collective occurs in a compiled program."""
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(found.items())) or "nothing"


def explicit(of: Layouts, make: Callable[[Layout], tuple[Callable, Any]]) -> Callable[[Case], Tree]:
    """The result must have the specs in its type.

    Splits with collectives are left out: the sharding of a sum over a split axis is ambiguous, so lax requires `out_sharding`.
    """

    def run(mesh, layout):
        function, wanted = make(layout)
        return jax.jit(lambda *args: with_types(function(*args), wanted), compiler_options=QUICKLY)(*placed(mesh, layout))

    return on_each(lambda case: {name: layout for name, layout in of(case).items() if not layout.collectives}, run, AxisType.Explicit)


def with_types(result: Tree, wanted) -> Tree:
    for y, spec in zip(jax.tree.leaves(result), jax.tree.leaves(jax.tree.broadcast(wanted, result)), strict=True):
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


def by_xla(what: str, of: Layouts, needs: tuple[str, ...]) -> list[Check]:
    half = half_by_hand(of)
    mixed = f"{what}shard_map over one axis of two"
    return [
        Check(f"{what}automatic mesh", values, PARTITION, needs, run=automatic(of, value)),
        Check(f"gradient, {what}automatic mesh", gradients, PARTITION, (f"{what}automatic mesh", "vjp"),
            run=automatic(replicating(of), gradient)),
        Check(f"{what}explicit mesh", values, TYPES, needs, run=explicit(of, value)),
        Check(f"gradient, {what}explicit mesh", gradients, TYPES, (f"{what}explicit mesh", "vjp"), run=explicit(replicating(of), gradient)),
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
    *by_xla("", examples, ("devices", "vmap")),
    *(dataclasses.replace(check, note=left_out) for check in by_xla("splits, ", declared, ("devices", "splits", "jit"))),
))  # fmt: skip
