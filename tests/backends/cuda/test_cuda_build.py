"""Decisions of CMakeLists.txt before it compiles anything: whether to, with which compiler, and whether kernels of another build may be
linked.

Needs cmake; the CUDA compiler is a script that only prints its version, and nvidia-smi one that lists a GPU or fails.
"""

import ctypes
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
    env = os.environ | {"CUDACXX": f"{folder}/some_nvcc", "JAXEXT_CUDA": "", "PATH": f"{folder}:{os.environ['PATH']}"}
    here = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_COMPILER=NOTFOUND"]  # to look for a C++ compiler takes a second
    command = [CMAKE, "-S", ROOT, "-B", folder / "build", *here, *options]
    return subprocess.run(command, capture_output=True, text=True, env=env | environment)


@pytest.mark.parametrize(
    ("release", "options", "smi", "reason"),
    [
        ("11.8", [], GPU, "{folder}/some_nvcc is of CUDA 11.8, want 12.1 or newer"),  # it was taken for a folder
        *(  # pip compiled for ten minutes wherever a CUDA toolkit was
            ("13.0", options, smi, "nvidia-smi lists no GPU; JAXEXT_CUDA=ON ")
            for smi in ("echo No devices found.", "echo no driver >&2; exit 9")
            for options in ([], ["-DJAXEXT_CUDA=AUTO"])
        ),
    ],
)
def test_nothing_is_compiled_without_a_compiler_and_a_gpu(release, options, smi, reason, tmp_path):
    done = configure(tmp_path, release, *options, smi=smi)
    assert done.returncode == 0, done.stderr
    assert runpy.run_path(str(tmp_path / "build/_cuda_build.py"))["REASON"].startswith(reason.format(folder=tmp_path))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there")
def test_the_launcher_is_compiled_without_a_cuda_compiler(tmp_path):
    done = configure(tmp_path, "11.8", "-UCMAKE_CXX_COMPILER", smi="exit 9")
    assert done.returncode == 0, done.stderr
    assert runpy.run_path(str(tmp_path / "build/_cuda_build.py"))["NO_LAUNCHER"] == ""
    subprocess.run([str(CMAKE), "--build", tmp_path / "build"], check=True, capture_output=True)
    subprocess.run([str(CMAKE), "--install", tmp_path / "build", "--prefix", tmp_path], check=True, capture_output=True)
    library = ctypes.CDLL(str(tmp_path / "jaxext/_launcher.abi3.so"))
    assert library.jaxext_raw_initialize and library.jaxext_raw_execute and library.jaxext_launcher_ffi_version


@pytest.mark.parametrize(
    ("options", "reason"), [([], "no C++ compiler found"), (["-DJAXEXT_CUDA=OFF"], "JAXEXT_CUDA=OFF")], ids=["no compiler", "off"]
)
def test_without_a_launcher(options, reason, tmp_path):
    done = configure(tmp_path, "11.8", *options, smi="exit 9")
    assert done.returncode == 0 and f"No launcher of kernels that are given as text: {reason}" in done.stdout
    assert runpy.run_path(str(tmp_path / "build/_cuda_build.py"))["NO_LAUNCHER"] == reason


OLD = "some_nvcc is of CUDA 11.8, want 12.1 or newer"  # continuous integration and `make wheel` ask for kernels where no GPU is
ERRORS = {  # the compiler's release, options, the environment, and the message
    "asked for": ("11.8", ["-DJAXEXT_CUDA=ON"], {}, OLD),
    "kernels given": ("11.8", ["-DJAXEXT_KERNELS=/nowhere"], {}, OLD),
    "neither on nor off": ("11.8", ["-DJAXEXT_CUDA=off"], {}, "JAXEXT_CUDA is off, want AUTO, ON or OFF"),
    "on and off": ("11.8", ["-DJAXEXT_CUDA=ON"], {"JAXEXT_CUDA": "OFF"}, "JAXEXT_CUDA is OFF in the environment and ON as an option"),
    "why it is on": ("11.8", ["-DJAXEXT_CUDA=ON"], {}, "JAXEXT_CUDA is ON, or JAXEXT_KERNELS is given: "),
    "kernels given, and off": ("13.0", ["-DJAXEXT_CUDA=OFF", "{library}"], {}, "JAXEXT_KERNELS is given: JAXEXT_CUDA=OFF"),
    "kernels of another series": (
        "12.9",
        ["-DJAXEXT_CUDA=ON", "-DJAXEXT_PACKAGE=jaxext_kernels_cu13"],
        {},
        "some_nvcc is of CUDA 12.9, jaxext_kernels_cu13 wants one of CUDA 13",
    ),
    "kernels of other sources": ("13.0", ["{library}"], {}, "libjaxext_kernels.a is not of these sources in csrc"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_contradictions_are_refused(error, tmp_path):
    release, options, environment, message = ERRORS[error]
    library = tmp_path / "libjaxext_kernels.a"
    library.write_text("!<arch>\njaxext kernels of 0123456789abcdef for 80-real,90\n")
    options = [option.format(library=f"-DJAXEXT_KERNELS={library}") for option in options]
    done = configure(tmp_path, release, *options, smi="exit 9" if message == OLD else GPU, **environment)
    assert done.returncode != 0 and message in " ".join(done.stderr.split())


def test_one_wheel_without_cuda_kernels_serves_every_platform_and_python(tmp_path):
    pytest.importorskip("scikit_build_core", reason="the build's tools are not in this environment")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-C", f"build-dir={tmp_path / 'build'}"]
    env = os.environ | {"JAXEXT_CUDA": "OFF", "CMAKE_ARGS": ""}  # which may name a library of kernels
    subprocess.run([*command, "--wheel-dir", tmp_path, ROOT], check=True, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"jaxext/py.typed", "jaxext/_cuda_build.py", "jaxext/kernels/matmul/kernel.py", "jaxext/bench/problems.py"} <= {*names}
    assert not [name for name in names if "benchmarks" in name]
    compiled = ("jaxext/_cuda_module.", "jaxext/_launcher.")
    assert not [name for name in names if name.startswith(compiled) and not name.endswith(".pyi")]
