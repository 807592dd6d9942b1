"""The sources and the compilers with which ptxsim's own tests passed: one line in passed.txt, which `make ptxsim` writes.

    python passed.py [--write]

Without --write the exit status says whether the line is that of the sources and compilers that are here.
"""

import hashlib
import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
PASSED = HERE / "passed.txt"
SOURCES = {".cc", ".cu", ".h", ".md", ".py", ".toml", ".txt"}


def digest_line() -> str:
    """Return a digest of all sources, and the versions of the compilers whose code the tests run."""
    paths = [path for path in sorted(HERE.parent.rglob("*")) if path.suffix in SOURCES and path != PASSED]
    digest = hashlib.sha256(b"".join(path.relative_to(HERE.parent).as_posix().encode() + path.read_bytes() for path in paths)).hexdigest()
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    return f"{digest} g++ {version('g++')}, nvcc {version('nvcc')}, triton {triton}\n"


def version(compiler: str) -> str:
    if shutil.which(compiler) is None:
        return "none"
    printed = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\d+\.\d+\.\d+", printed)[-1]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PASSED.write_text(digest_line())
    else:
        sys.exit(not PASSED.exists() or PASSED.read_text() != digest_line())
