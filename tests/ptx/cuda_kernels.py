"""Our CUDA kernels' PTX, launched on the interpreter by our own host code, with the parameters and tensor maps that it makes."""

import ctypes
import functools
import pathlib
import subprocess
import tempfile

import interpreter
import ml_dtypes
import numpy as np
import pytest
import triton
from cuda_launches import ADDRESSES, ELEMENTS, LIBRARY, OK, ask, runtime
from interpreter import Input, Module, Output, TensorMap

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
SWIZZLES = (0, 32, 64, 128)  # CUtensorMapSwizzle -> bytes of a row


@functools.cache
def modules(arch: str = "sm_90") -> dict[str, Module]:
    """Each kernel's module, by the name of the kernel."""
    cuobjdump = pathlib.Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xptx", "all", LIBRARY], cwd=folder, check=True, capture_output=True)
        for path in sorted(pathlib.Path(folder).glob("*.ptx")):
            text = path.read_text()
            if f".target {arch}" in text:
                module = Module(text)
                found |= dict.fromkeys(module.kernels, module)
    if not found:
        pytest.skip(f"{LIBRARY} has no PTX for {arch}: build with JAXEXT_PTX=ON in the environment, as `make build` does")
    for name, module in found.items():
        sizes = [size for _, size in module.kernels[name].parameters]
        runtime().TellParameters(name.encode(), len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))
    return found


def execute(case, operands, late, device=0, arch="sm_90"):
    """The result of a case of cuda_launches, as a vector, or its partial results.  Each element is written once."""
    known = modules(arch)
    status, asked = ask(case, device)
    assert status == OK, asked
    maps = [_tensor_map(entry) for entry in asked if "descriptor" in entry]
    dtype = np.dtype(DTYPES[case["result"]])
    result = Output(np.full(case["bytes"][2], 0xFF, np.uint8).view(dtype), ADDRESSES[2])
    arrays = [*(Input(values, address) for values, address in zip(operands, ADDRESSES, strict=False)), result]
    assert [array.values.nbytes for array in arrays] == case["bytes"]
    before = [values.tobytes() for values in operands]
    for entry in asked:
        if "kernel" not in entry:
            continue
        module = known[entry["kernel"]]
        where = {name: entry[name] for name in ("grid", "block", "cluster", "shared")}
        arguments = [bytes.fromhex(digits) for digits in entry["parameters"].split()]
        module.run(entry["kernel"], arguments=arguments, arrays=arrays, maps=maps, late=late, **where)
    assert (result.written == 1).all(), f"each element is written once: {np.bincount(result.written)}"
    assert [array.values.tobytes() for array in arrays[:2]] == before
    return result.values


def _tensor_map(entry) -> TensorMap:
    return interpreter.tensor_map(
        entry["address"],
        entry["strides"],
        entry["sizes"],
        entry["box"],
        ELEMENTS[entry["type"]],
        SWIZZLES[entry["swizzle"]],
        entry["steps"],
        (entry["lower"], entry["upper"]) if "lower" in entry else None,
    )
