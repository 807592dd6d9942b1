"""The calls by which kernels meet a GPU for the first time: those of each operation's `cases.py`, in the order of jaxext's imports."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType

from jaxext import ops
from jaxext.core.contact import Contact

PLATFORM, IMPLEMENTATIONS = "cuda", ("triton", "cuda")  # where and by which kernels they are checked


def cases(operation: str) -> ModuleType:
    return importlib.import_module(f"jaxext.ops.{operation}.cases")


_folders = [importlib.import_module(f"jaxext.ops.{module.name}").__name__ for module in pkgutil.iter_modules(ops.__path__)]
OPERATIONS = [name.rpartition(".")[2] for name in sys.modules if name in _folders]


def contacts(operations: Iterable[str] = OPERATIONS) -> list[Contact]:
    """All of them, by name once each, or those of some operations."""
    return [contact for operation in operations for contact in cases(operation).contacts()]
