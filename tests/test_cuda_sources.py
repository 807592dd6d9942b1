"""What the preprocessor makes of the Hopper kernels' sources.  Needs nvcc and the package nvidia-cutlass; no GPU."""

import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

CSRC = pathlib.Path(__file__).parent.parent / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
CUTLASS = importlib.util.find_spec("cutlass_library")


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
@pytest.mark.skipif(CUTLASS is None, reason="nvidia-cutlass is not installed")
@pytest.mark.parametrize("unit", ["matmul_nn_large.cu", "conv2d_fprop.cu"])
def test_no_descriptor_fails_without_a_word(unit):
    """CUTLASS goes on where the driver refuses a TMA descriptor: every such call has to pass through ours, which notes it.  A header of
    CUTLASS before sm90.cuh took the tiled ones past it."""
    assert NVCC and CUTLASS and CUTLASS.submodule_search_locations
    root = pathlib.Path(CUTLASS.submodule_search_locations[0]) / "source"
    includes = ["-I", str(CSRC), "-I", str(root / "include"), "-I", str(root / "tools/util/include")]
    command = [NVCC, "-E", "-std=c++17", "-arch=sm_90a", *includes, str(CSRC / unit)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    calls = re.findall(r"(\S*)\s*cutlass::call_cuTensorMapEncode(\w+)\(", text)
    assert {kind for _, kind in calls} == ({"Tiled"} if unit.startswith("matmul") else {"Tiled", "Im2col"})
    assert all(before.endswith("::jaxext::sm90::Noted(") for before, _ in calls), calls
