"""The compiled module as a file: what it needs, what it shows, how large it is, that its tables are tables, and that it refuses what its
sources refuse."""

import dataclasses
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import host_code
import pytest
from cuda_convs import ROLES, TABLE, problem
from simt_weight_only import a_problem as a_weight_only_problem
from test_causal_kernel import a_problem
from test_cuda_matmul import product

from jaxext.backends.cuda import cuda_binding, cuda_causal, cuda_conv, cuda_depthwise, cuda_matmul, cuda_pieces, cuda_weight_only
from jaxext.benchmarks import compiled_cuda, cuda_names
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.launch import SHARED_MEMORY

if reason := cuda_binding.missing():
    pytest.skip(f"no CUDA kernels: {reason}", allow_module_level=True)

from jaxext import _cuda_module  # noqa: E402

FILE = pathlib.Path(_cuda_module.__file__)
TABLES = compiled_cuda.tables(_cuda_module)
ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_cuda_module", {str(FILE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.handlers(), module.schema(), [*map(module.kernels, ("matmul", "pieces", "ragged", "scaled", "gram", "conv", "weight_only"))]
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
    assert FILE.stat().st_size < 42e6


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
    rows = [cuda_names.identity(row) for row in TABLES]
    assert len(set(rows)) == len(rows) > 0
    kernels = {name for name, *_ in rows}
    assert kernels == {"pieces", "scaled", "gram", "wide_weight_only"} | {
        f"{family}_{role}" for family in ("matmul", "ragged") for role in ("nn", "nt", "tn")
    } | {f"conv{rank}d_{role}" for rank in (1, 2, 3) for role in ROLES}


@pytest.mark.parametrize("row", TABLES, ids=lambda row: "-".join(map(str, row.values())))
def test_rows_make_sense(row):
    assert 0 < row["shared"] <= SHARED_MEMORY[90]
    assert row["stages"] >= 2, "nothing is loaded while it multiplies"
    assert row["tile_m"] % 64 == row["tile_n"] % 8 == 0, "wgmma's tiles"
    assert row.get("cluster", row.get("cluster_m", row.get("cluster_n", 1))) in (1, 2, 4)


def test_tiles_of_convolutions_are_those_compiled():
    """The table of the tests that need no module is this one."""
    compiled = [{name: row[name] for name in TABLE[0]} for row in cuda_binding.compiled("conv")]
    in_order = lambda table: sorted(table, key=lambda row: str([*row.values()]))
    assert in_order(compiled) == in_order(TABLE)


def test_parts_of_a_launch_are_those_compiled():
    parts = {(row["role"], row["parts"]) for row in _cuda_module.kernels("conv")}
    assert parts == {*cuda_conv.PARTS_OF_LAUNCH.items()}


def test_facts_of_the_build():
    assert re.fullmatch(r"\d+(-real|-virtual)?(,\d+(-real|-virtual)?)*", _cuda_module.archs)
    assert re.match(r"\d+\.\d+", _cuda_module.cuda_version)
    assert _cuda_module.ffi_version() <= cuda_binding._ffi_version()


@pytest.mark.parametrize("family", [cuda_conv, cuda_depthwise], ids=lambda family: family.__name__.rpartition("_")[2])
def test_refusals_of_convolutions_are_those_of_the_sources(family):
    """Every number arrives where it belongs: each is changed in turn, and most are named in a reason."""
    case = problem("fprop", (9, 8), (3, 2), G=64, C=8 if family is cuda_conv else 1, K=8 if family is cuda_conv else 1)
    cases = [dataclasses.replace(case, **{name: value}) for name in ("B", "N", "G", "C", "K") for value in (0, -7, 40, 3 << 30)]
    cases += [
        dataclasses.replace(case, **{name: (*now[:axis], value, *now[axis + 1 :])})
        for name, now in cuda_conv.fields(case).items()
        if isinstance(now, tuple)
        for axis in range(3)
        for value in (0, -7, 33, 3 << 30)
    ]
    cases += [dataclasses.replace(case, name=f"conv{rank}d_{role}", role=role) for rank in range(5) for role in ROLES]
    cases += [dataclasses.replace(case, arch=arch) for arch in (75, 80, 100)]
    cases += [dataclasses.replace(case, dtypes=("bf16", *others)) for others in (("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "i8"))]
    answers = [(family.refused(case), host_code.refuses(case, family)) for case in cases]
    assert [answer for answer, _ in answers] == [answer for _, answer in answers]
    assert len({answer for answer, _ in answers}) > 20


def test_refusals_of_causal_convolutions_are_those_of_the_sources():
    """Every number arrives where it belongs."""
    for role in ("forward", "backward"):
        case = a_problem(role, state=True, idx=True)
        cases = [dataclasses.replace(case, **{name: value}) for name in "BTCJ" for value in (0, -7, 9, 40, 3 << 30)]
        cases += [dataclasses.replace(case, arch=75), dataclasses.replace(case, dtypes=("fp16", "i8", "fp16"))]
        cases += [dataclasses.replace(case, epilogue=Epilogue(bias=bias)) for bias in (None, "bf16", "i8")]
        answers = [(cuda_causal.refused(case), host_code.refuses(case, cuda_causal)) for case in cases]
        assert [answer for answer, _ in answers] == [answer for _, answer in answers]
        assert len({answer for answer, _ in answers}) >= 9
    assert cuda_causal.refused(dataclasses.replace(case, T=10**30))


def test_refusals_of_weight_only_products_are_those_of_the_sources():
    """Every number arrives where it belongs."""
    case = a_weight_only_problem(N=160)
    cases = [dataclasses.replace(case, **{name: value}) for name in "BMKS" for value in (0, -7, 3, 96, 3 << 30)]
    cases += [dataclasses.replace(case, N=value, J=value) for value in (0, -7, 3, 96, 3 << 30)]
    cases += [
        dataclasses.replace(case, arch=75),
        dataclasses.replace(case, packed=True),
        dataclasses.replace(case, dtypes=("fp16", "i8", "bf16")),
    ]
    answers = [(cuda_weight_only.refused(case), host_code.refuses(case, cuda_weight_only)) for case in cases]
    assert [answer for answer, _ in answers] == [answer for _, answer in answers]
    assert len({answer for answer, _ in answers}) >= 10
    assert cuda_weight_only.refused(dataclasses.replace(case, N=10**30, J=10**30))


def test_refusals_of_products_are_those_of_the_sources():
    """With a table of fewer kernels: of operands that it has too."""
    for role in ("nn", "nt", "tn"):
        for sizes in itertools.product((0, 8, 60, 2**29, 2**31), repeat=4):
            case = dataclasses.replace(product(8, 8, 8, role=role), **dict(zip("BMNK", sizes, strict=True)))
            assert cuda_matmul.refused(case) == host_code.refuses(case)
            case = dataclasses.replace(case, dtypes=("fp32",) * 3, precision="bf16x6")
            assert cuda_pieces.refused(case) == host_code.refuses(case, cuda_pieces)


@pytest.mark.parametrize("beyond", [2**63, -(2**63) - 1, 10**30])
def test_numbers_beyond_64_bits_are_refused(beyond):
    case = problem("fprop", (9, 8), (3, 2))
    assert cuda_conv.refused(dataclasses.replace(case, N=beyond))
    assert cuda_conv.refused(dataclasses.replace(case, low=(0, beyond, 0)))
    assert cuda_depthwise.refused(dataclasses.replace(case, C=1, K=1, low=(0, beyond, 0)))


def test_what_is_asked_in_vain():
    asked: dict[str, Any] = cuda_matmul.fields(product(8, 8, 8)) | {"dtypes": ("bf16", "bf16", "bf16"), "arch": 90}
    assert _cuda_module.refuses("matmul_nn", **asked) is None
    with pytest.raises(ValueError, match="there is no target matmul_nm"):
        _cuda_module.refuses("matmul_nm", **asked)
    with pytest.raises(ValueError, match="there is no family nothing"):
        _cuda_module.kernels("nothing")
    with pytest.raises(TypeError):
        _cuda_module.refuses("matmul_nn", **dict[str, Any](asked, B=1.5))
    with pytest.raises(TypeError, match="gram is given a field that it has not"):
        _cuda_module.refuses("gram", **asked)
    with pytest.raises(TypeError, match="ragged_nn wants the field P"):
        _cuda_module.refuses("ragged_nn", **asked)
    with pytest.raises(ValueError, match="want three dtypes, or four"):
        _cuda_module.refuses("matmul_nn", **dict[str, Any](asked, dtypes=("bf16",)))
    conv: dict[str, Any] = cuda_conv.fields(problem("fprop", (9, 8), (3, 2))) | {"dtypes": ("bf16",) * 3, "arch": 90}
    with pytest.raises(ValueError, match="input wants three numbers"):
        _cuda_module.refuses("conv2d_fprop", **dict[str, Any](conv, input=(9, 8)))
