"""The files and compilers with which parts of CI passed: a line for each part in passed.txt.  CI leaves a part out while its line holds.

    python .ci/passed.py PART [--write]

Exit status 0 if the line matches the files and compilers here.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PASSED = ROOT / ".ci/passed.txt"
# The CUDA kernels, the plans of their calls, and the tests that read, simulate or run their code.  A star matches slashes too.
CUDA = (
    "csrc/* CMakeLists.txt ptxsim/ptxsim/* kernels/epilogue.py kernels/geometry.py kernels/launch.py kernels/machine.py"
    " kernels/*/problem.py jaxext/*cuda* jaxext/backends/* jaxext/bench/* jaxext/ops/*/problem.py benchmarks/*cuda* benchmarks/compiled.py"
    " tests/*cuda* tests/csrc/* tests/scaled* tests/simt* tests/ptx/conftest.py tests/ptx/defects.py tests/ptx/test_cutlass_products.py"
    " tests/ptx/test_pieces_accuracy.py tests/call_frame.py tests/cpp.py tests/host_code.py tests/lowered.py"
)
PARTS = {"cuda": (CUDA, ("g++", "nvcc")), "ptxsim": ("ptxsim/*", ("g++", "nvcc", "triton"))}


def line(part: str) -> str:
    """Return the part's name, a digest of its files, and the versions of its compilers."""
    patterns, compilers = PARTS[part]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    digest = hashlib.sha256()
    for name in sorted(name for name in listed if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())):
        if (ROOT / name).exists():
            digest.update(f"{name}\0{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\0".encode())
    return " ".join([part, digest.hexdigest(), *(f"{compiler}-{version(compiler)}" for compiler in compilers)])


def version(compiler: str) -> str:
    """Return the version of a compiler, or `none`; nvcc is looked for where .ci/run looks for it."""
    if compiler == "triton":
        return importlib.metadata.version(compiler) if importlib.util.find_spec(compiler) else "none"
    folders = [f"{os.environ.get(name, '/usr/local/cuda')}/bin" for name in ("CUDA_HOME", "CUDA_PATH")]
    asked = os.environ.get("CUDACXX") if compiler == "nvcc" else None
    path = shutil.which(asked or compiler) or shutil.which(compiler, path=os.pathsep.join(folders))
    if path is None:
        return "none"
    return re.findall(r"\d+\.\d+\.\d+", subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout)[-1]


def main(argv=None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Exit status 0 if a part of CI passed with the files and compilers here.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--write", action="store_true", help="record that the part passed")
    options = parser.parse_args(argv)
    lines = PASSED.read_text().splitlines() if PASSED.exists() else []
    here, others = line(options.part), [other for other in lines if other.split()[0] != options.part]
    if options.write:
        PASSED.write_text("".join(f"{each}\n" for each in sorted([*others, here])))
    elif here not in lines:
        print(f"{options.part}: .ci/passed.txt has other files or compilers; here: {here}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
