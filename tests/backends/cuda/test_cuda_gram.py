"""Products with an own transpose on Hopper before any launch: what is refused, and which tile is taken.

Needs g++; no GPU and no compiled module.
"""

from typing import Any

import host_code
import pytest

from jaxext.backends.cuda import cuda_gram, cuda_matmul

TILES = [dict(tile_m=m, tile_n=n, tile_k=64, cluster_m=2) for m, n in ((128, 256), (192, 192), (128, 192))]
TABLE = [dict(operands="bf16", most_splits=32, **tile) for tile in TILES]


def a_problem(rows=4096, depth=4096, **changes) -> cuda_gram.GramProblem:
    fields: dict[str, Any] = dict(name="gram", role="nt", B=1, M=rows, N=depth, K=rows, dtypes=("bf16",) * 3, precision="ieee", arch=90)
    return cuda_gram.GramProblem(**(fields | changes))


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "an older GPU": (dict(arch=80), "compute capability is 8.0, the gram kernels want 9.0"),
    "a newer GPU": (dict(arch=100), "compute capability is 10.0, the gram kernels want 9.0"),
    "wide factors": (dict(dtypes=("fp32",) * 3), "x is fp32, want bf16 or fp16"),
    "two dtypes": (dict(dtypes=("bf16", "fp16", "bf16")), "the operands are bf16 and fp16, want one dtype"),
    "another result": (dict(dtypes=("bf16", "bf16", "fp16")), "the result is fp16, want bf16 or fp32"),
    "another addend": (dict(addend="fp32"), "the addend is fp32, want bf16, as the result"),
    "a short sum": (dict(depth=20), "a row of x has 40 bytes, TMA wants a multiple of 16: pad N to 24"),
    "short rows of the result": (dict(rows=20), "a row of the result has 40 bytes, want a multiple of 16: pad M to 24"),
    "short rows in float32": (dict(rows=18, dtypes=("bf16", "bf16", "fp32")), "has 72 bytes, want a multiple of 16: pad M to 20"),
    "a long axis": (dict(depth=2**31), f"an axis has {2**31} elements, want {2**31 - 2**16} at most"),
    "many elements": (dict(rows=2**19, depth=8), "has 2^38 elements or more, want fewer"),
    "a negative axis": (dict(B=-1), "an axis has -1 elements, want 0 or more"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_refused(name):
    changes, reason = REASONS[name]
    assert reason in str(host_code.refuses(a_problem(**changes), cuda_gram))


def test_what_is_taken():
    taken = [dict(rows=8, depth=8), dict(rows=2**18, depth=8), dict(B=2**31 - 2**16, rows=8, depth=8), dict(rows=0), dict(depth=0)]
    taken += [dict(addend="bf16"), dict(rows=20, addend="fp32", dtypes=("bf16", "bf16", "fp32"))]
    for changes in taken:
        assert host_code.refuses(a_problem(**changes), cuda_gram) is None, changes


@pytest.mark.parametrize("name", "BMN")
@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**62, 2**31, -1, 0])
def test_every_number_may_be_asked_about(name, number):
    assert (host_code.refuses(a_problem(**{name: number}), cuda_gram) is None) == (number == 0)


def test_tiles_are_those_that_touch_the_lower_triangle():
    """Counted one by one, in clusters of two."""
    for tile in TILES:
        config = cuda_gram.GramConfig(**tile)
        height = 2 * config.tile_m
        for rows in (1, 8, config.tile_n, height, height + 8, 1000, 4096):
            tops = range(0, rows, height)
            want = sum(left < min(top + height, rows) for top in tops for left in range(0, rows, config.tile_n))
            assert cuda_gram.tiles(a_problem(rows), config) == 2 * want, (tile, rows)


# Rows, as many as columns -> the tile that leaves the fewest multiprocessors without work, and the gain that the model expects at least.
EXPECTED = {2048: ((128, 192), 1.1), 4096: ((192, 192), 1.7), 5120: ((128, 192), 1.7), 8192: ((128, 256), 1.9), 16384: ((128, 256), 1.9)}


@pytest.mark.parametrize("rows", EXPECTED)
def test_what_a_square_is_expected_to_gain(rows):
    tile, gain = EXPECTED[rows]
    problem = a_problem(rows, rows)
    config = cuda_gram.pick(problem, TABLE)
    assert (config.tile_m, config.tile_n, config.splits) == (*tile, 1)
    assert 1 / cuda_gram.share(problem, TABLE) >= gain
    assert cuda_gram.clocks(problem, config) == min(cuda_gram.clocks(problem, other) for other in cuda_gram.candidates(problem, TABLE))


def test_a_whole_product_is_the_best_of_the_librarys():
    problem = a_problem(4096, 4096)
    tile = cuda_matmul.MatmulConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)
    assert cuda_matmul.of_library(problem) <= cuda_matmul.clocks(problem, tile)


def test_an_addend_takes_time_and_one_part():
    plain, added = a_problem(512, 8192), a_problem(512, 8192, addend="bf16", of_addend=2.0)
    (config,) = [config for config in cuda_gram.candidates(added, TABLE) if config.tile_m == 192]
    assert cuda_gram.clocks(added, config) > cuda_gram.clocks(plain, config)
    assert cuda_gram.pick(plain, TABLE).splits > 1, "a device has more multiprocessors than this has tiles"


def test_parts_are_long_enough():
    for depth in (64, 512, 1024, 8192):
        configs = cuda_gram.candidates(a_problem(512, depth), TABLE)
        assert {config.splits for config in configs} == {1} | {splits for splits in (2, 4, 8, 16, 32) if depth // 64 // splits >= 4}
    assert {config.splits for config in cuda_gram.candidates(a_problem(512, 8192, B=2), TABLE)} == {1}
    assert not cuda_gram.candidates(a_problem(2**15, 8, B=2**31), TABLE)
