"""The compiled CUDA kernels' host code without CUDA: what it asks of CUDA for a call of a target.

The host code of csrc/ is compiled here and linked with the library's kernels and a CUDA runtime that writes down what it is asked:
csrc/cuda_runtime.cc.  Needs nvcc and the folder in which jaxext was built, or skips; no GPU and no driver.  The module that imports this is
skipped where no kernels are compiled.
"""

import ctypes
import functools
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import call_frame
import numpy as np
import pytest
import test_cuda_gram
from cuda_cases import CODES, INTERNAL, INVALID, OK, Case

from jaxext.backends.cuda import cuda_binding

TESTS = pathlib.Path(__file__).parent
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
LIBRARIES = sorted(TESTS.parent.glob("build/*/libjaxext_kernels.a"), key=lambda path: path.stat().st_mtime)
if reason := cuda_binding.missing():
    pytest.skip(f"no CUDA kernels: {reason}", allow_module_level=True)
LIBRARY = LIBRARIES[-1] if LIBRARIES else TESTS

from jaxext import _cuda_module  # noqa: E402

STREAM = 77
ELEMENTS = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # CUtensorMapDataType -> bytes
SWIZZLE = {0: 1 << 10, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> most bytes of a row of the box

# What can be called, a row for each compiled kernel.
ROWS = {family: _cuda_module.kernels(family) for family in _cuda_module.families()}
MATMULS, SCALEDS, RAGGEDS, RAGGED_SCALEDS, CONVS = (ROWS[family] for family in ("matmul", "scaled", "ragged", "ragged_scaled", "conv"))
GRAMS = ROWS[test_cuda_gram.SMALL.name]
PIECES = [row | {"role": role} for row in _cuda_module.kernels("pieces") for role in ("nn", "nt", "tn")]
DEPTHWISE = [
    dict(rank=rank, role=role, operands=dtype)
    for rank in (1, 2, 3)
    for role in ("fprop", "dgrad", "wgrad")
    for dtype in ("float32", "bfloat16", "float16")
]
WIDE_WEIGHT_ONLYS = _cuda_module.kernels("weight_only")
WEIGHT_ONLYS = [dict(operands=dtype, bits=bits) for dtype in ("bf16", "fp16") for bits in (4, 8)]
CAUSALS = [dict(role=role, operands=dtype) for role in ("forward", "backward") for dtype in ("fp32", "bf16", "fp16")]
SCHEMA = _cuda_module.schema()


_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def _host_code() -> str:
    """The library, in which the sources that are here decode the calls of all targets, as one object."""
    folder = _FOLDER.name
    flags = ["-std=c++17", "-O0", "-Xcompiler", "-fPIC,-Wall,-Wextra,-fsanitize=undefined,-fno-sanitize-recover=all"]
    csrc = TESTS.parent / "csrc"
    units = [*csrc.glob("*/*_target.cc"), *(path for path in csrc.glob("common/*.cc") if path.name != "ffi.cc")]
    command = [NVCC, *flags, f"-I{csrc}", "--threads", str(os.cpu_count()), "-c", *units]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    objects = [f"{path.stem}.o" for path in units]
    shutil.copy(LIBRARY, f"{folder}/kernels.a")
    subprocess.run(["ar", "d", "kernels.a", *(f"{path.name}.o" for path in units)], cwd=folder, check=True)
    subprocess.run(["ld", "-r", *objects, "--whole-archive", "kernels.a", "-o", "library.o"], cwd=folder, check=True)
    return f"{folder}/library.o"


@functools.cache
def runtime(*more: str | pathlib.Path, copy: int = 0) -> ctypes.CDLL:
    """The stand-in for CUDA with our host code, and with what `more` names to nvcc.  A copy remembers nothing of the others' calls."""
    if reason := (NVCC is None and "no nvcc here") or (not LIBRARIES and "jaxext was not built in this checkout"):
        pytest.skip(f"no CUDA kernels to link: {reason}", allow_module_level=True)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cuda_runtime.so"
        # -z,defs: a function of CUDA that the runtime has not, such as one that allocates, waits or copies, is an error
        flags = ["-std=c++17", "-O0", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-Wall,-Wextra,-fsanitize=undefined"]
        # What `more` has comes first, and is taken in place of the library's.
        sources = [TESTS / "csrc/cuda_runtime.cc", *more, _host_code()]
        command = [NVCC, *flags, "-Xlinker", "-z,defs,-z,muldefs", f"-I{TESTS.parent / 'csrc'}", *sources, "-o", path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return ctypes.CDLL(path)


def prepared() -> list[dict[str, Any]]:
    """Return what this thread's last call asked of CUDA before descriptors and launches: kernels that it loaded, attributes that it set."""
    answer = ctypes.create_string_buffer(1 << 16)
    runtime().Prepared(answer, ctypes.c_int64(len(answer)))
    return json.loads(answer.value)


def load(case, device=0, failing=""):
    """Call `ask` without a stream, as a handler's initialize stage does."""
    runtime().OnlyLoad(1)
    try:
        return ask(case, device, failing)
    finally:
        runtime().OnlyLoad(0)


def ask(case: Case, device=0, failing=""):
    """(status, what was asked of CUDA, or the message)."""
    words = [_words(case.attributes[name]) for name in SCHEMA[case.target]]
    rows = [[CODES.index(dtype), case.addresses[name], len(shape), *shape] for name, (dtype, shape) in case.arrays.items()]
    attributes, arrays = ((ctypes.c_int64 * sum(map(len, parts)))(*itertools.chain(*parts)) for parts in (words, rows))
    answer = ctypes.create_string_buffer(1 << 20)
    counts = len(case.operands), len(case.results)
    given = attributes, *counts, arrays, ctypes.c_int64(STREAM), answer, ctypes.c_int64(len(answer))
    status = runtime().CallTarget(case.target.encode(), device, failing.encode(), *given)
    text = answer.value.decode()
    return status, json.loads(text) if status == OK else text


def handled(case: Case) -> tuple[int, str]:
    """Return what `ask` does, but of the compiled module's handlers: the answer of both stages, the same if no kernel can be loaded."""
    operands, results = (
        [(dtype, shape, case.addresses[name]) for name, (dtype, shape) in group.items()] for group in (case.operands, case.results)
    )
    (answer,) = {
        call_frame.call(call_frame.library(), handler(case.target, stage), number, operands, results, case.attributes)
        for stage, number in call_frame.STAGES.items()
    }
    return {call_frame.OK: OK, call_frame.INVALID: INVALID, call_frame.INTERNAL: INTERNAL}[answer[0]], answer[1]


def handler(target: str, stage: str) -> ctypes.c_void_p:
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(ctypes.pythonapi.PyCapsule_GetPointer(_cuda_module.handlers()[f"jaxext_{target}_v1"][stage], None))


def _words(value) -> list[int]:
    """An attribute in units of 8 bytes."""
    return np.atleast_1d(value).astype(float if isinstance(value, float) else np.int64).view(np.int64).tolist()
