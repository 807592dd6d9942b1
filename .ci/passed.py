"""The inputs with which slow parts of CI passed: a line for each part in passed.txt.  CI leaves a part out while its line holds.

    python .ci/passed.py PART [--write]

Without --write the exit status says whether the line is that of the files and the compilers that are here.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PASSED = ROOT / ".ci/passed.txt"
# The CUDA kernels, what calls them, and what reads, simulates or runs their code.
CUDA = (
    "csrc/* CMakeLists.txt ptxsim/ptxsim/* jaxext/*cuda* tests/*cuda* tests/csrc/* tests/ptx/* tests/scaled* tests/simt*"
    " tests/call_frame.py tests/host_code.py"
)
# The code that `python -m jaxext verify` asks for, and what compares it with the record.
RECORD = "csrc/* kernels/* jaxext/*cuda* jaxext/*triton* jaxext/bench/* jaxext/verify/* jaxext/tables/* benchmarks/record.py"
PARTS = {"ptxsim": ("ptxsim/*", ("g++", "nvcc", "triton")), "cuda": (CUDA, ("g++", "nvcc")), "record": (RECORD, ("nvcc", "triton"))}


def line(part: str) -> str:
    """Return the part's name, a digest of its files, and the versions of its compilers."""
    names, compilers = PARTS[part]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    digest = hashlib.sha256()
    for name in sorted(name for name in listed if any(fnmatch.fnmatchcase(name, glob) for glob in names.split())):
        digest.update(f"{name}\0{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\0".encode())
    return " ".join([part, digest.hexdigest(), *(f"{compiler}-{version(compiler)}" for compiler in compilers)])


def version(compiler: str) -> str:
    if compiler == "triton":
        return importlib.metadata.version(compiler) if importlib.util.find_spec(compiler) else "none"
    if (path := shutil.which(compiler) or shutil.which(compiler, path="/usr/local/cuda/bin")) is None:
        return "none"
    return re.findall(r"\d+\.\d+\.\d+", subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout)[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Whether a part of CI passed with the files and compilers that are here.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--write", action="store_true", help="write that it did")
    options = parser.parse_args()
    lines = PASSED.read_text().splitlines() if PASSED.exists() else []
    if options.write:
        others = [other for other in lines if other.split()[0] != options.part]
        PASSED.write_text("".join(f"{each}\n" for each in sorted([*others, line(options.part)])))
    else:
        sys.exit(line(options.part) not in lines)
