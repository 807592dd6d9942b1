"""The script for a machine with a GPU and no limit of time, with stand-ins for what runs there: what it prints and how it ends."""

import re
import subprocess
import sys

import pytest
from gpu_machine import SCRIPTS, Machine

COMMANDS = """
*"pip install"*) mkdir -p build/site && cp -r jaxext build/site && touch "$OUT/compiled" ;;
*importlib.metadata*) echo ${KERNELS:-compiled} ;;
*tests/test_fails.py) echo "FAILED tests/test_fails.py::test_a - off by one"; exit 1 ;;
*tests/test_hangs.py) exec sleep 60 ;;
*tests/test_passes.py | *tests/backends/test_gpu_suite.py) echo "2 passed" ;;
*'jax.devices("gpu")'*) true ;;
"""
OF_GPUS = sorted(path for path in (SCRIPTS.parent / "tests/backends").glob("test_gpu*.py") if "pytest.mark.gpu" in path.read_text())


def test_each_file_is_a_process_and_one_that_fails_or_hangs_takes_no_other_part_along(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    files = "tests/test_fails.py tests/test_passes.py tests/test_hangs.py tests/test_fails.py"
    status, output = machine.run("on_gpu.sh", "tests", "suite", TESTS=files, LIMIT="2")
    assert (
        status == 1
        and "tests-test_fails: FAILED, status 1" in output
        and "tests-test_passes: passed" in output
        and "suite: passed" in output
    )
    assert "tests-test_hangs: FAILED, not done in time" in output and "tests-test_fails: NOT BEGUN" in output
    assert output.endswith("FAILED: tests-test_fails\nFAILED: tests-test_hangs\nFAILED: tests-test_fails\n")
    assert (machine.out / "failures.txt").read_text() == "FAILED tests/test_fails.py::test_a - off by one\n"


def test_a_wheel_of_another_checkout_is_refused_and_without_one_it_is_compiled(tmp_path):
    machine = Machine(tmp_path / "other", COMMANDS)
    (machine.checkout / "jaxext/a.py").write_text("# of today\n")
    status, output = machine.run("on_gpu.sh", "suite")
    assert status == 1 and "they differ in jaxext/a.py" in output and "one GPU" not in output
    machine = Machine(tmp_path / "none", COMMANDS, tag="cp27")
    status, output = machine.run("on_gpu.sh", "suite", KERNELS="built without")
    assert status == 0 and (machine.out / "compiled").exists() and "!!! NO CUDA KERNELS: built without" in output


def test_every_file_of_gpu_tests_is_run():
    script = (SCRIPTS / "on_gpu.sh").read_text()
    (braces,) = re.findall(r"tests/backends/test_gpu_\{(.*?)\}", script)
    named = {"test_gpu", "test_gpu_suite", *(f"test_gpu_{name}" for name in braces.split(","))}
    assert {path.stem for path in OF_GPUS} == named and all(
        f"tests/backends/{name}.py" in script for name in ("test_gpu", "test_gpu_suite")
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", OF_GPUS, ids=lambda path: path.stem)
def test_a_file_of_gpu_tests_is_collected_by_itself(path):
    """A GPU runs it in a process of its own, and another file, collected before, may have given it what it imports."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", path]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
