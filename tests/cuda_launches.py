"""The compiled CUDA kernels' host code without CUDA: what it asks of it for a call.

The kernels' library is linked with a CUDA runtime that writes down what it is asked: csrc/cuda_runtime.cc.  Needs nvcc and the folder in
which jaxext was built; no GPU and no driver.  Where one lacks, the module that imports this is skipped.
"""

import ctypes
import functools
import json
import math
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import pytest
import simt_weight_only
from simt_causal import OPERANDS, RESULTS, itemsize, operand_shapes, result_shapes

from jaxext.backends.cuda import cuda_binding
from jaxext.kernels.epilogue import ACTIVATIONS

TESTS = pathlib.Path(__file__).parent
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
LIBRARIES = sorted(TESTS.parent.glob("build/*/libjaxext_kernels.a"), key=lambda path: path.stat().st_mtime)
if reason := cuda_binding.missing() or (NVCC is None and "no nvcc here") or (not LIBRARIES and "jaxext was not built in this checkout"):
    pytest.skip(f"no CUDA kernels to link: {reason}", allow_module_level=True)
LIBRARY = LIBRARIES[-1]

from jaxext import _cuda_module  # noqa: E402

OK, INVALID, INTERNAL = range(3)  # jaxext::Status
CODES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]  # jaxext::Dtype
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ROLES = {"nn": 0, "nt": 1, "tn": 2, "fprop": 0, "dgrad": 1, "wgrad": 2, "forward": 0, "backward": 1}
SLOTS = {"nn": "abc", "nt": "bca", "tn": "acb", "fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}  # operands and result
SHAPES = {"a": "BMK", "b": "BKN", "c": "BMN"}
RAGGED_SLOTS = {"nn": "xwy", "nt": "wyx", "tn": "xyw"}
RAGGED_SHAPES = {"x": "BPRMK", "w": "BGKN", "y": "BPRMN"}
# Of both operands, the result, and an epilogue's arrays: aligned to no more than TMA wants.
ADDRESSES = [(i << 44) + 16 for i in (1, 2, 3)]
ADDED = {slot: (i << 44) + 16 for i, slot in enumerate(("bias", "residual", "saved"), 4)}
PLACES = (7 << 44) + 4  # of a ragged product
# Of a scaled product's: factors, their scales, and the result.
SCALED = {name: (i << 44) + 16 for i, name in enumerate(("a", "b", "left", "right", "d"), 1)}
# Of a product's with an own transpose.
GRAM = {name: (i << 44) + 16 for i, name in enumerate(("x", "addend", "y"), 1)}
# Of a causal convolution's arrays.
CAUSAL = {name: (i << 44) + 16 for i, name in enumerate((*OPERANDS, *RESULTS), 1)}
# Of a weight-only product's.
WEIGHT_ONLY = {name: (i << 44) + 16 for i, name in enumerate(simt_weight_only.NAMES, 1)}
STREAM = 77
ELEMENTS = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 9: 2}  # CUtensorMapDataType -> bytes
SWIZZLE = {0: 1 << 10, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> most bytes of a row of the box

# What can be called, a row for each compiled kernel.
MATMULS = _cuda_module.matmul_kernels()
SCALEDS = _cuda_module.scaled_kernels()
GRAMS = _cuda_module.gram_kernels()
PIECES = [row | {"role": role} for row in _cuda_module.pieces_kernels() for role in ("nn", "nt", "tn")]
RAGGEDS = _cuda_module.ragged_kernels()
CONVS = [row | {"family": 1} for row in _cuda_module.conv_kernels()]
DEPTHWISE = [
    dict(family=2, rank=rank, role=role, operands=dtype)
    for rank in (1, 2, 3)
    for role in ("fprop", "dgrad", "wgrad")
    for dtype in ("float32", "bfloat16", "float16")
]
WIDE_WEIGHT_ONLYS = _cuda_module.wide_weight_only_kernels()
WEIGHT_ONLYS = [dict(family=6, operands=dtype, bits=bits) for dtype in ("bf16", "fp16") for bits in (4, 8)]
CAUSALS = [dict(family=4, role=role, operands=dtype) for role in ("forward", "backward") for dtype in ("fp32", "bf16", "fp16")]


@functools.cache
def runtime(*more: str | pathlib.Path, copy: int = 0) -> ctypes.CDLL:
    """The stand-in for CUDA with our host code, and with what `more` names to nvcc.  A copy remembers nothing of the others' calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cuda_runtime.so"
        # -z,defs: a function of CUDA that the runtime has not, such as one that allocates, waits or copies, is an error
        flags = ["-std=c++17", "-O0", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-Wall,-Wextra", "-Xlinker", "-z,defs"]
        command = [NVCC, *flags, f"-I{TESTS.parent / 'csrc'}", TESTS / "csrc/cuda_runtime.cc", *more, LIBRARY, "-o", path]
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


def ask(case, device=0, failing=""):
    """(status, what was asked of CUDA, or the message).  A case may have an epilogue: the activation's number, and whose arrays exist."""
    numbers = [_pointer(values) for values in (case["problem"], case["config"], [*ADDRESSES, STREAM, PLACES])]
    epilogue = None
    if "epilogue" in case:
        activation, slots = case["epilogue"]
        epilogue = (ctypes.c_int64 * 4)(activation, *(address if slot in slots else 0 for slot, address in ADDED.items()))
    answer = ctypes.create_string_buffer(1 << 20)
    if case["family"] == 4:
        return _ask_causal(case, device, failing, answer)
    if case["family"] == 5:
        given = [_pointer(case[name]) for name in ("dtypes", "problem", "config", "strides", "addresses")]
        return _told(runtime().CallScaled(device, failing.encode(), *given, answer, ctypes.c_int64(len(answer))), answer)
    if case["family"] == 7:
        dtypes, problem, config, addresses = (_pointer(case[name]) for name in ("dtypes", "problem", "config", "addresses"))
        factors = (ctypes.c_double * 2)(*case["factors"])
        given = dtypes, problem, config, factors, addresses
        return _told(runtime().CallGram(device, failing.encode(), *given, answer, ctypes.c_int64(len(answer))), answer)
    if case["family"] == 6:
        return _ask_weight_only(case, device, failing, answer)
    where = (case["family"], case["rank"], ROLES[case["role"]], device, failing.encode())
    dtypes = (CODES.index(case["operands"]), CODES.index(case["result"]))
    return _told(runtime().Call(*where, *dtypes, *numbers, epilogue, answer, ctypes.c_int64(len(answer))), answer)


def _ask_causal(case, device, failing, answer):
    numbers = [_pointer(case[name]) for name in ("numbers", "problem", "config", "addresses")]
    where = ROLES[case["role"]], device, failing.encode()
    return _told(runtime().CallCausal(*where, *numbers, answer, ctypes.c_int64(len(answer))), answer)


def _ask_weight_only(case, device, failing, answer):
    numbers = [_pointer(case[name]) for name in ("dtypes", "problem", "config", "addresses")]
    return _told(runtime().CallWeightOnly(device, failing.encode(), *numbers, answer, ctypes.c_int64(len(answer))), answer)


def _pointer(values):
    return (ctypes.c_int64 * len(values))(*values)


def _told(status, answer):
    text = answer.value.decode()
    return status, json.loads(text) if status == OK else text


# Cases: a row, a problem that it takes, and the bytes of both operands, the result and the epilogue's arrays.


def matmul(row, B, M, N, K, splits=1):
    sizes = dict(zip("BMNK", (B, M, N, K), strict=True))
    counts = [math.prod(sizes[label] for label in SHAPES[slot]) for slot in SLOTS[row["role"]]]
    config = [row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_m", "pingpong")] + [splits]
    case = {name: row[name] for name in ("role", "operands", "result")}
    scale = [BYTES[row["operands"]], BYTES[row["operands"]], BYTES[row["result"]] * splits]
    case |= dict(family=0, rank=0, problem=[B, M, N, K], config=config, bytes=[n * b for n, b in zip(counts, scale, strict=True)])
    if not row["fused"]:
        return case
    return case | dict(epilogue=(3, list(ADDED)), bytes=[*case["bytes"], 4 * B * N, case["bytes"][2], case["bytes"][2]])


def pieces(row, B, M, N, K, splits=1):
    sizes = dict(zip("BMNK", (B, M, N, K), strict=True))
    counts = [math.prod(sizes[label] for label in SHAPES[slot]) for slot in SLOTS[row["role"]]]
    return dict(
        family=8,
        rank=0,
        role=row["role"],
        operands="float32",
        result="float32",
        problem=[B, M, N, K],
        config=[row["tile_m"], row["tile_n"], row["pieces"], splits],
        bytes=[4 * n for n in (*counts[:2], counts[2] * splits)],
    )


def ragged(row, B, P, R, M, N, K, G):
    sizes = dict(zip("BPRMNKG", (B, P, R, M, N, K, G), strict=True))
    count = lambda slot: math.prod(sizes[label] for label in RAGGED_SHAPES[slot])
    case = {name: row[name] for name in ("role", "operands", "result")}
    config = [row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_n")]
    return case | dict(
        family=3, rank=0, problem=[*sizes.values()], config=config, bytes=[2 * count(slot) for slot in RAGGED_SLOTS[row["role"]]]
    )


def scaled(row, problem, left, right, result="bfloat16", splits=1):
    """`problem`: B, M, N, K, and the blocks I, J and S.  `left`, `right`: the scales' shapes, (B, I, S) and (B, J, S), or (B, S, J) if each
    column has its own; an axis of 1 is for all."""
    B, M, N, K, _, J, _ = problem
    strides = [0 if size == 1 else math.prod(left[axis + 1 :]) for axis, size in enumerate(left)]
    of_right = [0 if size == 1 else math.prod(right[axis + 1 :]) for axis, size in enumerate(right)]
    strides += [of_right[0], of_right[2], of_right[1]] if J == N else of_right
    config = [row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_m")] + [splits]
    return dict(
        family=5,
        dtypes=[CODES.index(dtype) for dtype in (row["operands"], row["second"], result)],
        operands=row["operands"],
        result=result,
        problem=[*problem],
        config=config,
        strides=strides,
        addresses=[*SCALED.values(), STREAM],
        bytes=dict(a=B * M * K, b=B * N * K, left=4 * math.prod(left), right=4 * math.prod(right), d=B * M * N * BYTES[result] * splits),
    )


def gram(row, B, M, N, result, factors=(1.0, 0.0), splits=1):
    """`factors`: of the product, and of the addend, which is there if its factor is not 0."""
    config = [row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_m")] + [splits]
    shapes = dict(x=B * M * N * BYTES[row["operands"]], addend=B * M * M * BYTES[result], y=B * M * M * BYTES[result] * splits)
    given = {name: size for name, size in shapes.items() if name != "addend" or factors[1]}
    return dict(
        family=7,
        dtypes=[CODES.index(dtype) for dtype in (row["operands"], result)],
        operands=row["operands"],
        result=result,
        problem=[B, M, N],
        config=config,
        factors=factors,
        addresses=[*(GRAM[name] if name in given else 0 for name in GRAM), STREAM],
        bytes=given,
    )


def conv(row, p, config):
    result = "float32" if config.splits > 1 else row["operands"]
    x, w, y = (p.B * p.G * n for n in (p.N * math.prod(p.input) * p.C, p.K * math.prod(p.filter) * p.C, p.N * math.prod(p.output) * p.K))
    counts = [dict(x=x, w=w, y=y)[slot] for slot in SLOTS[row["role"]]]
    scale = [BYTES[row["operands"]], BYTES[row["operands"]], BYTES[result] * config.splits]
    numbers = [p.B, p.N, p.G, p.C, p.K, *p.input, *p.filter, *p.output, *p.stride, *p.low, *p.input_dilation, *p.filter_dilation]
    fields = ("lanes", "strip", "pieces", "lines") if row["family"] == 2 else ("tile_m", "tile_n", "cluster")
    values = [row[name] if name in row else getattr(config, name) for name in fields] + [config.splits]
    return row | dict(result=result, problem=numbers, config=values, bytes=[n * b for n, b in zip(counts, scale, strict=True)])


def causal(problem, config):
    """A case with an address for each array that exists, and its bytes by name."""
    shapes = operand_shapes(problem) | result_shapes(problem, config.splits)
    short = {"fp32": 0, "bf16": 1, "fp16": 2}  # jaxext::Dtype
    epilogue = problem.epilogue
    numbers = [*(short[dtype] for dtype in (*problem.dtypes[:2], epilogue.bias or "fp32"))]
    return dict(
        family=4,
        role=problem.role,
        operands=problem.dtypes[0],
        numbers=[*numbers, 0 if epilogue.activation is None else 1 + ACTIVATIONS.index(epilogue.activation)],
        problem=[problem.B, problem.T, problem.C, problem.J],
        config=[config.lanes, config.strip, config.splits],
        addresses=[*(CAUSAL[name] if name in shapes else 0 for name in CAUSAL), STREAM],
        bytes={name: math.prod(shape) * itemsize(problem, name) for name, shape in shapes.items()},
    )


def weight_only(problem, config):
    """A case with the bytes of its arrays by name."""
    short, result = {"fp32": 0, "bf16": 1, "fp16": 2}, "fp32" if config.splits > 1 else problem.dtypes[2]  # jaxext::Dtype
    dtypes = simt_weight_only.dtypes(problem, config.splits)
    return dict(
        family=6,
        role=problem.role,
        operands=problem.dtypes[0],
        dtypes=[short[problem.dtypes[0]], short[result]],
        problem=[problem.B, problem.M, problem.N, problem.K, problem.S, problem.bits_of_weight],
        config=[config.tile_m, config.tile_n, config.splits],
        addresses=[*WEIGHT_ONLY.values(), STREAM],
        bytes={name: math.prod(shape) * dtypes[name].itemsize for name, shape in simt_weight_only.shapes(problem, config.splits).items()},
    )
