"""TMA's boxes of the dense convolutions for Hopper.

conv_plan.cc is compiled by a C++ compiler (host_code.py) and asked for its parts and boxes; gathering by these as TMA does must give
what the definition gives, bit for bit on small integers.  Needs g++; no GPU and no CUDA.
"""

import random

import numpy as np
import pytest
from cuda_convs import CASES, OPEN, SLOTS, candidates, random_problem, refuses, shape_of, truth
from host_code import Part, plan

from jaxext.backends.cuda.cuda_conv import ConvConfig
from jaxext.kernels.geometry import ConvProblem


def gathered(problem: ConvProblem, parts: list[Part], splits: int, operands) -> np.ndarray:
    """What the kernels compute of the parts: a matrix product of what TMA reads through the boxes, stored as a matrix."""
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
        exact(case, ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=splits))


def test_boxes_of_random_problems():
    rng = random.Random(0)
    taken = 0
    for _ in range(400):
        case = random_problem(rng)
        if 0 in case.output:
            continue
        configs = candidates(case)
        if reason := refuses(case):
            assert plan(case, configs[0]) == f"conv: {reason}"
            continue
        taken += 1
        exact(case, rng.choice(configs))
        for config in configs:
            assert not isinstance(plan(case, config), str), (case, config)
    assert taken > 200
