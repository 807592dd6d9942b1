"""The calls by which kernels meet a GPU for the first time: those of each operation's `cases.py`, sorted by its folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from jaxext import ops
from jaxext.core.contact import Contact

PLATFORM, IMPLEMENTATIONS = "cuda", ("triton", "cuda")  # where and by which kernels they are checked


def cases(operation: str) -> ModuleType:
    return importlib.import_module(f"jaxext.ops.{operation}.cases")


OPERATIONS = sorted(module.name for module in pkgutil.iter_modules(ops.__path__))


def contacts(operations: Iterable[str] = OPERATIONS) -> list[Contact]:
    """All of them, by name once each, or those of some operations."""
    return [contact for operation in operations for contact in cases(operation).contacts()]
