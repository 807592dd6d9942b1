"""The machine: a library of C++, which is compiled when it is first used, and again when a source or a flag changes."""

import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).parent
SOURCES = next(folder for folder in (HERE / "src", HERE.parent / "src") if folder.is_dir())  # in an installation, or in a checkout
CACHE = "~/.cache/ptxsim"


@functools.cache
def library() -> ctypes.CDLL:
    """Load the machine.

    `CXX` in the environment names the compiler (default: g++), `CXXFLAGS` adds flags, and `PTXSIM_CACHE` names the folder of libraries.
    """
    units, headers = sorted(SOURCES.glob("*.cc")), sorted(SOURCES.glob("*.h"))
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O2", "-fPIC", *os.environ.get("CXXFLAGS", "").split()]
    digest = hashlib.sha256("\n".join([compiler, *flags, *(path.read_text() for path in [*units, *headers])]).encode()).hexdigest()
    cache = pathlib.Path(os.environ.get("PTXSIM_CACHE", CACHE)).expanduser()
    path = cache / f"{digest[:16]}.so"
    if not path.exists():
        if shutil.which(compiler) is None:
            raise RuntimeError(f"ptxsim is C++ and needs a compiler for its first use: {compiler} is not found, and CXX may name another")
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():  # another process may have compiled it
                _compile([compiler, *flags], units, folder)
                os.replace(f"{folder}/library.so", path)
    loaded = ctypes.CDLL(str(path))
    loaded.PtxParse.restype = ctypes.c_void_p
    return loaded


def _compile(compiler: list[str], units: list[pathlib.Path], folder: str) -> None:
    objects = [f"{folder}/{unit.stem}.o" for unit in units]
    running = [subprocess.Popen([*compiler, "-c", unit, "-o", made]) for unit, made in zip(units, objects, strict=True)]
    if any([process.wait() for process in running]):
        raise RuntimeError(f"{' '.join(compiler)} does not compile {SOURCES}")
    subprocess.run([*compiler, "-shared", *objects, "-o", f"{folder}/library.so"], check=True)
