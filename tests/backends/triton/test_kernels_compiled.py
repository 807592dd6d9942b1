"""Every Triton kernel is well compiled for every architecture: the kernels are those of which `make kernels` found none to break a law.

The tables in benchmarks/results have a hash of each.  A few kernels are compiled anew.  No GPU is needed.
"""

import dataclasses
import importlib
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

pytest.importorskip("triton", reason="no Triton here")

# ruff: noqa: E402
import triton

from benchmarks import alignment, compiled, device_code
from benchmarks.kernel_problems import COMPILED, KERNELS, PRODUCTS
from jaxext.bench import triton_ptx
from jaxext.bench.case import LAYOUTS
from jaxext.bench.kinds import Conv
from jaxext.kernels import checks, depthwise, matmul
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.launch import SHARED_MEMORY

ROOT = pathlib.Path(__file__).parents[3]
TABLES = sorted((ROOT / "benchmarks" / "results").glob("kernels_triton_*.json"))
MADE_ANEW = "kernels changed: `python -m benchmarks.kernel_table --check --digests FILE` makes the table anew, some ten minutes on 2 cores"
pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture(params=TABLES, ids=lambda path: path.stem)
def table(request, monkeypatch):
    """A table, and the kernels as they are with its Triton, some of which refuse more."""
    table = json.loads(request.param.read_text())
    monkeypatch.setattr(checks, "triton_version", lambda: tuple(map(int, table["version"].split("."))))
    return table


@pytest.mark.sampled(1)
def test_the_tables_are_of_the_kernels_that_are_here(table):
    """Each program of today has its row, and the facts about its launch are those of today."""
    assert table["device_code"] == device_code.digest(), MADE_ANEW
    assert [*table["rows"]] == [*map(asked, compiled.programs())], MADE_ANEW


def test_there_are_tables():
    assert len(TABLES) >= 2


def asked(program):
    launch = importlib.import_module(f"jaxext.kernels.{program.kernel}").launch(program.problem, program.config)
    return compiled.digests(compiled.described(program) | compiled.facts(program.problem, launch))[0]


@pytest.mark.parametrize(("kernel", "problem", "arch", "name"), [
    ("matmul", "4096 cubed,", 80, "matmul_nn"),
    ("scaled", "scaled 4096 cubed", 90, "scaled_dot_w_nn"),
])  # fmt: skip
def test_the_compiler_makes_of_a_kernel_what_the_table_says(kernel, problem, arch, name):
    programs = compiled.programs(kernel, problem, [arch])
    row = compiled.compile_row(next(program for program in programs if program.picked and program.problem.name == name))
    assert compiled.offences(row) == [], compiled.line(row)
    asked, made = compiled.digests(row)
    for path in TABLES:
        table = json.loads(path.read_text())
        if table["version"] == triton.__version__:
            assert table["rows"][asked] == made, compiled.line(row)


def test_the_digest_is_of_what_the_compiler_reads():
    source = 'LIMIT = 4\n@triton.jit\ndef f(x):\n    """Says."""\n    return x + LIMIT\n\ndef launch(n):\n    return n\n'
    alike = [source.replace("+ LIMIT", "+ (LIMIT)  # why"), source.replace("Says.", "Tells."), source.replace("return n", "return 2 * n")]
    others = [source.replace("x + L", "x - L"), source.replace("= 4", "= 5"), source.replace("(x):", "(x, y):")]
    of = lambda *sources: device_code.digest_of(sources)
    assert {*map(of, alike)} == {of(source)} and len({of(source), *map(of, others)}) == 4


@pytest.mark.sampled(12, "resnet50 3x3, 32x56x56x64", "scaled 4096 cubed")
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_the_pick_is_a_candidate_and_every_candidate_launches(case):
    module = importlib.import_module(f"jaxext.kernels.{case.kernel}")
    for role in case.products:
        for numbers in case.numbers:
            for arch in SHARED_MEMORY if "sweep" in case.tags else compiled.ARCHS:
                problem = case.problem(role, numbers, arch)
                if (reason := module.refuses(problem)) is not None:
                    assert numbers.startswith("fp8") and arch < 89 or "overwrites factors" in reason, reason
                    continue
                candidates = module.candidates(problem)
                assert module.candidates(problem)[0] in candidates
                assert len(set(candidates)) == len(candidates)
                tiles = [{**dataclasses.asdict(config), "splits": 1, "finds_visit": None, "chunk": None} for config in candidates]
                assert len({tuple(tile.items()) for tile in tiles}) <= 16
                for config in candidates:
                    launch = module.launch(problem, config)
                    assert launch.grid == module.grid(problem, config)
                    assert all(n <= limit for n, limit in zip(launch.grid, (2**31 - 1, 65535, 65535), strict=False))


@pytest.mark.parametrize("case", [case for case in PRODUCTS if isinstance(case, Conv)], ids=lambda case: case.name)
def test_a_convolution_of_the_table_is_one_of_lax(case):
    y = jax.eval_shape(
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (case.stride,) * case.rank,
            case.padding or "SAME",
            (case.input_dilation,) * case.rank,
            (case.dilation,) * case.rank,
            LAYOUTS[case.rank],
            case.groups,
        ),
        jax.ShapeDtypeStruct(case.x, jnp.bfloat16),
        jax.ShapeDtypeStruct(case.w, jnp.bfloat16),
    )
    assert y.shape == (case.x[0], *case.output, case.w[-1])
    if case.padding is None:
        assert list(case.pads) == lax.padtype_to_pads(
            case.x[1:-1], [(r - 1) * case.dilation + 1 for r in case.w[:-2]], (case.stride,) * case.rank, "SAME"
        )


def test_names_are_told_apart():
    assert len({case.name for case in COMPILED}) == len(COMPILED)


def test_every_kernel_is_in_the_tables():
    """Each folder of kernels/ has its kernels in the table; other files are part of them, or read by the host alone."""
    folder = pathlib.Path(matmul.__file__).parents[1]
    assert {path.parent.name for path in folder.glob("*/kernel.py")} == {*KERNELS}
    assert not any("@triton.jit" in path.read_text() for path in folder.rglob("*.py") if path.name in device_code.HOST)


PRODUCT = {"rows": 128, "columns": 256, "depth": 64, "dtype": "bf16", "precision": "tf32"}
GOOD = {
    "kernel": "matmul",
    "problem": "4096 cubed",
    "role": "nn",
    "numbers": "bf16",
    "arch": 90,
    "config": "Config()",
    "picked": True,
    "name": "matmul_nn",
    "function": "matmul_nn",
    "warps": 8,
    "stages": 3,
    "splits": 1,
    "shared": 147456,
    "tensor_memory": 0,
    "dtypes": ["bf16", "bf16", "bf16"],
    "aligned": True,
    "dots": [PRODUCT],
    "registers": 170,
    "local": 0,
    "spills": 0,
    "spills_in_loops": 0,
    "widest": [16, 16],
    "loads": {"16": 36},
    "stores": {"16": 8},
    "wgmma": 4,
    "tcgen05": 0,
    "mma": 0,
    "fma": 0,
}


def test_spills_are_found():
    """A tile of 128 x 256 over 4 warps is 256 sums per thread, which has 255 registers."""
    program = next(program for program in compiled.programs("matmul", "4096 cubed", [90]) if program.picked)
    config = dataclasses.replace(program.config, tile_m=128, tile_n=256, num_warps=4, num_stages=3)
    row = compiled.compile_row(dataclasses.replace(program, config=config))
    assert row["function"] == "matmul_nn" and row["registers"] == 255 and row["wgmma"] and set(row["loads"]) == {"16"}
    assert compiled.offences(row) == ["spills", "spills in a loop", "has local memory"]


ODD = ConvProblem(
    name="conv2d_fprop", role="fprop", B=2, N=3, G=33, C=1, K=1, input=(1, 9, 11), filter=(1, 3, 5), output=(1, 9, 11),
    low=(0, 1, 2), dtypes=("bf16",) * 3, precision="tf32", arch=90,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "widest"),
    [
        ({}, [2, 2]),
        (dict(role="dgrad", name="conv2d_dgrad", G=34, stride=(1, 1, 2), output=(1, 9, 6), dtypes=("bf16", "bf16", "fp32")), [4, 8]),
        (dict(role="wgrad", name="conv2d_wgrad", dtypes=("fp32", "bf16", "bf16")), [4, 4]),
    ],
    ids=["fprop", "even dgrad", "wgrad"],
)
def test_odd_rows_are_read_and_written_in_their_own_pieces(change, widest):
    """No hint, and nothing that Triton derives from constant strides, may promise more than the addresses of odd rows keep."""
    problem = dataclasses.replace(ODD, **change)
    row = compiled.compile_row(compiled.Program("depthwise", "odd", "", problem, depthwise.candidates(problem)[0], True))
    assert "error" not in row and row["widest"] == widest
    assert max(map(int, row["loads"])) == widest[0]
    assert compiled.offences(row) == []


EPILOGUES = {
    "bias": dict(activation="gelu", bias="bf16"),
    "all": dict(activation="gelu", bias="fp32", residual="bf16", saves=True),
    "gated": dict(activation="gelu", gated=True, saves=True),
}


def test_an_epilogue_is_well_compiled():
    """It holds the sums of a wide tile in the registers that the plain kernel has, and spills none."""
    program = next(compiled.programs("matmul", "4096 cubed,", [80]))
    problem = dataclasses.replace(program.problem, epilogue=Epilogue(**EPILOGUES["bias"]))
    row = compiled.compile_row(dataclasses.replace(program, problem=problem, config=matmul.candidates(problem)[0]))
    assert compiled.offences(row) == [], compiled.line(row)
    assert row["local"] == row["spills"] == 0
    assert row["function"] == program.problem.name


@pytest.mark.parametrize(("name", "columns", "stored"), [("bias", 33, 2), ("all", 33, 2), ("gated", 36, 8)])
def test_odd_rows_beside_an_epilogue(name, columns, stored):
    """The bias, the residual, both results, and the second half of a gated operand's columns have odd rows."""
    problem = matmul.Problem(
        name="matmul_nn", role="nn", B=2, M=40, N=columns, K=columns - 1, dtypes=("bf16",) * 3, precision="tf32", arch=80,
        epilogue=Epilogue(**EPILOGUES[name]),
    )  # fmt: skip
    launch = matmul.launch(problem, matmul.candidates(problem)[0])
    row = compiled.assembled(str(triton_ptx.compile_launch(launch, problem).asm["ptx"]))
    assert max(map(int, row["loads"])) <= alignment.widest(problem, launch)[0]
    assert max(map(int, row["stores"])) == alignment.widest(problem, launch)[1] == stored


@pytest.mark.parametrize(("packed", "stored"), [(True, 8), (False, 4)])
def test_taps_that_are_packed_are_one_row_of_the_filter(packed, stored):
    """Ten of one channel, in float32: stores of 8 bytes are right, and Triton 3.6 makes them."""
    config = types.SimpleNamespace(packed=packed, groups=1)
    kernel = types.SimpleNamespace(__name__="conv_wgrad")
    launch = types.SimpleNamespace(constants={"CONFIG": config}, operands=("y", "x"), kernel=kernel, splits=66, results=1)
    problem = dataclasses.replace(ODD, role="wgrad", G=1, K=512, filter=(1, 1, 10))
    assert alignment.widest(problem, launch) == [16, stored]


def test_a_hash_is_of_all_but_the_time():
    asked, made = compiled.digests(GOOD)
    assert compiled.digests(GOOD | {"seconds": 9.0}) == (asked, made)
    for name in GOOD:
        other = compiled.digests(GOOD | {name: "other"})
        assert other == (other[0], made) if name in compiled.ASKED else (asked, other[1])
        assert other != (asked, made)


def test_a_good_row_breaks_no_law():
    assert compiled.offences(GOOD) == []


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"error": "ValueError: no"}, "does not compile"),
        ({"spills": 17}, "spills"),
        ({"spills_in_loops": 1}, "spills in a loop"),
        ({"local": 17}, "has local memory"),
        ({"shared": (227 << 10) + 1}, "shared memory over the limit"),
        ({"arch": 80, "wgmma": 0, "mma": 64, "shared": (163 << 10) + 1}, "shared memory over the limit"),
        ({"tensor_memory": 513}, "tensor memory over the limit"),
        ({"function": "matmul"}, "not named after its primitive"),
        ({"wgmma": 0, "mma": 64}, "not on the tensor cores that it could use"),
        ({"arch": 100, "wgmma": 0, "mma": 64}, "not on the tensor cores that it could use"),
        ({"arch": 80, "wgmma": 0, "fma": 64}, "not on the tensor cores that it could use"),
        ({"dots": [PRODUCT | {"dtype": "f32"}], "wgmma": 0, "fma": 64}, "not on the tensor cores that it could use"),
        ({"dots": [PRODUCT | {"dtype": "i8"}], "arch": 100, "wgmma": 0}, "not on the tensor cores that it could use"),
        ({"dots": []}, "no products of tiles"),
        ({"loads": {"16": 30, "4": 6}}, "narrow loads"),
        ({"loads": {}}, "narrow loads"),
        ({"kernel": "depthwise", "dots": [], "loads": {"8": 6}}, "narrow loads"),
        ({"aligned": False, "widest": [8, 16]}, "misaligned accesses"),
        ({"widest": [16, 2], "stores": {"4": 8, "2": 8}}, "misaligned accesses"),
    ],
)
def test_a_law_bites(change, law):
    assert compiled.offences(GOOD | change) == [law]


@pytest.mark.parametrize(
    "change",
    [
        {"spills": 8, "local": 16},
        {"aligned": False, "loads": {"2": 36}},
        {"warps": 4, "dots": [PRODUCT | {"rows": 16, "columns": 64, "depth": 32}], "wgmma": 0, "mma": 8, "loads": {"16": 2, "8": 2}},
        {"kernel": "depthwise", "dots": [], "loads": {"16": 6, "2": 4}},
        {"dtypes": ["fp32"] * 3, "dots": [PRODUCT | {"columns": 128, "depth": 32, "dtype": "f32"}], "loads": {"16": 4, "4": 16}},
        {"dtypes": ["fp32"] * 3, "dots": [PRODUCT | {"dtype": "f32", "precision": "ieee"}], "wgmma": 0, "fma": 64},
        {"dtypes": ["i8"] * 2 + ["i32"], "dots": [PRODUCT | {"dtype": "i8"}], "arch": 100, "wgmma": 0, "mma": 64},
    ],
    ids=["resting", "unaligned", "small tiles", "filters of few taps", "turned tiles", "without tensor cores", "older tensor cores"],
)
def test_a_law_asks_for_no_more_than_can_be(change):
    assert compiled.offences(GOOD | change) == []
