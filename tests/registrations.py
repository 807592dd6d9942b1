"""Implementations and forms of users last until the process ends, and a process of the tests has other test files to run."""

import contextlib
import os
from collections.abc import Iterator

import jax

from jaxext import extend
from jaxext.core.family import families
from jaxext.core.form import owner
from jaxext.tables import active, environment


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """A context whose end forgets every form and implementation that was registered in it, and the programs that contain them.

    jax's caches are cleared only if implementations changed: compiling takes long.
    """
    before = {family: list(family.implementations) for family in families.values()}
    codes = {name: list(of) for name, of in environment._codes.items()}
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        if any(family.implementations != kept for family, kept in before.items()):
            jax.clear_caches()
            for family, kept in before.items():
                family.implementations[:] = kept
        for name in families.keys() - {family.name for family in before}:
            for primitive in [primitive for primitive, (form, _) in owner.items() if form.family.name == name]:
                del owner[primitive]
            extend._defined.pop(name, None)
            extend._declared.pop(name, None)
            del families[name]
        if environment._codes != codes:
            environment._codes.clear()
            environment._codes.update(codes)
            environment.codes.cache_clear()
            active._tables.clear()
        os.environ.pop("TRITON_CACHE_DIR", None)  # jax_triton sets it
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = cache
