"""Layouts of a function and its arguments on a mesh, for the checks on several devices.

The mesh has the axes "x" and "y"; "y" has size 2 if the number of devices is even and above 2, else 1.  Every function is split along the
axis that vmap adds, with each argument in turn replicated; this needs no declaration and no collective.  Users declare further splits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext._messages import format_value, refuse_traced
from jaxext.testing.conformance import Case, Tree, is_float
from jaxext.testing.derivatives import square, whole_cotangent
from jaxext.testing.vmapped import one_by_one

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Cut:
    """An axis along which a function is independent, as it lies in each argument and in each array of the result; None: it is missing."""

    name: str
    args: tuple[int | None, ...]
    result: tuple[int | None, ...]

    def size(self, args: Sequence) -> int:
        """The number of its elements; 0 if no argument has it."""
        return next((x.shape[axis] for x, axis in zip(args, self.args, strict=True) if axis is not None), 0)


@dataclasses.dataclass(frozen=True)
class Split:
    """A way to split a function over the mesh axes "x" and "y".

    With n devices, "x" has size n / 2 and "y" has size 2 if n is even and above 2.  Otherwise "x" has all devices, and splits over "y" are
    skipped.  `args` and `result` are the `jax.P` of each argument and of the result.  `collectives` are those of the compiled program
    ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"), each repeated as often as it occurs.  `part` is the
    function of one device's parts inside `jax.shard_map`.  It defaults to the function itself if there are no collectives; otherwise
    `shard_map` is not checked.
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
        if (
            not isinstance(self.collectives, Collection)
            or isinstance(self.collectives, str)
            or not all(isinstance(name, str) and name in COLLECTIVES for name in self.collectives)
        ):
            raise ValueError(f"Split: collectives is {format_value(self.collectives)}, want a sequence of {', '.join(COLLECTIVES)}")

    def fit(self, args: tuple, result: Tree, mesh: Mesh) -> None:
        """Raise ValueError if arrays of these shapes cannot be split this way."""
        try:
            specs = jax.tree.leaves(jax.tree.broadcast(self.result, result, is_leaf=_is_spec), is_leaf=_is_spec)
            for x, spec in zip((*args, *jax.tree.leaves(result)), (*self.args, *specs), strict=True):
                NamedSharding(mesh, spec).shard_shape(x.shape)
        except (ValueError, IndexError) as error:
            shapes = ", ".join(str(x.shape) for x in args)
            want = "want one P for each argument, axes that are there, and sizes that a mesh of"
            raise ValueError(f"check_op: {self} does not fit arguments of shapes {shapes}: {want} {dict(mesh.shape)} divides") from error

    def cuts(self, args: tuple, result: Tree) -> list[Cut]:
        """Its axes, if a device computes the function itself of its part, without collectives."""
        if self.collectives or self.part:
            return []
        specs = jax.tree.leaves(jax.tree.broadcast(self.result, result, is_leaf=_is_spec), is_leaf=_is_spec)
        found = []
        for mesh_axis in sorted(axes_of(self.args)):
            of_args, of_result = ([_position(spec, mesh_axis) for spec in of] for of in (self.args, specs))
            if None not in of_result:
                where = ", ".join(f"axis {axis} of argument {k}" for k, axis in enumerate(of_args) if axis is not None)
                found.append(Cut(where, tuple(of_args), tuple(of_result)))
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


def _is_spec(x) -> bool:
    return isinstance(x, P)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A split with its arguments: `whole` is the function of them, `meaning` the same without vmap, `part` that of a device's parts.

    `weights` are those of the result in a loss.
    """

    args: tuple
    specs: tuple[P, ...]
    result: Any
    collectives: tuple[str, ...]
    weights: Tree
    whole: Callable
    meaning: Callable
    part: Callable | None

    @property
    def floats(self) -> tuple[int, ...]:
        return tuple(k for k, x in enumerate(self.args) if is_float(x))


def mesh_of(devices: tuple, kind: AxisType = AxisType.Auto) -> Mesh:
    n = len(devices)
    shape = (n // 2, 2) if n % 2 == 0 and n > 2 else (n, 1)
    return jax.make_mesh(shape, ("x", "y"), axis_types=(kind, kind), devices=devices)


def mapped(case: Case, over: str | tuple[str, str]) -> dict[str, Layout]:
    """One example per device, split over mesh axes: with all arguments split, and with each argument in turn replicated."""
    args, n = range(len(case.args)), len(case.devices)
    weights = jax.tree.map(lambda ct: jnp.stack([ct] * n), whole_cotangent(case))
    layouts = {}
    for whole in (None, *args) if len(args) > 1 else (None,):
        split = tuple(k for k in args if k != whole)
        in_axes = [0 if k in split else None for k in args]

        def one(*parts, split=split):
            """The single example of a device, without vmap."""
            return jax.tree.map(lambda y: jnp.expand_dims(y, 0), case.fn(*(x[0] if k in split else x for k, x in enumerate(parts))))

        layouts["mapped" if whole is None else f"mapped, argument {whole} replicated"] = Layout(
            args=tuple(case.examples[k][:n] if k in split else case.args[k] for k in args),
            specs=tuple(P(over) if k in split else P() for k in args),
            result=P(over),
            collectives=(),
            weights=weights,
            whole=jax.vmap(case.fn, in_axes),
            meaning=lambda *args, split=split: one_by_one(case.fn, args, split),
            part=one,
        )
    return layouts


def unsplit(case: Case) -> str:
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
            weights=whole_cotangent(case),
            whole=case.fn,
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


def replicating(of: Callable[[Case], dict[str, Layout]]) -> Callable[[Case], dict[str, Layout]]:
    """Return `of` for gradients: without the layout "mapped", since those with a replicated argument cover mapped ones too."""
    return lambda case: {name: at for name, at in of(case).items() if name != "mapped" or len(case.args) == 1}


def half_by_hand(of: Callable[[Case], dict[str, Layout]]) -> Callable[[Case], dict[str, Layout]]:
    """One axis by hand and the other left to XLA: mapped examples split over both axes, or declared splits over one axis."""
    if of is examples:
        return lambda case: {name: dataclasses.replace(at, part=at.whole) for name, at in mapped(case, ("x", "y")).items()}
    return lambda case: {name: at for name, at in of(case).items() if at.part and len(axes_of(at.specs)) == 1}


def axes_of(specs) -> set[str]:
    """The mesh axes in some specs."""
    entries = [entry for spec in specs for entry in spec if entry is not None]
    return {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))}


def values(case: Case) -> Tree:
    return {name: layout.meaning(*layout.args) for name, layout in layouts(case).items()}


def gradients(case: Case) -> Tree:
    return {name: downhill(layout.meaning, layout)(*layout.args) for name, layout in replicating(layouts)(case).items()}


def downhill(f: Callable, layout: Layout) -> Callable:
    """The gradient of a loss with respect to all floating-point arguments."""
    return jax.grad(lambda *args: square(f(*args), layout.weights), layout.floats)


def specs_of_gradients(layout: Layout) -> tuple[P, ...]:
    return tuple(layout.specs[k] for k in layout.floats)
