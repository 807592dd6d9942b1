"""Counts the devices along named mesh axes."""

from __future__ import annotations

from collections.abc import Hashable

import jax
from jax import lax
from jax.core import Tracer

from jaxext._messages import format_value


def devices_along(axis: Hashable, argument: str) -> int:
    """The number of devices along an axis, or along a tuple of axes.  `argument` names the function and argument in errors."""
    if isinstance(axis, list | int | Tracer) or axis == ():
        raise TypeError(f"{argument} is {format_value(axis)}, want a name or a tuple of names")
    try:
        n = lax.axis_size(axis)
    except NameError as error:
        raise NameError(f"{argument} is {format_value(axis)}, want an axis of a shard_map or pmap around the call ({error})") from error
    if isinstance(axis, tuple) and len(axis) > 1:
        # ppermute numbers the devices in mesh order; PartitionSpec and other collectives number them in the order of the names
        ordered = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axis)
        if axis != ordered:
            raise ValueError(f"{argument} is {format_value(axis)}, want several axes in the order of their mesh, {ordered!r}")
    return n
