"""The host code of csrc/ that decides what the CUDA kernels are asked, compiled by a C++ compiler: tests/csrc/host_code.cc.

`refuses` is what the compiled module answers, but of the sources that are here, and of a table of matrix products with bfloat16 alone (and
float8 in nt).  Needs g++; no GPU, no CUDA and no compiled module.
"""

import ctypes
import dataclasses
import functools
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import pytest

from jaxext.backends.cuda import cuda_causal, cuda_conv, cuda_gram, cuda_matmul, cuda_scaled
from jaxext.backends.cuda.cuda_conv import ConvConfig
from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.matmul.problem import MatmulProblem

ROOT = pathlib.Path(__file__).parent.parent
# jaxext::MatmulRole, jaxext::ConvRole, jaxext::CausalRole
ROLES = {"nn": 0, "nt": 1, "tn": 2, "fprop": 0, "dgrad": 1, "wgrad": 2, "forward": 0, "backward": 1}
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all"]


@dataclasses.dataclass(frozen=True)
class Box:
    input: int
    filter: int
    output: int
    low: int
    high: int
    pixel: int
    tap: int
    lower: int
    upper: int
    first_offset: int
    tap_stride: int


@dataclasses.dataclass(frozen=True)
class Part:
    N: int
    x: int
    w: int
    y: int
    boxes: tuple[Box, Box, Box]


@functools.cache
def _library() -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ found")
    csrc, tests = ROOT / "csrc", ROOT / "tests/csrc"
    plans = ("conv", "depthwise", "causal", "weight_only")
    units = [tests / "host_code.cc", *(csrc / f"{name}/{name}.cc" for name in ("matmul", "pieces", "ragged", "scaled", "gram"))]
    units += [csrc / f"{name}/{name}_plan.cc" for name in plans]
    with tempfile.TemporaryDirectory() as folder:
        objects = [pathlib.Path(folder) / f"{unit.stem}.o" for unit in units]
        compile = ["g++", *FLAGS, f"-I{csrc}", f"-I{tests / 'cuda'}", "-c"]
        running = [subprocess.Popen([*compile, unit, "-o", made]) for unit, made in zip(units, objects, strict=True)]
        assert [process.wait() for process in running] == [0] * len(units)
        subprocess.run(["g++", *FLAGS, *objects, "-o", f"{folder}/host_code.so"], check=True)
        return ctypes.CDLL(f"{folder}/host_code.so")


def _pointer(values):
    return np.ctypeslib.as_ctypes(np.array(values, np.int64))


def _numbers(problem: MatmulProblem | ConvProblem | CausalProblem, family=cuda_conv):
    """The fields of its struct in csrc, in order."""
    return _pointer(np.hstack([*family.fields(problem).values()]))


def refuses(problem: MatmulProblem | ConvProblem | CausalProblem, family=cuda_matmul) -> str | None:
    """Why the kernels of the family, which has the module, do not take the problem, or None."""
    name = family.__name__.rpartition("cuda_")[2]
    rank = cuda_conv.rank(problem) if isinstance(problem, ConvProblem) else 0
    added = [problem.epilogue.bias or ""] if family is cuda_causal else [problem.addend or ""] if family is cuda_gram else []
    dtypes = (*problem.operand_dtypes, problem.dtypes[2]) if family is cuda_scaled else problem.dtypes
    names = [dtype.encode() for dtype in (*dtypes, *added)]
    dtypes = (ctypes.c_char_p * len(names))(*names)
    text = ctypes.create_string_buffer(1000)
    refused = _library().Refuses(name.encode(), ROLES[problem.role], rank, _numbers(problem, family), dtypes, problem.arch, text)
    return text.value.decode() if refused else None


def most_parts() -> int:
    """B·G·splits."""
    return _library().MostParts()


def plan(problem: ConvProblem, config: ConvConfig) -> list[Part] | str:
    """The parts of a dense convolution, or the reason for refusing."""
    out, text = np.zeros((_library().MostPhases(), 37), np.int64), ctypes.create_string_buffer(1000)
    where = (ROLES[problem.role], cuda_conv.rank(problem))
    numbers = _numbers(problem), _pointer(dataclasses.astuple(config))
    count = _library().Plan(*where, *numbers, np.ctypeslib.as_ctypes(out.ravel()), text)
    if count < 0:
        return text.value.decode()
    rows = out[:count].tolist()
    return [Part(*row[:4], boxes=(Box(*row[4:15]), Box(*row[15:26]), Box(*row[26:37]))) for row in rows]
