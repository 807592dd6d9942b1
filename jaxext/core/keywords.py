"""The static keywords of a call of an operation that is declared by a reference."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Keywords:
    """The keywords by name; of a tangent also the implementation that was named, which its transpose uses.

    They are part of the key of a program.  Its reference can distinguish 1 from True and from 1.0, which are equal: `types` has theirs.
    """

    items: tuple[tuple[str, Any], ...]
    named: str | None = None
    types: tuple = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "types", tuple(_types(value) for _, value in self.items))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.items)


def _types(value: Any) -> Any:
    return (type(value), *map(_types, value)) if isinstance(value, tuple) else type(value)
