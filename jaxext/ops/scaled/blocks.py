"""Axes in blocks: how the scales along them cut them, and arrays divided into blocks, joined again, and spread over their elements.

Shardings in types are kept where devices divide the blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext.core import partition


@dataclasses.dataclass(frozen=True)
class Cut:
    """Neighbouring axes in blocks.  Axes before the last one that has several scales have one for each element."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]  # of the scales along each axis

    @classmethod
    def of(cls, sizes: Sequence[int], *scales: Sequence[int]) -> Cut:
        """`scales`: how many there are along each axis, one for each array that has these axes."""
        counts = [functools.reduce(_common, along) for along in zip(*scales, strict=True)]
        last = max((i for i, count in enumerate(counts) if count != 1), default=0)
        return cls(tuple(sizes), (*sizes[:last], *counts[last:]))

    @property
    def scaled(self) -> list[bool]:
        """A mask of the axes that have blocks."""
        last = max((i for i, count in enumerate(self.counts) if count != 1), default=-1)
        return [i <= last for i in range(len(self.sizes))]

    @property
    def parts(self) -> list[list[int]]:
        """The sizes that become of each axis: how many blocks, if it has any, and their size, if that is not one."""
        return [
            [size] if not scaled else [count] if count == size else [count, size // count]
            for size, count, scaled in zip(self.sizes, self.counts, self.scaled, strict=True)
        ]

    @property
    def ranks(self) -> tuple[int, int]:
        """The number of axes that are of blocks, and the number of those inside."""
        return sum(self.scaled), sum(map(len, self.parts)) - sum(self.scaled)


def _common(one: int, other: int) -> int:
    """The least number of blocks in which those of both lie; either may be symbolic if they are alike."""
    return one if other == 1 or one == other else other if one == 1 else math.lcm(one, other)


def blocks_fit(counts: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether an array of this shape has as many blocks of equal size along each axis."""
    same = len(counts) == len(shape)
    return not counts or same and all(n and size % n == 0 or n == size for n, size in zip(counts, shape, strict=True))


def divided(x: jax.Array, parts: Sequence[Sequence[int]]) -> jax.Array:
    """Each axis as several.  If it is sharded in the type, the first of them is, where devices divide it."""
    sizes, sharding = [size for part in parts for size in part], partition.explicit(jax.typeof(x))
    if sharding is None or sizes == [*x.shape]:
        return x.reshape(sizes)
    x = placed(x, NamedSharding(sharding.mesh, P(*_kept(sharding, parts))))
    return lax.reshape(x, sizes, out_sharding=divided_sharding(sharding, parts))


def divided_sharding(sharding: NamedSharding, parts: Sequence[Sequence[int]]) -> NamedSharding:
    """The sharding that `divided` makes of this one."""
    return NamedSharding(sharding.mesh, _parts_spec(_kept(sharding, parts), parts))


def joined(x: jax.Array, parts: Sequence[Sequence[int]]) -> jax.Array:
    """The inverse of `divided`."""
    sizes, sharding = [math.prod(part) for part in parts], partition.explicit(jax.typeof(x))
    if sharding is None or sizes == [*x.shape]:
        return x.reshape(sizes)
    specs = iter(sharding.spec)
    firsts = [[next(specs) for _ in part][0] for part in parts]
    x = placed(x, NamedSharding(sharding.mesh, _parts_spec(firsts, parts)))
    return lax.reshape(x, sizes, out_sharding=NamedSharding(sharding.mesh, P(*firsts)))


def placed(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Resharded in its type, but for what is so already: from jax 0.12 that is an error in the program of one device."""
    return x if sharding is None or jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)


def _parts_spec(specs: Sequence, parts: Sequence[Sequence[int]]) -> P:
    return P(*(spec if i == 0 else None for spec, part in zip(specs, parts, strict=True) for i in range(len(part))))


def _kept(sharding: NamedSharding, parts: Sequence[Sequence[int]]) -> list:
    """The specs of axes whose first part is split evenly."""

    def devices(spec) -> int:
        return math.prod(sharding.mesh.shape[name] for name in (spec if isinstance(spec, tuple) else (spec,)) if name is not None)

    return [None if part[0] % devices(spec) else spec for spec, part in zip(sharding.spec, parts, strict=True)]


def spread(scale: jax.Array, wanted: Sequence[int]) -> jax.Array:
    """Each element of the scale as often as it takes for these sizes."""
    for axis, size in enumerate(wanted):
        if (n := scale.shape[axis]) != size:
            parts = [[n] for n in scale.shape]
            parts[axis] = [n, size // n]
            repeated = jnp.broadcast_to(lax.expand_dims(scale, [axis + 1]), [n for part in parts for n in part])
            scale = joined(repeated, parts)
    return scale
