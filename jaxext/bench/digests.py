"""The digest of the code that computes a row of the report by a library.

It is of the files of one family of kernels and of all that they include or import, not of all kernels: a report in which a kernel was
mended keeps the rows of the others.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator

from jaxext import ops
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.kernel import KERNELS, PROBLEMS, KernelImplementation
from jaxext.backends.triton import triton_binding
from jaxext.bench.bench_report import Measured, Results
from jaxext.core.implementation import hash_of
from jaxext.tables import environment

# Tag -> the family of kernels; a problem with none of these has the family of its operation, or is a matrix product.
_FAMILIES = {
    "depthwise": "depthwise",
    **dict.fromkeys(("one-axis", "two-axes", "three-axes"), "conv"),
    "ragged": "ragged",
    "causal_conv1d": "causal",
    "quantized_matmul": "scaled",
    "ragged_scaled_dot": "ragged_scaled",
    "moe": "ragged",
}
# Family -> its folders in csrc, and its operations, where these are not of its own name alone.
_FOLDERS = {"scaled": ("scaled", "weight_only"), "pieces": ("pieces", "matmul")}
_OPERATIONS = {
    "depthwise": ("conv",),
    "ragged": ("ragged", "ragged_gather"),
    "pieces": ("matmul",),
    "ragged_scaled": ("ragged_scaled", "ragged", "scaled"),
}
_IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import (.*)", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def digests(tags: Collection[str], numbers: str, libraries: Iterable[str], platform: str) -> dict[str, str]:
    """Library -> digest, for a problem with these tags in this kind of numbers.  lax and cuBLAS have "": versions tell what they are."""
    return {library: _digest(family(tags, numbers), library, platform) for library in libraries}


def current(row: Measured, platform: str) -> Results:
    """The results of a row whose code is today's."""
    known = digests(row.tags, row.numbers, row.results, platform)
    return Results((library, result) for library, result in row.results.items() if row.digests.get(library) == known[library])


def family(tags: Collection[str], numbers: str) -> str:
    """The family of kernels that compute a problem."""
    own = [tag for tag in tags if "own" in tags and (KERNELS / tag).is_dir()]
    found = next(iter([*(family for tag, family in _FAMILIES.items() if tag in tags), *own, "matmul"]))
    return "pieces" if found == "matmul" and numbers in ("bf16x3", "bf16x6") else found


@functools.cache
def _digest(family: str, library: str, platform: str) -> str:
    codes = environment.codes(platform)
    if library == "triton":
        return hash_of([*_triton_files("matmul" if family == "pieces" else family)])
    if library == "cuda" and (csrc := _csrc()):
        return hash_of([*_cuda_files(family, csrc)])
    return " ".join(codes.values()) if library == "jaxext" else codes.get(library, "")


def _triton_files(family: str) -> Iterator[pathlib.Path]:
    yield from KernelImplementation.shared
    yield from sorted(pathlib.Path(triton_binding.__file__).parent.glob("*.py"))
    yield from _operation_files(family, "triton")
    yield from _closure(sorted((KERNELS / family).glob("*.py")), _imported)


def _cuda_files(family: str, csrc: pathlib.Path) -> Iterator[pathlib.Path]:
    yield from KernelImplementation.shared
    yield pathlib.Path(cuda_binding.__file__)
    yield from _operation_files(family, "cuda")
    yield from PROBLEMS
    folders = ("common", *_FOLDERS.get(family, (family,)))
    yield from _closure([path for folder in folders for path in sorted(csrc.glob(f"{folder}/*.c[cu]"))], functools.partial(_included, csrc))


def _operation_files(family: str, library: str) -> list[pathlib.Path]:
    folders = [pathlib.Path(ops.__path__[0]) / operation for operation in _OPERATIONS.get(family, (family,))]
    return sorted(path for folder in folders for name in (f"{library}*.py", "problem.py") for path in folder.glob(name))


def _closure(files: Iterable[pathlib.Path], named) -> list[pathlib.Path]:
    """The files and all that they name, directly or not."""
    found, waiting = set(), [*files]
    while waiting:
        if (path := waiting.pop()) not in found and path.exists():
            found.add(path)
            waiting += named(path)
    return sorted(found)


def _included(folder: pathlib.Path, file: pathlib.Path) -> list[pathlib.Path]:
    return [folder / name for name in _INCLUDE.findall(file.read_text())]


def _imported(file: pathlib.Path) -> Iterator[pathlib.Path]:
    for dots, module, names in _IMPORT.findall(file.read_text()):
        folder = file.parents[len(dots) - 1].joinpath(*filter(None, module.split(".")))
        yield folder.with_suffix(".py")  # from .problem import Problem
        yield from (folder / f"{name.split()[0]}.py" for name in names.split(",") if name.strip())  # from .. import tile


@functools.cache
def _csrc() -> pathlib.Path | None:
    """The folder of the sources of which the CUDA module was compiled, of this checkout or of the one in which the process runs; None
    if they are not there."""
    try:
        from jaxext._cuda_build import SOURCES
    except ImportError:
        return None
    for folder in (KERNELS.parent / "csrc", pathlib.Path("csrc").resolve()):
        paths = sorted((path for path in folder.rglob("*.*") if path.parent.name != "launcher"), key=pathlib.Path.as_posix)
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        if hashes and hashlib.sha256("".join(hashes).encode()).hexdigest() == SOURCES:
            return folder
    return None
