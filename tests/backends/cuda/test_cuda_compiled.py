"""Every CUDA kernel of the compiled module is well compiled: what `python -m benchmarks.kernel_table` prints, held against its laws.

The machine code itself is read, with the tools in Triton's wheel or those of a CUDA toolkit.  Needs the module; no GPU.
"""

import collections
import pathlib
import re

import pytest

from benchmarks import compiled_cuda, cuda_laws
from jaxext.backends.cuda import cuda_binding
from jaxext.bench import cuda_names, machine_code

pytestmark = pytest.mark.cuda

NEWER = 100  # PTX is assembled for it, if for no other: slow

MATMUL = {"arch": "90a", "source": "code", "function": "_Z1f", "kernel": "matmul_nn", "operands": "bfloat16", "result": "bfloat16"}
MATMUL |= {"config": "128x256x64", "tile_m": 128, "tile_n": 256, "tile_k": 64, "cluster_m": 2, "pingpong": 0, "stages": 4, "told": True}
MATMUL |= {"registers": 168, "stack": 0, "static": 1024, "shared": 214016, "local": 0, "barriers": 2, "spills": 0, "bytes": 20992}
MATMUL |= {"wgmma": 8, "tma": 5, "im2col": 0, "multicast": 4, "tma_stores": 8, "loads": {"4": 2}, "stores": {}}
CONV = MATMUL | {"kernel": "conv2d_fprop", "cluster": 2, "im2col": 1, "tma_stores": 0, "stores": {"16": 64, "4": 128}}
SCALED = MATMUL | {"kernel": "scaled", "second": "float8_e5m2", "tma_stores": 0, "loads": {"16": 4, "4": 12}, "stores": {"16": 16}}
OTHER = MATMUL | {"kernel": "of_a_new_family", "tma_stores": 0, "loads": {"16": 12}, "stores": {"16": 13}}
RAGGED = MATMUL | {"kernel": "ragged_nn", "cluster_m": 1, "cluster_n": 2, "tma_stores": 0, "stores": {"16": 16}}
PORTABLE = {"arch": "80", "cluster_m": 1, "vector": 8, "wgmma": 0, "tma": 0, "multicast": 0, "tma_stores": 0, "shared": 0, "told": False}
GATHER = MATMUL | PORTABLE | {"kernel": "depthwise_gather", "loads": {"16": 6, "2": 7}, "stores": {"16": 4}}
WGRAD = MATMUL | PORTABLE | {"kernel": "depthwise_wgrad", "loads": {"16": 14}, "stores": {"4": 3, "2": 3}}
MMA = MATMUL | PORTABLE | {"kernel": "depthwise_mma", "registers": 128, "rows": 7, "mma": 14}
MMA |= {"loads": {"16": 5, "2": 64}, "stores": {"16": 2}}
MMA_WGRAD = MMA | {"kernel": "depthwise_mma_wgrad", "mma": 98, "loads": {"16": 14, "8": 14, "2": 2}, "stores": {"4": 1, "2": 1}}
CAUSAL = MATMUL | PORTABLE | {"kernel": "causal_forward", "access": 16, "loads": {"16": 11, "4": 1, "2": 2}, "stores": {"16": 4}}
CAUSAL_BACK = CAUSAL | {"kernel": "causal_backward", "vector": 4, "access": 8, "loads": {"8": 20, "4": 9}, "stores": {"8": 4, "4": 5}}
WEIGHT_ONLY = MATMUL | PORTABLE | {"kernel": "weight_only", "mma": 32, "access": 16, "loads": {"16": 25}, "stores": {"16": 12}}
WIDE = MATMUL | {"kernel": "wide_weight_only", "bits": 4, "cluster_m": 1, "multicast": 0, "of_registers": 28, "tma_stores": 0}
WIDE |= {"wgmma": 28, "loads": {"8": 9}, "stores": {"16": 32, "8": 32}}
PIECES = MATMUL | {"kernel": "pieces", "pieces": 3, "cluster_m": 1, "multicast": 0, "tma_stores": 0, "wgmma": 12, "of_registers": 12}
PIECES |= {"operands": "float32", "stores": {"8": 32, "4": 64}}
GOOD = {
    "matmul": MATMUL,
    "conv": CONV,
    "ragged": RAGGED,
    "scaled": SCALED,
    "a new family": OTHER,
    "gather": GATHER,
    "wgrad": WGRAD,
    "depthwise on tensor cores": MMA,
    "depthwise wgrad on tensor cores": MMA_WGRAD,
    "causal": CAUSAL,
    "causal backward": CAUSAL_BACK,
    "weight-only": WEIGHT_ONLY,
    "wide weight-only": WIDE,
    "pieces": PIECES,
    "weight-only, narrow": WEIGHT_ONLY | {"access": 4, "loads": {"16": 6, "4": 32}},
    "many filters per channel": GATHER | {"many": True, "stores": {"16": 4, "8": 4, "2": 4}},
    "many filters per channel, wgrad": WGRAD | {"many": True, "loads": {"16": 8, "8": 7, "2": 7}},
    "one channel": GATHER | {"vector": 1, "loads": {"2": 9}, "stores": {"2": 8}},
}

# A law, and rows that break no other.
BROKEN = [
    ("spills", MATMUL | {"spills": 2}),
    ("has local memory", GATHER | {"local": 8}),
    ("has local memory", WGRAD | {"stack": 8}),
    ("more shared memory than a block gets", MATMUL | {"shared": (227 << 10) + 1}),
    ("more shared memory than a block gets", GATHER | {"shared": (163 << 10) + 1}),
    ("static shared memory misaligns the swizzled tiles", CONV | {"static": 2048}),
    ("not on the tensor cores", CONV | {"wgmma": 0}),
    ("not on the tensor cores", WEIGHT_ONLY | {"mma": 0}),
    ("not two products for each filter row", MMA | {"mma": 28}),
    ("not two products for each filter row", MMA_WGRAD | {"mma": 14}),
    ("fewer than two blocks on a multiprocessor", MMA | {"registers": 136}),
    ("narrow stores", MMA | {"stores": {"16": 2, "4": 8}}),
    ("left factors not multiplied from registers", WIDE | {"of_registers": 20}),
    ("left factors not multiplied from registers", PIECES | {"of_registers": 6}),
    ("not one instruction for each product of pieces", PIECES | {"pieces": 2}),
    ("narrow loads", WEIGHT_ONLY | {"loads": {"8": 50}}),
    ("narrow stores", WEIGHT_ONLY | {"stores": {"16": 8, "4": 16}}),
    ("operands not loaded by TMA", MATMUL | {"tma": 0}),
    ("pixels not gathered by TMA", CONV | {"im2col": 0}),
    ("nothing shared in a cluster", MATMUL | {"multicast": 0}),
    ("nothing shared in a cluster", RAGGED | {"multicast": 0}),
    ("results not stored by TMA", MATMUL | {"tma_stores": 0}),
    ("narrow loads", GATHER | {"loads": {"4": 24, "2": 7}}),
    ("narrow loads", WGRAD | {"loads": {"16": 13, "4": 4}}),
    ("narrow loads", WGRAD | {"many": True, "loads": {"8": 7, "2": 7}}),
    ("narrow stores", GATHER | {"many": True, "stores": {"8": 4, "2": 4}}),
    ("narrow loads", CAUSAL_BACK | {"loads": {"4": 49}}),
    ("narrow stores", CAUSAL | {"stores": {"16": 4, "4": 4}}),
    ("narrow stores", CAUSAL_BACK | {"stores": {"4": 8}}),
    ("narrow stores", GATHER | {"stores": {"16": 2, "4": 8}}),
    ("narrow stores", MATMUL | {"stores": {"4": 2}}),
    ("narrow stores", RAGGED | {"stores": {"4": 64}}),
    ("narrow stores", CONV | {"kernel": "conv2d_dgrad"}),
    ("narrow stores", SCALED | {"stores": {"16": 16, "4": 64}}),
    ("narrow stores", OTHER | {"stores": {"16": 13, "2": 64}}),
    ("nothing shared in a cluster", SCALED | {"multicast": 0}),
    ("named after nothing in csrc", GATHER | {"kernel": "unknown"}),
    ("not in the module's table", CONV | {"told": False}),
]


@pytest.mark.parametrize("name", GOOD)
def test_good_rows_break_no_law(name):
    assert cuda_laws.offences(GOOD[name]) == []
    assert "!!" not in compiled_cuda.line(GOOD[name])


@pytest.mark.parametrize("law, row", BROKEN)
def test_laws_bite(law, row):
    assert cuda_laws.offences(row) == [law]
    assert compiled_cuda.line(row).endswith(f"!! {law}")


def test_every_law_is_tested():
    assert {law for law, _ in BROKEN} == set(cuda_laws.LAWS)


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
                                                                 /* 0x000fe40000000f00 */
        /*0010*/              @!P1 LDG.E.128.CONSTANT R4, desc[UR8][R2.64] ;
        /*0020*/                   LDG.E.U16.CONSTANT R4, desc[UR8][R2.64] ;
        /*0030*/               @P0 STG.E.64 desc[UR8][R2.64], R4 ;
        /*0040*/                   STG.E desc[UR8][R2.64], R4 ;
        /*0050*/             @!UP0 UTMALDG.4D.IM2COL [UR8], [UR6], UR4 ;
        /*0060*/                   UTMALDG.3D.MULTICAST [UR8], [UR6], UR4 ;
        /*0070*/                   UTMASTG.3D [UR8], [UR6] ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*0088*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0090*/                   HMMA.16816.F32.BF16 R24, R4, R8, RZ ;
        /*00a0*/                   STL [R1], R4 ;
        /*00b0*/                   LDL.64 R4, [R1] ;
        /*00c0*/                   BRA 0xc0 ;
"""


def test_instructions_are_counted():
    assert compiled_cuda.count(SASS) == {
        **{"spills": 2, "wgmma": 2, "of_registers": 1, "mma": 1, "tma": 2, "im2col": 1, "multicast": 1, "tma_stores": 1},
        **{"loads": {"16": 1, "2": 1}, "stores": {"8": 1, "4": 1}, "bytes": 208},
    }


# What needs the module.


@pytest.fixture(scope="module")
def module():
    if reason := cuda_binding.missing():
        pytest.skip(f"no CUDA kernels: {reason}")
    try:
        machine_code.find("cuobjdump")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    from jaxext import _cuda_module

    return _cuda_module


@pytest.fixture(scope="module", params=["compiled", pytest.param("assembled", marks=pytest.mark.slow)])
def archs(module, request):
    """Return the architectures that the module has code for, and the newer one if the kernels are to be assembled for it."""
    newer = {NEWER} if request.param == "assembled" else set()
    return {90, *(int(number) for number in re.findall(r"\d+", module.archs))} | newer


@pytest.fixture(scope="module")
def rows(module, archs):
    return compiled_cuda.collect(pathlib.Path(module.__file__), module, archs)


def test_every_kernel_is_well_compiled(rows):
    assert [compiled_cuda.line(row) for row in rows if cuda_laws.offences(row)] == []


def test_every_kernel_of_the_tables_is_there_once(module, rows):
    tables = compiled_cuda.tables(module)
    assert collections.Counter(map(cuda_names.identity, tables)) == collections.Counter(
        cuda_names.identity(row) for row in rows if row["arch"] == "90a"
    )


def test_portable_kernels_are_there_for_every_architecture(module, archs, rows):
    """The same ones, by name: as code, and as PTX for GPUs to come."""
    kernels = collections.defaultdict(set)
    for row in rows:
        if row["kernel"].startswith(("depthwise", "causal", "weight_only")):
            kernels[row["arch"], row["source"]].add(row["function"])
    want = set()
    for arch in module.archs.split(","):
        number, _, kind = arch.partition("-")
        want |= {(number, "code")} if kind != "virtual" else set()
        want |= {(str(newer), "PTX") for newer in machine_code.NEWER if newer in archs and kind != "real"}
    assert set(kernels) == want
    assert len({frozenset(functions) for functions in kernels.values()}) == 1
    for kernel in ("depthwise_wgrad", "causal_forward", "causal_backward"):
        assert {row["operands"] for row in rows if row["kernel"] == kernel} == {"float32", "bfloat16", "float16"}
