"""Products with an own transpose on Hopper before any launch: a family of test_cuda_families.py, and its tiles."""

import functools
from typing import Any

import pytest

from jaxext.backends.cuda import cuda_tiles
from jaxext.kernels.gram.problem import Problem
from jaxext.ops.gram import cuda as cuda_gram

TILES = [dict(tile_m=m, tile_n=n, tile_k=64, cluster_m=2) for m, n in ((128, 256), (192, 192), (128, 192))]
TABLE = [dict(operands="bf16", most_splits=32, **tile) for tile in TILES]


def a_problem(rows=4096, depth=4096, **changes) -> Problem:
    fields: dict[str, Any] = dict(name="gram", role="nt", B=1, M=rows, N=depth, K=rows, dtypes=("bf16",) * 3, precision="ieee", arch=90)
    return Problem(**(fields | changes))


FAMILY, SMALL, SIZES = cuda_gram, a_problem(), "BMN"
REFUSED = {
    "wide factors": (a_problem(dtypes=("fp32",) * 3), "x is fp32, want bf16 or fp16"),
    "two dtypes": (a_problem(dtypes=("bf16", "fp16", "bf16")), "the operands are bf16 and fp16, want one dtype"),
    "another result": (a_problem(dtypes=("bf16", "bf16", "fp16")), "the result is fp16, want bf16 or fp32"),
    "another addend": (a_problem(addend="fp32"), "the addend is fp32, want bf16, as the result"),
    "a short sum": (a_problem(depth=20), "a row of x has 40 bytes, TMA wants a multiple of 16: pad N to 24"),
    "short rows of the result": (a_problem(rows=20), "a row of the result has 40 bytes, want a multiple of 16: pad M to 24"),
    "short rows in float32": (
        a_problem(rows=18, dtypes=("bf16", "bf16", "fp32")),
        "a row of the result has 72 bytes, want a multiple of 16: pad M to 20",
    ),
    "many elements": (a_problem(rows=2**19, depth=8), "an array of B=1 M=524288 N=8 has 2^38 elements or more, want fewer"),
}
TAKEN = [a_problem(8, 8), a_problem(2**18, 8), a_problem(8, 8, B=2**31 - 2**16), a_problem(0), a_problem(depth=0)]
TAKEN += [a_problem(addend="bf16"), a_problem(20, addend="fp32", dtypes=("bf16", "bf16", "fp32"))]
# Rows, as many as columns -> the tile that leaves the fewest multiprocessors without work, and the gain that the model expects at least.
EXPECTED = {2048: ((128, 192), 1.1), 4096: ((192, 192), 1.7), 5120: ((128, 192), 1.7), 8192: ((128, 256), 1.9), 16384: ((128, 256), 1.9)}
PICKS = {f"a square of {rows}": (a_problem(rows, rows), dict(tile_m=m, tile_n=n, splits=1)) for rows, ((m, n), _) in EXPECTED.items()} | {
    "fewer tiles than multiprocessors": (a_problem(512, 8192), dict(splits=range(2, 33)))
}
PARTS, deep = {64: 1, 512: 2, 1024: 4, 8192: 32}, functools.partial(a_problem, 512)


def test_tiles_are_those_that_touch_the_lower_triangle():
    """Counted one by one, in clusters of two."""
    for tile in TILES:
        config = cuda_gram.TileConfig(**tile)
        height = 2 * config.tile_m
        for rows in (1, 8, config.tile_n, height, height + 8, 1000, 4096):
            tops = range(0, rows, height)
            want = sum(left < min(top + height, rows) for top in tops for left in range(0, rows, config.tile_n))
            assert cuda_gram.tiles(a_problem(rows), config) == 2 * want, (tile, rows)


@pytest.mark.parametrize("rows", EXPECTED)
def test_what_a_square_is_expected_to_gain(rows):
    assert 1 / cuda_gram.share(a_problem(rows, rows), TABLE) >= EXPECTED[rows][1]


def test_a_whole_product_is_the_best_of_the_librarys():
    problem = a_problem(4096, 4096)
    tile = cuda_tiles.GemmConfig(tile_m=128, tile_n=256, tile_k=64, cluster_m=2, pingpong=0)
    assert cuda_tiles.library_clocks(problem) <= cuda_tiles.clocks(problem, tile)


def test_an_addend_takes_time_and_one_part():
    plain, added = a_problem(512, 8192), a_problem(512, 8192, addend="bf16", of_addend=2.0)
    (config,) = [config for config in cuda_gram.candidates(added, TABLE) if config.tile_m == 192]
    assert cuda_gram.clocks(added, config) > cuda_gram.clocks(plain, config)


def test_more_tiles_than_a_grid_can_number_have_no_candidate():
    assert not cuda_gram.candidates(a_problem(2**15, 8, B=2**31), TABLE)
