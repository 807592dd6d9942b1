"""Splits an operation on labelled axes over devices.  All shardings become programs here.

A mesh axis that shards a label splits every operand and result along that label.  If the label is contracted, each device holds a partial
sum, and a psum adds the parts.  Window labels are not split.  The same assignment of mesh axes to labels serves all ways in which
JAX splits programs:

    the program of one device (one device, fully manual shard_map, pmap)    nothing to do
    shardings in the types (explicit mesh)                                  a shard_map over the explicit axes
    jit over several devices, automatic axes                                custom_partitioning with the labels as its Shardy rule
    XLA's partitioner alone (partial-manual shard_map, exported program)    plain XLA ops, with window labels unsharded

"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext._compat import Partitioner

Spec = tuple  # one entry per axis of an array: None, a mesh axis, or several


@dataclasses.dataclass(frozen=True)
class Names:
    """The axis names of all operands and results, and the axes that must not be split.  The first result's sharding decides for all."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    unsharded: tuple[str, ...]

    @property
    def contracted(self) -> tuple[str, ...]:
        kept = {axis for axes in (*self.results, self.unsharded) for axis in axes}
        return tuple(dict.fromkeys(axis for axes in self.operands for axis in axes if axis not in kept))

    @property
    def shardy_rule(self) -> dict:
        """Keywords for custom_partitioning.  Shardy wants the special factors in the order of their first use."""
        order = dict.fromkeys(axis for axes in (*self.operands, *self.results) for axis in axes)
        return dict(
            sharding_rule=" -> ".join(", ".join(map(" ".join, arrays)) for arrays in (self.operands, self.results)),
            reduction_factors=tuple(axis for axis in order if axis in self.contracted),
            need_replication_factors=tuple(axis for axis in order if axis in self.unsharded),
        )


def explicit(aval) -> NamedSharding | None:
    """The sharding in an array's type, if its mesh has explicit axes."""
    mesh = aval.sharding.mesh
    return aval.sharding if not mesh.empty and AxisType.Explicit in mesh.axis_types else None


def cotangent_sharding(linear, *operands) -> NamedSharding | None:
    """The sharding in the type of a cotangent: that of the linear operand, or replicated if only the linear operand is on no mesh."""
    if not linear.sharding.mesh.empty:
        return explicit(linear)
    mesh = next((s.mesh for s in map(explicit, map(jax.typeof, operands)) if s is not None), None)
    return None if mesh is None else NamedSharding(mesh, P(*(None,) * linear.ndim))


def insert(sharding: NamedSharding, axis: int, spec) -> NamedSharding:
    """The sharding with one more array axis, for vmap."""
    partitions = list(sharding.spec)
    partitions[axis:axis] = [spec]
    return NamedSharding(sharding.mesh, P(*partitions))


def renamed(sharding: NamedSharding, axes: Sequence[str], others: Sequence[str]) -> NamedSharding:
    """The sharding of an array with the axes `others`, in which each axis is sharded as in an array with the axes `axes`."""
    specs = dict(zip(axes, sharding.spec, strict=False))
    return NamedSharding(sharding.mesh, P(*(specs.get(axis) for axis in others)))


def place_on_one_mesh(args: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, with those on no mesh replicated over that of the others, if it has explicit axes."""
    mesh = next((s.mesh for s in map(explicit, map(jax.typeof, args)) if s is not None), None)
    if mesh is None:
        return list(args)

    def placed(x):  # the transpose of a reshard would have a mapped cotangent on no mesh
        replicated = NamedSharding(mesh, P(*(None,) * (x.ndim + 1)))
        return lax.squeeze(lax.broadcast_in_dim(x, (1, *x.shape), range(1, x.ndim + 1), out_sharding=replicated), [0])

    return [placed(x) if jax.typeof(x).sharding.mesh.empty else x for x in args]


def broadcast_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """x, broadcast to the shape of another array of the same rank and, on an explicit mesh, split like it: the transpose adds up parts."""
    sharding, own = (explicit(jax.typeof(each)) for each in (other, x))
    if sharding is None or own is None or x.shape == other.shape and own == sharding:  # vmap cannot transpose what brings x onto a mesh
        return jnp.broadcast_to(x, other.shape)
    spec = tuple(entry if n == wide else None for entry, n, wide in zip(sharding.spec, x.shape, other.shape, strict=True))
    x = x if spec == tuple(own.spec) else _reshard(x, sharding.mesh, P(*spec))
    return jnp.broadcast_to(x, other.shape, out_sharding=sharding)


def broadcast_together(x: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, broadcast to the shape of another array of the same rank, and that one: both split like it, and like x along the other axes."""
    axes = [str(at) for at in range(x.ndim)]
    own = [axis if n == wide else f"{axis} of size 1" for axis, n, wide in zip(axes, x.shape, other.shape, strict=True)]
    other, x = aligned((axes, own), (other, x))
    return broadcast_like(x, other), other


def aligned(axes: Sequence[Sequence[str]], args: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, in whose types each of these axes has one sharding: that of the first array that splits it."""
    mesh = next((s.mesh for s in map(explicit, map(jax.typeof, args)) if s is not None), None)
    if mesh is None:
        return list(args)
    specs = [(names, tuple(jax.typeof(x).sharding.spec)) for names, x in zip(axes, args, strict=True)]
    assigned = _assign(Names((), (), ()), mesh, _sizes(axes, args), specs)
    placed = [_place(names, assigned) for names in axes]
    return [x if spec == tuple(place) else _reshard(x, mesh, place) for x, place, (_, spec) in zip(args, placed, specs, strict=True)]


def alike(args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """The arrays with one sharding of these axes in their types, as vmap wants: that of the first that is sharded, if it fits all."""
    shardings = [None if at is None else explicit(jax.typeof(x)) for x, at in zip(args, axes, strict=True)]
    specs = [s.spec[at] for s, at in zip(shardings, axes, strict=True) if s is not None and at is not None]
    if len({*specs}) <= 1:
        return list(args)
    wanted = next(spec for spec in specs if spec is not None)
    taken = [{*s.spec[:at], *s.spec[at + 1 :]} for s, at in zip(shardings, axes, strict=True) if s is not None and at is not None]
    wanted = None if any(wanted in others for others in taken) else wanted

    def placed(x, sharding, at):
        return x if sharding is None else _reshard(x, sharding.mesh, P(*sharding.spec[:at], wanted, *sharding.spec[at + 1 :]))

    return [placed(*each) for each in zip(args, shardings, axes, strict=True)]


def split(
    itself: Callable,
    known_as: Mapping[str, str],
    local: Callable,
    names: Names,
    partitioner: Partitioner,
    platform: str,
    out_sharding: NamedSharding | None,
    *args: jax.Array,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of `args` that computes `local(partitioner, summed, part, *args)`, which gives all results, on devices among which
    `args` are split as `partitioner` says (`_compat.partitioner_of`).

    `summed(y, axes)` adds partial sums over the devices that split a label that is not in `axes`, those of y; it is None if every result
    has all split labels.  `part(axis, size)` tells which elements of an axis of `size` this device has: the first one, and how many; it
    is None if the axis is not split.  `itself(*args)` binds the operation that is being lowered.  `known_as`, made by `known`, identifies
    it to XLA's partitioner, which calls `local` back.  `out_sharding` is that of the first result.
    """
    shardings = [explicit(jax.typeof(x)) for x in args]
    if any(s is not None for s in shardings):
        return functools.partial(_split_by_types, local, names, platform, out_sharding)
    if partitioner is Partitioner.LABELS:
        return functools.partial(_split_by_labels, itself, known_as, local, names)
    return functools.partial(_constrained(local, names, partitioner), partitioner, None, _part({}, None))


def _constrained(local, names, partitioner):
    """`local` for a program that XLA's partitioner may split, with constraints on the axes that it must not split."""
    if partitioner is Partitioner.NOBODY:
        return local

    def unsplit(arrays, axes, forwards=False):
        unsharded = ([at for at, axis in enumerate(each) if axis in names.unsharded] for each in axes)
        return [_compat.unsplit(x, each, forwards=forwards) for x, each in zip(arrays, unsharded, strict=True)]

    # XLA multiplies other matrices of a batch if the result asks to split the batch like the sum: a split of the batch and the sum is kept.
    shared = {*names.operands[0]}.intersection(*names.operands[1:2])
    in_results = {axis for each in names.results for axis in each}
    forwards = bool(shared & in_results and shared - in_results)

    def run(partitioner, summed, part, *args):
        return tuple(unsplit(local(partitioner, summed, part, *unsplit(args, names.operands)), names.results, forwards))

    return run


def known(product: str, *, by_version: bool) -> dict[str, str]:
    """Attributes that identify a product lowered behind a callback, for the persistent cache of compiled programs.

    Without `product` the cache would confuse convolutions of the same shapes, and choices of different tables or settings.  `code` lets
    another process find the program.  It is omitted if a user's implementation states no version.
    """
    code, settings = _code() if by_version else None, repr(_compat.settings())
    product = f"{product} {hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    return {"product": product} if code is None else {"product": product, "code": code}


@functools.cache
def _code() -> str | None:
    """A hash of this package, or None if its sources cannot be read."""
    try:
        files = [file.read_bytes() for file in sorted(pathlib.Path(__file__).parents[1].glob("**/*.py"))]
    except OSError:
        return None
    return hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in files)).hexdigest()[:16] if files else None


def _assign(names: Names, mesh, sizes: dict[str, int], specs: Sequence[tuple[Sequence[str], Spec]]) -> dict[str, tuple[str, ...]]:
    """Mesh axes for each label.  The first spec that names one wins; a mesh axis serves one label and must divide it evenly."""
    assigned: dict[str, tuple[str, ...]] = {}
    for axes, spec in specs:
        for axis, wanted in zip(axes, spec, strict=False):
            wanted = () if wanted is None else wanted if isinstance(wanted, tuple) else (wanted,)
            taken = {m for other in assigned.values() for m in other}
            even = sizes[axis] % math.prod(mesh.shape[m] for m in wanted) == 0
            if wanted and axis not in names.unsharded and axis not in assigned and not taken & set(wanted) and even:
                assigned[axis] = wanted
    return assigned


def _agreed(specs: Sequence[tuple[Sequence[str], Spec]], axes: Sequence[str], spec: Spec) -> list[tuple[Sequence[str], Spec]]:
    """The part of the operands' specs that agrees with the result's spec.  It has priority, because it moves no data."""
    wanted = dict(zip(axes, spec, strict=False))
    return [(axes, tuple(s if wanted.get(a) == s else None for a, s in zip(axes, spec, strict=False))) for axes, spec in specs]


def _place(axes: Sequence[str], assigned: dict[str, tuple[str, ...]]) -> P:
    return P(*(assigned.get(axis) for axis in axes))


def _summed(names: Names, assigned: dict[str, tuple[str, ...]], wide=()) -> Callable[[jax.Array, Sequence[str]], jax.Array] | None:
    """A psum of a result with these axes over the mesh axes that split any other, in float32 for dtypes in `wide`; None if none does."""

    def summed(y, axes):
        over = tuple(m for axis, split in assigned.items() if axis not in axes for m in split)
        if not over:
            return y
        if y.dtype == bool:  # psum does not support booleans; their sum is "any"
            return lax.psum(y.astype(jnp.int32), over) != 0
        if jnp.issubdtype(y.dtype, jnp.complexfloating):  # XLA aborts on a sum of complex parts that are constant
            return lax.complex(*lax.psum((lax.real(y), lax.imag(y)), over))
        return lax.psum(y.astype(jnp.float32), over).astype(y.dtype) if y.dtype in wide else lax.psum(y, over)

    return summed if any(axis not in axes for axis in assigned for axes in names.results) else None


def _part(assigned: dict[str, tuple[str, ...]], mesh) -> Callable[[str, int], tuple[jax.Array, int] | None]:
    """The first element of an axis that this device has, and how many it has; None if the axis is not split."""

    def part(axis, size):
        if axis not in assigned:
            return None
        has = size // math.prod(mesh.shape[m] for m in assigned[axis])
        return lax.axis_index(assigned[axis]) * has, has

    return part


def _split_by_labels(itself, known_as, local, names, *args):
    """jit over automatic axes: Shardy propagates shardings by the labels, then calls `partition` with the result.

    custom_partitioning wraps the product itself, not an implementation: only its shape is needed, and custom_partitioning accepts no
    constants, which an implementation may have.
    """
    settings = _compat.settings()

    def partition(mesh, arg_shapes, result_shapes):
        shapes = (*arg_shapes, *result_shapes)
        specs = _compat.named_specs(mesh, [shape.sharding for shape in shapes])
        sizes = _sizes((*names.operands, *names.results), shapes)
        placed = list(zip((*names.operands, *names.results), specs, strict=True))
        operands, result = placed[: len(arg_shapes)], placed[len(arg_shapes)]
        # Kept labels have priority over contracted ones: gathering an operand is cheaper than adding parts of a result that could have been
        # split.
        kept = [(axes, tuple(None if a in names.contracted else s for a, s in zip(axes, spec, strict=False))) for axes, spec in operands]
        assigned = _assign(names, mesh, sizes, [*_agreed(operands, *result), *kept, *operands, result])
        shardings = [tuple(NamedSharding(mesh, _place(axes, assigned)) for axes in arrays) for arrays in (names.results, names.operands)]
        avals = [ShapedArray(s.shard_shape(y.shape), y.dtype) for s, y in zip(shardings[0], result_shapes, strict=True)]
        of_part = functools.partial(local, Partitioner.LABELS, _summed(names, assigned), _part(assigned, mesh))
        return mesh, functools.partial(_compat.lowered_within, settings, of_part, avals), *shardings

    product = custom_partitioning(itself)
    product.def_partition(partition=partition, decode_shardings=False, **names.shardy_rule)
    with set_xla_metadata(**known_as):
        return product(*args)


def _split_by_types(local, names, platform, out_sharding, *args):
    """Explicit mesh: the types give the shardings of the operands, so the program is a shard_map over the explicit axes.

    If two labels want the same mesh axis (a batch and a filter both sharded over "data"), the label that stays sharded in the result gets
    it, and the other operand is gathered.
    """
    mesh = next(s.mesh for s in map(explicit, map(jax.typeof, args)) if s is not None)
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}
    automatic = [mesh.shape[name] for name in mesh.axis_names if name not in manual]
    # On CPUs XLA rewrites a bfloat16 psum to float32, and aborts on it in a partial-manual shard_map.
    wide = (jnp.bfloat16,) if automatic and platform == "cpu" else ()
    sizes = _sizes(names.operands, args)
    specs = [(axes, tuple(jax.typeof(x).sharding.spec)) for axes, x in zip(names.operands, args, strict=True)]
    if out_sharding is not None:
        specs = [*_agreed(specs, names.results[0], tuple(out_sharding.spec)), *specs]
    assigned = _assign(names, mesh, sizes, specs)
    args = tuple(_reshard(x, mesh, _place(axes, assigned)) for axes, x in zip(names.operands, args, strict=True))
    partitioner = Partitioner.XLA if any(n > 1 for n in automatic) else Partitioner.NOBODY
    specs = [_place(axes, assigned) for axes in names.results]
    if any(0 in x.shape for x in args):  # XLA does not compile each shard_map with empty operands: that of jax 0.11 ends the process
        results = local(partitioner, None, _part({}, None), *(_reshard(x, mesh, P(*(None,) * x.ndim)) for x in args))
        results = tuple(_reshard(y, mesh, spec) for y, spec in zip(results, specs, strict=True))
    else:
        results = jax.shard_map(
            functools.partial(_constrained(local, names, partitioner), partitioner, _summed(names, assigned, wide), _part(assigned, mesh)),
            mesh=mesh,
            in_specs=tuple(_place(axes, assigned) for axes in names.operands),
            out_specs=tuple(specs),
            axis_names=manual,
        )(*args)
    if out_sharding is None:
        return results
    wanted = [renamed(out_sharding, names.results[0], axes) for axes in names.results]
    return tuple(_reshard(y, mesh, sharding.spec) for y, sharding in zip(results, wanted, strict=True))


def _reshard(x, mesh, spec):
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _sizes(names, arrays):
    return {axis: n for axes, x in zip(names, arrays, strict=True) for axis, n in zip(axes, x.shape, strict=True)}
