"""The host code of csrc/ that decides what the CUDA kernels are asked, compiled by a C++ compiler: tests/csrc/host_code.cc.

`refuses` is what the compiled module answers, but of the sources that are here, and of a table of matrix products with bfloat16 alone (and
float8 and float32 in nt).  Needs g++; no GPU, no CUDA and no compiled module.
"""

import collections
import ctypes
import dataclasses
import functools
import pathlib
import types
from typing import Any
from unittest import mock

import cpp
import numpy as np

import jaxext
from jaxext.kernels.geometry import ConvProblem
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv.cuda_dense import ConvConfig
from jaxext.ops.matmul import cuda as cuda_matmul

ROOT = pathlib.Path(__file__).parent.parent
ROLES = {"fprop": 0, "dgrad": 1, "wgrad": 2}  # jaxext::ConvRole


Box = collections.namedtuple("Box", "input filter output low high pixel tap lower upper first_offset tap_stride")
Part = collections.namedtuple("Part", "N x w y boxes")  # with three boxes


@functools.cache
def _library() -> ctypes.CDLL:
    csrc = cpp.CSRC
    alone = [path for path in csrc.glob("*/*.cc") if path.stem == path.parent.name and not (path.parent / f"{path.stem}_plan.cc").exists()]
    alone.remove(csrc / "launcher/launcher.cc")
    units = [ROOT / "tests/csrc/host_code.cc", *sorted(alone)]
    units += sorted([*csrc.glob("*/*_plan.cc"), *csrc.glob("*/*_target.cc"), *csrc.glob("common/*.cc")])
    units.remove(csrc / "common/ffi.cc")
    return cpp.shared_library(units, [*cpp.SANITIZED, "-O1", "-Werror"])


def _pointer(values):
    return np.ctypeslib.as_ctypes(np.array(values, np.int64))


def refuses(problem: Any, family: types.ModuleType = cuda_matmul) -> str | None:
    """The reason why the kernels of a family, which has the module, do not take the problem, or None."""

    def answer(target, *, dtypes, arch, **fields):
        names = (ctypes.c_char_p * 4)(*(dtype.encode() for dtype in (*dtypes, "")[:4]))
        text = ctypes.create_string_buffer(1000)
        refused = _library().Refuses(target.encode(), _pointer(np.hstack([*fields.values()])), names, arch, text)
        assert refused in (0, 1), f"there is no target {target}"
        return text.value.decode() if refused else None

    with mock.patch.object(jaxext, "_cuda_module", types.SimpleNamespace(refuses=answer), create=True):
        return family.refused(problem)


def gemm(role: str, sizes: tuple[int, ...], splits: int) -> list[int]:
    """Return 1 if A of a matrix product is its first operand, or 0, and then the numbers of its `Gemm` (csrc/matmul/matmul.h)."""
    out = np.zeros(9, np.int64)
    _library().NumbersOfGemm(("nn", "nt", "tn").index(role), _pointer(sizes), ctypes.c_int64(splits), np.ctypeslib.as_ctypes(out))
    return out.tolist()


def most_parts() -> int:
    """B·G·splits."""
    return _library().MostParts()


def plan(problem: ConvProblem, config: ConvConfig) -> list[Part] | str:
    """The parts of a dense convolution, or the reason for refusing."""
    out, text = np.zeros((_library().MostPhases(), 37), np.int64), ctypes.create_string_buffer(1000)
    where = (ROLES[problem.role], cuda_conv.rank(problem))
    numbers = _pointer(np.hstack([*cuda_conv.fields(problem).values()])), _pointer(dataclasses.astuple(config))
    count = _library().Plan(*where, *numbers, np.ctypeslib.as_ctypes(out.ravel()), text)
    if count < 0:
        return text.value.decode()
    rows = out[:count].tolist()
    return [Part(*row[:4], boxes=(Box(*row[4:15]), Box(*row[15:26]), Box(*row[26:37]))) for row in rows]
