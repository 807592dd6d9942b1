"""Prints lines by folder, words of the docs, bytes of data, and sizes of the packages: `make size`."""

import collections
import os
import pathlib
import subprocess
import sys
import tempfile

FOLDERS = ("jaxext", "kernels", "csrc", "ptxsim", "tests", "benchmarks", "docs", "examples", "packaging")
DATA = {".json", ".jsonl", ".csv", ".npz"}
PICTURES = {".svg", ".png", ".ipynb"}


def print_counts() -> None:
    lines, words, data = collections.Counter(), 0, 0
    for name in subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines():
        path = pathlib.Path(name)
        if path.suffix in DATA:
            data += path.stat().st_size
        elif path.parts[0] in FOLDERS and path.suffix not in PICTURES:
            lines[path.parts[0]] += len(path.read_text().splitlines())
            words += len(path.read_text().split()) if path.parts[0] == "docs" and path.suffix == ".md" else 0
    for folder in FOLDERS:
        print(f"{folder:<12}{lines[folder]:>9,} lines")
    print(f"{'in all':<12}{lines.total():>9,} lines\n{'docs':<12}{words:>9,} words\n{'data':<12}{data:>9,} bytes")


def print_package_sizes(folder: pathlib.Path) -> None:
    sdist = "import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", sdist, str(folder)], check=True, stdout=subprocess.DEVNULL)
    wheel = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", "."]
    subprocess.run([sys.executable, "-m", *wheel], check=True, env=os.environ | {"JAXEXT_CUDA": "OFF"})
    for kind, path in (("sdist", *folder.glob("*.tar.gz")), ("wheel", *folder.glob("*.whl"))):
        print(f"{kind:<12}{path.stat().st_size:>9,} bytes")


if __name__ == "__main__":
    print_counts()
    with tempfile.TemporaryDirectory() as temporary:
        print_package_sizes(pathlib.Path(temporary))
