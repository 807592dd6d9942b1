"""The native launcher of kernels that users give as text: how its library is found, and registered with XLA.

csrc/launcher/launcher.cc says which attributes a call of the handler `jaxext_raw_v1` has.  The library needs no Python: it is loaded by
ctypes.  Its name is that of an extension module, by which importlib finds it in editable installations too.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib

import jax

from jaxext.backends import native
from jaxext.backends.ffi_version import refused_version

TARGET = "jaxext_raw_v1"


def find() -> pathlib.Path | None:
    """Return the path of the library, or None if it is not installed."""
    spec = native.find("_launcher")
    return pathlib.Path(spec.origin) if spec and spec.origin else None


@functools.cache
def missing() -> str | None:
    """Return the reason why there is no launcher here, or None.  Loads the library."""
    path = find()
    if path is None:
        return _not_built()
    try:
        library = _library(path)
    except (OSError, AttributeError) as error:  # AttributeError: it has no such function
        return f"the launcher does not load: {error}"
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.jaxext_launcher_ffi_version(ctypes.byref(major), ctypes.byref(minor))
    return refused_version((major.value, minor.value))


@functools.cache
def register() -> None:
    """Make the handler known to XLA.

    Raises:
      RuntimeError: there is no launcher.
    """
    path = find()
    if (reason := missing()) or path is None:
        raise RuntimeError(f"no launcher of kernels that are given as text: {reason}")
    library = _library(path)
    stages = {stage: jax.ffi.pycapsule(getattr(library, f"jaxext_raw_{stage}")) for stage in ("initialize", "execute")}
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA", api_version=1)


def _not_built() -> str:
    try:
        from jaxext._cuda_build import NO_LAUNCHER
    except ImportError:  # or it is of an older jaxext
        return "jaxext was installed without a launcher, reinstall it: pip install . in the repository"
    return "; ".join(filter(None, [f"built without a launcher ({NO_LAUNCHER})", str(native.kernels())]))


def _library(path: pathlib.Path) -> ctypes.CDLL:
    """Load the library, with all that `register` takes of it."""
    library = ctypes.CDLL(str(path))
    for name in ("jaxext_raw_initialize", "jaxext_raw_execute", "jaxext_launcher_ffi_version"):
        getattr(library, name)
    return library
