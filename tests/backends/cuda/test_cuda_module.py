"""The compiled module as a file: what it needs, what it shows, how large it is, and that its tables are tables."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxext.backends.cuda import cuda_binding
from jaxext.benchmarks import compiled_cuda
from jaxext.kernels._launch import SHARED_MEMORY

if reason := cuda_binding.missing():
    pytest.skip(f"no CUDA kernels: {reason}", allow_module_level=True)

from jaxext import _cuda_module  # noqa: E402

FILE = pathlib.Path(_cuda_module.__file__)
TABLES = [*_cuda_module.matmul_kernels(), *_cuda_module.conv_kernels()]
ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_cuda_module", {str(FILE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.handlers(), module.matmul_kernels(), module.conv_kernels()
print([line for line in open("/proc/self/maps") if "libcuda" in line])
"""


def said(*command):
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not there")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_it_loads_by_itself():
    """Without jax, and without a driver, even where there is one."""
    assert said(sys.executable, "-c", ALONE) == "[]\n"


def test_it_is_small():
    assert FILE.stat().st_size < 40e6


def test_it_needs_only_the_system():
    """Neither the driver nor a CUDA runtime, which is linked into it."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", said("readelf", "-d", str(FILE)))
    assert {name.partition(".so")[0] for name in needed} <= {
        "libc",
        "libm",
        "libdl",
        "librt",
        "libpthread",
        "libgcc_s",
        "libstdc++",
        "ld-linux-x86-64",
    }


def test_it_exports_nothing_but_the_module():
    """Another library's symbols of the same names, of another CUDA or another C++, must not meet these."""
    assert {line.split()[-1] for line in said("nm", "-D", "--defined-only", str(FILE)).splitlines()} == {"PyInit__cuda_module"}


def test_rows_are_told_apart():
    """By what a call says of a kernel."""
    rows = [compiled_cuda.identity(row) for row in TABLES]
    assert len(set(rows)) == len(rows) > 0
    kernels = {name for name, *_ in rows}
    assert kernels == {f"matmul_{role}" for role in ("nn", "nt", "tn")} | {
        f"conv{rank}d_{role}" for rank in (1, 2, 3) for role in ("fprop", "dgrad", "wgrad")
    }


@pytest.mark.parametrize("row", TABLES, ids=lambda row: "-".join(map(str, row.values())))
def test_rows_make_sense(row):
    assert 0 < row["shared"] <= SHARED_MEMORY[90]
    assert row["stages"] >= 2, "nothing is loaded while it multiplies"
    assert row["tile_m"] % 64 == row["tile_n"] % 8 == 0, "wgmma's tiles"
    assert row["cluster_m"] in (1, 2, 4)


def test_facts_of_the_build():
    assert re.fullmatch(r"\d+(-real|-virtual)?(,\d+(-real|-virtual)?)*", _cuda_module.archs)
    assert re.match(r"\d+\.\d+", _cuda_module.cuda_version)
    assert _cuda_module.ffi_version() <= cuda_binding._ffi_version()
