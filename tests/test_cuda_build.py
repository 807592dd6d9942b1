"""What CMakeLists.txt decides before it compiles anything: with which compiler, and whether kernels of another build may be linked.

Needs cmake; the CUDA compiler is a script that only tells its version.
"""

import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
pytestmark = pytest.mark.skipif(CMAKE is None or sys.platform != "linux", reason="no cmake here, or not Linux")


def configure(folder, release, *options):
    """With a compiler of this release, which CUDACXX names as it does for CMake itself."""
    compiler = folder / "some_nvcc"
    compiler.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n")
    compiler.chmod(0o755)
    command = [CMAKE, "-S", ROOT, "-B", folder / "build", *options]
    return compiler, subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDACXX": str(compiler)})


def test_the_compiler_that_is_named_is_asked(tmp_path):
    """It was looked for as if it were a folder, and another was taken."""
    compiler, done = configure(tmp_path, "11.8")
    assert done.returncode == 0, done.stderr
    built = runpy.run_path(str(tmp_path / "build/_cuda_build.py"))
    assert built["REASON"] == f"{compiler} is of CUDA 11.8, want 12.1 or newer"


def test_kernels_of_other_sources_are_not_linked(tmp_path):
    """They were, without a word."""
    library = tmp_path / "libjaxext_kernels.a"
    library.write_text("!<arch>\njaxext kernels of 0123456789abcdef for 80-real,90\n")
    _, done = configure(tmp_path, "13.0", f"-DJAXEXT_KERNELS={library}")
    assert done.returncode != 0
    assert f"{library} is not of these sources in csrc" in " ".join(done.stderr.split())
