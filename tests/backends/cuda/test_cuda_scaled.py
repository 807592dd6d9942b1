"""Scaled products on Hopper before any launch: a family of test_cuda_families.py, and the arrays that the kernel gets."""

import dataclasses

import host_code
import jax.numpy as jnp
import numpy as np
import pytest
import test_scaled_dot

from jaxext.backends.cuda import cuda_tiles
from jaxext.ops.scaled import cuda as cuda_scaled

WIDE = dict(tile_m=128, tile_n=256, tile_k=128, cluster_m=2)
NARROW = dict(tile_m=64, tile_n=128, tile_k=128, cluster_m=1)
TABLE = [
    dict(operands=first, second=second, most_splits=32, **tile)
    for first, second in (("fp8e4nv", "fp8e4nv"), ("fp8e5", "fp8e4nv"), ("fp8e4nv", "fp8e5"))
    for tile in (WIDE, NARROW)
]
E4M3 = ("fp8e4nv", "fp8e4nv", "bf16")


def product(role="nt", sizes=(16, 512, 384), cuts=(1, 1, 1), slots="xwy", dtypes=E4M3, **fields) -> cuda_scaled.ScaledProblem:
    """`sizes`, `cuts`: of rows, the depth and columns."""
    slots = "".join(slot for slot in slots if slot != test_scaled_dot.ROLES[role]) if slots == "xwy" else slots
    of_triton = test_scaled_dot.a_problem(role, slots, cuts, sizes, dtypes, **fields)
    return cuda_scaled.ScaledProblem(
        **{field.name: getattr(of_triton, field.name) for field in dataclasses.fields(cuda_scaled.ScaledProblem)}
    )


PAIRS = "want fp8e4nv times fp8e4nv or fp8e5, or fp8e5 times fp8e4nv, into bf16 or fp32"
FAMILY, SMALL, SIZES = cuda_scaled, product(), "BMNKIJS"
REFUSED = {
    "wide factors": (product(dtypes=("bf16", "fp8e4nv", "bf16")), f"fp8e4nv times bf16 into bf16, {PAIRS}"),
    "cotangents twice": (product(dtypes=("fp8e5", "fp8e5", "bf16")), f"fp8e5 times fp8e5 into bf16, {PAIRS}"),
    "another result": (product(dtypes=("fp8e4nv", "fp8e4nv", "fp16")), f"fp8e4nv times fp8e4nv into fp16, {PAIRS}"),
    "a short sum": (product(sizes=(256, 520, 384)), "520 elements are contracted, TMA wants a multiple of 16"),
    "short rows of the result": (
        product(sizes=(256, 512, 388)),
        "a row of 388 elements of the result has 776 bytes, want a multiple of 16",
    ),
    "fine scales": (product(cuts=(1, 16, 1)), "scales for each 32 elements of a sum, want one for all or for multiples of 128"),
    "many elements": (
        product(sizes=(2**20, 2**19, 16)),
        "an array of B=1 M=1048576 N=16 K=524288 I=1 J=1 S=1 has 2^38 elements or more, want fewer",
    ),
    "scales both ways": (product(cuts=(16, 1, 3), slots="xy"), "the result has scales of rows and columns at once"),
}
TAKEN = [
    product(role, cuts=cuts, dtypes=dtypes, B=B)
    for role in test_scaled_dot.ROLES
    for cuts in [(1, 1, 1), (16, 1, 384), (16, 4, 3), (2, 2, 384), (4, 1, 12)]
    for dtypes, B in ((E4M3, 1), ((*E4M3[:2], "fp32"), 3))
]
TAKEN += [product(role, sizes=sizes) for role in test_scaled_dot.ROLES for sizes in ((0, 512, 384), (40, 16, 8))]
TAKEN += [product(sizes=(256, 512, 388), dtypes=("fp8e4nv", "fp8e4nv", "fp32"))]  # a row of float32 may be shorter
# 8,192 cubed; DeepSeek-V3's products in training and decoding, with a scale for 128 of each row, and for squares of the weight.
CUBE, TRAINING = product("nt", (8192, 8192, 8192), (8192, 64, 64)), product("nt", (4096, 7168, 4096), (4096, 56, 32))
DECODING = product("nt", (16, 7168, 2048), (16, 56, 16))  # with fewer tiles than a device has multiprocessors
PICKS = {
    "cube": (CUBE, WIDE | dict(splits=1)),
    "training": (TRAINING, WIDE | dict(splits=1)),
    "decoding": (DECODING, dict(tile_m=64, splits=range(2, 33))),
}
PARTS = {16: 1, 512: 1, 1024: 2, 4096: 8}


def deep(depth, **changes):
    return product(sizes=(64, depth, 128), **changes)


def test_results_with_scales_of_both_axes_are_refused():
    """Scales of one axis join those of the factors."""
    for cuts, slots, both in [((16, 1, 3), "xy", True), ((16, 1, 1), "xy", False), ((1, 1, 3), "xy", False), ((16, 1, 3), "wy", False)]:
        said = cuda_scaled.scaled_both_ways(product("nt", cuts=cuts, slots=slots))
        assert said == ("the result has scales of rows and columns at once" if both else None)


def spread(scale, shape):
    """A scale with an element for each of a factor."""
    for axis in (1, 2):
        scale = np.repeat(scale, shape[axis] // scale.shape[axis], axis)
    return scale


CUTS = {
    "tensor": (1, 1, 1),
    "tensor of odd sizes": (1, 1, 1),
    "rows": (16, 1, 1),
    "columns": (1, 4, 384),
    "rows and columns": (16, 1, 384),
    "rows and squares": (16, 4, 3),
    "narrow columns": (2, 2, 12),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("of", CUTS)
@pytest.mark.parametrize("role", test_scaled_dot.ROLES)
def test_arrays_of_the_kernel(role, of):
    """They are those of csrc/scaled/scaled_target.cc; their product is that of the operands, with every set of scales."""
    for slots in ("x", "w", "y", "xw", "wy", "xy", "xwy"):
        problem = product(role, (48, 528, 400) if "odd" in of else (16, 512, 384), CUTS[of], slots, B=2)
        if slots == "xwy":
            problem = dataclasses.replace(problem, scaled=("x", "w", "y"))
        if cuda_scaled.scaled_both_ways(problem):
            continue
        operands = test_scaled_dot.some_operands(problem)
        given = {name: operands[name] for name in cuda_scaled.slots(problem)}
        assert len(given) == len(operands)
        made = cuda_scaled.arrays(problem, {name: jnp.asarray(x) for name, x in given.items()})
        a, b, left, right = (np.asarray(x.astype(jnp.float32), np.float64) for x in made.values())
        fields = cuda_scaled.fields(problem)
        B, M, N, K, blocks, columns, steps = fields.values()
        assert a.shape == (B, M, K) and b.shape == (B, N, K)
        assert all(size in (1, want) for size, want in zip(left.shape, (B, blocks, steps), strict=True))
        each = columns == N
        assert all(size in (1, want) for size, want in zip(right.shape, (B, steps, N) if each else (B, columns, steps), strict=True))
        assert not each or right.shape[2] == N, "beside each other: one for all has J = 1"
        right = right.swapaxes(1, 2) if each else right
        got = np.einsum("bmk,bnk->bmn", a * spread(left, a.shape), b * spread(right, b.shape))
        np.testing.assert_array_equal(got, test_scaled_dot.true(problem, operands))


def test_fewer_rows_take_less_time():
    clocks = [cuda_scaled.clocks(problem, cuda_scaled.candidates(problem, TABLE)[0]) for problem in (DECODING, TRAINING, CUBE)]
    assert clocks == sorted(clocks)


@pytest.mark.parametrize("role", test_scaled_dot.ROLES)
def test_a_cube_is_expected_to_take_two_thirds_of_the_clocks(role):
    """The comparison is with 16-bit factors, and the clocks include transpositions before the product."""
    for cuts in [(1, 1, 1), (8192, 64, 64), (8192, 64, 8192)]:
        cube = product(role, (8192,) * 3, cuts)
        assert cuda_tiles.library_clocks(cube) > 1.5 * cuda_scaled.clocks(cube, cuda_scaled.candidates(cube, TABLE)[0])


def test_tiles_are_as_many_as_a_grid_can_number():
    """There are too many wide tiles, the only ones that host_code.py knows."""
    problem = product(sizes=(1, 16, 8), B=2**31 - 2**16)
    assert host_code.refuses(problem, cuda_scaled) == "B=2147418112 M=1 N=8 K=16 I=1 J=1 S=1 make 2^31 tiles or more, want fewer"
    assert {config.tile_m for config in cuda_scaled.candidates(problem, TABLE)} == {64}
