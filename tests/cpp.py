"""Libraries of C++ sources, compiled by g++ once for all processes of the tests, and again when a source changes."""

import concurrent.futures
import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence

import filelock
import pytest

CSRC = pathlib.Path(__file__).parent.parent / "csrc"
STAND_INS = pathlib.Path(__file__).parent / "csrc/cuda"  # headers in place of CUDA's
HEADERS = [*CSRC.glob("*/*.h"), *STAND_INS.parent.rglob("*.h")]
SANITIZED = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", f"-I{STAND_INS}"]


def shared_file(suffix: str, sources: Sequence[str], make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return a file of all processes, which `make(path)` writes once: a hash of the sources names it."""
    home = pathlib.Path(tempfile.gettempdir()) / f"jaxext-tests-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    file = home / f"{hashlib.sha256(''.join(sources).encode()).hexdigest()[:16]}.{suffix}"
    with filelock.FileLock(file.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=home) as folder:
        if not file.exists():
            make(pathlib.Path(folder) / file.name)
            os.replace(f"{folder}/{file.name}", file)
    return file


def shared_library(units: Sequence[pathlib.Path], flags: Sequence[str], headers: Iterable[pathlib.Path] = HEADERS) -> ctypes.CDLL:
    """Return the library of these units, which include these headers; the test is skipped where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not there")

    def make(made: pathlib.Path) -> None:
        objects = [made.parent / f"{i}.o" for i in range(len(units))]
        compile = lambda unit, to: subprocess.run(["g++", *flags, "-c", unit, "-o", to], check=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile, units, objects))
        subprocess.run(["g++", "-shared", *flags, *objects, "-o", made], check=True)

    return ctypes.CDLL(str(shared_file("so", [*flags, *(path.read_text() for path in [*units, *sorted(headers)])], make)))
