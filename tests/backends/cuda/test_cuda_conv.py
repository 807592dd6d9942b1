"""Dense convolutions for Hopper before any launch: a family of test_cuda_families.py, its limits, TMA's boxes and its tiles.

conv_plan.cc is compiled by a C++ compiler (host_code.py) and asked for its parts and boxes.  Gathering by these as TMA does must give what
the definition gives, bit for bit on small integers.  Each limit of TMA's boxes, of CUTLASS and of a launch has a problem on either side;
what is not refused has parts in every candidate.  Needs g++; no GPU and no CUDA.
"""

import dataclasses
import random

import cuda_convs
import numpy as np
import pytest
from cuda_convs import CASES, OPEN, ROLES, SLOTS, candidates, problem, refuses, shape_of, truth
from host_code import Part, plan

from jaxext.kernels.geometry import ConvProblem
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv.cuda_dense import GEOMETRY, ConvConfig

FAMILY, TABLE, SMALL = cuda_conv, cuda_convs.TABLE, CASES["causal"]
FAR = {
    "input dilation": (problem("fprop", (8, 8), (3, 3), input_dilation=(1, 2, 1)), "an input dilation of 2, TMA's boxes have no holes"),
    "many phases": (problem("dgrad", (8, 8), (3, 3), stride=8, G=9), "64 phases of the strides in each of 9 groups*"),
    "long stride": (problem("fprop", (32, 32), (16, 16), stride=16), "a stride of 16, a TMA box takes 8 at most"),
    "input channels": (problem("fprop", (8, 8), (3, 3), C=12), "12 channels per group, TMA wants a multiple of 8"),
    "output channels": (problem("wgrad", (8, 8), (3, 3), K=4), "4 channels per group, TMA wants a multiple of 8"),
    "many groups": (problem("fprop", (8, 8), (3, 3), G=13, B=5), "65 groups, with those of the batch label, it takes 64 at most"),
    "3-D, wide filter": (problem("fprop", (40, 4, 4), (33, 1, 1), low=(16, 0, 0), high=(16, 0, 0)), "a dilated filter of 33 on axis D*"),
    "3-D, far taps without padding": (problem("fprop", (40, 4, 4), (18, 1, 1)), "corners 0 and -17 of the box on axis D*"),
    "2-D, far padding": (problem("fprop", (8, 8), (200, 1), low=(199, 0)), "corners -199 and -199 of the box on axis H*"),
    "1-D, far dilation": (problem("fprop", (70000,), (2,), low=0, dilation=65535), "a dilated filter of 65536 on axis W*"),
    "only padding": (problem("fprop", (4,), (2,), low=9, high=-6), "axis W lies in the padding altogether"),
    "pixels": (problem("fprop", (1 << 15, 1 << 15), (1, 1), N=2), "2147483648 pixels, it takes fewer than 2^31 - 2^16"),
    "elements": (problem("fprop", (1 << 15, 1 << 10), (1, 1), C=1 << 16), "an array of 2^39 elements or more, it takes fewer"),
    "blocks": (problem("wgrad", (200, 200), (100, 100), C=448), "70000 blocks side by side, it takes 65535 at most"),
    "outputs": (problem("fprop", (4,), (1,), K=1 << 23), "131072 blocks side by side, it takes 65535 at most"),
}
REFUSED = FAR | {
    "float32": (dataclasses.replace(SMALL, dtypes=("fp32",) * 3), "the operands are fp32 and fp32, it takes two of bf16 or fp16"),
    "two dtypes": (dataclasses.replace(SMALL, dtypes=("bf16", "fp16", "bf16")), "the operands are bf16 and fp16, it takes two of *"),
    "another result": (dataclasses.replace(SMALL, dtypes=("bf16", "bf16", "fp16")), "the result is fp16, it gives bf16 or fp32"),
    "four axes": (dataclasses.replace(SMALL, name="conv4d_fprop"), "4 spatial axes, want 1 to 3"),
    "no axes": (dataclasses.replace(SMALL, name="conv0d_fprop"), "0 spatial axes, want 1 to 3"),
    "a long axis": (dataclasses.replace(SMALL, C=2**31), "a size, padding or dilation is 2147483648, it takes less than 2^31"),
}
TAKEN = [dataclasses.replace(SMALL, dtypes=("fp16", "fp16", "fp32")), dataclasses.replace(SMALL, N=0)]
LIMITS = {
    "1-D, lower corner": (1 << 15, lambda n: problem("fprop", (9,), (2,), low=n)),
    "1-D, upper corner": ((1 << 15) - 1, lambda n: problem("fprop", (9,), (1,), high=n)),
    "1-D, taps without padding": (32769, lambda n: problem("wgrad", (33000,), (n,))),
    "1-D, taps": (65534, lambda n: problem("fprop", (40000,), (2,), high=n - 32768, dilation=n)),
    "1-D, padding": (65536, lambda n: problem("dgrad", (9,), (2,), low=n, high=-15000, dilation=50000)),
    "2-D, lower corner": (128, lambda n: problem("wgrad", (9, 9), (2, 2), low=(n, 0))),
    "2-D, upper corner": (127, lambda n: problem("fprop", (9, 9), (1, 1), high=(0, n))),
    "2-D, upper corner in dgrad": (127, lambda n: problem("dgrad", (9, 200), (1, 1), high=(0, -n))),
    "2-D, crop in dgrad": (128, lambda n: problem("dgrad", (400, 9), (1, 1), low=(-n, 0))),
    "2-D, taps without padding": (129, lambda n: problem("fprop", (9, 140), (1, n))),
    "2-D, taps": (255, lambda n: problem("fprop", (300, 9), (n, 1), high=(127, 0))),
    "2-D, taps in strided dgrad": (258, lambda n: problem("dgrad", (600, 9), (n, 1), stride=(2, 1))),
    "2-D, padding": (256, lambda n: problem("dgrad", (9, 60), (3, 1), low=(n, 0), high=(-100, 0), dilation=(80, 1))),
    "3-D, lower corner": (16, lambda n: problem("fprop", (5, 5, 5), (1, 1, 1), low=(0, n, 0))),
    "3-D, upper corner": (15, lambda n: problem("wgrad", (5, 5, 5), (1, 1, 1), high=(0, 0, n))),
    "3-D, taps": (31, lambda n: problem("fprop", (40, 5, 5), (n, 1, 1), high=(n - 17, 0, 0))),
    "3-D, padding": (16, lambda n: problem("dgrad", (9, 5, 5), (3, 1, 1), low=(n, 0, 0), high=(-5, 0, 0), dilation=(5, 1, 1))),
    "strides": (8, lambda n: problem("fprop", (40, 40), (3, 3), stride=n)),
    "parts": (64, lambda n: problem("fprop", (8,), (3,), **{64: dict(B=2, G=32), 65: dict(B=5, G=13)}[n])),
    "phases": (8, lambda n: problem("dgrad", (8, 8), (3, 3), stride=8, G=n)),
    "pixels": (65535, lambda n: problem("fprop", (n, 32767), (1, 1))),
    "elements": ((1 << 19) - 1, lambda n: problem("fprop", (n,), (1,), C=1 << 20)),
    "channels": ((1 << 28) - 1, lambda n: problem("fprop", (1,), (1,), C=8 * n)),
    "blocks": (65535 * 8, lambda n: problem("dgrad", (8,), (1,), C=8 * n)),
    "blocks of taps": (21844, lambda n: problem("wgrad", (65535,), (n,), C=192, low=30000)),
}
IMAGES = dict(N=64, low=1, high=1)
PICKS = {
    # The narrow tile is for few channels, the large one for many tiles.
    "64 channels": (problem("fprop", (56, 56), (3, 3), C=64, K=64, **IMAGES), dict(tile_n=64)),
    "64 channels of x": (problem("dgrad", (56, 56), (3, 3), C=64, K=256, **IMAGES), dict(tile_n=64)),
    "256 channels": (problem("fprop", (28, 28), (3, 3), C=256, K=256, **IMAGES), dict(tile_n=128)),
    "256 channels, wgrad": (problem("wgrad", (28, 28), (3, 3), C=256, K=256, **IMAGES), dict(tile_n=128)),
    "few images": (problem("fprop", (28, 28), (3, 3), C=128, K=128, N=4, low=1, high=1), dict(tile_m=128)),
    "many images": (problem("fprop", (28, 28), (3, 3), C=128, K=128, N=256, low=1, high=1), dict(tile_m=256)),
    "sequence": (problem("fprop", (8192,), (3,), C=256, K=256, N=8, low=2), dict(tile_m=128, tile_n=256)),
    # Few tiles are split until the device is full: nine taps by pairs.
    "few tiles": (problem("wgrad", (56, 56), (3, 3), C=64, K=64, **IMAGES), dict(splits=13)),
    "many tiles": (problem("wgrad", (14, 14), (3, 3), C=2048, K=2048, **IMAGES), dict(splits=1)),
    "long sequence": (problem("wgrad", (1 << 16,), (3,), C=256, K=256, low=2), dict(splits=range(2, 65))),
    "no image": (dataclasses.replace(CASES["wgrad"], N=0), dict(splits=1)),
}


def split(splits: int = 1) -> ConvConfig:
    return ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=splits)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_where_they_are(name):
    """The check of a problem and the plan of its parts have the same limits."""
    last, of = LIMITS[name]
    assert refuses(of(last)) is None and isinstance(plan(of(last), split()), list)
    assert refuses(of(last + 1)) is not None and plan(of(last + 1), split()) == f"conv: {refuses(of(last + 1))}"


@pytest.mark.parametrize("name", FAR)
def test_what_is_refused_has_no_parts(name):
    case, _ = FAR[name]
    assert plan(case, split()) == f"conv: {refuses(case)}"


def near_limits(rng: random.Random) -> ConvProblem | None:
    role, rank = rng.choice(ROLES), rng.choice((1, 2, 3))
    corner = 1 << (16 // rank - 1)

    def draw(*choices):
        """One of them for each axis; those that are not small, give or take a little."""
        return tuple(size if (size := rng.choice(choices)) < 4 else size + rng.randint(-1, 1) for _ in range(rank))

    case = problem(
        role,
        draw(1, 3, corner, 2 * corner, 4 * corner),
        draw(1, 1, 2, 3, corner // 4 + 3, corner, 2 * corner) if rank == 1 else draw(1, 2, 3, corner // 4 + 2),
        B=rng.choice((1, 8)),
        N=rng.choice((1, 3, 64)),
        G=rng.choice((1, 8, 9)),
        K=rng.choice((8, 8 << 16)),
        stride=draw(1, 2, 8),
        low=draw(0, 1, -1, corner, 2 * corner),
        high=draw(0, 1, -2, corner, 2 * corner),
        dilation=draw(1, 1, 2, corner // 2, corner),
    )
    return None if 0 in case.output else case


def test_what_is_taken_near_the_limits_has_parts_in_every_candidate():
    """Every view of which begins at 16 bytes."""
    rng, taken, refused = random.Random(0), 0, 0
    for _ in range(1500):
        if (case := near_limits(rng)) is None:
            continue
        if refuses(case):
            refused += 1
            continue
        taken += 1
        for config in candidates(case):
            parts = plan(case, config)
            assert not isinstance(parts, str), (case, config, parts)
            assert all(at % 8 == 0 for part in parts for at in (part.x, part.w, part.y))
    assert taken > 100 and refused > 100


@pytest.mark.parametrize(
    ("changes", "splits", "words"),
    [
        ({}, 0, "splits=0"),
        ({}, 65, "splits=65"),
        ({"N": 2}, 5, "splits is 5"),
        ({"N": 1}, 7, "splits is 7"),
        ({"role": "fprop"}, 2, "splits is 2"),
        ({"G": 40}, 2, "G=40 splits=2"),
    ],
)
def test_splits_that_cannot_be(changes, splits, words):
    case = dataclasses.replace(problem("wgrad", (6, 6), (1, 1)), **changes)
    reason = plan(case, split(splits))
    assert isinstance(reason, str) and words in reason


def test_sizes_that_no_array_has_are_refused():
    huge = 2**62
    for name in ("B", "N", "G", "C", "K"):
        for size in (-8, 2**31, huge):
            assert isinstance(plan(dataclasses.replace(SMALL, **{name: size}), split()), str)
    for name in GEOMETRY:
        for size in (-huge, 2**31, huge):
            assert isinstance(plan(dataclasses.replace(SMALL, **{name: (1, 1, size)}), split()), str), (name, size)


def test_arrays_beyond_counting_are_refused():
    size = 2**30
    case = dataclasses.replace(SMALL, N=size, C=size, K=size, input=(1, 1, size), output=(1, 1, size), filter=(1, 1, size))
    assert "2^39" in str(plan(case, split()))


def test_an_empty_result_has_no_parts():
    assert plan(dataclasses.replace(SMALL, N=0), split()) == []
    assert isinstance(plan(dataclasses.replace(SMALL, C=0), split()), str)


# Boxes.


def gathered(problem: ConvProblem, parts: list[Part], splits: int, operands) -> np.ndarray:
    """Compute the parts as the kernels do: a matrix product of what TMA reads through the boxes, stored as a matrix."""
    role, p = problem.role, problem
    result = np.full((splits * np.prod(shape_of(p, OPEN[role])),), np.nan)
    arrays = {slot: array.ravel() for slot, array in operands.items()}

    def store(matrix, rows):
        places = rows[:, None] + np.arange(matrix.shape[1])
        assert np.isnan(result[places]).all(), "stored twice"
        result[places] = matrix

    def pixels(first, images, sizes, steps, whole, channels):
        """Offsets of the pixels of a view."""
        n, d, h, w = np.ix_(range(images), *(range(0, step * size, step) for size, step in zip(sizes, steps, strict=True)))
        return (first + (((n * whole[0] + d) * whole[1] + h) * whole[2] + w) * p.G * channels).ravel()

    def box(slot, part, channels):
        """(pixels, taps, channels) read of `slot`, and zeros outside its view."""
        whole = p.output if slot == "y" else p.input
        targets = [b.input if slot == "y" else b.output for b in part.boxes]
        sources = [b.output if slot == "y" else b.input for b in part.boxes]
        strides = (1, 1, 1) if slot == "y" else p.stride
        at = []
        for b, size, count, stride in zip(part.boxes, sources, targets, strides, strict=True):
            assert (size + b.upper - b.lower - 1) // stride + 1 == count, "TMA walks through another number of pixels"
            at.append(b.lower + b.first_offset + stride * np.arange(count)[:, None] + b.tap_stride * np.arange(b.filter))
        d, h, w = (
            at[0][:, None, None, :, None, None],
            at[1][None, :, None, None, :, None],
            at[2][None, None, :, None, None, :],
        )
        inside = (d >= 0) & (d < sources[0]) & (h >= 0) & (h < sources[1]) & (w >= 0) & (w < sources[2])
        pixel = np.where(inside, (d * whole[1] + h) * whole[2] + w, 0)
        image = np.arange(part.N)[:, None, None, None, None, None, None] * int(np.prod(whole))
        places = getattr(part, slot) + (image + pixel)[..., None] * p.G * channels + np.arange(channels)
        return (arrays[slot][places] * inside[..., None]).reshape(part.N * int(np.prod(targets)), -1, channels)

    for part in parts:
        y = pixels(part.y, part.N, [b.output for b in part.boxes], (1, 1, 1), p.output, p.K)
        x = pixels(part.x, part.N, [b.input for b in part.boxes], [b.pixel for b in part.boxes], p.input, p.C)
        k, t, r, s, c = np.ix_(range(p.K), *(range(0, b.tap * b.filter, b.tap) for b in part.boxes), range(p.C))
        w = (part.w + (((k * p.filter[0] + t) * p.filter[1] + r) * p.filter[2] + s) * p.C + c).reshape(p.K, -1, p.C)
        if role == "wgrad":
            of_y = arrays["y"][y[:, None] + np.arange(p.K)]
            store(np.einsum("mk,mtc->ktc", of_y, box("x", part, p.C)).reshape(p.K, -1), w[:, 0, 0])
        elif role == "fprop":
            store(np.einsum("mtc,ktc->mk", box("x", part, p.C), arrays["w"][w]), y)
        elif w.size == 0:
            store(np.zeros((len(x), p.C)), x)
        else:
            store(np.einsum("mtk,ktc->mc", box("y", part, p.K), arrays["w"][w]), x)
    return result.reshape((splits, *shape_of(p, OPEN[role]))).sum(0)


def exact(problem: ConvProblem, config: ConvConfig) -> None:
    rng = np.random.default_rng(0)
    slots = [slot for slot in SLOTS if slot != OPEN[problem.role]]
    operands = {slot: rng.integers(-3, 4, shape_of(problem, slot)).astype(np.float64) for slot in slots}
    parts = plan(problem, config)
    assert not isinstance(parts, str), parts
    np.testing.assert_array_equal(gathered(problem, parts, config.splits, operands), truth(problem, operands))


@pytest.mark.parametrize("name", CASES)
def test_boxes_gather_what_the_definition_asks_for(name):
    case = CASES[name]
    assert refuses(case) is None
    for splits in sorted({config.splits for config in candidates(case)}):
        exact(case, split(splits))


# The model.


def test_phases_cost_no_more_than_the_strides_save():
    """The taps of all phases together are those of the filter, so a stride of 2 costs a quarter of none."""
    image = {"N": 64, "C": 256, "K": 256, "low": 1}
    dense, strided = (problem("dgrad", (56, 56), (3, 3), stride=stride, high=1, **image) for stride in (1, 2))
    config = candidates(dense)[0]
    assert cuda_conv.clocks(strided, config) < cuda_conv.clocks(dense, config) / 3
