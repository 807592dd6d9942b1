"""Dataclasses from data, such as JSON has: every value is checked against its annotation.

Annotations are of dataclasses, `Mapping[str, X]`, `tuple[X, ...]`, tuples of a fixed length of one type, str, bool, int, float, `Any`, and
unions of these.  Numbers are finite; only where an annotation is `float | str` may one be NaN or infinite, which JSON has as text.  It
must not know of what the data speaks.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

Record = TypeVar("Record")

NOT_FINITE = ("nan", "inf", "-inf")


def made(kind: type[Record], data, where: str = "") -> Record:
    """The dataclass `kind` with these fields.

    Args:
      kind: a dataclass.
      data: a dict of its fields; lists stand for tuples.
      where: what to call the data in errors, up to the point before a field.

    Raises:
      ValueError: a field is missing, unknown or not as annotated, or `kind` itself raises one.

    Example:
      >>> made(Default, {"implementation": "xla", "how": "lax"})
    """
    data = _instance(data, dict, where.removesuffix("."))
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    if unknown := sorted(data.keys() - fields.keys()):
        raise ValueError(f"{where}{unknown[0]}: is no field, want of {', '.join(fields)}")
    for name, field in fields.items():
        if name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}{name}: is missing")
    hints = typing.get_type_hints(kind)
    values = {name: _value(hints[name], value, f"{where}{name}") for name, value in data.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _value(hint, value, where: str):
    """The value as annotated."""
    kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        return _one_of(of, value, where)
    if dataclasses.is_dataclass(kind):
        return made(typing.cast(type, kind), value, f"{where}.")
    if kind is Mapping:
        return {key: _value(of[1], item, f"{where}.{key}") for key, item in _instance(value, dict, where).items()}
    if kind is tuple:
        items = _instance(value, list, where)
        if of[-1] is not ... and len(items) != len(of):
            raise ValueError(f"{where}: got {items}, want {len(of)} items")
        return tuple(_value(of[0], item, f"{where}[{_label(i, item)}]") for i, item in enumerate(items))
    if kind is float:
        return _number(value, where)
    return value if kind is Any else _instance(value, kind, where)


def _one_of(hints, value, where: str):
    """Of several records, that with the value's fields; of other annotations, the first that its type allows."""
    if value is None and types.NoneType in hints:
        return None
    if float in hints and str in hints and isinstance(value, str):
        return float(value) if value in NOT_FINITE else value
    fitting = (hint for hint in hints if dataclasses.is_dataclass(hint) and isinstance(value, dict) and value.keys() <= _names(hint))
    return _value(next(fitting, hints[0]), value, where)


def _names(kind) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _number(value, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:  # an int beyond every float
            pass
    raise ValueError(f"{where}: got {_shown(value)}, want a finite number")


def _instance(value, kind: type, where: str):
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        wanted = {dict: "an object", list: "a list", str: "a text", int: "an integer", bool: "true or false"}
        raise ValueError(f"{where}: got {_shown(value)}, want {wanted.get(kind, kind.__name__)}")
    return value


def _shown(value) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _label(i: int, item) -> str:
    """An item's place in a list, and its name, if it has one."""
    name = item.get("name") if isinstance(item, dict) else None
    return f"{i}: {name!r}" if isinstance(name, str) else str(i)
