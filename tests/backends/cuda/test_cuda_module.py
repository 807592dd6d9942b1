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

from benchmarks import compiled_cuda
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.ffi_version import running_version
from jaxext.bench import cuda_names
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.launch import SHARED_MEMORY
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.matmul import cuda as cuda_matmul
from jaxext.ops.matmul import cuda_pieces
from jaxext.ops.scaled import cuda_weight_only

if reason := cuda_binding.missing():
    pytest.skip(f"no CUDA kernels: {reason}", allow_module_level=True)

from jaxext import _cuda_module  # noqa: E402

pytestmark = pytest.mark.cuda

FILE = pathlib.Path(_cuda_module.__file__)
TABLES = compiled_cuda.tables(_cuda_module)
ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_cuda_module", {str(FILE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.handlers(), module.schema(), [*map(module.kernels, module.families())]
print([line for line in open("/proc/self/maps") if "libcuda" in line])
"""


def said(*command):
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not there")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_it_loads_by_itself():
    """The module loads without jax and without a driver, even on a machine that has one."""
    assert said(sys.executable, "-c", ALONE) == "[]\n"


def test_it_is_small():
    assert FILE.stat().st_size < 42e6


def test_it_needs_only_the_system():
    """It needs no driver and no CUDA runtime, which is linked into it."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", said("readelf", "-d", str(FILE)))
    assert {name.partition(".so")[0] for name in needed} <= {
        *("libc", "libm", "libdl", "librt", "libpthread", "libgcc_s", "libstdc++", "ld-linux-x86-64")
    }


def test_it_exports_nothing_but_the_module():
    """Another library's symbols of the same names, of another CUDA or another C++, must not meet these."""
    assert {line.split()[-1] for line in said("nm", "-D", "--defined-only", str(FILE)).splitlines()} == {"PyInit__cuda_module"}


def test_rows_are_told_apart():
    """Two kernels differ in the fields by which a call names them."""
    rows = [cuda_names.identity(row) for row in TABLES]
    assert len(set(rows)) == len(rows) > 0
    kernels = {name for name, *_ in rows}
    assert kernels == {row["family"].replace("weight", "wide_weight") for row in TABLES if "role" not in row} | {
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
    assert _cuda_module.ffi_version() <= running_version()


def changed(problem, **values):
    """Problems in each of which a field has another value."""
    return [dataclasses.replace(problem, **{name: value}) for name, several in values.items() for value in several]


def conv_problems(channels):
    one = problem("fprop", (9, 8), (3, 2), G=64, C=channels, K=channels)
    problems = changed(one, **dict.fromkeys("BNGCK", (0, -7, 40, 3 << 30)), arch=(75, 80, 100))
    for name, now in cuda_conv.fields(one).items():
        if isinstance(now, tuple):
            problems += changed(one, **{name: [(*now[:i], value, *now[i + 1 :]) for i in range(3) for value in (0, -7, 33, 3 << 30)]})
    problems += [dataclasses.replace(one, name=f"conv{rank}d_{role}", role=role) for rank in range(5) for role in ROLES]
    return problems + changed(one, dtypes=[("bf16", *others) for others in (("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "i8"))])


def causal_problems():
    for role in ("forward", "backward"):
        one = a_problem(role, state=True, idx=True)
        yield from changed(one, **dict.fromkeys("BTCJ", (0, -7, 9, 40, 3 << 30)), arch=[75], dtypes=[("fp16", "i8", "fp16")])
        yield from changed(one, epilogue=[Epilogue(bias=bias) for bias in (None, "bf16", "i8")])


def weight_only_problems():
    one = a_weight_only_problem(N=160)
    yield from changed(one, **dict.fromkeys("BMKS", (0, -7, 3, 96, 3 << 30)), arch=[75], packed=[True], dtypes=[("fp16", "i8", "bf16")])
    yield from (dataclasses.replace(one, N=value, J=value) for value in (0, -7, 3, 96, 3 << 30))


def matmul_problems(**changes):
    """Yield products of operands that the table of fewer kernels has too."""
    yield dataclasses.replace(product(8, 8, 8), **changes)
    for role, sizes in itertools.product(("nn", "nt", "tn"), itertools.product((0, 8, 60, 2**29, 2**31), repeat=4)):
        yield dataclasses.replace(product(8, 8, 8, role=role), **dict(zip("BMNK", sizes, strict=True)), **changes)


# Problems of a family, and at least how many answers there are.
REFUSED = {
    cuda_conv: ([*conv_problems(8)], 21),
    cuda_depthwise: ([*conv_problems(1)], 21),
    cuda_causal: ([*causal_problems()], 10),
    cuda_weight_only: ([*weight_only_problems()], 10),
    cuda_matmul: ([*matmul_problems()], 10),
    cuda_pieces: ([*matmul_problems(dtypes=("fp32",) * 3, precision="bf16x6")], 10),
}


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.__name__.rpartition("cuda_")[2])
def test_refusals_are_those_of_the_sources(family):
    """Every number arrives where it belongs: each is changed in turn, and most are named in a reason."""
    problems, least = REFUSED[family]
    answers = [family.refused(problem) for problem in problems]
    assert answers == [host_code.refuses(problem, family) for problem in problems]
    assert len({*answers}) >= least


@pytest.mark.parametrize("beyond", [2**63, -(2**63) - 1, 10**30])
def test_numbers_beyond_64_bits_are_refused(beyond):
    for family in (cuda_depthwise, cuda_causal, cuda_weight_only):
        assert family.refused(dataclasses.replace(REFUSED[family][0][0], arch=90, B=beyond))
    for family, channels in ((cuda_conv, 8), (cuda_depthwise, 1)):
        one = problem("fprop", (9, 8), (3, 2), G=64, C=channels, K=channels)
        assert all(family.refused(wrong) for wrong in changed(one, N=[beyond], low=[(0, beyond, 0)]))


def test_what_is_asked_in_vain():
    asked: dict[str, Any] = cuda_matmul.fields(product(8, 8, 8)) | {"dtypes": ("bf16", "bf16", "bf16"), "arch": 90}
    assert _cuda_module.refuses("matmul_nn", **asked) is None
    with pytest.raises(ValueError, match="there is no target matmul_nm"):
        _cuda_module.refuses("matmul_nm", **asked)
    with pytest.raises(ValueError, match="there is no family nothing"):
        _cuda_module.kernels("nothing")
    with pytest.raises(TypeError):
        _cuda_module.refuses("matmul_nn", **dict[str, Any](asked, B=1.5))
    with pytest.raises(TypeError, match="matmul_nn is given a field that it has not"):
        _cuda_module.refuses("matmul_nn", **asked, P=1)
    with pytest.raises(TypeError, match="ragged_nn wants the field P"):
        _cuda_module.refuses("ragged_nn", **asked)
    with pytest.raises(ValueError, match="want three dtypes, or four"):
        _cuda_module.refuses("matmul_nn", **dict[str, Any](asked, dtypes=("bf16",)))
    conv: dict[str, Any] = cuda_conv.fields(problem("fprop", (9, 8), (3, 2))) | {"dtypes": ("bf16",) * 3, "arch": 90}
    with pytest.raises(ValueError, match="input wants three numbers"):
        _cuda_module.refuses("conv2d_fprop", **dict[str, Any](conv, input=(9, 8)))
