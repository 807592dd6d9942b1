"""Operands and results whose axes have labels, and what follows from the labels alone: for forms and for operations."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext._target import device_kind
from jaxext.core import partition
from jaxext.core.call import Call
from jaxext.core.family import Family
from jaxext.core.static import Static
from jaxext.core.window import Window


class Labelled(abc.ABC):
    """Arrays by name.  A label stands for `ranks` neighbouring axes, a window label for exactly one.

    Attributes:
      primitives: open slot -> primitive.
      name: also of primitives and of kernels, and in profiles.
      window: the window labels.
      family: its implementations.
    """

    name: str
    window: tuple[str, ...]
    family: Family
    primitives: Mapping[str, Primitive]

    @property
    @abc.abstractmethod
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """The labels of each array."""

    @abc.abstractmethod
    def op(self, open: str) -> str:
        """The name of the primitive that computes `open`, of its kernels, and in profiles."""

    @abc.abstractmethod
    def operands(self, open: str) -> tuple[str, ...]:
        """The operands of that primitive."""

    @abc.abstractmethod
    def factors(self, open: str) -> tuple[str, ...]:
        """Return the operands in which it is bilinear; they are the large ones."""

    # --- ragged labels: a form with such labels (`ops/ragged`) overrides these, and an operation takes them from the form of its product

    @property
    def form(self) -> Labelled | None:
        """The form of the product inside, if this is an operation that has one."""
        return None

    @property
    def chosen(self) -> tuple[str, ...]:
        """The labels of one slot alone, of which each product of two numbers meets one element: they do not count as work."""
        return self.form.chosen if self.form else ()

    @property
    def unmapped(self) -> tuple[str, ...]:
        """The labels that no axis joins which vmap maps."""
        return self.form.unmapped if self.form else ()

    @property
    def uncut(self) -> Mapping[str, str]:
        """The axes of labels that devices split in some operands only -> their names in the others, which are not split."""
        return self.form.uncut if self.form else {}

    @property
    def gathered(self) -> Collection[tuple[str, str]]:
        """Pairs of an operand and an axis of it whose sharding does not matter."""
        return self.form.gathered if self.form else ()

    def axes_to_split(self, name: str, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of an operand as devices may split them."""
        return self.form.axes_to_split(name, axes) if self.form else tuple(axes)

    def local_operands(self, operands: dict[str, jax.Array], part: Callable, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """The operands of one device, from those that devices have been given their parts of."""
        return self.form.local_operands(operands, part, sizes) if self.form else operands

    # --- what an operation says that may have to be unfused where devices split it

    def unfused(self, options: Any, split: set[str], summed: Callable | None) -> Any:
        """The options of the unfused composition if devices split these axes, or None."""
        return None

    def rows(self, open: str) -> tuple[str, str] | None:
        """The labels of batch and rows, if the rows of the result are independent of each other: they come first, and weights have none."""
        if self.family.weights is None or open == self.family.weights:
            return None
        batch, row, *_ = self.labels[open]
        assert row not in self.labels[self.family.weights], f"{self.name}: {self.family.weights} has the label {row}"
        return batch, row

    def unsplit_axes(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The axes that must not be split."""
        return self.form.unsplit_axes(ranks) if self.form else self.window

    @functools.cached_property
    def free(self) -> tuple[str, ...]:
        """Every label except the window's, in order of first use."""
        return tuple(dict.fromkeys(label for labels in self.labels.values() for label in labels if label not in self.window))

    def pack(self, rank: Mapping[str, int]) -> tuple[int, ...]:
        """The number of axes of each label in the order of `free`: 1 if it is not given."""
        return tuple(rank.get(label, 1) for label in self.free)

    def unpack(self, ranks: Sequence[int]) -> dict[str, int]:
        """The number of axes of each label, by label."""
        return dict(zip(self.free, ranks, strict=True))

    def axes(self, name: str, ranks: Sequence[int]) -> tuple[str, ...]:
        """A name for each axis of an array: the axes of label N are "N0", "N1" and so on; a window label names its only axis."""
        rank = self.unpack(ranks)
        numbered = ([label] if label in self.window else [f"{label}{i}" for i in range(rank[label])] for label in self.labels[name])
        return tuple(axis for axes in numbered for axis in axes)

    def position(self, name: str, label: str, ranks: Sequence[int]) -> int:
        """The position of the first axis of `label` in an array."""
        rank = self.unpack(ranks)
        before = self.labels[name][: self.labels[name].index(label)]
        return sum(1 if other in self.window else rank[other] for other in before)

    def sizes(self, open: str, shapes: Sequence[Sequence[int]], ranks: Sequence[int], window: Window | None) -> dict[str, int]:
        """The size of every axis, by name, from the shapes of the operands."""
        sizes = {} if window is None else window.sizes
        for name, shape in zip(self.operands(open), shapes, strict=True):
            for axis, n in zip(self.axes(name, ranks), shape, strict=True):
                assert sizes.setdefault(axis, n) == n, f"{self.name}: axis {axis} of {name} is {n}, elsewhere {sizes[axis]}"
        return sizes

    def independent(self, operands: Sequence[str], results: Sequence[str], ranks: Sequence[int], unsharded: Sequence[str] = ()) -> dict:
        """The axes that all results have and that are not `unsharded`: where each lies in the operands, and where in the results."""
        axes = {name: self.axes(name, ranks) for name in (*operands, *results)}

        def where(names, axis):
            return tuple(axes[name].index(axis) if axis in axes[name] else None for name in names)

        kept = (axis for axis in axes[results[0]] if axis not in unsharded and all(axis in axes[name] for name in results))
        return {axis: (where(operands, axis), where(results, axis)) for axis in kept}

    def totals(self, sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
        """The number of elements of each label but the window's: the product over its axes."""
        return {label: math.prod(sizes[f"{label}{i}"] for i in range(n)) for label, n in zip(self.free, ranks, strict=True)}

    def all_sizes(self, sizes: Mapping[str, int], static: Static) -> dict[str, int]:
        """The size of each label, from those of its axes."""
        return self.totals(sizes, static.ranks) | ({} if static.window is None else static.window.sizes)

    def call(
        self,
        open: str,
        avals: Sequence,
        *,
        static: Static,
        wanted: Sequence[str] = (),
        platform: str,
        arch: int | None,
        partitioner: _compat.Partitioner,
    ) -> Call:
        """The `Call` of one device, from the shapes and dtypes of its operands and the parameters of the primitive."""
        extents = self.sizes(open, [aval.shape for aval in avals], static.ranks, static.window)
        return Call(
            op=self.op(open),
            open=open,
            labels=self.labels,
            axes={name: self.axes(name, static.ranks) for name in self.labels},
            sizes=self.all_sizes(extents, static),
            extents=extents,
            dtypes={name: aval.dtype for name, aval in zip(self.operands(open), avals, strict=True)},
            dtype=static.dtype,
            window=static.window,
            precision=static.precision,
            platform=platform,
            arch=arch,
            device=device_kind(platform),
            partitioner=partitioner,
            in_place=static.in_place,
            parameters=static,
            rows=self.rows(open),
        )

    def sharding(self, open, avals, ranks, out_sharding: NamedSharding | None, unsharded: Sequence[str], gathered=()) -> NamedSharding:
        """Sharding in types: each axis of a result is sharded as in the operands; `unsharded` axes must not be.  `gathered` are pairs of
        an operand and an axis, whose sharding does not matter."""
        op = self.op(open)
        sharded: dict[str, list] = {}
        for name, aval in zip(self.operands(open), avals, strict=True):
            for axis, spec in zip(self.axes(name, ranks), aval.sharding.spec.partitions, strict=True):
                if spec is not None and axis in unsharded:
                    what = "window axis" if axis in self.window else "axis"
                    raise _compat.ShardingTypeError(f"{op}: {what} {axis} of {name} is sharded over {spec!r}, want it unsharded")
                if spec is not None and (name, axis) not in gathered:
                    sharded.setdefault(axis, []).append((name, spec))
        if out_sharding is not None:
            return out_sharding
        kept = self.axes(open, ranks)
        for axis, by_name in sharded.items():
            specs = list(dict.fromkeys(spec for _, spec in by_name))
            if len(specs) > 1:
                raise _compat.ShardingTypeError(f"{op}: axis {axis} is sharded over {specs[0]!r} and over {specs[1]!r}, want one sharding")
            if axis not in kept and self.factors(open) and {name for name, _ in by_name} >= {*self.factors(open)}:
                raise _compat.ShardingTypeError(
                    f"{op}: the sum runs over axis {axis}, which is sharded over {specs[0]!r}, so the sharding of the result is ambiguous,"
                    " want `out_sharding`"
                )
        mesh = next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty), avals[0].sharding.mesh)
        return NamedSharding(mesh, P(*(sharded[axis][0][1] if axis in sharded else None for axis in kept)))

    def joined(self, label: str, open: str, operands: Mapping, mapped: Mapping[str, int], static: Static) -> tuple[dict, Static]:
        """Return, for vmap, operands and parameters with the mapped axis as the first axis of `label`.  Unmapped operands that have the
        label are broadcast."""
        ranks, out_sharding = static.ranks, static.out_sharding
        specs = [jax.typeof(operands[name]).sharding.spec.partitions[d] for name, d in mapped.items()] if out_sharding is not None else []
        size = next(operands[name].shape[d] for name, d in mapped.items())
        joined = dict(operands)
        for name, x in operands.items():
            if label in self.labels[name]:
                at = self.position(name, label, ranks)
                joined[name] = jnp.moveaxis(x, mapped[name], at) if name in mapped else _repeated(x, at, size)
        if out_sharding is not None:
            spec = next((spec for spec in specs if spec is not None), None)
            out_sharding = partition.insert(out_sharding, self.position(open, label, ranks), spec)
        ranks = tuple(n + (free == label) for free, n in zip(self.free, ranks, strict=True))
        return joined, static.replace(ranks=ranks, out_sharding=out_sharding)


def _repeated(x, axis, size):
    """x broadcast along a new axis."""
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))
