"""The commands of `make`: its Python, where CUDA kernels are compiled, and the tests; pre-commit has the parts of lint."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None or not (ROOT / "Makefile").exists(), reason="no make here, or no Makefile")


def command(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def would_run(folder, *arguments, gpu=False, **environment):
    """The commands of `make` for an environment that is not there yet, on a machine with or without a GPU."""
    command(folder / "nvidia-smi", "echo GPU 0: NVIDIA H100" if gpu else "echo no driver >&2; exit 9")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **environment}  # without what a `make` that runs these tests has set
    make = ["make", "--dry-run", "-C", ROOT, f"VENV={folder / 'venv'}", *arguments]
    return subprocess.run(make, env=env, capture_output=True, text=True, check=True).stdout


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
        ("cuda", False, {}, "ON"),
    ],
)
def test_cuda_kernels_are_compiled_where_they_can_run_and_where_asked_for(target, gpu, environment, mode, tmp_path):
    said = would_run(tmp_path, target, gpu=gpu, **environment)
    assert set(re.findall(r"JAXEXT_CUDA=(\w*)", said)) == {mode}
    assert ("nvidia-cutlass" in said) == (mode != "OFF")


@pytest.mark.parametrize(("run", "taken"), [({"3.13", "3.12"}, "python3.13"), ({"3.12"}, "python3.12"), ({}, "python3")])
def test_the_newest_python_that_runs_makes_the_environment_unless_one_is_given(run, taken, tmp_path):
    """The others are as pyenv's shims of versions that are not selected, and python3 is too old."""
    for version in ("3.13", "3.12", "3.11"):
        command(tmp_path / f"python{version}", f"echo {version}" if version in run else "exit 127")
    command(tmp_path / "python3", "echo 3.10")
    command(tmp_path / "pyenv", "exit 1")
    assert f"\n{taken} -m venv" in "\n" + would_run(tmp_path, "demo")
    assert "mine -m venv" in would_run(tmp_path, "demo", PYTHON="mine")
    assert "mine -m venv" in would_run(tmp_path, "demo", "PYTHON=mine")


def test_pyenv_is_found_beside_its_shims(tmp_path):
    """A PATH may have the shims, which run only what is selected, and not pyenv itself."""
    shims, managed = tmp_path / "shims", tmp_path / "versions/3.13.1/bin"
    for folder in (shims, tmp_path / "bin", managed):
        folder.mkdir(parents=True)
    command(shims / "python3", "echo 3.10")
    command(shims / "python3.13", "exit 127")
    command(tmp_path / "bin/pyenv", '[ $1 = versions ] && echo 3.13.1 || echo "$PYENV_ROOT/versions/$2"')
    command(managed / "python", "echo 3.13")
    path = f"{shims}:/usr/bin:/bin"
    found = subprocess.run([ROOT / ".ci/find-python", "3.13"], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(managed / "python")


def test_the_demo_needs_nothing_that_only_the_tests_need(tmp_path):
    assert "'.[demo]'" in would_run(tmp_path, "demo") and "'.[test]'" not in would_run(tmp_path, "demo")
    assert "'.[test]'" in would_run(tmp_path, "test")


def test_the_long_tail_is_left_out_unless_asked_for(tmp_path):
    def chosen(*arguments):
        return re.findall(r'-m pytest .*-m "(.*?)" (.*)', would_run(tmp_path, *arguments))

    quick = "not slow and not cuda"
    assert chosen("test") == [(quick, "tests"), (quick, "tests/kernels")]
    assert chosen("test-all") == [("", "tests"), ("", "tests/kernels")]
    assert chosen("test", "MARK=slow", "TESTS=tests/project/test_demo.py") == [("slow", "tests/project/test_demo.py")]
    assert chosen("test", "TESTS=tests/kernels/test_conv.py") == [("not slow", "tests/kernels/test_conv.py")]


def test_the_hooks_are_the_parts_of_lint(tmp_path):
    hooks = re.findall(r"entry: make (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks and len(set(hooks)) == len(hooks)
    assert would_run(tmp_path, *hooks) == would_run(tmp_path, "lint")
