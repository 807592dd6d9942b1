"""The launcher of the CUDA kernels of products with quantised weights on a CPU: which problems it takes, with which configs, and the
defects that their simulation finds."""

import dataclasses
import math

import host_code
import numpy as np
import pytest
import simt
from simt_weight_only import a_problem, check_parts, operands_of, run

from jaxext.backends.cuda import cuda_weight_only
from jaxext.backends.cuda.cuda_weight_only import TILES, WeightOnlyConfig

INVALID = 1  # jaxext::Status
CONFIG = WeightOnlyConfig(tile_m=8, tile_n=64)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return simt.build(tmp_path_factory, family="weight_only")


def refuses(problem):
    return host_code.refuses(dataclasses.replace(problem, J=problem.N), cuda_weight_only)  # a scale for each column


REFUSED = [
    ({"B": -1}, "B is -1, it takes 0 or more"),
    ({"N": 1 << 30}, "N is 1073741824, it takes fewer than 1073741824"),
    ({"K": 1 << 21}, "K is 2097152, it takes fewer than 2097152"),
    ({"dtypes": ("fp32", "i8", "fp32")}, "x is fp32, it takes bf16, fp16"),
    ({"dtypes": ("bf16", "i8", "fp16")}, "the result is fp16, it takes bf16, as x, and fp32"),
    ({"M": 65, "arch": 80}, "65 rows, it takes 64 at most, and more on compute capability 9.0"),
    ({"N": 80}, "N is 80, it takes multiples of 32"),
    ({"K": 48}, "K is 48, it takes multiples of 32"),
    ({"S": 8}, "8 scales along K of 128, it takes blocks of multiples of 32"),
    ({"S": 3}, "3 scales along K of 128, it takes blocks of multiples of 32"),
    ({"S": 0}, "0 scales along K of 128, it takes blocks of multiples of 32"),
    ({"B": 1 << 24, "N": 96}, "16777216 products with 96 columns, it takes fewer: a grid has 2147483647 blocks at most"),
]


@pytest.mark.parametrize("changes, reason", REFUSED)
def test_refusals(driver, tmp_path, changes, reason):
    """The launcher says the same as the module says before a program is made."""
    case = dataclasses.replace(a_problem(), **changes)
    assert refuses(case) == reason
    (reply,) = run(driver, tmp_path, [(case, CONFIG, {})], dry=True)
    assert (reply.code, reply.message) == (INVALID, f"weight_only: {reason}")


def test_refused_weights():
    assert refuses(dataclasses.replace(a_problem(), dtypes=("bf16", "fp8e4nv", "bf16"))) == "w is fp8e4nv, it takes int8 and int4"


LIMITS = {  # of each: the last problem within and the first beyond it
    "rows": ({"M": 64, "arch": 80}, {"M": 65, "arch": 80}),
    "rows of Hopper": ({"M": (1 << 30) - 1, "B": 1}, {"M": 1 << 30, "B": 1}),
    "columns": ({"N": 96}, {"N": 97}),
    "depth": ({"K": 128}, {"K": 129}),
    "a long sum": ({"K": (1 << 21) - 64, "S": 2}, {"K": 1 << 21, "S": 2}),
    "blocks of a scale": ({"S": 4}, {"S": 5}),
    "batches": ({"B": (1 << 24) - 1, "N": 64}, {"B": 1 << 24, "N": 64}),
    "capability": ({"arch": 80}, {"arch": 79}),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_are_where_they_are(limit):
    within, beyond = (refuses(dataclasses.replace(a_problem(), **changes)) for changes in LIMITS[limit])
    assert within is None and beyond is not None


def test_which_products_are_none_of_these():
    reasons = {
        "the product nt, a derivative, want the product itself": dict(role="nt"),
        "scales of x and w, want scales of w alone": dict(scaled=("x", "w")),
        "1 scales along N of 96, want one for each column": dict(J=1),
    }
    for reason, changes in reasons.items():
        assert cuda_weight_only.refused(dataclasses.replace(a_problem(), **changes)) == reason


REFUSED_CONFIGS = [
    ({"tile_m": 16}, "weight_only: tile_m x tile_n is 16x64, want one of 8x128, 8x64, 16x128, 32x256, 64x256, 128x256"),
    ({"tile_n": 256}, "weight_only: tile_m x tile_n is 8x256, want one of 8x128, 8x64, 16x128, 32x256, 64x256, 128x256"),
    ({"splits": 0}, "weight_only: splits is 0, want 1 to 64"),
    ({"splits": 65}, "weight_only: splits is 65, want 1 to 64"),
]


@pytest.mark.parametrize("changes, message", REFUSED_CONFIGS)
def test_refused_configs(driver, tmp_path, changes, message):
    (reply,) = run(driver, tmp_path, [(a_problem(), dataclasses.replace(CONFIG, **changes), {})], dry=True)
    assert (reply.code, reply.message) == (INVALID, message)


def random_problem(rng):
    """Of sizes from 1 to the limits, and sometimes at one or one beyond it."""

    def size(limit, of=1):
        return limit + of * int(rng.integers(-1, 2)) if rng.random() < 0.1 else of * int(2 ** rng.uniform(0, math.log2(limit // of)))

    group, bits = 32 * int(rng.integers(1, 5)), int(rng.choice([4, 8]))
    K = size(1 << 21, 32) // group * group or group
    return a_problem(size(65), size(1 << 30, 32), K, K // group, bits, str(rng.choice(["bf16", "fp16"])), B=size(1 << 24))


def test_what_is_taken_can_be_launched(driver, tmp_path):
    """In every configuration, on the blocks that the model counts."""
    rng = np.random.default_rng(0)
    cases = [random_problem(rng) for _ in range(1000)]
    taken = [case for case in cases if refuses(case) is None]
    assert min(len(taken), len(cases) - len(taken)) > 100
    asked = [(case, config, {}) for case in taken for config in cuda_weight_only.candidates(case)]
    for (case, config, _), reply in zip(asked, run(driver, tmp_path, asked, dry=True), strict=True):
        assert reply.code == 0, f"{reply.message}: {case}, {config}"
        assert (reply.grid, reply.tiles * 8) == (cuda_weight_only.grid(case, config), config.tile_m)
        assert reply.shared_bytes <= 48 << 10


def test_division_by_the_steps_of_a_scale_is_exact():
    """As the kernel does it: the high half of a product with 2^32 over the divisor, rounded up."""
    steps = np.arange(1 << 16, dtype=np.uint64)
    for of_scale in (2, 3, 4, 5, 7, 12, 100, 255, 1023, 4097, 32768, 65535):
        np.testing.assert_array_equal(steps * np.uint64(-(-(1 << 32) // of_scale)) >> np.uint64(32), steps // np.uint64(of_scale))


LAYERS = {"qkv": (4096, 6144), "out": (4096, 4096), "gate and up": (4096, 28672), "down": (14336, 4096)}


@pytest.mark.parametrize("bits", TILES)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_picked_for_one_row_fills_a_gpu(layer, bits):
    K, N = LAYERS[layer]
    problem = dataclasses.replace(a_problem(1, N, K, K // 128, bits), device="NVIDIA H200")  # an H100 wants fewer
    config = cuda_weight_only.pick(problem)
    assert config.tile_m == 8 and cuda_weight_only.grid(problem, config) >= 96
    assert 4 * config.splits * N < 0.05 * cuda_weight_only.weight_bytes(problem)  # partial results


PLAIN = a_problem(M=5, N=96, K=12 * 32, S=6)
INT4 = a_problem(M=5, N=96, K=20 * 32, S=10, bits=4)  # more steps than all warps load at first
HALF = dataclasses.replace(INT4, dtypes=("bf16", "i8", "fp32"))
ROWS = a_problem(M=11, N=64, K=12 * 32, S=12)
BATCHES = a_problem(M=2, N=64, K=4 * 32, S=2, B=3)
BROKEN = {  # the fault -> a case that shows it, a piece of weight_only.cuh or weight_only.cc, and what takes its place
    "no barrier before sums are given": (PLAIN, "__syncthreads();  // all have read what lies here", ""),
    "no barrier before sums are taken": (PLAIN, "__syncthreads();  // the sums are there", ""),
    "a barrier for some": (PLAIN, "__syncthreads();  // the sums are there", "if (along < 2 * half) __syncthreads();"),
    "a column too many": (PLAIN, "real = column < p.N;", "real = true;"),
    "a row too many is read": (PLAIN, "m < p.M", "true"),
    "a row too many is written": (PLAIN, "if (m >= p.M) continue;", ""),
    "a step too many": (PLAIN, "min(begin + p.share, p.steps)", "begin + p.share"),
    "a step ahead too many": (PLAIN, "real && step + s < end", "real"),
    "scales ahead too many": (PLAIN, "worker.real && step + kStride < end", "worker.real"),
    "the first scale for all": (PLAIN, "p.of_scale == 0 ? step : __umulhi(step, p.of_scale)", "0"),
    "the scale of the next column": (INT4, "k < 2 ? scale : next_scale", "k < 2 ? next_scale : scale"),
    "halves of bytes in the other order": (INT4, "both >> bit", "both >> (bit ^ kBits)"),
    "the other rows": (PLAIN, "half == 0 ? 0x5410 : 0x7632", "half == 0 ? 0x7632 : 0x5410"),
    "a chunk twice": (INT4, "chunk[s][r] = next[s][r];", ""),
    "half of the warps are left out": (PLAIN, "half > 0", "half > 1"),
    "all warps write": (PLAIN, "worker.warp / Of::kWarpsN != 0 || !worker.real", "!worker.real"),
    "some of a warp leave": (PLAIN, "worker.Load(first, end, chunk);", "if (!worker.real) return;\nworker.Load(first, end, chunk);"),
    "one weight for all batches": (BATCHES, "static_cast<int64_t>(batch) * p.K * p.N", "0"),
    "one scale for all batches": (BATCHES, "static_cast<int64_t>(batch) * p.S * p.N", "0"),
    "one x for all batches": (BATCHES, "static_cast<int64_t>(batch) * p.M * p.K", "0"),
    "the first rows again": (ROWS, "static_cast<int>(rest % p.row_blocks) * kTiles * kRowsOfTile", "0"),
    "results of 16 bits for 32": (HALF, "p.wide != 0", "p.wide == 0"),
    "wherever the arrays start": (PLAIN, "!Aligned(array)", "false"),
}
SHIFTED = {"wherever the arrays start": {"x": 4}}


@pytest.fixture(scope="session")
def broken_driver(tmp_path_factory):
    pieces = [(old, new) for _, old, new in BROKEN.values()]
    return simt.build(tmp_path_factory, simt.either(("weight_only.cuh", "weight_only.cc"), pieces), family="weight_only")


def check(driver, folder, names, number, shifts=None):
    asked = []
    for case in dict.fromkeys(BROKEN[what][0] for what in names):
        parts = 5 if case == PLAIN else 1  # of which the last is empty
        asked.append((case, dataclasses.replace(CONFIG, splits=parts), operands_of(case)))
    for (case, _, operands), reply in zip(
        asked, run(driver, folder, asked, shifts=shifts, environment={"BROKEN": str(number)}), strict=True
    ):
        assert reply.code == 0, reply.message
        check_parts(case, reply.parts, operands)


def test_kernels_of_which_no_piece_is_taken_are_right(broken_driver, tmp_path):
    check(broken_driver, tmp_path, BROKEN, -1)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(broken_driver, tmp_path, what):
    with pytest.raises(AssertionError, match=simt.FOUND + "|some threads of a warp|another order of threads"):
        check(broken_driver, tmp_path, [what], list(BROKEN).index(what), SHIFTED.get(what))
