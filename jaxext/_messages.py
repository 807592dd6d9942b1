"""Messages tell an array by its dtype and shape, as `float32[3,4]`, and everything in a line of limited length.

The numbers of an array say nothing about a wrong call, and there may be a thousand lines of them.
The module also tells whom messages address.
"""

from __future__ import annotations

import functools
import math
import os
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4", "complex64", "complex128"),
)
_LENGTH = 200  # characters
PAGES = "https://github.com/jaxext/jaxext/blob/main/docs/"  # for messages: an installed package has no docs/


def format_value(x: Any) -> str:
    """`repr(x)` in short, with `float32[3,4]` in the place of each array in x, which may be a pytree."""
    return _cut(" ".join(_SHORT.repr(x).splitlines()), _LENGTH)


def dtype_named(name: str, argument: str, dtype: Any) -> np.dtype:
    """The dtype that an argument of an operation names."""
    try:
        if isinstance(dtype, jax.Array | np.ndarray | np.generic):  # numpy warns, and takes their own
            raise TypeError("an array is no dtype")
        return np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise TypeError(f"{name}: {argument} is {format_value(dtype)}, want a dtype") from error


def array_named(name: str, argument: str, x: Any) -> jax.Array:
    """An argument of an operation as an array."""
    try:
        return jax.numpy.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {argument} is {format_value(x)}, want an array") from error


def refuse_traced(name: str, **static: Any) -> None:
    """Raise TypeError for an argument that must be known when a program is traced, and is not."""
    for argument, x in static.items():
        if isinstance(x, Tracer):
            raise TypeError(f"{name}: {argument} is traced, {format_value(x)}, want a static value")


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, such as "1 product" or "2 products"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, whose columns are as wide as their longest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def depth_of_the_user() -> int:
    """The `stacklevel` of the first frame above the caller that is outside jax and jaxext."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jaxext", "contextlib", "functools"):
        frame, depth = frame.f_back, depth + 1
    return depth


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


class _Bare(str):
    """A string without quotes in the representation of a container."""

    __repr__ = str.__str__


class _Short(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxset, self.maxfrozenset, self.maxdict = 4, 12, 12, 12, 12, 12
        self.maxstring = self.maxother = 120

    def repr1(self, x: Any, level: int) -> str:
        shape, dtype = _shape_and_dtype(x)
        if shape is None:
            return super().repr1(x, level)
        text = f"{dtype}[{','.join(map(str, shape))}]"
        return text if isinstance(x, jax.Array | np.ndarray) else f"{type(x).__name__}({text})"

    def repr_partial(self, x: functools.partial, level: int) -> str:
        given = [self.repr1(each, level - 1) for each in (x.func, *x.args)]
        return f"partial({', '.join(given + [f'{name}={self.repr1(each, level - 1)}' for name, each in x.keywords.items()])})"

    repr_Partial = repr_partial  # jax's

    def repr_instance(self, x: Any, level: int) -> str:
        """A class of the user's: its arrays are found if it is a pytree."""
        if level > 0 and not isinstance(x, type):
            try:
                leaves, structure = jax.tree.flatten(x, is_leaf=lambda leaf: leaf is not x)
                if any(leaf is not x for leaf in leaves):
                    return _cut(repr(structure.unflatten([_Bare(self.repr1(leaf, level - 1)) for leaf in leaves])), self.maxother)
            except Exception:  # of a class that holds nothing but arrays; a message must not fail for want of a value's name
                return f"<{type(x).__name__}>"
        return super().repr_instance(x, level)


def _shape_and_dtype(x: Any) -> tuple[tuple | None, Any]:
    """Shape and dtype, or None: of no array, and of numbers such as np.float32(1), which are as short as they are."""
    if isinstance(x, np.generic | type):
        return None, None
    try:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        return (None, None) if shape is None or dtype is None else (tuple(shape), dtype)
    except Exception:  # as of an array that was deleted, or a class of one's own
        return None, None


_SHORT = _Short()


def plain(data: Any) -> Any:
    """Data that JSON can represent.  Numbers that it lacks, such as NaN, become text."""
    if isinstance(data, Mapping):
        return {str(name): plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data) or isinstance(data, os.PathLike):
        return str(data)
    return data
