"""Launches of CUDA kernels: their numbers and sizes, checked against the parameters and what any GPU allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer

from jaxext._messages import format_value
from jaxext.extend.signature import Entry, Parameter

Sizes = tuple[int, int, int]
_LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64), "cluster": (16, 16, 16)}
_MOST_THREADS, _MOST_BLOCKS = 1024, 16  # of a block, and of a cluster


@dataclasses.dataclass(frozen=True)
class Number:
    """A number as the kernel gets it.  Equal ones have equal bits, unlike 0.0 and -0.0, or 1 and 1.0."""

    dtype: np.dtype
    data: bytes

    @property
    def bits(self) -> int:
        """All bits, as a number of 64."""
        return int.from_bytes(self.data.ljust(8, b"\0"), "little", signed=True)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a kernel: all that is static."""

    name: str  # with the template's arguments
    out: tuple[ShapedArray, ...]
    aliases: tuple[tuple[int, int], ...]  # operand, result
    numbers: tuple[Number | None, ...]  # by parameter: None of a pointer
    pointed: tuple[np.dtype, ...]  # by pointer
    grid: Sizes
    block: Sizes
    cluster: Sizes
    shared: int

    def passed(self) -> list[tuple[bool, np.dtype]]:
        """Return whether each parameter is a pointer, and its dtype."""
        pointed = iter(self.pointed)
        return [(each is None, next(pointed) if each is None else each.dtype) for each in self.numbers]

    def buffers(self, operands: int) -> Iterator[int]:
        """The index of each pointer's array among operands and results, in order."""
        aliased = {result for _, result in self.aliases}
        return iter([*range(operands), *(operands + i for i in range(len(self.out)) if i not in aliased)])


def number(kernel: str, parameter: Parameter, value: Any) -> Number:
    """The value as the parameter's type."""
    what, dtype = f"{kernel}: {parameter.name or 'a scalar'}", parameter.dtype
    if isinstance(value, Tracer):
        raise TypeError(f"{what} is traced, {format_value(value)}, want a static scalar, or a pointer to an array")
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0:
        value = np.asarray(value)[()]
    if not isinstance(value, bool | int | float | complex | np.generic):
        raise TypeError(f"{what} is {format_value(value)}, want a scalar{f', {parameter.type}' if parameter.type else ''}")
    if dtype is None:
        if not isinstance(value, np.generic):
            raise TypeError(f"{what} has the type {parameter.type or 'unknown'}, want a scalar of numpy, such as np.int32({value})")
        if parameter.bytes not in (None, value.dtype.itemsize) or value.dtype.itemsize not in (1, 2, 4, 8):
            raise TypeError(f"{what} is {value.dtype}, want {parameter.bytes or '1, 2, 4 or 8'} bytes")
        return Number(value.dtype, value.tobytes())
    taken = {"b": "b", "i": "iu", "u": "iu", "c": "iufVc"}.get(dtype.kind, "iufV")  # V: bfloat16
    kind = "i" if type(value) is int else np.asarray(value).dtype.kind
    if kind not in taken:
        raise TypeError(f"{what} is {format_value(value)}, want a {parameter.type}")
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if not low <= int(value) <= high:  # type: ignore[arg-type]
            raise ValueError(f"{what} is {value}, want a {parameter.type}, {low} to {high}")
    try:
        with np.errstate(over="ignore"):
            made = np.asarray(value, dtype)
    except OverflowError:  # an integer beyond all floats
        made = np.asarray(np.inf, dtype)
    if dtype.kind in "fV" and not np.isfinite(made) and math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{what} is {value}, want a number in the range of {parameter.type}")
    return Number(dtype, made.tobytes())


def sizes(kernel: str, what: str, given: Any) -> Sizes:
    """The three sizes of a grid, a block or a cluster."""
    along = tuple(given) if isinstance(given, tuple | list) else (given,)
    if not 1 <= len(along) <= 3 or not all(map(is_whole, along)):
        raise ValueError(f"{kernel}: {what} is {format_value(given)}, want one to three whole numbers")
    x, y, z = (*map(int, along), 1, 1)[:3]
    for axis, size, most in zip("xyz", (x, y, z), _LIMITS[what], strict=True):
        if not 1 <= size <= most:
            raise ValueError(f"{kernel}: {what} is {given}, {size} along {axis}, want 1 to {most}")
    return x, y, z


def refuse_sizes(kernel: str, grid: Sizes, block: Sizes, cluster: Sizes) -> None:
    """Raise if no GPU takes them together."""
    if math.prod(block) > _MOST_THREADS:
        raise ValueError(f"{kernel}: block is {block}, {math.prod(block)} threads, want at most {_MOST_THREADS}")
    if math.prod(cluster) > _MOST_BLOCKS:
        raise ValueError(f"{kernel}: cluster is {cluster}, {math.prod(cluster)} blocks, want at most {_MOST_BLOCKS}")
    if any(blocks % of_cluster for blocks, of_cluster in zip(grid, cluster, strict=True)):
        raise ValueError(f"{kernel}: grid is {grid}, want a multiple of the cluster {cluster}")


def shaped(kernel: str, out: Any) -> tuple[ShapedArray, ...]:
    """The types of the results."""
    results = tuple(out) if isinstance(out, tuple | list) else (out,)
    if not results:
        raise TypeError(f"{kernel}: out is empty, want one result or more")
    for y in results:
        if not (hasattr(y, "shape") and hasattr(y, "dtype")):
            raise TypeError(f"{kernel}: out is {format_value(y)}, want an object with a shape and a dtype, such as a jax.ShapeDtypeStruct")
    return tuple(ShapedArray(y.shape, jax.dtypes.canonicalize_dtype(y.dtype)) for y in results)


def refuse_compiled(kernel: str, types: Sequence[Parameter] | None, entry: Entry, launch: Launch) -> None:
    """Raise if the compiled kernel has other parameters than the call passes, or cannot be launched so.

    `types` are those of its parameters, if they are known.
    """
    passed = launch.passed()
    if len(entry.sizes) != len(passed):
        raise TypeError(f"{kernel}: the compiled kernel has {len(entry.sizes)} parameters, but the call passes {len(passed)}")
    for i, (size, (pointer, dtype)) in enumerate(zip(entry.sizes, passed, strict=True)):
        wanted = 8 if pointer else dtype.itemsize
        declared = types[i] if types else None
        other_type = declared is not None and (declared.pointer != pointer or declared.is_other(dtype))
        if size != wanted or other_type:
            have = f"{declared}, {size} bytes" if declared else f"{size} bytes"
            want = f"a pointer to {dtype}" if pointer else f"{dtype}, {wanted} bytes"
            raise TypeError(f"{kernel}: parameter {i} is compiled as {have}, but the call passes {want}")
    if entry.threads is not None and math.prod(launch.block) > entry.threads:
        raise ValueError(
            f"{kernel}: block is {launch.block}, {math.prod(launch.block)} threads, want at most {entry.threads}, as the source declares"
        )
    if entry.cluster is not None and (*entry.cluster, 1, 1)[:3] != launch.cluster:
        raise ValueError(f"{kernel}: cluster is {launch.cluster}, want {(*entry.cluster, 1, 1)[:3]} as the source declares")


def short(x: Any) -> str:
    return f"{np.dtype(x.dtype)}[{','.join(map(str, x.shape))}]"


def is_whole(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)
