"""Kernels of other packages, which declare them by the entry-point group `jaxext.kernels`.

They are loaded when an implementation is first chosen or named.  An entry point is a module, which registers its kernels when it is
imported, or a function that does so, which is called.
"""

from __future__ import annotations

import importlib.metadata
import threading
import warnings

import jax

GROUP = "jaxext.kernels"
_lock = threading.RLock()  # an entry point may call an operation itself
_state = {"loading": False, "done": False}


def load() -> None:
    """Load the entry points of all installed packages, once.  One that fails is a warning, and the others are loaded.

    Other threads wait until all are loaded.
    """
    if _state["done"]:
        return
    with _lock:
        if _state["done"] or _state["loading"]:
            return
        _state["loading"] = True
        try:
            failures = [*filter(None, map(_failure, sorted(importlib.metadata.entry_points(group=GROUP))))]
            _state["done"] = True
        finally:
            _state["loading"] = False
    for failure in failures:
        warnings.warn(failure, stacklevel=2)


def _failure(entry: importlib.metadata.EntryPoint) -> str | None:
    """Load an entry point, and return why that failed, or None."""
    try:
        with jax.ensure_compile_time_eval():  # a program may be traced now
            loaded = entry.load()
            if callable(loaded):
                loaded()
    except (Exception, SystemExit) as error:
        of = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
        return f"{of}: the kernels {entry.name!r} ({entry.value}) do not load: {type(error).__name__}: {error}"
    return None
