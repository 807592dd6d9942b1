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
FUSED = [target for target in CUSTOM_CALLS if "linear" in target or "bias_act" in target]
ROOT = pathlib.Path(__file__).parents[3]
DTYPES = {"float32": 11, "bfloat16": 16, "float16": 10, "float8_e4m3fn": 20, "int32": 4, "int64": 5}  # XLA_FFI_DataType
INVALID, INTERNAL = 3, 13  # XLA_FFI_Error_Code
ADDRESSES = [i << 20 for i in range(1, 7)]  # of both operands, the result, bias, residual and what is saved
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


def call(library, target, dtypes, shapes, attributes, given=0):
    """The code and the message of a handler's answer.  Arrays are both operands, the result, `given` more operands, and those of the
    epilogue."""
    sizes = [np.array(shape, np.int64) for shape in shapes]
    arrays = zip(dtypes, ADDRESSES, sizes, strict=False)
    buffers = [Buffer(DTYPES[dtype], address, len(size), size.ctypes.data) for dtype, address, size in arrays]
    values = {name: np.array(value, np.int64) for name, value in sorted(attributes.items())}
    described = [Attribute(name.encode(), 5, v.size if v.ndim else -1, v.ctypes.data) for name, v in values.items()]
    message = ctypes.create_string_buffer(4096)
    operands = 3 + given + attributes.get("bias", 0) + attributes.get("residual", 0)
    groups = ((Buffer, [*buffers[:2], *buffers[3:operands]]), (Buffer, [buffers[2], *buffers[operands:]]), (Attribute, described))
    counted = [x for kind, items in groups for x in (ctypes.c_int64(len(items)), (kind * len(items))(*items))]
    handler = ctypes.c_void_p(library.HandlerOf(target.encode()))
    assert handler.value, f"there is no handler {target}"
    code = library.CallHandler(handler, *counted, message, ctypes.c_int64(len(message)))
    return code, message.value.decode()


def role_of(target) -> tuple[str, str]:
    """Of the product that a target launches: its form and its role."""
    form, _, name = target.removeprefix("jaxext_").removesuffix("_v1").partition("_")
    return {"linear": ("matmul", "nn")}.get(form, (form, "fprop" if name == "bias_act" else name))


def right(target, splits):
    """The launcher that a target calls; dtypes, shapes and attributes of a right call."""
    form, role = role_of(target)
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


@pytest.mark.parametrize("target", [target for target in CUSTOM_CALLS if target not in FUSED])
def test_a_call_reaches_the_launcher_of_its_role(library, target):
    for splits in (1, 4):
        launcher, dtypes, shapes, problem, config = right(target, splits)
        numbers = " ".join(str(n) for value in problem.values() for n in np.ravel(value))
        said = f"{launcher}: {numbers}; {' '.join(map(str, config.values()))}; bfloat16 float32; {' '.join(map(str, ADDRESSES[:3]))}"
        assert call(library, target, dtypes, shapes, problem | config) == (INTERNAL, said)


def with_epilogue(target, bias, residual, saves, activation=7):
    """As `right`, with these of an epilogue's arrays."""
    launcher, dtypes, shapes, problem, config = right(target, 1)
    (first, *_), second, result = shapes
    columns = (first, shapes[1][-1]) if "linear" in target else second[:3]
    arrays = [("float32", columns)] * bias + [(dtypes[2], result)] * (residual + saves)
    dtypes, shapes = (
        [*known, *more] for known, more in zip((dtypes, shapes), zip(*arrays, strict=True) if arrays else ((), ()), strict=True)
    )
    return launcher, dtypes, shapes, problem, config, dict(activation=activation, bias=bias, residual=residual, saves=saves)


RAGGED = {"nn": "xwy", "nt": "wyx", "tn": "xyw"}  # both operands and the result


def of_ragged(role):
    """Dtypes, shapes and attributes of a right call, whose places come third."""
    problem = {"B": 2, "P": 3, "R": 5, "M": 70, "N": 11, "K": 13, "G": 17}
    shapes = {"x": (2, 3, 5, 70, 13), "w": (2, 17, 13, 11), "y": (2, 3, 5, 70, 11)}
    config = {"tile_m": 32, "tile_n": 103, "tile_k": 107, "cluster_n": 109}
    places = (2, 3, 17, 2) if role == "tn" else (2, 3, 3 + 17 - 1, 5)
    first, second, result = (shapes[slot] for slot in RAGGED[role])
    return ["bfloat16", "bfloat16", "float32", "int32"], [first, second, result, places], problem, config


@pytest.mark.parametrize("role", RAGGED)
def test_a_ragged_call_reaches_its_launcher(library, role):
    dtypes, shapes, problem, config = of_ragged(role)
    numbers = "; ".join(" ".join(map(str, each.values())) for each in (problem, config))
    first, second, result, places = ADDRESSES[:4]
    said = f"ragged {role}: {numbers}; bfloat16 float32; {first} {second} {places} {result}"
    assert call(library, f"jaxext_ragged_{role}_v1", dtypes, shapes, problem | config, given=1) == (INTERNAL, said)


@pytest.mark.parametrize("role", RAGGED)
def test_ragged_arrays_that_do_not_fit_are_refused(library, role):
    dtypes, shapes, problem, config = of_ragged(role)

    def refused(dtypes=dtypes, shapes=shapes, **attributes):
        code, message = call(library, f"jaxext_ragged_{role}_v1", dtypes, shapes, problem | config | attributes, given=1)
        assert code == INVALID
        return message

    name = "ranges" if role == "tn" else "visits"
    for i, slot in enumerate([*RAGGED[role], name]):
        for wrong in (shapes[i][::-1], shapes[i][1:], (math.prod(shapes[i]),)):
            text = f"{slot} has the shape ({', '.join(map(str, wrong))}), want"
            assert text in refused(shapes=[*shapes[:i], wrong, *shapes[i + 1 :]])
    assert refused(dtypes=[*dtypes[:3], "int64"]).endswith(f"{name} is S64, want S32")
    assert refused(dtypes=["bfloat16", "float16", *dtypes[2:]]).endswith("the operands are bfloat16 and float16, want one dtype")
    assert refused(tile_m=0).endswith("tile_m is 0, want 1 or more")
    if role != "tn":  # where a visit is of a tile
        for wrong in (16, 2**62):
            assert f"{name} has the shape" in refused(tile_m=wrong)


@pytest.mark.parametrize("target", FUSED)
def test_an_epilogue_reaches_the_launcher(library, target):
    for exist in itertools.product((0, 1), repeat=3):
        launcher, dtypes, shapes, problem, config, epilogue = with_epilogue(target, *exist)
        numbers = " ".join(str(n) for value in problem.values() for n in np.ravel(value))
        addresses = iter(ADDRESSES[3:])
        told = " ".join(str(next(addresses) if each else 0) for each in exist)
        said = (
            f"{launcher}: {numbers}; {' '.join(map(str, config.values()))}; bfloat16 float32; {' '.join(map(str, ADDRESSES[:3]))}; 7 {told}"
        )
        assert call(library, target, dtypes, shapes, problem | config | epilogue) == (INTERNAL, said)


@pytest.mark.parametrize("target", FUSED)
def test_an_epilogue_that_does_not_fit_is_refused(library, target):
    _, dtypes, shapes, problem, config, epilogue = with_epilogue(target, 1, 1, 1)
    attributes = problem | config | epilogue
    for name, value in (("activation", 10), ("activation", -1), ("bias", 2), ("saves", -1)):
        code, message = call(library, target, dtypes, shapes, attributes | {name: value})
        assert code == INVALID and message.startswith(f"{name} is {value}, want 0 ")
    for i, (name, dtype) in enumerate({"bias": "bfloat16", "residual": "bfloat16", "saved": "float16"}.items(), 3):
        code, message = call(library, target, [*dtypes[:i], dtype, *dtypes[i + 1 :]], shapes, attributes)
        assert (code, message) == (INVALID, f"{name} is {dtype}, want float32")
        code, message = call(library, target, dtypes, [*shapes[:i], shapes[i][1:], *shapes[i + 1 :]], attributes)
        assert code == INVALID and message.startswith(f"{name} has the shape (")
    code, message = call(library, target, dtypes[:-1], shapes[:-1], attributes)
    assert (code, message) == (INVALID, "2 operands and 0 results beside those of the product, want 2 and 1")


@pytest.mark.parametrize("target", CUSTOM_CALLS)
def test_arrays_that_do_not_fit_are_refused(library, target):
    _, dtypes, shapes, problem, config = right(target, 4)
    config |= dict(activation=0, bias=0, residual=0, saves=0) if target in FUSED else {}
    for i, slot in enumerate(SLOTS[role_of(target)[1]]):
        for wrong in (shapes[i][::-1], shapes[i][1:], (math.prod(shapes[i]),)):
            code, message = call(library, target, dtypes, [*shapes[:i], wrong, *shapes[i + 1 :]], problem | config)
            assert code == INVALID and f"{slot} has the shape ({', '.join(map(str, wrong))}), want" in message
    code, message = call(library, target, ["bfloat16", "float16", "float32"], shapes, problem | config)
    assert code == INVALID and message.endswith("the operands are bfloat16 and float16, want one dtype")
