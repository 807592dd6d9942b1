"""The handlers of csrc/*_ffi.cc, compiled by a C++ compiler with launchers that say what they are asked: tests/csrc/launchers.cc.

Every number, dtype and address of a call arrives where it belongs, and arrays that do not fit are refused before.  Needs g++; no GPU, no
CUDA and no compiled module, whose handlers test_cuda_handlers.py calls.
"""

import ctypes
import itertools
import math
import pathlib
import shutil
import subprocess

import jax
import numpy as np
import pytest

from jaxext.backends.cuda import cuda_binding

CUSTOM_CALLS = (*cuda_binding.CudaMatmul.custom_calls, *cuda_binding.CudaConv.custom_calls)
ROOT = pathlib.Path(__file__).parents[3]
DTYPES = {"float32": 11, "bfloat16": 16, "float16": 10, "float8_e4m3fn": 20}  # XLA_FFI_DataType
INVALID, INTERNAL = 3, 13  # XLA_FFI_Error_Code
ADDRESSES = [1 << 20, 2 << 20, 3 << 20]  # of both operands and the result
SLOTS = {"nn": "abc", "nt": "bca", "tn": "acb", "fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}  # both operands and the result
PROBLEM = {
    **{"B": 2, "N": 3, "G": 5, "C": 7, "K": 11, "input": (13, 17, 19), "filter": (23, 29, 31), "output": (37, 41, 43)},
    **{"stride": (47, 53, 59), "low": (61, 67, 71), "input_dilation": (73, 79, 83), "filter_dilation": (89, 97, 101)},
}
CONFIGS = {  # and the number of parts
    "matmul": ("tile_m", "tile_n", "tile_k", "cluster_m", "pingpong"),
    "conv": ("tile_m", "tile_n", "cluster_m"),
    "depthwise": ("lanes", "strip", "pieces"),
}


class Buffer(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("address", ctypes.c_int64), ("rank", ctypes.c_int64), ("sizes", ctypes.c_void_p)]


class Attribute(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("size", ctypes.c_int64), ("data", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not there")
    folder, tests = tmp_path_factory.mktemp("ffi_handlers"), ROOT / "tests/csrc"
    headers = [f"-I{ROOT / 'csrc'}", f"-I{tests / 'cuda'}", "-isystem", jax.ffi.include_dir()]
    units = [*(ROOT / "csrc").glob("*_ffi.cc"), tests / "launchers.cc", tests / "call_frame.cc"]
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", *headers]
    compilers = [subprocess.Popen([*command, "-c", u, "-o", folder / f"{u.stem}.o"], stderr=subprocess.PIPE, text=True) for u in units]
    for compiler in compilers:
        said = compiler.communicate()[1]
        assert compiler.returncode == 0, said[:3000]
    subprocess.run(["g++", "-shared", *folder.glob("*.o"), "-o", folder / "handlers.so"], check=True)
    library = ctypes.CDLL(str(folder / "handlers.so"))
    library.HandlerOf.restype = ctypes.c_void_p
    return library


def call(library, target, dtypes, shapes, attributes):
    """The code and the message of a handler's answer."""
    sizes = [np.array(shape, np.int64) for shape in shapes]
    arrays = zip(dtypes, ADDRESSES, sizes, strict=True)
    buffers = [Buffer(DTYPES[dtype], address, len(size), size.ctypes.data) for dtype, address, size in arrays]
    values = {name: np.array(value, np.int64) for name, value in sorted(attributes.items())}
    described = [Attribute(name.encode(), 5, v.size if v.ndim else -1, v.ctypes.data) for name, v in values.items()]
    message = ctypes.create_string_buffer(4096)
    groups = ((Buffer, buffers[:2]), (Buffer, buffers[2:]), (Attribute, described))
    counted = [x for kind, items in groups for x in (ctypes.c_int64(len(items)), (kind * len(items))(*items))]
    handler = ctypes.c_void_p(library.HandlerOf(target.encode()))
    assert handler.value, f"there is no handler {target}"
    code = library.CallHandler(handler, *counted, message, ctypes.c_int64(len(message)))
    return code, message.value.decode()


def right(target, splits):
    """The launcher that a target calls; dtypes, shapes and attributes of a right call."""
    _, form, role, _ = target.split("_")
    family = next(name for name in CONFIGS if form.startswith(name))
    config = dict(zip(CONFIGS[family], itertools.count(103), strict=False)) | {"splits": splits}
    if family == "matmul":
        problem = {"B": 2, "M": 3, "N": 5, "K": 7}
        shapes = {"a": (2, 3, 7), "b": (2, 7, 5), "c": (2, 3, 5)}
    else:
        problem, (B, N, G, C, K, input, filter, output) = PROBLEM, tuple(PROBLEM.values())[:8]
        shapes = {"x": (B, N, *input, G, C), "w": (B, G, K, *filter, C), "y": (B, N, *output, G, K)}
    first, second, result = (shapes[slot] for slot in SLOTS[role])
    parts = (splits,) if splits > 1 else ()
    launcher = f"{'depthwise' if family == 'depthwise' else form} {role}"
    return launcher, ["bfloat16", "bfloat16", "float32"], [first, second, (*parts, *result)], problem, config


@pytest.mark.parametrize("target", CUSTOM_CALLS)
def test_a_call_reaches_the_launcher_of_its_role(library, target):
    for splits in (1, 4):
        launcher, dtypes, shapes, problem, config = right(target, splits)
        numbers = " ".join(str(n) for value in problem.values() for n in np.ravel(value))
        said = f"{launcher}: {numbers}; {' '.join(map(str, config.values()))}; bfloat16 float32; {' '.join(map(str, ADDRESSES))}"
        assert call(library, target, dtypes, shapes, problem | config) == (INTERNAL, said)


@pytest.mark.parametrize("target", CUSTOM_CALLS)
def test_arrays_that_do_not_fit_are_refused(library, target):
    _, dtypes, shapes, problem, config = right(target, 4)
    for i, slot in enumerate(SLOTS[target.split("_")[2]]):
        for wrong in (shapes[i][::-1], shapes[i][1:], (math.prod(shapes[i]),)):
            code, message = call(library, target, dtypes, [*shapes[:i], wrong, *shapes[i + 1 :]], problem | config)
            assert code == INVALID and f"{slot} has the shape ({', '.join(map(str, wrong))}), want" in message
    code, message = call(library, target, ["bfloat16", "float16", "float32"], shapes, problem | config)
    assert code == INVALID and message.endswith("the operands are bfloat16 and float16, want one dtype")
