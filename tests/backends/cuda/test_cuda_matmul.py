"""Matrix products on Hopper: the choice of a tile, a pure function, on a table of tiles as the compiled module tells it; and what csrc/
refuses with the same table (host_code.py), which needs g++.  No GPU."""

import dataclasses
import itertools
import random

import pytest
from host_code import refuses

from jaxext.backends.cuda import cuda_matmul
from jaxext.backends.cuda.cuda_matmul import MatmulConfig, candidates, clocks, pick
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.machine import machine
from jaxext.kernels.matmul.problem import MatmulProblem


def row(role, operands, result, tile_m, tile_n, tile_k, cluster_m, pingpong, fused=False):
    tile = dict(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, cluster_m=cluster_m, pingpong=pingpong)
    return dict(role=role, operands=operands, result=result, fused=fused, most_splits=32) | tile


TILES = [  # of 16-bit operands: the result's dtype, tile_m, tile_n, cluster_m, pingpong
    *(("bf16", 128, 256, 2, 0), ("bf16", 128, 192, 2, 1), ("bf16", 64, 64, 1, 1)),
    *(("fp32", 128, 256, 2, 0), ("fp32", 128, 192, 2, 1), ("fp32", 64, 128, 1, 1), ("fp32", 64, 256, 2, 1), ("fp32", 64, 64, 1, 1)),
]
TABLE = [  # that of tests/csrc/host_code.cc
    *(row(role, "bf16", result, m, n, 64, cluster, pingpong) for role in ("nn", "nt", "tn") for result, m, n, cluster, pingpong in TILES),
    row("nt", "fp8e4nv", "bf16", 128, 128, 128, 2, 0),
]


def product(m, n, k, *, B=1, role="nn", dtypes=("bf16", "bf16", "bf16"), arch=90) -> MatmulProblem:
    """Of this many rows, columns and contracted elements, in this role."""
    sizes = {"nn": dict(M=m, N=n, K=k), "nt": dict(M=m, K=n, N=k), "tn": dict(K=m, N=n, M=k)}[role]
    return MatmulProblem(name=f"matmul_{role}", role=role, B=B, **sizes, dtypes=dtypes, precision="tf32", arch=arch)


FUSED = [row("nn", "bf16", "bf16", 128, 256, 64, 2, 0, True), row("nn", "bf16", "bf16", 64, 128, 64, 1, 1, True)]


def test_an_epilogue_takes_tiles_that_fuse_it():
    """In one part: none can follow the parts of a sum."""
    with_bias = dataclasses.replace(product(64, 4096, 8192), epilogue=Epilogue(bias="bf16"))
    assert pick(product(64, 4096, 8192), [*TABLE, *FUSED]).splits > 1
    assert {config.splits for config in candidates(with_bias, [*TABLE, *FUSED])} == {1}
    assert len(candidates(with_bias, [*TABLE, *FUSED])) == len(FUSED)
    assert candidates(with_bias, TABLE) == []


@pytest.mark.parametrize("role", ["nn", "nt", "tn"])
def test_large_products_take_the_large_tile(role):
    for n in (4096, 8192):
        assert pick(product(n, n, n, role=role), TABLE) == MatmulConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)


def test_a_wave_that_a_wide_tile_leaves_empty_takes_the_narrow_one():
    """1536 x 3072: 6 x 12 pairs of wide tiles are 1.09 rounds of 132, of narrow ones 192 are 1.45, each shorter."""
    assert pick(product(1536, 3072, 4096), TABLE).tile_n == 192


def test_a_short_depth_takes_ping_pong():
    """Whose epilogue is hidden behind the other warp group's products."""
    assert pick(product(8192, 8192, 256), TABLE).pingpong == 1


def test_skinny_products_are_split():
    for m in (8, 16, 64):
        config = pick(product(m, 4096, 8192), TABLE)
        assert config.tile_m == 64 and config.splits > 1


def test_long_sums_of_a_small_result_are_split():
    assert pick(product(256, 256, 65536, role="tn"), TABLE).splits > 1


def test_batches_are_not_split():
    assert all(config.splits == 1 for config in candidates(product(64, 64, 8192, B=3), TABLE))


@pytest.mark.parametrize("depth", [512, 1000, 4096 + 8, 12288])
def test_parts_are_equal_aligned_and_not_short(depth):
    for config in candidates(product(64, 512, depth), TABLE):
        assert depth % config.splits == 0
        assert config.splits == 1 or (depth // config.splits) % 8 == 0 and depth // config.splits >= 4 * 64


def test_parts_are_float32():
    tiles = {(c.tile_m, c.tile_n) for c in candidates(product(64, 512, 8192), TABLE) if c.splits > 1}
    assert tiles == {(m, n) for result, m, n, *_ in TILES if result == "fp32"}


def test_float32_results_take_large_tiles_too():
    """Only 64 x 128 had them, of which the loads take as long as twice its products."""
    problem = product(4096, 4096, 4096, dtypes=("bf16", "bf16", "fp32"))
    config = pick(problem, TABLE)
    assert (config.tile_m, config.tile_n) == (128, 256)
    assert clocks(problem, config) < 1.05 * clocks(product(4096, 4096, 4096), config)


def test_a_weight_gradient_of_few_tiles_is_split_into_large_ones():
    config = pick(product(1024, 1024, 65536, role="tn", dtypes=("bf16", "bf16", "fp32")), TABLE)
    assert config.tile_m * config.tile_n >= 128 * 192 and config.splits > 1


def test_at_most_128_rows_share_their_columns():
    """Two blocks of 64 rows load each column once."""
    config = pick(product(128, 4096, 7168), TABLE)
    assert (config.tile_m, config.tile_n, config.cluster_m) == (64, 256, 2)


@pytest.mark.parametrize("result", ["bf16", "fp32"])
def test_small_products_take_the_small_tile(result):
    config = pick(product(32, 32, 32, B=4096, dtypes=("bf16", "bf16", result)), TABLE)
    assert (config.tile_m, config.tile_n) == (64, 64)


def test_time_grows_with_every_size():
    config = MatmulConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)
    sizes = (1024, 4096, 16384)
    for m, n in itertools.product(sizes, sizes):
        times = [clocks(product(m, n, k), config) for k in sizes]
        assert times == sorted(times)
    assert clocks(product(4096, 4096, 4096, B=4), config) > clocks(product(4096, 4096, 4096), config)


def test_the_model_of_a_large_product_is_near_the_machines_rate():
    """Not a measurement: the model must not promise more than the machine has, nor a fraction of it."""
    config = MatmulConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)
    least = 8192**3 / (2048 * 132)
    assert least < clocks(product(8192, 8192, 8192), config) < 1.5 * least


def test_the_right_factor_is_read_anew_for_each_64_rows(monkeypatch):
    """From shared memory, where nothing else is slow."""
    gpu = dataclasses.replace(machine(90), products=10**9, l2=10**9, memory=10**9, multiprocessors=1)
    monkeypatch.setattr(cuda_matmul, "machine", lambda arch, device: gpu)
    long = 10**7
    for m, n, moved in ((128, 128, 2 * 128 + 128 + 2 * 128), (64, 256, 2 * (64 + 256)), (128, 256, 128 + 256 + 128 + 2 * 256)):
        config = MatmulConfig(tile_m=m, tile_n=n, tile_k=64, cluster_m=1, pingpong=1)
        assert clocks(product(m, n, long), config) == pytest.approx(long * moved * 2 / 128, rel=1e-3)


REFUSALS = {
    "another GPU": (dict(arch=100), "compute capability is 10.0, the matmul kernels want 9.0"),
    "mixed dtypes": (
        dict(dtypes=("bf16", "fp16", "fp32")),
        "the operands are bf16 and fp16, want one dtype: convert one, or name no implementation",
    ),
    "a wide operand": (
        dict(dtypes=("bf16", "fp32", "fp32")),
        "the operands are bf16 and fp32, want one dtype: convert one, or name no implementation",
    ),
    "a gradient of a float32 result": (
        dict(role="nt", dtypes=("bf16", "fp32", "bf16")),
        "the operands are bf16 and fp32, want one dtype: name no implementation for gradients of fp32 results",
    ),
    "an operand's dtype": (dict(dtypes=("fp32", "fp32", "fp32")), "the operands are fp32, nn takes bf16"),
    "a result's dtype": (dict(dtypes=("bf16", "bf16", "fp16")), "the result is fp16, nn of bf16 gives bf16, fp32"),
    "8-bit floats with the contracted axis first": (dict(dtypes=("fp8e4nv", "fp8e4nv", "bf16")), "the operands are fp8e4nv, nn takes bf16"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    changes, reason = REFUSALS[case]
    assert refuses(product(64, 64, 64, **changes)) == reason


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((64, 64, 60), "a row of the left operand has 120 bytes, TMA wants a multiple of 16: pad K to 64"),
        ((64, 60, 64), "a row of the right operand has 120 bytes, TMA wants a multiple of 16: pad N to 64"),
        ((2**29, 256, 8), "B=1 M=536870912 N=256 K=8 make 2^31 tiles or more, want fewer"),
        ((2**20, 2**18, 64), "an array of B=1 M=1048576 N=262144 K=64 has 2^38 elements or more, want fewer"),
        ((2**31, 64, 64), "an axis has 2147483648 elements, want 2147418112 at most"),
        ((-64, 64, 64), "an axis has -64 elements, want 0 or more"),
    ],
)
def test_refused_sizes(sizes, reason):
    assert refuses(product(*sizes)) == reason


# Of each limit: the last problem within and the first beyond it.
LIMITS = {
    "bytes of the left operand's rows": (product(64, 64, 72), product(64, 64, 76)),
    "bytes of the right operand's rows": (product(64, 72, 64, role="nn"), product(64, 76, 64, role="nn")),
    "bytes of rows whose contracted axis is first": (product(72, 64, 60, role="tn"), product(76, 64, 60, role="tn")),
    "bytes of the result's rows": (product(64, 72, 64, role="nt"), product(64, 76, 64, role="nt")),
    "bytes of a float32 result's rows": (
        product(64, 68, 64, role="nt", dtypes=("bf16", "bf16", "fp32")),
        product(64, 66, 64, role="nt", dtypes=("bf16", "bf16", "fp32")),
    ),
    "elements of the result": (product(2**20 - 1, 2**18, 8), product(2**20, 2**18, 8)),
    "elements of the left operand, with all batches": (product(2**17 - 1, 8, 2**17, B=16), product(2**17, 8, 2**17, B=16)),
    "elements of the right operand": (product(8, 2**18, 2**20 - 8), product(8, 2**18, 2**20)),
    "tiles": (product(128 * (2**22 - 2**7 - 15), 256, 8), product(128 * (2**22 - 2**7 - 15) + 1, 256, 8)),
    "length": (product(8, 8, 2**31 - 2**16), product(8, 8, 2**31 - 2**16 + 8)),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_are_where_they_are(limit):
    within, beyond = LIMITS[limit]
    assert refuses(within) is None and refuses(beyond) is not None


def test_what_makes_too_many_tiles_has_no_candidate():
    """And all else has one: cuda_matmul.py and csrc/matmul/matmul.cc count alike."""
    rng, problems = random.Random(0), [*LIMITS["tiles"]]
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


def test_nothing_to_do_is_taken():
    assert refuses(product(64, 64, 0)) is None


def test_what_is_taken_has_a_pick():
    for role, m, n, k in itertools.product(("nn", "nt", "tn"), (8, 64, 1000), (8, 264), (8, 1024)):
        problem = product(m, n, k, role=role)
        assert refuses(problem) is None
        assert pick(problem, TABLE) in candidates(problem, TABLE)


def test_eight_bit_rows_are_sixteen_elements():
    problem = product(64, 64, 24, role="nt", dtypes=("fp8e4nv", "fp8e4nv", "bf16"))
    assert refuses(problem) == "a row of the left operand has 24 bytes, TMA wants a multiple of 16: pad N to 32"
    assert refuses(dataclasses.replace(problem, N=32)) is None
