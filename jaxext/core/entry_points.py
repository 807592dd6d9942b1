"""Kernels of other packages, which declare them by the entry-point group `jaxext.kernels`.

They are loaded when an implementation is first chosen or named.  An entry point is a module, which registers its kernels when it is
imported, or a function that does so, which is called.  `python -m jaxext info` lists them.
"""

from __future__ import annotations

import importlib.metadata
import threading
import warnings

import jax

from jaxext._messages import depth_of_the_user

GROUP, LOADED = "jaxext.kernels", "loaded"
_lock = threading.RLock()  # an entry point may call an operation itself
_state = {"loading": False, "done": False}
states: dict[str, str] = {}  # of each entry point, by package and name: LOADED, or its error


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
            states.update(map(_loaded, sorted(importlib.metadata.entry_points(group=GROUP))))
            _state["done"] = True
        finally:
            _state["loading"] = False
    for entry, state in states.items():
        if state != LOADED:
            warnings.warn(f"{entry} of {GROUP} does not load: {state}", stacklevel=depth_of_the_user())


def _loaded(entry: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Load an entry point, and return its package and name, and its state."""
    of = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    named = f"{of}: {entry.name} = {entry.value}"
    try:
        with jax.ensure_compile_time_eval():  # a program may be traced now
            loaded = entry.load()
            if callable(loaded):
                loaded()
    except (Exception, SystemExit) as error:
        return named, f"{type(error).__name__}: {error}"
    return named, LOADED
