"""Matrix products on Hopper before any launch: a family of test_cuda_families.py, and the model by which a tile is chosen."""

import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest
from host_code import gemm, refuses

from jaxext.backends.cuda import cuda_tiles
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.machine import LAUNCH, machine
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.ops.matmul import cuda as cuda_matmul
from jaxext.ops.matmul.cuda import GemmConfig, candidates, clocks


def row(role, operands, result, tile_m, tile_n, tile_k, cluster_m, pingpong, fused=False):
    tile = dict(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, cluster_m=cluster_m, pingpong=pingpong)
    return dict(role=role, operands=operands, result=result, fused=fused, most_splits=32) | tile


TILES = [  # of 16-bit operands: the result's dtype, tile_m, tile_n, cluster_m, pingpong
    *(("bf16", 128, 256, 2, 0), ("bf16", 128, 192, 2, 1), ("bf16", 64, 64, 1, 1)),
    *(("fp32", 128, 256, 2, 0), ("fp32", 128, 192, 2, 1), ("fp32", 64, 256, 2, 1), ("fp32", 64, 64, 1, 1)),
]
FUSED = [row("nn", "bf16", "bf16", 128, 256, 64, 2, 0, True), row("nn", "bf16", "bf16", 64, 128, 64, 1, 1, True)]
TABLE = [  # that of tests/csrc/host_code.cc, but for tiles that fuse an epilogue
    *(row(role, "bf16", result, m, n, 64, cluster, pingpong) for role in ("nn", "nt", "tn") for result, m, n, cluster, pingpong in TILES),
    row("nt", "fp8e4nv", "bf16", 128, 128, 128, 2, 0),
    row("nt", "fp32", "fp32", 128, 256, 32, 2, 0),
    *FUSED,
    row("nt", "fp32", "fp32", 128, 192, 32, 2, 0, True),
]


def product(m, n, k, *, B=1, role="nn", dtypes=("bf16", "bf16", "bf16"), precision="tf32", arch=90) -> MatmulProblem:
    """Return a problem with this many rows, columns and contracted elements, in this role."""
    sizes = {"nn": dict(M=m, N=n, K=k), "nt": dict(M=m, K=n, N=k), "tn": dict(K=m, N=n, M=k)}[role]
    return MatmulProblem(name=f"matmul_{role}", role=role, B=B, **sizes, dtypes=dtypes, precision=precision, arch=arch)


FAMILY, SMALL, SIZES = cuda_matmul, product(64, 64, 64), "BMNK"
FLOAT32, TF32_OR_PIECES = ("fp32",) * 3, "float32 is multiplied as TF32 or in pieces alone, want precision DEFAULT, HIGH, TF32_TF32_F32, "
EIGHT_BITS, WITH_FLOAT32, SEVERAL = ("fp8e4nv", "fp8e4nv", "bf16"), ("bf16", "bf16", "fp32"), range(2, 33)
ONE_DTYPE = "want one dtype: convert one, or name no implementation"
REFUSED = {
    "mixed dtypes": (product(64, 64, 64, dtypes=("bf16", "fp16", "fp32")), f"the operands are bf16 and fp16, {ONE_DTYPE}"),
    "a wide operand": (product(64, 64, 64, dtypes=("bf16", "fp32", "fp32")), f"the operands are bf16 and fp32, {ONE_DTYPE}"),
    "a gradient of a float32 result": (
        product(64, 64, 64, role="nt", dtypes=("bf16", "fp32", "bf16")),
        "the operands are bf16 and fp32, want one dtype: name no implementation for gradients of fp32 results",
    ),
    "an operand's dtype": (product(64, 64, 64, dtypes=("i8", "i8", "i32")), "the operands are i8, nn takes bf16*"),
    **{  # HIGHEST too: numbers below 2**-110 have no last piece, and what operands hold is not known when a kernel is chosen
        precision: (product(64, 64, 64, dtypes=FLOAT32, precision=precision), f"{TF32_OR_PIECES}BF16_BF16_F32_X3 or BF16_BF16_F32_X6")
        for precision in ("tf32x3", "ieee")
    },
    "pieces with an epilogue": (
        dataclasses.replace(product(64, 64, 64, dtypes=FLOAT32, precision="bf16x6"), epilogue=Epilogue()),
        "with an epilogue float32 is multiplied as TF32 alone, want precision DEFAULT, HIGH or TF32_TF32_F32",
    ),
    "a result of fewer bits": (product(64, 64, 64, dtypes=("fp32", "fp32", "bf16")), "the result is bf16, nn of fp32 gives fp32"),
    **{  # the contracted axis is the last of both
        f"rows of float32, {role}": (
            product(63, 64, 62, role=role, dtypes=FLOAT32),
            f"a row of each operand has 248 bytes, TMA wants a multiple of 16: pad {axis} to 64",
        )
        for role, axis in (("nn", "K"), ("nt", "N"))
    },
    "rows of a float32 result": (
        product(64, 62, 64, role="nt", dtypes=FLOAT32),
        "a row of the result has 248 bytes, TMA wants a multiple of 16: pad K to 64",
    ),
    "a result's dtype": (product(64, 64, 64, dtypes=("bf16", "bf16", "fp16")), "the result is fp16, nn of bf16 gives bf16, fp32"),
    "8-bit floats with the contracted axis first": (product(64, 64, 64, dtypes=EIGHT_BITS), "the operands are fp8e4nv, nn takes bf16*"),
    "rows of 8-bit floats": (
        product(64, 64, 24, role="nt", dtypes=EIGHT_BITS),
        "a row of the left operand has 24 bytes, TMA wants a multiple of 16: pad N to 32",
    ),
    "left rows": (product(64, 64, 60), "a row of the left operand has 120 bytes, TMA wants a multiple of 16: pad K to 64"),
    "right rows": (product(64, 60, 64), "a row of the right operand has 120 bytes, TMA wants a multiple of 16: pad N to 64"),
    "tiles": (product(2**29, 256, 8), "B=1 M=536870912 N=256 K=8 make 2^31 tiles or more, want fewer"),
    "elements": (product(2**20, 2**18, 64), "an array of B=1 M=1048576 N=262144 K=64 has 2^38 elements or more, want fewer"),
}
LIMITS = {  # the last number within, and the problem of a number
    "bytes of the left operand's rows": (18, lambda n: product(64, 64, 4 * n)),
    "bytes of the right operand's rows": (18, lambda n: product(64, 4 * n, 64, role="nn")),
    "bytes of rows whose contracted axis is first": (18, lambda n: product(4 * n, 64, 60, role="tn")),
    "bytes of the result's rows": (18, lambda n: product(64, 4 * n, 64, role="nt")),
    "bytes of a float32 result's rows": (34, lambda n: product(64, 2 * n, 64, role="nt", dtypes=WITH_FLOAT32)),
    "elements of the result": (2**20 - 1, lambda n: product(n, 2**18, 8)),
    "elements of the left operand, with all batches": (2**17 - 1, lambda n: product(n, 8, 2**17, B=16)),
    "elements of the right operand": (2**17 - 1, lambda n: product(8, 2**18, 8 * n)),
    "tiles": (128 * (2**22 - 2**7 - 15), lambda n: product(n, 256, 8)),
    "length": (2**28 - 2**13, lambda n: product(8, 8, 8 * n)),
}
TAKEN = [product(64, 64, 0), product(64, 64, 32, role="nt", dtypes=EIGHT_BITS)]
TAKEN += [product(63, 68, k, role=role, dtypes=FLOAT32) for role, k in (("nn", 36), ("nt", 36), ("tn", 36), ("tn", 37))]
TAKEN += [product(m, n, k, role=role) for role, m, n, k in itertools.product(("nn", "nt", "tn"), (8, 64, 1000), (8, 264), (8, 1024))]
LARGE, SKINNY = dict(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0, splits=1), dict(tile_m=64, splits=SEVERAL)
PICKS = {
    # 6 x 12 pairs of wide tiles are 1.09 rounds of 132, of narrow ones 192 are 1.45, each shorter.
    "a wave that a wide tile leaves empty": (product(1536, 3072, 4096), dict(tile_n=192)),
    # The epilogue is hidden behind the other warp group's products.
    "a short depth": (product(8192, 8192, 256), dict(pingpong=1)),
    "a long sum": (product(256, 256, 65536, role="tn"), dict(splits=SEVERAL)),
    "a weight gradient of few tiles": (
        product(1024, 1024, 65536, role="tn", dtypes=WITH_FLOAT32),
        dict(tile_m=128, tile_n=range(192, 257), splits=SEVERAL),
    ),
    # Two blocks of 64 rows load each column once.
    "at most 128 rows": (product(128, 4096, 7168), dict(tile_m=64, tile_n=256, cluster_m=2)),
    **{f"{m} rows": (product(m, 4096, 8192), SKINNY) for m in (8, 16, 64)},
    **{f"{n}, {role}": (product(n, n, n, role=role), LARGE) for n in (4096, 8192) for role in ("nn", "nt", "tn")},
    **{f"float32, {role}": (product(4096, 4096, 4096, role=role, dtypes=FLOAT32), LARGE | dict(tile_k=32)) for role in ("nn", "nt", "tn")},
    "small": (product(32, 32, 32, B=4096), dict(tile_m=64, tile_n=64)),
    "small, in float32": (product(32, 32, 32, B=4096, dtypes=WITH_FLOAT32), dict(tile_m=64, tile_n=64)),
}
PARTS, deep = {512: 2, 1000: 1, 4096 + 8: 1, 8192: 32, 12288: 32}, functools.partial(product, 64, 512)


def test_an_epilogue_takes_tiles_that_fuse_it():
    """The sum has one part: no epilogue can follow the parts of a sum."""
    with_bias = dataclasses.replace(product(64, 4096, 8192), epilogue=Epilogue(bias="bf16"))
    assert candidates(product(64, 4096, 8192), TABLE)[0].splits > 1
    assert [config.splits for config in candidates(with_bias, TABLE)] == [1] * len(FUSED)
    assert candidates(with_bias, [row for row in TABLE if row not in FUSED]) == []


def test_what_is_transposed_before_counts():
    """Nothing in nt, the right factor in nn, both in tn: each is read and written."""
    gpu, config = machine(90), candidates(product(512, 512, 512, dtypes=FLOAT32), TABLE)[0]
    nt, nn, tn = (clocks(product(512, 768, 256, role=role, dtypes=FLOAT32), config) for role in ("nt", "nn", "tn"))
    assert nn - nt == pytest.approx(gpu.moving(8 * 768 * 256) + LAUNCH)
    assert tn - nn == pytest.approx(gpu.moving(8 * 512 * 256) + LAUNCH)
    assert clocks(product(512, 768, 256), config) == cuda_tiles.clocks(product(512, 768, 256), config)


def test_parts_are_float32():
    tiles = {(c.tile_m, c.tile_n) for c in candidates(product(64, 512, 8192), TABLE) if c.splits > 1}
    assert tiles == {(m, n) for result, m, n, *_ in TILES if result == "fp32"}


def test_float32_results_take_large_tiles_too():
    """Only 64 x 128 had them, of which the loads take as long as twice its products."""
    problem = product(4096, 4096, 4096, dtypes=("bf16", "bf16", "fp32"))
    config = candidates(problem, TABLE)[0]
    assert (config.tile_m, config.tile_n) == (128, 256)
    assert clocks(problem, config) < 1.05 * clocks(product(4096, 4096, 4096), config)


def test_time_grows_with_every_size():
    config = GemmConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)
    sizes = (1024, 4096, 16384)
    for m, n in itertools.product(sizes, sizes):
        times = [clocks(product(m, n, k), config) for k in sizes]
        assert times == sorted(times)
    assert clocks(product(4096, 4096, 4096, B=4), config) > clocks(product(4096, 4096, 4096), config)


def test_the_model_of_a_large_product_is_near_the_machines_rate():
    """The bounds are no measurement: the model must not promise more than the machine has, nor a fraction of it."""
    config = GemmConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)
    least = 8192**3 / (2048 * 132)
    assert least < clocks(product(8192, 8192, 8192), config) < 1.5 * least


def test_the_right_factor_is_read_anew_for_each_64_rows(monkeypatch):
    """Shared memory is the bound here, since nothing else is slow."""
    gpu = dataclasses.replace(machine(90), products=10**9, l2=10**9, memory=10**9, multiprocessors=1)
    monkeypatch.setattr(cuda_tiles, "machine", lambda arch, device: gpu)
    long = 10**7
    for m, n, moved in ((128, 128, 2 * 128 + 128 + 2 * 128), (64, 256, 2 * (64 + 256)), (128, 256, 128 + 256 + 128 + 2 * 256)):
        config = GemmConfig(tile_m=m, tile_n=n, tile_k=64, cluster_m=1, pingpong=1)
        assert clocks(product(m, n, long), config) == pytest.approx(long * moved * 2 / 128, rel=1e-3)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_where_they_are(name):
    last, of = LIMITS[name]
    assert refuses(of(last)) is None and refuses(of(last + 1)) is not None


def test_what_makes_too_many_tiles_has_no_candidate():
    """All other products have one: cuda_matmul.py and csrc/matmul/matmul.cc count alike."""
    rng, problems = random.Random(0), [LIMITS["tiles"][1](LIMITS["tiles"][0] + beyond) for beyond in (0, 1)]
    for _ in range(4000):
        rows = int(2 ** rng.uniform(20, 31))
        cols = 16 * int(2 ** rng.uniform(0, 27) / (rows >> 20))
        role, result = rng.choice(("nn", "nt", "tn")), rng.choice(("bf16", "fp32"))
        problems += [product(rows // 16 * 16, cols, 8, B=rng.choice((1, 1, 3)), role=role, dtypes=("bf16", "bf16", result))] if cols else []
    seen = {True: 0, False: 0}
    for problem in problems:
        reason = refuses(problem)
        if reason and "tiles" not in reason:
            continue
        assert any(config.splits == 1 for config in candidates(problem, TABLE)) == (reason is None), problem
        seen[reason is None] += 1
    assert min(seen.values()) > 100


@pytest.mark.parametrize("sizes, splits", [((1, 8, 12, 20), 1), ((3, 4, 6, 10), 1), ((1, 8, 12, 20), 2), ((1, 8, 12, 20), 4)])
@pytest.mark.parametrize("role", ["nn", "nt", "tn"])
def test_products_are_told_by_their_strides(role, sizes, splits):
    """Roles, batches and parts of a split sum, carried out as the kernels are told of them, are the definition."""
    rng, (B, M, N, K) = np.random.default_rng(0), sizes
    slots, equation = {"nn": ("abc", "bmk,bkn->bmn"), "nt": ("bca", "bkn,bmn->bmk"), "tn": ("acb", "bmk,bmn->bkn")}[role]
    shapes = dict(a=(B, M, K), b=(B, K, N), c=(B, M, N))
    operands = [rng.integers(-3, 4, shapes[slot]) for slot in slots[:2]]
    in_order, m, n, k, batch, a_leading, a_batch, b_leading, b_batch = gemm(role, sizes, splits)
    a, b = operands if in_order else operands[::-1]
    part, row, column, depth = np.ogrid[:batch, :m, :n, :k]
    at_a = part * a_batch + (row + depth * a_leading if role == "tn" else row * a_leading + depth)  # the majors of matmul_sm90.cuh
    at_b = part * b_batch + (column * b_leading + depth if role == "nt" else depth * b_leading + column)
    parts = (a.ravel()[at_a] * b.ravel()[at_b]).sum(-1).reshape(splits, *shapes[slots[2]])
    np.testing.assert_array_equal(parts.sum(0), np.einsum(equation, *operands))
