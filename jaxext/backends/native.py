"""The compiled parts of jaxext, and where they come from: the CUDA kernels (`_cuda_module`), and the launcher of kernels that are given as
text (`_launcher`).

A build from sources has them in the package `jaxext`.  Parts that it lacks come from a distribution of compiled kernels,
jaxext-kernels-cu13 or jaxext-kernels-cu12, if it was built of the sources of this jaxext: both have a module `_cuda_build` with the
digests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

OWN = "jaxext"
SERIES = (13, 12)  # of CUDA, for which there are distributions, in order of preference


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The installed distributions of compiled kernels."""

    taken: str | None  # the import package of the one that has what a build from sources lacks
    name: str  # its distribution and version
    refused: Mapping[str, str]  # distribution and version -> the reason why it is not used

    def __str__(self) -> str:
        return "; ".join(f"{name} is installed, but {reason}" for name, reason in self.refused.items())


def cuda_module() -> ModuleType:
    """Return the compiled CUDA kernels.

    Raises:
      ImportError: there are none, or they do not load.
    """
    if (package := _package("_cuda_module")) != OWN:
        return importlib.import_module(f"{package}._cuda_module")
    from jaxext import _cuda_module

    return _cuda_module


def find(part: str) -> ModuleSpec | None:
    """Return where a part lies, or None.  The part itself is not loaded."""
    return importlib.util.find_spec(f"{_package(part)}.{part}")


@functools.cache
def _package(part: str) -> str:
    """Return the import package that has a part.  One of jaxext's own that does not load is not replaced."""
    package = kernels().taken
    return package if package and importlib.util.find_spec(f"{OWN}.{part}") is None else OWN


def origin(part: str) -> str:
    """Return who brought a part, and its file."""
    spec = find(part)
    if spec is None:
        return "nowhere"
    return f"{'a build from sources' if _package(part) == OWN else kernels().name}: {spec.origin}"


@functools.cache
def kernels() -> Kernels:
    """Return the installed distribution that is used: of those that fit, the first whose series of CUDA the driver runs, else the first.

    Programs for GPUs of other machines are compiled with any driver.
    """
    fitting, refused = {}, {}
    for series in SERIES:
        try:
            version = importlib.metadata.version(f"jaxext-kernels-cu{series}")
        except importlib.metadata.PackageNotFoundError:
            continue
        name = f"jaxext-kernels-cu{series} {version}"
        if reason := _refused(series):
            refused[name] = reason
        else:
            fitting[name] = series
    newest = driver()
    runs = [name for name, series in fitting.items() if newest is None or newest[0] >= series]
    taken = next(iter([*runs, *fitting]), "")
    for name in fitting.keys() - {taken}:
        refused[name] = f"{taken} is used" if name in runs or not newest else f"the driver is of CUDA {newest[0]}.{newest[1]}"
    return Kernels(f"jaxext_kernels_cu{fitting[taken]}" if taken else None, taken, refused)


def _refused(series: int) -> str | None:
    """Return the reason why the installed distribution of a series does not fit this jaxext, or None."""
    try:
        own, built = (importlib.import_module(f"{package}._cuda_build") for package in (OWN, f"jaxext_kernels_cu{series}"))
    except ImportError as error:
        return f"it does not load: {error}"
    wanted, found = ((build.SOURCES[:16], getattr(build, "LAUNCHER", "")[:16]) for build in (own, built))  # an older build has none
    if found == wanted:
        return None
    return (
        f"was built of other sources ({'/'.join(found)}), this jaxext wants {'/'.join(wanted)}: make kernel-wheel in its"
        f" clone, then pip install --find-links wheels --force-reinstall --no-deps jaxext-kernels-cu{series}"
    )


@functools.cache
def driver() -> tuple[int, int] | None:
    """Return the version of CUDA of this machine's driver, or None if it has no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return (version.value // 1000, version.value % 1000 // 10) if version.value > 0 else None
