"""The compiled CUDA kernels' host code without CUDA: what it asks of it for a call.

The kernels' library is linked with a CUDA runtime that writes down what it is asked: csrc/cuda_runtime.cc.  Needs nvcc and the folder in
which jaxext was built, or skips; no GPU and no driver.  The module that imports this is skipped where no kernels are compiled.
"""

import ctypes
import dataclasses
import functools
import itertools
import json
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_cases import (  # noqa: F401
    BYTES,
    EPILOGUE,
    FAMILIES,
    LONG,
    SLOTS,
    Arrays,
    Case,
    add_epilogue,
    causal,
    conv,
    in_parts,
    numbers_of,
    weight_only,
)

from jaxext.backends.cuda import cuda_binding

TESTS = pathlib.Path(__file__).parent
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
LIBRARIES = sorted(TESTS.parent.glob("build/*/libjaxext_kernels.a"), key=lambda path: path.stat().st_mtime)
if reason := cuda_binding.missing():
    pytest.skip(f"no CUDA kernels: {reason}", allow_module_level=True)
LIBRARY = LIBRARIES[-1] if LIBRARIES else TESTS

from jaxext import _cuda_module  # noqa: E402

OK, INVALID, INTERNAL = range(3)  # jaxext::Status
CODES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32"]  # jaxext::Dtype
SHAPES = {"a": "BMK", "b": "BKN", "c": "BMN"}
RAGGED_SLOTS = {"nn": "xwy", "nt": "wyx", "tn": "xyw"}
RAGGED_SHAPES = {"x": "BPRMK", "w": "BGKN", "y": "BPRMN"}
STREAM = 77
ELEMENTS = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 9: 2}  # CUtensorMapDataType -> bytes
SWIZZLE = {0: 1 << 10, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> most bytes of a row of the box

# What can be called, a row for each compiled kernel.
MATMULS, SCALEDS, GRAMS, RAGGEDS, CONVS = map(_cuda_module.kernels, ("matmul", "scaled", "gram", "ragged", "conv"))
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


@functools.cache
def runtime(*more: str | pathlib.Path, copy: int = 0) -> ctypes.CDLL:
    """The stand-in for CUDA with our host code, and with what `more` names to nvcc.  A copy remembers nothing of the others' calls."""
    if reason := (NVCC is None and "no nvcc here") or (not LIBRARIES and "jaxext was not built in this checkout"):
        pytest.skip(f"no CUDA kernels to link: {reason}", allow_module_level=True)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cuda_runtime.so"
        # -z,defs: a function of CUDA that the runtime has not, such as one that allocates, waits or copies, is an error
        flags = ["-std=c++17", "-O0", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-Wall,-Wextra", "-Xlinker", "-z,defs"]
        # All of the library, whose targets register themselves; what `more` has comes first, and is taken in place of the library's.
        subprocess.run(["ld", "-r", "--whole-archive", LIBRARY, "-o", f"{folder}/library.o"], check=True)
        sources = [TESTS / "csrc/cuda_runtime.cc", *more, f"{folder}/library.o"]
        command = [NVCC, *flags, "-Xlinker", "-z,muldefs", f"-I{TESTS.parent / 'csrc'}", *sources, "-o", path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return ctypes.CDLL(path)


def prepared() -> list[dict[str, Any]]:
    """What this thread's last call asked of CUDA before descriptors and launches: kernels that it loaded, attributes that it set."""
    answer = ctypes.create_string_buffer(1 << 16)
    runtime().Prepared(answer, ctypes.c_int64(len(answer)))
    return json.loads(answer.value)


def load(case, device=0, failing=""):
    """As `ask`, without a stream: as a handler's initialize stage calls."""
    runtime().OnlyLoad(1)
    try:
        return ask(case, device, failing)
    finally:
        runtime().OnlyLoad(0)


def ask(case: Case, device=0, failing=""):
    """(status, what was asked of CUDA, or the message)."""
    words = [_words(case.attributes[name]) for name in SCHEMA[case.target]]
    rows = [
        [CODES.index(dtype), case.addresses[name], len(shape), *shape] for name, (dtype, shape) in {**case.operands, **case.results}.items()
    ]
    attributes, arrays = ((ctypes.c_int64 * sum(map(len, parts)))(*itertools.chain(*parts)) for parts in (words, rows))
    answer = ctypes.create_string_buffer(1 << 20)
    counts = len(case.operands), len(case.results)
    given = attributes, *counts, arrays, ctypes.c_int64(STREAM), answer, ctypes.c_int64(len(answer))
    status = runtime().CallTarget(case.target.encode(), device, failing.encode(), *given)
    text = answer.value.decode()
    return status, json.loads(text) if status == OK else text


def _words(value) -> list[int]:
    """An attribute in units of 8 bytes."""
    return np.atleast_1d(value).astype(float if isinstance(value, float) else np.int64).view(np.int64).tolist()


def _config(row, names, splits=None) -> dict[str, int]:
    return {name: row[name] for name in names.split()} | ({} if splits is None else {"splits": splits})


# Cases: a row, and a problem that it takes.


def matmul(row, B, M, N, K, splits=1, epilogue: tuple[int, Sequence[str]] | None = None):
    """`epilogue`: the activation's number and the slots that exist; all of them if the kernel fuses one."""
    sizes = dict(B=B, M=M, N=N, K=K)
    first, second, open_ = (tuple(sizes[label] for label in SHAPES[slot]) for slot in SLOTS[row["role"]])
    names = SLOTS[row["role"]]
    operands = {names[0]: (row["operands"], first), names[1]: (row["operands"], second)}
    result = (row["result"], in_parts(open_, splits))
    attributes = sizes | _config(row, "tile_m tile_n tile_k cluster_m pingpong", splits)
    if not row["fused"]:
        return Case(f"matmul_{row['role']}", attributes, operands, {names[2]: result})
    activation, slots = epilogue or (3, EPILOGUE)
    return add_epilogue(Case("linear", attributes, operands, {names[2]: result}), (B, N), activation, slots)


def pieces(row, B, M, N, K, splits=1):
    plain = matmul(row | dict(fused=False, result="float32") | dict.fromkeys(("tile_k", "cluster_m", "pingpong"), 0), B, M, N, K, splits)
    attributes = dict(B=B, M=M, N=N, K=K) | _config(row, "tile_m tile_n pieces", splits)
    return dataclasses.replace(plain, target=f"pieces_{row['role']}", attributes=attributes)


def ragged(row, B, P, R, M, N, K, G):
    sizes = dict(B=B, P=P, R=R, M=M, N=N, K=K, G=G)
    shapes = {slot: (row["operands"], tuple(sizes[label] for label in labels)) for slot, labels in RAGGED_SHAPES.items()}
    first, second, open_ = RAGGED_SLOTS[row["role"]]
    places = (B, P, G, 2) if row["role"] == "tn" else (B, P, -(-M // row["tile_m"]) + G - 1, 5)
    operands = {first: shapes[first], second: shapes[second], "places": ("int32", places)}
    attributes = sizes | _config(row, "tile_m tile_n tile_k cluster_n")
    return Case(f"ragged_{row['role']}", attributes, operands, {open_: shapes[open_]})


def scaled(row, problem, left, right, result="bfloat16", splits=1):
    """`problem`: B, M, N, K, and the blocks I, J and S.  `left`, `right`: the scales' shapes, (B, I, S) and (B, J, S), or (B, S, J) if each
    column has its own; an axis of 1 is for all."""
    B, M, N, K, *_ = problem
    operands = {"a": (row["operands"], (B, M, K)), "b": (row["second"], (B, N, K)), "left": ("float32", left), "right": ("float32", right)}
    attributes = dict(zip("BMNKIJS", problem, strict=True)) | _config(row, "tile_m tile_n tile_k cluster_m", splits)
    return Case("scaled", attributes, operands, {"d": (result, in_parts((B, M, N), splits))})


def gram(row, B, M, N, result, factors=(1.0, 0.0), splits=1):
    """`factors`: of the product, and of the addend, which is there if its factor is not 0."""
    attributes = (
        dict(B=B, M=M, N=N)
        | _config(row, "tile_m tile_n tile_k cluster_m", splits)
        | dict(zip(("scale", "of_addend"), factors, strict=True))
    )
    operands = {"x": (row["operands"], (B, M, N))} | ({"addend": (result, (B, M, M))} if factors[1] else {})
    return Case("gram", attributes, operands, {"y": (result, in_parts((B, M, M), splits))})
