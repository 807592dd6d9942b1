"""Implementations and forms of users last until the process ends, and a process of the tests has other test files to run."""

import contextlib
import os
from collections.abc import Iterator

import jax

from jaxext import _dispatch, _tuned
from jaxext._conv import CONV_IMPLEMENTATIONS
from jaxext._form import owner
from jaxext._matmul import MATMUL_IMPLEMENTATIONS


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """A context whose end forgets every form and implementation that was registered in it, and the programs that contain them.

    jax's caches are cleared only if implementations changed: compiling takes long.
    """
    lists = [MATMUL_IMPLEMENTATIONS, CONV_IMPLEMENTATIONS, *(form.implementations for form in _dispatch.defined.values())]
    before = [*map(list, lists)]
    defined, versions = set(_dispatch.defined), {name: set(of) for name, of in _tuned._versions.items()}
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        if [*map(list, lists)] != before:
            jax.clear_caches()
            for implementations, kept in zip(lists, before, strict=True):
                implementations[:] = kept
        for name in _dispatch.defined.keys() - defined:
            for primitive in _dispatch.defined.pop(name).primitives.values():
                del owner[primitive]
        if _tuned._versions != versions:
            _tuned._versions.clear()
            _tuned._versions.update(versions)
            _tuned.context.cache_clear()
            _tuned._tables.clear()
        os.environ.pop("TRITON_CACHE_DIR", None)  # jax_triton sets it
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = cache
