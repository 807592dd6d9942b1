"""The Hopper kernels' sources and CUTLASS's: what the preprocessor makes of both, and what our host code hands over.

Needs nvcc and the package nvidia-cutlass; no GPU and no driver.
"""

import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

TESTS = pathlib.Path(__file__).parents[2]
CSRC = TESTS.parent / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
TARGET = "-gencode=arch=compute_90a,code=compute_90a"  # one, and no machine code: `-arch=sm_90a` compiles for two
CUTLASS = importlib.util.find_spec("cutlass_library")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(NVCC is None, reason="no nvcc here"),
    pytest.mark.skipif(CUTLASS is None, reason="nvidia-cutlass is not installed: make build"),
]


def nvcc(*arguments) -> str:
    assert NVCC and CUTLASS and CUTLASS.submodule_search_locations
    root = pathlib.Path(CUTLASS.submodule_search_locations[0]) / "source"
    includes = [f"-I{CSRC}", f"-I{root / 'include'}", f"-I{root / 'tools/util/include'}"]
    command = [NVCC, "-std=c++17", TARGET, "-DNDEBUG", "--expt-relaxed-constexpr", *includes, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("unit", ["matmul/matmul_nn_sm90.cu", "conv/conv2d_fprop_sm90.cu"])
def test_no_descriptor_fails_without_a_word(unit):
    """CUTLASS goes on where the driver refuses a TMA descriptor: every such call has to pass through ours, which notes it.  A header of
    CUTLASS before sm90.cuh took the tiled ones past it."""
    text = nvcc("-E", CSRC / unit)
    assert "cutlass::call_cuTensorMapEncode" not in text
    calls = re.findall(r"DriverFunction<decltype\(cuTensorMapEncode(\w+)\)>", text)
    assert set(calls) == ({"Tiled"} if unit.startswith("matmul") else {"Tiled", "Im2col"})


@pytest.mark.parametrize("rank", [2, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 3))])  # 50 s each to compile
def test_what_cutlass_makes_of_our_convolutions(tmp_path, rank):
    """TMA reads both operands where the definition has them, by the descriptors and coordinates that CUTLASS makes of our arguments;
    stores are the result's."""
    program = tmp_path / "conv_arguments"
    nvcc("-O0", f"-DRANK={rank}", "-o", program, TESTS / "csrc/conv_arguments.cu", CSRC / "conv/conv_plan.cc")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    parts = {role: int(count) for role, count in re.findall(rf"conv{rank}d_(\w+): (\d+) parts", done.stdout)}
    assert set(parts) == {"fprop", "dgrad", "wgrad"} and min(parts.values()) > 50


def test_blocks_that_do_not_fit_are_not_compiled(tmp_path):
    """Every Hopper kernel states its budget."""
    unit = tmp_path / "budgets.cu"
    right = ["384, 1, 232448, 40 + 2 * 232", "256, 2, 115712, 40 + 208", "512, 1, 1024, 24 + 104 + 2 * 192", "128, 1, 0, 0"]
    block, blocks = "a block has 227 KB of shared memory at most", "a multiprocessor has 228 KB, of which each block takes 1 KB besides"
    registers = "a warp group would wait for registers that no other gives up"
    wrong = {
        "384, 1, 232449, 0": [block, blocks],
        "256, 2, 115713, 0": [blocks],
        "384, 1, 1024, 40 + 2 * 240": [registers],
        "256, 2, 1024, 40 + 224": [registers],
    }
    budgets = "".join(f"static_assert(jaxext::sm90::BlockBudget<{each}>::kSharedBytes >= 0);\n" for each in (*right, *wrong))
    unit.write_text(f'#include "common/sm90.cuh"\n{budgets}')
    with pytest.raises(subprocess.CalledProcessError) as failed:
        nvcc("-c", "-o", tmp_path / "budgets.o", unit)
    found = re.findall(r'static assertion failed with "(.*?)"', failed.value.stderr)
    assert found == sum(wrong.values(), []), failed.value.stderr
    for source in [CSRC / "weight_only/wide_weight_only.cuh", *CSRC.glob("*/*_sm90.cuh")]:
        text = source.read_text()
        assert ("BlockBudget<" in text) == ("Launch(" in text), source
