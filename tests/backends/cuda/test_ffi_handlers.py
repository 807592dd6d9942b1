"""The handlers of csrc/, compiled by a C++ compiler with launchers that say what they are asked: tests/csrc/launchers.cc.

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

from jaxext.backends.cuda.cuda_convolutions import CudaConv
from jaxext.backends.cuda.cuda_matmul import CudaMatmul

CUSTOM_CALLS = (*CudaMatmul.custom_calls, *CudaConv.custom_calls)
FUSED = [target for target in CUSTOM_CALLS if "linear" in target or "bias_act" in target]
ROOT = pathlib.Path(__file__).parents[3]
DTYPES = {
    "int8": 2,
    "float32": 11,
    "bfloat16": 16,
    "float16": 10,
    "float8_e4m3fn": 20,
    "float8_e5m2": 19,
    "int32": 4,
    "int64": 5,
    "float64": 12,
}  # XLA_FFI_DataType
INVALID, INTERNAL = 3, 13  # XLA_FFI_Error_Code
PREPARE, INITIALIZE, EXECUTE = 1, 2, 3  # XLA_FFI_ExecutionStage
ADDRESSES = [i << 20 for i in range(1, 7)]  # of both operands, the result, bias, residual and what is saved
SLOTS = {"nn": "abc", "nt": "bca", "tn": "acb", "fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}  # both operands and the result
PROBLEM = {
    **{"B": 2, "N": 3, "G": 5, "C": 7, "K": 11, "input": (13, 17, 19), "filter": (23, 29, 31), "output": (37, 41, 43)},
    **{"stride": (47, 53, 59), "low": (61, 67, 71), "input_dilation": (73, 79, 83), "filter_dilation": (89, 97, 101)},
}
CONFIGS = {  # and the number of parts
    "matmul": ("tile_m", "tile_n", "tile_k", "cluster_m", "pingpong"),
    "pieces": ("tile_m", "tile_n", "pieces"),
    "conv": ("tile_m", "tile_n", "cluster"),
    "depthwise": ("lanes", "strip", "pieces", "lines"),
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
    units = [*(ROOT / "csrc").glob("*/*_target.cc"), *(ROOT / "csrc/common").glob("*.cc"), tests / "launchers.cc", tests / "call_frame.cc"]
    command = [
        "g++",
        "-std=c++17",
        "-O0",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-fsanitize=undefined",
        "-fno-sanitize-recover=all",
        *headers,
    ]
    compilers = [subprocess.Popen([*command, "-c", u, "-o", folder / f"{u.stem}.o"], stderr=subprocess.PIPE, text=True) for u in units]
    for compiler in compilers:
        said = compiler.communicate()[1]
        assert compiler.returncode == 0, said[:3000]
    subprocess.run(["g++", "-shared", "-fsanitize=undefined", *folder.glob("*.o"), "-o", folder / "handlers.so"], check=True)
    library = ctypes.CDLL(str(folder / "handlers.so"))
    library.HandlerOf.restype = ctypes.c_void_p
    return library


def call(library, target, dtypes, shapes, attributes, given=0):
    """The code and the message of a handler's answer.  Arrays are both operands, the result, `given` more operands, and those of the
    epilogue."""
    sizes = [np.array(shape, np.int64) for shape in shapes]
    arrays = zip(dtypes, ADDRESSES, sizes, strict=False)
    buffers = [Buffer(DTYPES[dtype], address, len(size), size.ctypes.data) for dtype, address, size in arrays]
    operands = 3 + given + attributes.get("bias", 0) + attributes.get("residual", 0)
    return answer(library, target, [*buffers[:2], *buffers[3:operands]], [buffers[2], *buffers[operands:]], attributes)


def answer(library, target, operands, results, attributes):
    """What the handler of each stage answers, which is the same but for the launcher's word that it only loads."""
    given = operands, results, attributes
    loading, code = (staged(library, target, stage, stage, *given) for stage in (INITIALIZE, EXECUTE))
    assert loading == ((INTERNAL, f"load {code[1]}") if code[0] == INTERNAL else code)
    return code


def staged(library, target, handler, stage, operands, results, attributes):
    """What the handler of one stage answers in another."""
    values = {name: np.array(v, np.float64 if isinstance(v, float) else np.int64) for name, v in sorted(attributes.items())}
    described = [Attribute(name.encode(), DTYPES[v.dtype.name], v.size if v.ndim else -1, v.ctypes.data) for name, v in values.items()]
    message = ctypes.create_string_buffer(4096)
    groups = ((Buffer, operands), (Buffer, results), (Attribute, described))
    counted = [x for kind, items in groups for x in (ctypes.c_int64(len(items)), (kind * len(items))(*items))]
    pointer = ctypes.c_void_p(library.HandlerOf(target.encode(), handler == INITIALIZE))
    assert pointer.value, f"there is no handler {target}"
    code = library.CallHandler(pointer, stage, *counted, message, ctypes.c_int64(len(message)))
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
    if family in ("matmul", "pieces"):
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


@pytest.mark.parametrize("handler", [INITIALIZE, EXECUTE])
def test_a_handler_refuses_other_stages(library, handler):
    for stage in {PREPARE, INITIALIZE, EXECUTE} - {handler}:
        code, message = staged(library, "jaxext_gram_v1", handler, stage, [], [], {})
        assert code == INVALID and message.startswith("Wrong execution stage"), message


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
    assert refused(dtypes=[*dtypes[:3], "int64"]).endswith(f"{name} is of another dtype, want int32")
    assert refused(dtypes=["bfloat16", "float16", *dtypes[2:]]).endswith(" is float16, want bfloat16")
    assert refused(tile_m=0).endswith("tile_m is 0, want 1 or more")
    if role != "tn":  # where a visit is of a tile
        for wrong in (16, 2**62):
            assert f"{name} has the shape" in refused(tile_m=wrong)


SCALED = dict(B=2, M=3, N=5, K=7, I=3, J=5, S=11), dict(tile_m=103, tile_n=104, tile_k=105, cluster_m=106, splits=1)
# Blocks of columns; the scales' shapes; how far their elements are apart: in the batch, of rows or columns, of steps.
STRIDES = [
    (5, (2, 3, 11), (2, 11, 5), "33 11 1 55 1 5"),
    (4, (2, 3, 11), (2, 4, 11), "33 11 1 44 11 1"),
    (4, (1, 3, 11), (2, 4, 1), "0 11 1 4 1 0"),
    (5, (2, 1, 11), (1, 11, 5), "11 0 1 0 1 5"),
    (1, (2, 3, 1), (1, 1, 1), "3 1 0 0 0 0"),
]


@pytest.mark.parametrize(("columns", "left", "right", "strides"), STRIDES, ids=str)
def test_a_scaled_call_reaches_its_launcher(library, columns, left, right, strides):
    """With the strides of its scales, in which an axis of size 1 is for all."""
    problem, config = SCALED[0] | {"J": columns}, SCALED[1] | {"splits": 4}
    shapes = [(2, 3, 7), (2, 5, 7), (4, 2, 3, 5), left, right]
    dtypes = ["float8_e4m3fn", "float8_e5m2", "float32", "float32", "float32"]
    numbers = "; ".join(" ".join(map(str, each.values())) for each in (problem, config))
    numbers = numbers.replace(";", " 4;", 1)  # jaxext::Dtype::kE5M2
    a, b, d, of_a, of_b = ADDRESSES[:5]
    said = f"scaled: {numbers} {strides}; float8_e4m3fn float32; {a} {b} {of_a} {of_b} {d}"
    assert call(library, "jaxext_scaled_v1", dtypes, shapes, problem | config, given=2) == (INTERNAL, said)


def test_scaled_arrays_that_do_not_fit_are_refused(library):
    problem, config = SCALED
    shapes, dtypes = [(2, 3, 7), (2, 5, 7), (2, 3, 5), (2, 3, 11), (2, 11, 5)], ["float8_e4m3fn"] * 2 + ["bfloat16", "float32", "float32"]
    for i, name in enumerate(("a", "b", "d", "left", "right")):
        for wrong in (shapes[i][::-1], shapes[i][1:], (math.prod(shapes[i]),)):
            changed = [*shapes[:i], wrong, *shapes[i + 1 :]]
            code, message = call(library, "jaxext_scaled_v1", dtypes, changed, problem | config, given=2)
            assert code == INVALID and f"{name} has the shape ({', '.join(map(str, wrong))}), want" in message
    code, message = call(library, "jaxext_scaled_v1", [*dtypes[:4], "bfloat16"], shapes, problem | config, given=2)
    assert code == INVALID and message.endswith("right is bfloat16, want float32")


GRAM = dict(B=2, M=3, N=5), dict(tile_m=103, tile_n=104, tile_k=105, cluster_m=106, splits=1), dict(scale=7.0, of_addend=-11.0)


@pytest.mark.parametrize("added, splits", [(False, 1), (False, 4), (True, 1)])
def test_a_gram_call_reaches_its_launcher(library, added, splits):
    problem, config, factors = GRAM[0], GRAM[1] | {"splits": splits}, GRAM[2]
    x, result = (2, 3, 5), (2, 3, 3)
    arrays = [("bfloat16", x), *([("float32", result)] if added else []), ("float32", (splits, *result) if splits > 1 else result)]
    numbers = "; ".join(" ".join(map(str, each)) for each in (problem.values(), (*config.values(), 7, -11)))
    one, *_, last = of = [i << 20 for i in range(1, len(arrays) + 1)]
    said = f"gram: {numbers}; bfloat16 float32; {one} {of[1] if added else 0} {last}"
    assert ask_gram(library, arrays, problem | config | factors) == (INTERNAL, said)


def ask_gram(library, arrays, attributes):
    """The answer, where the address of the i-th array is 2^20 i."""
    sizes = [np.array(shape, np.int64) for _, shape in arrays]
    of = [Buffer(DTYPES[dtype], i << 20, len(s), s.ctypes.data) for i, ((dtype, _), s) in enumerate(zip(arrays, sizes, strict=True), 1)]
    return answer(library, "jaxext_gram_v1", of[:-1], of[-1:], attributes)


def test_gram_arrays_that_do_not_fit_are_refused(library):
    attributes = GRAM[0] | GRAM[1] | GRAM[2]
    right = {"x": ("bfloat16", (2, 3, 5)), "addend": ("bfloat16", (2, 3, 3)), "y": ("bfloat16", (2, 3, 3))}
    for name, (dtype, shape) in right.items():
        for wrong in (shape[1:], (*shape[:-1], 4), (math.prod(shape),)):
            code, message = ask_gram(library, [*(right | {name: (dtype, wrong)}).values()], attributes)
            assert code == INVALID and message.startswith(f"{name} has the shape ({', '.join(map(str, wrong))}), want")
        code, message = ask_gram(library, [*(right | {name: ("int64", shape)}).values()], attributes)
        assert code == INVALID and message.startswith(f"{name} is of another dtype, want")
    wide = right | {"addend": ("float32", (2, 3, 3))}
    assert ask_gram(library, [*wide.values()], attributes) == (INVALID, "addend is float32, want bfloat16")
    several = [right["x"], right["addend"], *right.values()]
    assert ask_gram(library, several[1:], attributes)[1].startswith("x has the shape")
    assert ask_gram(library, [right["x"], right["addend"], right["addend"], right["y"]], attributes) == (
        INVALID,
        "3 operands and 1 results, want 2 and 1",
    )


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
    assert (code, message) == (INVALID, "saved is missing: there are 4 operands and 1 results")


@pytest.mark.parametrize("target", CUSTOM_CALLS)
def test_arrays_that_do_not_fit_are_refused(library, target):
    _, dtypes, shapes, problem, config = right(target, 4)
    config |= dict(activation=0, bias=0, residual=0, saves=0) if target in FUSED else {}
    for i, slot in enumerate(SLOTS[role_of(target)[1]]):
        for wrong in (shapes[i][::-1], shapes[i][1:], (math.prod(shapes[i]),)):
            code, message = call(library, target, dtypes, [*shapes[:i], wrong, *shapes[i + 1 :]], problem | config)
            assert code == INVALID and f"{slot} has the shape ({', '.join(map(str, wrong))}), want" in message
    code, message = call(library, target, ["bfloat16", "float16", "float32"], shapes, problem | config)
    assert code == INVALID and message.endswith(" is float16, want bfloat16")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (0, ""),
        (1, "broken has members without a name"),
        (2, "two targets are called gram"),
        (3, "broken has two attributes B"),
    ],
)
def test_families_that_contradict_themselves(library, how, message):
    said = ctypes.create_string_buffer(1000)
    library.CheckBroken(how, said)
    assert said.value.decode() == message


def test_attributes_that_do_not_fit_are_refused(library):
    attributes = GRAM[0] | GRAM[1] | GRAM[2]
    arrays = [("bfloat16", (2, 3, 5)), ("bfloat16", (2, 3, 3))]
    for name in attributes:
        others = {key: value for key, value in attributes.items() if key != name}
        wanted = "a float64" if name in GRAM[2] else "an int64"
        message = f"attribute {name} is missing or of another type, want {wanted}"
        assert ask_gram(library, arrays, others) == (INVALID, message)
        wrong = 7 if name in GRAM[2] else 7.0
        assert ask_gram(library, arrays, attributes | {name: wrong}) == (INVALID, message)
    assert ask_gram(library, arrays, attributes | {"more": 1}) == (INVALID, "11 attributes, want 10")
    _, dtypes, shapes, problem, config = right("jaxext_conv2d_fprop_v1", 1)
    code, message = call(library, "jaxext_conv2d_fprop_v1", dtypes, shapes, problem | config | {"stride": (1, 1)})
    assert (code, message) == (INVALID, "attribute stride is missing or of another type, want three int64")


def of_weight_only(bits=4, splits=3):
    """Of a right call: dtypes and shapes by the names of arrays, operands first, and attributes."""
    B, M, N, K, S = 2, 5, 96, 128, 4
    shapes = {"x": (B, M, K), "w": (B, K, N * bits // 8), "scale": (B, S, N), "y": (splits, B, M, N) if splits > 1 else (B, M, N)}
    dtypes = {"x": "bfloat16", "w": "int8", "scale": "float32", "y": "float32"}
    attributes = dict(B=B, M=M, N=N, K=K, S=S, bits=bits, tile_m=103, tile_n=107, splits=splits)
    return {name: (dtypes[name], shape) for name, shape in shapes.items()}, attributes


def ask_weight_only(library, arrays, attributes):
    """The answer, where the address of the i-th array is 2^20 i."""
    sizes = {name: np.array(shape, np.int64) for name, (_, shape) in arrays.items()}
    of = [Buffer(DTYPES[arrays[n][0]], i << 20, len(sizes[n]), sizes[n].ctypes.data) for i, n in enumerate(arrays, 1)]
    return answer(library, "jaxext_weight_only_v1", of[:-1], of[-1:], attributes)


@pytest.mark.parametrize("bits, splits", [(4, 3), (8, 1)])
def test_a_weight_only_call_reaches_its_launcher(library, bits, splits):
    addresses = " ".join(str(i << 20) for i in (1, 2, 3, 4))
    numbers = f"2 5 96 128 4 {bits}; 103 107 {splits}"
    assert ask_weight_only(library, *of_weight_only(bits, splits)) == (INTERNAL, f"weight_only: {numbers}; bfloat16 float32; {addresses}")


def test_weight_only_arrays_that_do_not_fit_are_refused(library):
    arrays, attributes = of_weight_only()
    for name, (dtype, shape) in arrays.items():
        for wrong in (shape[1:], (*shape[:-1], 3), (math.prod(shape),)):
            code, message = ask_weight_only(library, arrays | {name: (dtype, wrong)}, attributes)
            assert code == INVALID and message.startswith(f"{name} has the shape ({', '.join(map(str, wrong))}), want")
        code, message = ask_weight_only(library, arrays | {name: ("int64", shape)}, attributes)
        assert code == INVALID and message.startswith(f"{name} is of another dtype, want")
    code, message = ask_weight_only(library, arrays | {"scale": ("float16", arrays["scale"][1])}, attributes)
    assert (code, message) == (INVALID, "scale is float16, want float32")
    code, message = ask_weight_only(library, arrays | {"w": ("float16", arrays["w"][1])}, attributes)
    assert (code, message) == (INVALID, "w is float16, want int8")


CAUSAL = {"causal_conv1d": ("y",), "causal_conv1d_backward": ("d_x", "sums", "d_initial_states")}
CAUSAL_ADDED = ("bias", "initial_states", "seq_idx", "idx_of_states")


def of_causal(op, added=CAUSAL_ADDED):
    """Of a right call: dtypes and shapes by the names of arrays, operands first, and attributes."""
    B, T, C, J, splits = 2, 70, 11, 5, 13 if "backward" in op else 1
    shapes = {"x": (B, T, C), "weight": (J, C), "bias": (C,), "initial_states": (B, J - 1, C), "seq_idx": (B, T)}
    shapes |= {"idx_of_states": (B, J - 1), "d_y": (B, T, C), "y": (B, T, C), "d_x": (B, T, C)}
    shapes |= {"sums": (splits, J + ("bias" in added), C), "d_initial_states": (B, J - 1, C)}
    dtypes = {"weight": "float16", "bias": "float32", "seq_idx": "int32", "idx_of_states": "int32", "sums": "float32"}
    d_y = ("d_y",) if "backward" in op else ()
    results = [name for name in CAUSAL[op] if name != "d_initial_states" or "initial_states" in added]
    arrays = {name: (dtypes.get(name, "bfloat16"), shapes[name]) for name in ("x", "weight", *added, *d_y, *results)}
    attributes = dict(B=B, T=T, C=C, J=J, lanes=103, strip=107, splits=splits, activation=7)
    return arrays, attributes | {name: int(name in added) for name in CAUSAL_ADDED}


def ask_causal(library, op, arrays, attributes):
    """The answer, and the arrays' addresses."""
    sizes = {name: np.array(shape, np.int64) for name, (_, shape) in arrays.items()}
    addresses = {name: i << 20 for i, name in enumerate(arrays, 1)}
    of = {n: Buffer(DTYPES[dtype], addresses[n], len(sizes[n]), sizes[n].ctypes.data) for n, (dtype, _) in arrays.items()}
    results = [of[name] for name in of if name in CAUSAL[op]]
    return answer(library, f"jaxext_{op}_v1", [of[name] for name in of if name not in CAUSAL[op]], results, attributes), addresses


@pytest.mark.parametrize("op", CAUSAL)
def test_a_causal_call_reaches_its_launcher(library, op):
    """With whichever operands there are."""
    for count in range(len(CAUSAL_ADDED) + 1):
        for added in itertools.combinations(CAUSAL_ADDED, count):
            arrays, attributes = of_causal(op, added)
            told, addresses = ask_causal(library, op, arrays, attributes)
            slots = ("x", "weight", *CAUSAL_ADDED, "d_y", "y" if "y" in arrays else "d_x", "sums", "d_initial_states")
            listed = " ".join(str(addresses.get(slot, 0)) for slot in slots)
            numbers = f"2 70 11 5; 103 107 {attributes['splits']} 7 {0 if 'bias' in added else -1}"
            role = "backward" if "backward" in op else "forward"
            assert told == (INTERNAL, f"causal {role}: {numbers}; bfloat16 float16; {listed}")


@pytest.mark.parametrize("op", CAUSAL)
def test_causal_arrays_that_do_not_fit_are_refused(library, op):
    arrays, attributes = of_causal(op)

    def refused(arrays=arrays, **changes):
        (code, message), _ = ask_causal(library, op, arrays, attributes | changes)
        assert code == INVALID
        return message

    for name, (dtype, shape) in arrays.items():
        for wrong in (shape[1:], (*shape[:-1], 3), (math.prod(shape),)):
            if wrong != shape:
                assert refused(arrays | {name: (dtype, wrong)}).startswith(f"{name} has the shape ({', '.join(map(str, wrong))}), want")
        assert refused(arrays | {name: ("int64", shape)}).startswith(f"{name} is of another dtype, want")
        if name not in ("x", "weight", "bias"):
            assert refused(arrays | {name: ("float16", shape)}).startswith(f"{name} is ")
    for name, value in (("activation", 10), ("activation", -1), ("bias", 2), ("seq_idx", -1)):
        assert refused(**{name: value}).startswith(f"{name} is {value}, want 0 ")
    last = list(arrays)[-1]
    assert refused({name: of for name, of in arrays.items() if name != last}).startswith(f"{last} is missing")
    assert refused(idx_of_states=0).startswith("d_y has the shape" if "backward" in op else "6 operands and 1 results, want 5 and 1")
