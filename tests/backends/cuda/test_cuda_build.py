"""What CMakeLists.txt decides before it compiles anything: whether to, with which compiler, and whether kernels of another build may be
linked.

Needs cmake; the CUDA compiler is a script that only prints its version, and nvidia-smi one that lists a GPU or fails.
"""

import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[3]
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
pytestmark = pytest.mark.skipif(CMAKE is None or sys.platform != "linux", reason="no cmake here, or not Linux")


GPU = "echo 'GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)'"


def configure(folder, release, *options, smi=GPU, **environment):
    """Configure with a compiler of this release, which CUDACXX names as it does for CMake itself, and an nvidia-smi that does this."""
    for name, does in {"some_nvcc": f"echo Cuda compilation tools, release {release}, V{release}.1", "nvidia-smi": smi}.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    compiler = folder / "some_nvcc"
    env = os.environ | {"CUDACXX": str(compiler), "JAXEXT_CUDA": "", "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [CMAKE, "-S", ROOT, "-B", folder / "build", *options]
    return compiler, subprocess.run(command, capture_output=True, text=True, env=env | environment)


def test_the_compiler_that_is_named_is_asked(tmp_path):
    """It was looked for as if it were a folder, and another was taken."""
    compiler, done = configure(tmp_path, "11.8")
    assert done.returncode == 0, done.stderr
    built = runpy.run_path(str(tmp_path / "build/_cuda_build.py"))
    assert built["REASON"] == f"{compiler} is of CUDA 11.8, want 12.1 or newer"


@pytest.mark.parametrize("smi", ["echo No devices found.", "echo no driver >&2; exit 9"])
def test_nothing_is_compiled_without_a_gpu(smi, tmp_path):
    """pip compiled for ten minutes wherever a CUDA toolkit was."""
    for option in ([], ["-DJAXEXT_CUDA=AUTO"]):
        _, done = configure(tmp_path, "13.0", *option, smi=smi)
        assert done.returncode == 0, done.stderr
        assert runpy.run_path(str(tmp_path / "build/_cuda_build.py"))["REASON"].startswith("nvidia-smi lists no GPU; JAXEXT_CUDA=ON ")


@pytest.mark.parametrize("options", [["-DJAXEXT_CUDA=ON"], ["-DJAXEXT_KERNELS=/nowhere"]])
def test_kernels_are_compiled_without_a_gpu_where_asked_for(options, tmp_path):
    """Continuous integration and `make wheel` ask for the kernels.  The old compiler shows that it was asked."""
    _, done = configure(tmp_path, "11.8", *options, smi="exit 9")
    assert done.returncode != 0 and "some_nvcc is of CUDA 11.8, want 12.1 or newer" in " ".join(done.stderr.split())


def test_kernels_of_other_sources_are_not_linked(tmp_path):
    """They were, without a word."""
    library = tmp_path / "libjaxext_kernels.a"
    library.write_text("!<arch>\njaxext kernels of 0123456789abcdef for 80-real,90\n")
    _, done = configure(tmp_path, "13.0", f"-DJAXEXT_KERNELS={library}")
    assert done.returncode != 0
    assert f"{library} is not of these sources in csrc" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("option", "environment", "message"),
    [
        ("-DJAXEXT_CUDA=off", {}, "JAXEXT_CUDA is off, want AUTO, ON or OFF"),
        ("-DJAXEXT_CUDA=ON", {"JAXEXT_CUDA": "OFF"}, "JAXEXT_CUDA is OFF in the environment and ON as an option"),
        ("-DJAXEXT_CUDA=ON", {}, "JAXEXT_CUDA is ON, or JAXEXT_KERNELS is given: "),
    ],
)
def test_contradictions_are_refused(option, environment, message, tmp_path):
    _, done = configure(tmp_path, "11.8", option, **environment)
    assert done.returncode != 0 and message in " ".join(done.stderr.split())


def test_kernels_that_are_given_are_not_left_out_in_silence(tmp_path):
    _, done = configure(tmp_path, "13.0", "-DJAXEXT_CUDA=OFF", f"-DJAXEXT_KERNELS={tmp_path / 'libjaxext_kernels.a'}")
    assert done.returncode != 0 and "JAXEXT_KERNELS is given: JAXEXT_CUDA=OFF" in " ".join(done.stderr.split())


def test_one_wheel_without_cuda_kernels_serves_every_platform_and_python(tmp_path):
    pytest.importorskip("scikit_build_core", reason="the build's tools are not in this environment")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-C", f"build-dir={tmp_path / 'build'}"]
    env = os.environ | {"JAXEXT_CUDA": "OFF", "CMAKE_ARGS": ""}  # which may name a library of kernels
    subprocess.run([*command, "--wheel-dir", tmp_path, ROOT], check=True, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"jaxext/py.typed", "jaxext/_cuda_build.py", "jaxext/kernels/matmul/kernel.py", "jaxext/benchmarks/problems.py"} <= {*names}
    assert not [name for name in names if name.startswith("jaxext/_cuda_module.") and not name.endswith(".pyi")]
