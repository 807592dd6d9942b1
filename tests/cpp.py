"""Libraries of C++ sources, compiled by g++ once for all processes of the tests, and again when a source changes."""

import concurrent.futures
import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import filelock
import pytest

CSRC = pathlib.Path(__file__).parent.parent / "csrc"
STAND_INS = pathlib.Path(__file__).parent / "csrc/cuda"  # headers in place of CUDA's
HEADERS = [*CSRC.glob("*/*.h"), *STAND_INS.parent.rglob("*.h")]
SANITIZED = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", f"-I{STAND_INS}"]


def shared_library(units: Sequence[pathlib.Path], flags: Sequence[str]) -> ctypes.CDLL:
    """Return the library of these units, which may include HEADERS; the test is skipped where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not there")
    sources = [*flags, *(path.read_text() for path in [*units, *sorted(HEADERS)])]
    home = pathlib.Path(tempfile.gettempdir()) / f"jaxext-tests-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    library = home / f"{hashlib.sha256(''.join(sources).encode()).hexdigest()[:16]}.so"
    with filelock.FileLock(library.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=home) as folder:
        if not library.exists():
            objects = [f"{folder}/{i}.o" for i in range(len(units))]
            compile = lambda unit, to: subprocess.run(["g++", *flags, "-c", unit, "-o", to], check=True)
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile, units, objects))
            subprocess.run(["g++", "-shared", *flags, *objects, "-o", f"{folder}/{library.name}"], check=True)
            os.replace(f"{folder}/{library.name}", library)
    return ctypes.CDLL(str(library))
