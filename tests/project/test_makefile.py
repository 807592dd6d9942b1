"""What `make` would run: where CUDA kernels are compiled, which tests are chosen, and that pre-commit has the parts of lint."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None or not (ROOT / "Makefile").exists(), reason="no make here, or no Makefile")


def would_run(folder, *arguments, gpu=False, **environment):
    """The commands of `make` for an environment that is not there yet, on a machine with or without a GPU."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + ("echo GPU 0: NVIDIA H100\n" if gpu else "echo no driver >&2; exit 9\n"))
    smi.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **environment}  # without what a `make` that runs these tests has set
    command = ["make", "--dry-run", "-C", ROOT, f"VENV={folder / 'venv'}", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "gpu", "environment", "mode"),
    [
        ("demo", False, {}, "OFF"),
        ("test", False, {}, "OFF"),
        ("demo", True, {}, "AUTO"),
        ("test", True, {}, "AUTO"),
        ("test", False, {"CMAKE_ARGS": "-DJAXEXT_KERNELS=/libjaxext_kernels.a"}, "AUTO"),
        ("demo", False, {"JAXEXT_CUDA": "ON"}, "ON"),
        ("demo", True, {"JAXEXT_CUDA": "OFF"}, "OFF"),
        ("build", False, {}, "ON"),
    ],
)
def test_cuda_kernels_are_compiled_where_they_can_run_and_where_asked_for(target, gpu, environment, mode, tmp_path):
    said = would_run(tmp_path, target, gpu=gpu, **environment)
    assert set(re.findall(r"JAXEXT_CUDA=(\w*)", said)) == {mode}
    assert ("nvidia-cutlass" in said) == (mode != "OFF")


def test_the_demo_needs_nothing_that_only_the_tests_need(tmp_path):
    assert "'.[demo]'" in would_run(tmp_path, "demo") and "'.[test]'" not in would_run(tmp_path, "demo")
    assert "'.[test]'" in would_run(tmp_path, "test")


def test_the_long_tail_is_left_out_unless_asked_for(tmp_path):
    def chosen(*arguments):
        return re.findall(r'-m pytest .*-m "(.*?)" (.*)', would_run(tmp_path, *arguments))

    assert chosen("test") == [("not slow", "tests"), ("not slow", "tests/kernels")]
    assert chosen("test-all") == [("", "tests"), ("", "tests/kernels")]
    assert chosen("test", "MARK=slow", "TESTS=tests/project/test_demo.py") == [("slow", "tests/project/test_demo.py")]
    assert chosen("test", "TESTS=tests/kernels/test_conv.py") == [("not slow", "tests/kernels/test_conv.py")]


def test_the_hooks_are_the_parts_of_lint(tmp_path):
    hooks = re.findall(r"entry: make (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks and len(set(hooks)) == len(hooks)
    assert would_run(tmp_path, *hooks) == would_run(tmp_path, "lint")
