"""Our CUDA kernels' PTX, launched on the interpreter by our own host code, with the parameters and tensor maps that it makes."""

import ctypes
import functools
import importlib.util
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import ptxsim
import pytest
import triton
from cuda_calls import Arrays, Call, unwritten_results
from cuda_cases import OK
from cuda_launches import ELEMENTS, LIBRARY, NVCC, TESTS, ask, runtime
from ptxsim import EARLY, LATE, Input, Module, Output, TensorMap

SWIZZLES = (0, 32, 64, 128)  # CUtensorMapSwizzle -> bytes of a row


@functools.cache
def modules(arch: str = "sm_90") -> dict[str, Module]:
    """The module of each kernel of our library, by the kernel's name."""
    library = runtime()  # skips where there is none
    found = modules_of(LIBRARY, arch)
    if not found:
        assert os.environ.get("JAXEXT_PTX") != "ON", f"{LIBRARY} has no PTX for {arch}, and was to have it"
        pytest.skip(f"{LIBRARY} has no PTX for {arch}: build with JAXEXT_PTX=ON in the environment, as `make build` does")
    tell_parameters(library, found)
    return found


def modules_of(binary, arch: str) -> dict[str, Module]:
    cuobjdump = pathlib.Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xptx", "all", binary], cwd=folder, check=True, capture_output=True)
        for path in sorted(pathlib.Path(folder).glob("*.ptx")):
            text = path.read_text()
            if f".target {arch}" in text:
                assert "brkpt" not in text, "an assertion in CUTLASS's pipelines: compiled without NDEBUG"
                module = Module(text)
                assert not (without_test := module.unverified_opcodes()), without_test
                found |= dict.fromkeys(module.kernels, module)
    return found


def compiled(source: str, *flags: str) -> tuple[ctypes.CDLL, dict[str, Module]]:
    """The runtime with what a file of tests/ptx/cuda launches, and its modules."""
    package = importlib.util.find_spec("cutlass_library")
    if package is None:
        pytest.skip("no headers of CUTLASS: nvidia-cutlass is not installed")
    cutlass = pathlib.Path(next(iter(package.submodule_search_locations or ()))) / "source"
    include = [f"-I{folder}" for folder in (cutlass / "include", cutlass / "tools/util/include", TESTS.parent / "csrc")]
    options = ["-std=c++17", "-O1", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", *flags]
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/{source}.o"
        command = [str(NVCC), "-gencode=arch=compute_90a,code=compute_90a", *options, *include, "-c", TESTS / "ptx/cuda" / source]
        subprocess.run([*command, "-o", made], check=True)
        library, found = runtime(made), modules_of(made, "sm_90")
    tell_parameters(library, found)
    return library, found


def tell_parameters(runtime: ctypes.CDLL, modules: dict[str, Module]) -> None:
    """Make the runtime write down the parameters of these kernels' launches too."""
    for name, module in modules.items():
        sizes = [size for _, size in module.kernels[name].parameters]
        runtime.TellParameters(name.encode(), len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))


def execute(call: Call, late, device=0, arch="sm_90", instead=None) -> Arrays:
    """The results of a call, from the library's modules or others.  Each element is written once, the operands never."""
    kernels = instead or modules(arch)  # first: it makes the runtime tell parameters
    status, asked = ask(call.case, device)
    assert status == OK, asked
    addresses = call.case.addresses
    inputs = [Input(values, addresses[name]) for name, values in call.operands.items()]
    outputs = [Output(values, addresses[name]) for name, values in unwritten_results(call.case).items()]
    before = [array.values.tobytes() for array in inputs]
    launch(asked, kernels, [*inputs, *outputs], late)
    for output in outputs:
        assert (output.written == 1).all(), f"each element is written once: {np.bincount(output.written.ravel())}"
    assert [array.values.tobytes() for array in inputs] == before
    return {name: output.values for name, output in zip(call.case.results, outputs, strict=True)}


def late_and_early(call: Call, **where) -> Arrays:
    """The results of a call, which are the same bits whether asynchronous work is late or early."""
    late, early = (execute(call, when, **where) for when in (LATE, EARLY))
    for one, other in zip(late.values(), early.values(), strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    return late


def check(call: Call, **where) -> None:
    """The results are right."""
    call.check(late_and_early(call, **where))


def launch(asked, modules: dict[str, Module], arrays, late) -> None:
    """Runs the kernels that a runtime was asked to launch, with the tensor maps that it was asked to encode."""
    maps = [_tensor_map(entry) for entry in asked if "descriptor" in entry]
    for entry in asked:
        if "kernel" in entry:
            where = {name: entry[name] for name in ("grid", "block", "cluster", "shared")}
            arguments = [bytes.fromhex(digits) for digits in entry["parameters"].split()]
            modules[entry["kernel"]].run(entry["kernel"], arguments=arguments, arrays=arrays, maps=maps, late=late, **where)


def _tensor_map(entry) -> TensorMap:
    return ptxsim.tensor_map(
        entry["address"],
        entry["strides"],
        entry["sizes"],
        entry["box"],
        ELEMENTS[entry["type"]],
        SWIZZLES[entry["swizzle"]],
        entry["steps"],
        (entry["lower"], entry["upper"]) if "lower" in entry else None,
    )
