"""Implementations and forms of users last until the process ends, and a process of the tests has other test files to run."""

import contextlib
import os
from collections.abc import Iterator

import jax

from jaxext.families import dispatch
from jaxext.families.conv import CONV_IMPLEMENTATIONS
from jaxext.families.matmul import MATMUL_IMPLEMENTATIONS
from jaxext.forms.form import owner
from jaxext.tables import in_force


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """A context whose end forgets every form and implementation that was registered in it, and the programs that contain them.

    jax's caches are cleared only if implementations changed: compiling takes long.
    """
    lists = [MATMUL_IMPLEMENTATIONS, CONV_IMPLEMENTATIONS, *(form.implementations for form in dispatch.defined.values())]
    before = [*map(list, lists)]
    defined, versions = set(dispatch.defined), {name: set(of) for name, of in in_force._versions.items()}
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        if [*map(list, lists)] != before:
            jax.clear_caches()
            for implementations, kept in zip(lists, before, strict=True):
                implementations[:] = kept
        for name in dispatch.defined.keys() - defined:
            for primitive in dispatch.defined.pop(name).primitives.values():
                del owner[primitive]
        if in_force._versions != versions:
            in_force._versions.clear()
            in_force._versions.update(versions)
            in_force.context.cache_clear()
            in_force._tables.clear()
        os.environ.pop("TRITON_CACHE_DIR", None)  # jax_triton sets it
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = cache
