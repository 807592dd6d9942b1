"""The handlers of the compiled module, called as XLA calls them, through its FFI's C API: tests/csrc/call_frame.cc.

What a handler cannot do comes back as an error that says what it got and what it wants, never as a crash, and never as a launch.  A right
call gets past all that and fails only in CUDA's own words, where there is no driver.  Needs g++ and the module; no GPU.
"""

import ctypes
import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
from typing import Any

import jax
import numpy as np
import pytest

from jaxext.backends.cuda import cuda_binding

if reason := cuda_binding.missing():
    pytest.skip(f"no CUDA kernels: {reason}", allow_module_level=True)
if not shutil.which("g++"):
    pytest.skip("g++ is not there", allow_module_level=True)

from jaxext import _cuda_module  # noqa: E402

OK, INVALID, INTERNAL = 0, 3, 13  # XLA_FFI_Error_Code
DTYPES = {
    "float32": 11,
    "bfloat16": 16,
    "float16": 10,
    "float8_e4m3fn": 20,
    "float8_e5m2": 19,
    "float64": 12,
    "int8": 2,
    "int32": 4,
    "int64": 5,
}  # XLA_FFI_DataType
ADDRESS = 1 << 20  # of every array: nothing is read or written before all is checked
COMMAND_BUFFER_COMPATIBLE = 1
STAGES = {"initialize": 2, "execute": 3}  # XLA_FFI_ExecutionStage

HANDLERS = _cuda_module.handlers()
FUSED = [name for name in HANDLERS if "linear" in name or "bias_act" in name]  # with an epilogue
CAUSAL = [name for name in HANDLERS if "causal" in name]
SCALED = [name for name in HANDLERS if "scaled" in name]  # test_cuda_scaled_launches.py calls it
GRAM = [name for name in HANDLERS if "gram" in name]  # test_cuda_gram_launches.py calls it
WEIGHT_ONLY = [name for name in HANDLERS if "weight_only" in name]
PIECES = [name for name in HANDLERS if "pieces" in name]  # test_cuda_pieces_launches.py calls these
MATMUL = [name for name in HANDLERS if "matmul" in name]
CONV = [name for name in HANDLERS if "jaxext_conv" in name and name not in FUSED]
DEPTHWISE = [name for name in HANDLERS if "depthwise" in name and name not in FUSED]
RAGGED = [name for name in HANDLERS if "ragged" in name]  # test_cuda_ragged_launches.py calls these
ALL = [*MATMUL, *CONV, *DEPTHWISE]
ROLES = {"nn": "abc", "nt": "bca", "tn": "acb", "fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}  # both operands and the result
PARTS = ("bfloat16", "float32")  # dtypes of a call whose result has parts
PROBLEM = ("B", "N", "G", "C", "K", "input", "filter", "output", "stride", "low", "input_dilation", "filter_dilation")


# Calls.


@dataclasses.dataclass(frozen=True)
class Buffer:
    dtype: str
    sizes: tuple[int, ...]
    address: int = ADDRESS


@dataclasses.dataclass(frozen=True)
class Call:
    target: str
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    attributes: dict

    def attribute(self, **values):
        return dataclasses.replace(self, attributes=self.attributes | values)

    def without(self, name):
        return dataclasses.replace(self, attributes={n: value for n, value in self.attributes.items() if n != name})

    def buffer(self, i, **values):
        """With one of the operands and the results changed."""
        buffers = [*self.operands, *self.results]
        buffers[i] = dataclasses.replace(buffers[i], **values)
        count = len(self.operands)
        return dataclasses.replace(self, operands=tuple(buffers[:count]), results=tuple(buffers[count:]))


def of_matmul(target):
    return "matmul" in target or "linear" in target


def role_of(target):
    name = target.removeprefix("jaxext_").removesuffix("_v1").partition("_")[2]
    return "nn" if name == "" else "fprop" if name == "bias_act" else name


def rank_of(target):
    return int(target.split("_")[1][-2])


def compiled(target, operands, result):
    """The fields of a config that has a kernel."""
    if "depthwise" in target:
        return {"lanes": 4, "strip": 4, "pieces": 1, "lines": 0, "splits": 1}
    rows = _cuda_module.kernels("matmul") if of_matmul(target) else _cuda_module.kernels("conv")
    where = {"role": role_of(target), "operands": operands} | (
        {"result": result, "fused": target in FUSED} if of_matmul(target) else {"rank": rank_of(target)}
    )
    row = next(row for row in rows if where.items() <= row.items())
    names = ("tile_m", "tile_n", "tile_k", "cluster_m", "pingpong") if of_matmul(target) else ("tile_m", "tile_n", "cluster")
    return {name: row[name] for name in names} | {"splits": 1}


def right(target, *dtypes: str, **changes):
    """A call that is right, of operands and a result, but for changes of attributes, which its arrays agree with."""
    operands, result = dtypes or ("bfloat16", "bfloat16")
    config = compiled(target, operands, result)
    if of_matmul(target):
        sizes = {"B": 1, "M": 256, "N": 512, "K": 256}
    else:
        axes = rank_of(target)
        size, one = (1,) * (3 - axes) + (8,) * axes, (1, 1, 1)
        filter, low = (1,) * (3 - axes) + (3,) * axes, (0,) * (3 - axes) + (1,) * axes
        labels = {"B": 1, "N": 2, "G": 64, "C": 1, "K": 1} if "depthwise" in target else {"B": 1, "N": 2, "G": 1, "C": 16, "K": 32}
        sizes = labels | dict(zip(PROBLEM[5:], (size, filter, size, one, low, one, one), strict=True))
    attributes: dict[str, Any] = sizes | config | changes
    shapes = shapes_of(target, attributes)
    parts = (attributes["splits"],) if attributes["splits"] > 1 else ()
    first, second, open_ = ROLES[role_of(target)]
    factors = (Buffer(operands, shapes[first]), Buffer(operands, shapes[second]))
    if target not in FUSED:
        return Call(target, factors, (Buffer("float32" if parts else result, parts + shapes[open_]),), attributes)
    y = Buffer(result, shapes[open_])  # and what has its shape
    bias = Buffer("float32", (1, *y.sizes[-1 if of_matmul(target) else -2 :]))
    made = dataclasses.replace(y, sizes=parts + y.sizes)
    return Call(target, (*factors, bias, y), (made, y), dict(bias=1, residual=1, saves=1, activation=4) | attributes)


def shapes_of(target, attributes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if of_matmul(target):
        B, M, N, K = (attributes[name] for name in "BMNK")
        return {"a": (B, M, K), "b": (B, K, N), "c": (B, M, N)}
    B, N, G, C, K, input, filter, output = (attributes[name] for name in PROBLEM[:8])
    return {"x": (B, N, *input, G, C), "w": (B, G, K, *filter, C), "y": (B, N, *output, G, K)}


def replaced(values, i, value):
    return (*values[:i], value, *values[i + 1 :])


# The library that calls.


class _Buffer(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("address", ctypes.c_int64), ("rank", ctypes.c_int64), ("sizes", ctypes.c_void_p)]


class _Attribute(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("size", ctypes.c_int64), ("data", ctypes.c_void_p)]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("call_frame") / "call_frame.so"
    source = pathlib.Path(__file__).parents[2] / "csrc" / "call_frame.cc"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
    done = subprocess.run(["g++", *flags, source, "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(path))


def handler_of(target, stage="execute"):
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(ctypes.pythonapi.PyCapsule_GetPointer(HANDLERS[target][stage], None))


@pytest.fixture
def answer(library):
    """answer(call) -> (code, message) of the handlers of both stages, which answer alike where nothing can be loaded."""

    def buffers(described):
        sizes = [np.array(b.sizes, np.int64) for b in described]
        made = [_Buffer(DTYPES[b.dtype], b.address, len(s), s.ctypes.data) for b, s in zip(described, sizes, strict=True)]
        return (_Buffer * len(made))(*made), sizes

    def answer(call):
        operands, operand_sizes = buffers(call.operands)
        results, result_sizes = buffers(call.results)
        values = {name: np.asarray(value, getattr(value, "dtype", np.int64)) for name, value in sorted(call.attributes.items())}
        attributes = (_Attribute * len(values))(
            *(
                _Attribute(name.encode(), DTYPES[value.dtype.name], value.size if value.ndim else -1, value.ctypes.data)
                for name, value in values.items()
            )
        )
        counted = [x for array in (operands, results, attributes) for x in (ctypes.c_int64(len(array)), array)]
        answers = []
        for name, stage in STAGES.items():
            message = ctypes.create_string_buffer(4096)
            code = library.CallHandler(handler_of(call.target, name), stage, *counted, message, ctypes.c_int64(len(message)))
            answers.append((code, message.value.decode()))
        assert answers[0] == answers[1]
        return answers[0]

    return answer


@pytest.fixture
def refuses(answer):
    """refuses(call, pattern): as an invalid argument, with a message that matches."""

    def refuses(call, pattern):
        code, message = answer(call)
        assert code == INVALID, f"{call} is answered with {code}: {message}"
        assert re.search(pattern, message), f"{message!r} does not match {pattern!r}"
        return message

    return refuses


def device():
    """Whether there is a GPU, to which calls that are right would be handed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0


# What is right.


@pytest.mark.parametrize("target", HANDLERS)
def test_metadata(library, target):
    """XLA asks a handler for its version, and whether its launches can be recorded: that of execute alone."""
    assert list(HANDLERS[target]) == [*STAGES]
    major, minor, traits = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_uint32()
    message = ctypes.create_string_buffer(4096)
    pointers = [ctypes.byref(x) for x in (major, minor, traits)]
    code = library.AskMetadata(handler_of(target), *pointers, message, ctypes.c_int64(len(message)))
    assert (code, message.value) == (OK, b"")
    assert (major.value, minor.value) == _cuda_module.ffi_version()
    assert traits.value == COMMAND_BUFFER_COMPATIBLE


def test_targets():
    forms = [f"{family}{rank}d" for family in ("conv", "depthwise") for rank in (1, 2, 3)]
    names = {f"{form}_{role}" for form in forms for role in ("fprop", "dgrad", "wgrad", "bias_act")}
    names |= {f"{form}_{role}" for form in ("matmul", "pieces", "ragged") for role in ("nn", "nt", "tn")}
    names |= {"linear", "scaled", "gram", "weight_only", "causal_conv1d", "causal_conv1d_backward"}
    assert set(HANDLERS) == {f"jaxext_{name}_v1" for name in names} and set(_cuda_module.schema()) == names


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
@pytest.mark.parametrize("target", [*ALL, *FUSED])
def test_right_calls_get_as_far_as_cuda(answer, target):
    calls = [right(target), right(target, "float16", "float16")]
    if target in MATMUL or role_of(target) == "wgrad":
        calls.append(right(target, *PARTS, splits=2))
    for call in calls:
        code, message = answer(call)
        assert code == INTERNAL, f"{call}: {message}"
        assert re.search("CUDA", message), message


@pytest.mark.parametrize("target", [*CONV, *DEPTHWISE])
def test_nothing_to_do_is_done(answer, target):
    assert answer(right(target, B=0)) == (OK, "")


# What is wrong with every call.

MISSING = "attribute {} is missing or of another type, want {}"
OPERAND = r"is int32, want float32, bfloat16, float16, float8_e4m3fn or float8_e5m2"
FAULTS = {
    "an attribute too few": (lambda call: call.without("N"), MISSING.format("N", "an int64")),
    "an attribute too many": (lambda call: call.attribute(more=1), r"\d+ attributes, want \d+"),
    "an attribute of another name": (lambda call: call.without("N").attribute(n=2), MISSING.format("N", "an int64")),
    "a field of another name": (lambda call: call.without("splits").attribute(parts=1), MISSING.format("splits", "an int64")),
    "32 bits": (lambda call: call.attribute(K=np.int32(1)), MISSING.format("K", "an int64")),
    "a real number": (lambda call: call.attribute(B=np.float64(1)), MISSING.format("B", "an int64")),
    "an array": (lambda call: call.attribute(B=np.ones(1, np.int64)), MISSING.format("B", "an int64")),
    "one operand": (
        lambda call: dataclasses.replace(call, operands=call.operands[:1]),
        "[bcwy] is missing: there are 1 operands and 1 results",
    ),
    "no result": (lambda call: dataclasses.replace(call, results=()), "[abcxwy] is missing: there are 2 operands and 0 results"),
    "two results": (lambda call: dataclasses.replace(call, results=call.results * 2), "2 operands and 2 results, want 2 and 1"),
    "integers": (lambda call: call.buffer(0, dtype="int32"), f"[abxw] {OPERAND}"),
    "integers as the second operand": (lambda call: call.buffer(1, dtype="int32"), "[bcwy] is int32, want bfloat16"),
    "integers as the result": (lambda call: call.buffer(2, dtype="int32"), f"[abcxwy] {OPERAND}"),
    "two dtypes": (lambda call: call.buffer(1, dtype="float16"), "[bcwy] is float16, want bfloat16"),
    "another result": (lambda call: call.buffer(2, dtype="float16"), "the result is fp16, .* gives bf16|bf16 times bf16 into fp16"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", ALL)
def test_faults_of_every_call(refuses, target, fault):
    change, pattern = FAULTS[fault]
    refuses(change(right(target)), pattern)


@pytest.mark.parametrize("target", ALL)
def test_shapes(refuses, target):
    """Every axis of every array, and their number."""
    call = right(target)
    for i, slot in enumerate(ROLES[role_of(target)]):
        want = (*call.operands, *call.results)[i].sizes
        others = [replaced(want, axis, want[axis] + by) for axis in range(len(want)) for by in (1, -1)]
        for got in [*others, want[1:], (1, *want), ()]:
            text = f"({', '.join(map(str, got))})"
            refuses(call.buffer(i, sizes=got), re.escape(f"{slot} has the shape {text}, want ({', '.join(map(str, want))})"))


def names_at_least(value, message):
    assert any(abs(int(number)) >= min(abs(value), 2**63 - 1) for number in re.findall(r"-?\d+", message)), message


ATTRIBUTES = [(target, name) for target in ALL for name in (*(PROBLEM if target not in MATMUL else "BMNK"), "splits")]


@pytest.mark.parametrize("target, name", ATTRIBUTES)
def test_sizes_beyond_all_bounds(refuses, target, name):
    """Negative ones, those that need more than 32 bits, and the ends of 64; arrays agree with them.  The message has the number, or what
    the number comes to with others."""
    now = right(target).attributes[name]
    for value in (2**31, 2**40, 2**63 - 1, -(2**31), -(2**63), *((-1,) if name != "low" else ())):
        for wrong in [value] if isinstance(now, int) else [replaced(now, axis, value) for axis in range(3)]:
            names_at_least(value, refuses(right(target, **{name: wrong}), r"\d"))


@pytest.mark.parametrize("target", ALL)
def test_configs_without_a_kernel(refuses, target):
    for name in compiled(target, "bfloat16", "bfloat16"):
        for value in (-1, 2**40, *((0,) if name not in ("pingpong", "lines") else ())):
            refuses(right(target, **{name: value}), "no kernel (has|with) |splits=-?[0-9]|(lanes|strip|pieces|lines|splits) is")


# What is wrong with the calls of one family.


@pytest.mark.parametrize("target", MATMUL)
def test_matmul(refuses, target):
    depth = {"nn": "K", "nt": "N", "tn": "M"}[role_of(target)]
    for name in "BMNK":
        refuses(right(target, **{name: 0}), f"{name}=0 .*want 1 or more")
    for i in range(3):
        refuses(right(target).buffer(i, address=ADDRESS + 8), "does not begin at a multiple of 16 bytes")
    refuses(right(target, M=132, N=132, K=132), "has 264 bytes, TMA wants a multiple of 16")
    refuses(right(target, *PARTS, splits=2, B=2), "splits is 2 and B is 2, want one of them to be 1")
    refuses(right(target, *PARTS, splits=2).buffer(2, dtype="bfloat16"), "partial results are bfloat16, want float32")
    refuses(right(target, *PARTS, splits=3), "has (256|512) elements, want a multiple of splits=3")
    if role_of(target) != "tn":  # where the contracted axis is not the one of neighbours
        refuses(right(target, *PARTS, splits=2, **{depth: 8}), "a part of an operand has 8 bytes, TMA wants a multiple of 16")
    call = right(target)
    role = role_of(target)
    for dtype, reason in {
        "float32": f"the operands are fp32, {role} takes bf16, fp16",
        "float8_e4m3fn": "the result is fp16, nt of fp8e4nv gives bf16, fp32" if role == "nt" else f"are fp8e4nv, {role} takes bf16, fp16",
    }.items():
        refuses(call.buffer(0, dtype=dtype).buffer(1, dtype=dtype).buffer(2, dtype="float16"), reason)


@pytest.mark.parametrize("target", MATMUL)
def test_matmul_near_the_end_of_32_bits(refuses, target):
    """Numbers of tiles are rounded up: in 32 bits that must not overflow."""
    for name in "MN":
        refuses(right(target, **{name: 2**31 - 8}), "2147483640")


@pytest.mark.parametrize("target", MATMUL)
def test_matmul_of_arrays_beyond_the_strides_of_tma(refuses, target):
    """Each in turn, by its sizes and by its batch."""
    for few in "NKM":
        for B in (1, 2**10):
            refuses(right(target, **{name: (2**20 if B == 1 else 2**14) for name in "MNK"} | {few: 8, "B": B}), "has 2.38 elements or more")


def axis(value, i=2, otherwise=(1, 1, 1)):
    """An array with this entry on one axis."""
    return replaced(otherwise, i, value)


@pytest.mark.parametrize("target", [*CONV, *DEPTHWISE])
@pytest.mark.parametrize("name", PROBLEM[5:])
def test_arrays(refuses, target, name):
    call = right(target)
    now = call.attributes[name]
    for length in (0, 2, 4):
        refuses(call.attribute(**{name: (*now, 1)[:length]}), MISSING.format(name, "three int64"))
    refuses(call.attribute(**{name: np.array(now, np.int32)}), MISSING.format(name, "three int64"))
    refuses(call.attribute(**{name: 1}), MISSING.format(name, "three int64"))


@pytest.mark.parametrize("target", CONV)
def test_conv(refuses, target):
    role, rank = role_of(target), rank_of(target)
    call = right(target)
    size, low = call.attributes["input"], call.attributes["low"]
    for i in range(3):
        refuses(call.buffer(i, address=ADDRESS + 8), "does not begin at a multiple of 16 bytes")
    for name in "CK":
        refuses(right(target, **{name: 12}), "12 channels per group, TMA wants a multiple of 8")
    for name in {"fprop": "C", "dgrad": "K", "wgrad": "N"}[role]:  # of a result that is not empty
        refuses(right(target, **{name: 0}), "an operand is empty, want none")
    refuses(right(target, G=65), "65 groups, with those of the batch label, it takes 64 at most")
    refuses(right(target, B=5, G=13), "65 groups, with those of the batch label")
    refuses(right(target, input_dilation=axis(2)), "an input dilation of 2, TMA's boxes have no holes")
    refuses(right(target, stride=axis(9)), "a stride of 9, a TMA box takes 8 at most")
    refuses(right(target, low=axis(40000, otherwise=low)), "axis W")
    refuses(right(target, filter_dilation=axis(40000)), "axis W")
    refuses(right(target, N=2**16, input=axis(2**15), output=axis(2**15)), "2147483648 pixels, it takes fewer than 2.31 - 2.16")
    if rank < 3:
        refuses(right(target, input=axis(2, 2 - rank, size)), "axis [DH] is in use, want [12] spatial axes")
    if role == "dgrad" and rank > 1:
        refuses(right(target, stride=axis(8, 1, axis(8)), G=9), "64 phases of the strides in each of 9 groups, it takes 512 together")
    if role == "wgrad":
        refuses(right(target, splits=3), "splits is 3, want at most N=2, or a multiple")
        refuses(right(target, filter=axis(70000)), "70000 blocks side by side, it takes 65535 at most")
        refuses(right(target, splits=40, N=40, G=2), "B=1 G=2 splits=40 make too many parts or none, want 1 to 64")
        refuses(right(target, splits=2).buffer(2, dtype="bfloat16"), "partial results are bfloat16, want float32")
    else:
        refuses(right(target, splits=2), "splits is 2, want 1 unless in wgrad")
    float32 = call.buffer(0, dtype="float32").buffer(1, dtype="float32")
    refuses(float32, "the operands are fp32 and fp32, it takes two of bf16 or fp16")


@pytest.mark.parametrize("target", [*CONV, *DEPTHWISE])
def test_conv_whose_products_leave_64_bits(refuses, target):
    """Sizes that are each within bounds."""
    used = range(3 - rank_of(target), 3)
    for many in (2**20, 2**29, 2**30 - 1):
        huge = tuple(many if i in used else 1 for i in range(3))
        labels = ["N", "NG"] if target in DEPTHWISE else ["N", "C", "K", "NC", "NK", "CK", "NCK"]
        for some in labels:
            sizes = dict.fromkeys(some, many // 8 * 8)
            refuses(right(target, input=huge, output=huge, **sizes), "^(conv|depthwise)")


@pytest.mark.parametrize("target", DEPTHWISE)
def test_depthwise(refuses, target):
    role, rank = role_of(target), rank_of(target)
    call = right(target)
    for i in range(3):
        refuses(call.buffer(i, address=ADDRESS + 1), "does not start at a multiple of its elements' size")
    refuses(right(target, C=2), "2 input channels per group, it takes 1")
    refuses(right(target, K=65536), "65536 outputs per group, it takes 1 to 65535")
    refuses(right(target, filter=axis(32)), "32 taps along an axis, it takes 31 at most")
    refuses(right(target, lanes=3), "lanes is 3, want a power of two up to 32")
    refuses(right(target, B=65536), "B=65536 and 1 phases, it takes 65535 at most")
    refuses(right(target, N=2**20, input=axis(2**12), output=axis(2**12)), "positions, it takes fewer than 2147418112")
    of_float8 = call.buffer(0, dtype="float8_e4m3fn").buffer(1, dtype="float8_e4m3fn")
    refuses(of_float8, "dtype fp8e4nv, it takes fp32, bf16, fp16")
    if role == "wgrad":
        refuses(right(target, pieces=64), "pieces is 64, want a power of two up to 32")
        refuses(right(target, splits=65536), "splits is 65536, want 1 to 65535")
        refuses(right(target, lines=1), "lines is 1, want 0 to 0")
        refuses(right(target, splits=2).buffer(2, dtype="bfloat16"), "a result of bfloat16 in parts, want float32")
    else:
        refuses(right(target, pieces=2), "pieces is 2, want a power of two up to 1")
        refuses(right(target, splits=2), "splits is 2, want 1 to 1")
        refuses(right(target, lines=33), "lines is 33, want 0 to 32")
        refuses(right(target, "float32", "float32", lines=1), "lines is 1, want 0: tensor cores take 16 bits, not float32")
    if role == "dgrad" and rank > 1:
        refuses(right(target, input=(1, 300, 300), stride=(1, 300, 300)), "B=1 and 90000 phases, it takes 65535 at most")


@pytest.mark.parametrize("target", FUSED)
def test_epilogues(refuses, target):
    """What test_ffi_handlers.py does not see, since it has no launchers."""
    call, depthwise = right(target), "depthwise" in target
    want = "does not start at a multiple of its elements' size" if depthwise else "does not begin at a multiple of 16 bytes"
    for i in range(len(call.operands) + len(call.results)):
        refuses(call.buffer(i, address=ADDRESS + (1 if depthwise else 8)), want)
    refuses(right(target, splits=2), "splits is 2(, want 1| with an epilogue, want 1)|conv: partial results are bfloat16, want float32")
    refuses(call.attribute(activation=10), "activation is 10, want 0 to 9")
    if of_matmul(target):
        in_float = functools.reduce(lambda call, i: call.buffer(i, dtype="float32"), range(3, 6), call)  # residual and both results
        refuses(in_float, "the result is fp32, nn with an epilogue of bf16 gives bf16")


def causal(target, dtype="bfloat16", changes: Any = ()):
    """A right call, but for changes of attributes, which its arrays agree with."""
    a: dict[str, Any] = dict(B=2, T=9, C=16, J=4, lanes=2, strip=8, splits=1, activation=5) | dict(changes)
    a |= dict(bias=1, initial_states=1, seq_idx=1, idx_of_states=1)
    x, state = Buffer(dtype, (a["B"], a["T"], a["C"])), Buffer(dtype, (a["B"], a["J"] - 1, a["C"]))
    numbers = Buffer("int32", x.sizes[:2]), Buffer("int32", state.sizes[:2])
    operands = x, Buffer("float32", (a["J"], a["C"])), Buffer("float16", (a["C"],)), state, *numbers
    if "backward" not in target:
        return Call(target, operands, (x,), a)
    return Call(target, (*operands, x), (x, Buffer("float32", (a["splits"], a["J"] + 1, a["C"])), state), a)


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
@pytest.mark.parametrize("target", CAUSAL)
def test_right_causal_calls_get_as_far_as_cuda(answer, target):
    for dtype in ("float32", "bfloat16", "float16"):
        code, message = answer(causal(target, dtype))
        assert code == INTERNAL and message.startswith("causal: the launch failed: "), message
    assert answer(causal(target, changes={"C": 0})) == (OK, "")


@pytest.mark.parametrize("target", CAUSAL)
def test_causal_calls_that_no_kernel_takes(refuses, target):
    """Whatever the sizes; their arrays are never read."""
    for name, value in (("B", -1), ("T", -(2**62)), ("C", 2**62), ("T", 2**62), ("B", 2**63 - 1), ("J", 32), ("J", 2**62)):
        refuses(causal(target, changes={name: value}), r"a size is -|steps|channels|taps")
    refuses(causal(target, "float8_e4m3fn"), "x is fp8e4nv, it takes fp32, bf16, fp16")
    for name, value in (("lanes", 3), ("lanes", -(2**63)), ("strip", 0), ("strip", 2**62), ("splits", 0), ("splits", 2**62)):
        refuses(causal(target, changes={name: value}), f"{name} is {value}, want ")
    for name in causal(target).attributes:
        refuses(causal(target).without(name), MISSING.format(name, "an int64"))
    refuses(causal(target).buffer(0, address=ADDRESS + 1), "an array does not start at a multiple of its elements' size")


def weight_only(dtype: Any = "bfloat16", result: Any = None, **changes):
    """A right call, but for changes of attributes, which its arrays agree with."""
    a: dict[str, Any] = dict(B=2, M=5, N=96, K=128, S=4, bits=4, tile_m=8, tile_n=64, splits=1) | changes
    x, w, scale = (a["B"], a["M"], a["K"]), (a["B"], a["K"], a["N"] // 2 if a["bits"] == 4 else a["N"]), (a["B"], a["S"], a["N"])
    y = (a["B"], a["M"], a["N"]) if a["splits"] <= 1 else (a["splits"], a["B"], a["M"], a["N"])
    operands = Buffer(dtype, x), Buffer("int8", w), Buffer("float32", scale)
    return Call("jaxext_weight_only_v1", operands, (Buffer(result or dtype, y),), a)


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
def test_right_weight_only_calls_get_as_far_as_cuda(answer):
    for call in (weight_only(), weight_only("float16", "float32", bits=8), weight_only(result="float32", splits=2)):
        code, message = answer(call)
        assert code == INTERNAL and message.startswith("weight_only: the launch failed: "), message
    for name in "BMN":
        assert answer(weight_only(**{name: 0})) == (OK, "")


def test_weight_only_calls_that_no_kernel_takes(refuses):
    """Whatever the sizes; their arrays are never read."""
    for name, value in (("B", -1), ("M", 65), ("N", 2**62), ("K", 2**62), ("B", 2**63 - 1), ("S", 3), ("S", 2**62), ("bits", 16)):
        refuses(weight_only(**{name: value}), r"it takes")
    refuses(weight_only("float32"), "x is fp32, it takes bf16, fp16")
    refuses(weight_only(result="float16"), "the result is fp16, it takes bf16, as x, and fp32")
    refuses(weight_only(result="bfloat16", splits=2), "the result is bfloat16, want float32, as partial results are")
    for name, value in (("tile_m", 9), ("tile_m", -(2**63)), ("tile_n", 2**62)):
        refuses(weight_only(**{name: value}), "tile_m x tile_n is ")
    for value in (0, -(2**63)):
        refuses(weight_only(splits=value), f"splits is {value}, want 1 to 64")
    for name in weight_only().attributes:
        refuses(weight_only().without(name), MISSING.format(name, "an int64"))
    for i in range(4):
        refuses(weight_only().buffer(i, address=ADDRESS + 8), "does not start at a multiple of 16 bytes")
