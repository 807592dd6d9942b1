"""Products with own transposes on Hopper: a family of test_cuda_families.py with all of its cases, and its tiles before any launch."""

import functools
import random
from typing import Any

import jax.numpy as jnp
import pytest
from cuda_cases import change_dtypes, config_of, make_case
from lowered import struct

import jaxext
from jaxext.backends.cuda import cuda_tiles
from jaxext.kernels.gram.problem import Problem
from jaxext.ops.gram import cuda as cuda_gram
from jaxext.ops.gram.problem import slower

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


def shapes(a):
    """The shapes of all arrays, and the name of the result that may have parts."""
    return dict(x=(a.B, a.M, a.N), addend=(a.B, a.M, a.M), y=(a.B, a.M, a.M)), "y"


def case(row, B, M, N, result, factors=(1.0, 0.0), splits=1):
    """`factors`: of the product, and of the addend, which is there if its factor is not 0."""
    numbers = dict(B=B, M=M, N=N) | config_of(row, "tile_m tile_n tile_k cluster_m", splits)
    operands = {"x": row["operands"]} | ({"addend": result} if factors[1] else {})
    return make_case("gram", numbers | dict(zip(("scale", "of_addend"), factors, strict=True)), operands, {"y": result})


def right(row):
    for result, factors, splits in [(row["operands"], (2.0, 0.5), 1), ("float32", (2.0, 0.0), 1), ("float32", (1.0, 0.0), 2)]:
        yield case(row, 3, 256, 512, result, factors, splits)


def some(row, count):
    """Yield random cases, then one of far more than 2^31 elements."""
    pick = random.Random(str(row))
    sizes = [(pick.choice([1, 3]), 8 * pick.randint(1, 200), 8 * pick.randint(1, 90)) for _ in range(count)]
    for B, M, N in [*sizes, (9, 2**16 + 8, 2**17)]:
        factors = pick.choice([(1.0, 0.0), (2.0, 0.0), (0.5, 3.0)])
        splits = pick.choice([1, 2]) if not factors[1] and N > 64 else 1
        yield case(row, B, M, N, "float32" if splits > 1 else pick.choice([row["operands"], "float32"]), factors, splits)


def described(row, B, M, N):
    """A case, and what is known of its launch: both blocks of a cluster load some of the columns' rows."""
    boxes = [[64, row["tile_m"], 1], [64, row["tile_n"] // 2, 1]]
    return case(row, B, M, N, row["operands"]), dict(loaded=["x", "x"], boxes=boxes, cluster=[2, 1, 1])


def faults(parts):
    """Changes of a right case, and the message.  `parts`: a change to a right case in parts, with other attributes."""
    yield from (({name: 0}, f"{name}=0.*, want 1 or more") for name in "BMN")
    yield from (({name: 96}, "no kernel has") for name in ("tile_m", "tile_n", "tile_k", "cluster_m"))
    yield from ((parts(splits=value), f"splits is {value}, want 1 to 32") for value in (0, -1, 33, 2**40))
    yield change_dtypes(addend="float32"), "addend is float32, want bfloat16"
    yield change_dtypes(x="float32"), "x is fp32, want bf16 or fp16"
    yield change_dtypes(addend="float16", y="float16"), "the result is fp16, want bf16 or fp32"
    yield parts(splits=5), "splits is 5, with 8 steps of the sum a part has none"
    yield lambda case: change_dtypes(y="bfloat16")(parts()(case)), "parts are bfloat16, want float32"
    yield lambda case: change_dtypes(addend="float32", y="float32")(case.having(splits=2)), "splits is 2 with an addend, want 1"


def programs():
    """Functions, operands, and of each kernel that they call the shapes of its arrays, and attributes (test_cuda_stand_in.py)."""
    for x, B, splits in ((struct(512, 2048), 1, 4), (struct(3, 512, 2048), 3, 1)):  # one matrix has parts: all multiprocessors work
        factor, square = (B, 512, 2048), (B, 512, 512)
        yield f"gram {B}", jaxext.gram, [x], dict(gram=[factor, square, dict(splits=splits)])
        first, again = [factor, square, dict(scale=1, of_addend=0)], [square, square, square, dict(scale=2.0315, of_addend=-4.775)]
        called = {"gram": first, "gram again": again, "linear": [square, factor, factor, factor]}
        yield f"muon {B}", functools.partial(jaxext.newton_schulz, steps=1), [x], called


def choices(refusal):
    """Calls by name, and the reason for which `cuda` is not chosen, or None.  `refusal`: the module's."""
    calls = lambda *rows, dtype=jnp.bfloat16: [(jaxext.gram, struct(each, each, dtype=dtype)) for each in rows]
    yield "gram", calls(4096, 8192), None
    for rows in (8, 1024):  # few tiles
        reason = slower(cuda_gram.share(a_problem(rows, rows), TABLE))
        assert reason is not None
        yield f"gram of {rows} rows", calls(rows), reason
    yield "gram of float32", calls(8, 1024, 4096, 8192, dtype=jnp.float32), refusal


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
