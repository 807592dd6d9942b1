"""The devices along named axes, taken as one: how many there are, if they can be counted."""

from __future__ import annotations

from collections.abc import Hashable

import jax
from jax import lax


def devices_along(axis: Hashable, argument: str) -> int:
    """The number of devices along an axis, or along several in a tuple.  `argument` is what errors call it: a function and its argument."""
    if isinstance(axis, list):
        raise TypeError(f"{argument} is {axis!r}, want a name or a tuple of names")
    try:
        n = lax.axis_size(axis)
    except NameError as error:
        raise NameError(f"{argument} is {axis!r}, want an axis of a shard_map or pmap around the call ({error})") from error
    if isinstance(axis, tuple) and len(axis) > 1:
        # ppermute numbers the devices in the order of the mesh, PartitionSpec and other collectives in that of the names
        ordered = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axis)
        if axis != ordered:
            raise ValueError(f"{argument} is {axis!r}, want several axes in the order of their mesh, {ordered!r}")
    return n
