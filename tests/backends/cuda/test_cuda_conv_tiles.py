"""Which tile of a dense convolution for Hopper is expected to be fastest, and into how many parts a sum is split.

These are pure functions on a table of tiles as the compiled module tells it.  They count phases and parts as conv_plan.cc makes them:
both are compared (host_code.py), which needs g++.  No GPU.
"""

import dataclasses
import math
import random

import host_code
from cuda_convs import CASES, candidates, pick, problem, random_problem, refuses
from host_code import plan

from jaxext.backends.cuda import cuda_conv
from jaxext.backends.cuda.cuda_conv import ConvConfig


def test_phases_cost_no_more_than_the_strides_save():
    """The taps of all phases together are those of the filter, so a stride of 2 costs a quarter of none."""
    image = {"N": 64, "C": 256, "K": 256, "low": 1}
    dense, strided = (problem("dgrad", (56, 56), (3, 3), stride=stride, high=1, **image) for stride in (1, 2))
    config = pick(dense)
    assert cuda_conv.clocks(strided, config) < cuda_conv.clocks(dense, config) / 3


def test_the_narrow_tile_is_for_few_channels():
    image = {"N": 64, "low": 1, "high": 1}
    assert pick(problem("fprop", (56, 56), (3, 3), C=64, K=64, **image)).tile_n == 64
    assert pick(problem("dgrad", (56, 56), (3, 3), C=64, K=256, **image)).tile_n == 64
    assert pick(problem("fprop", (28, 28), (3, 3), C=256, K=256, **image)).tile_n == 128
    assert pick(problem("wgrad", (28, 28), (3, 3), C=256, K=256, **image)).tile_n == 128


def test_the_large_tile_is_for_many_tiles():
    few, many = (problem("fprop", (28, 28), (3, 3), C=128, K=128, N=N, low=1, high=1) for N in (4, 256))
    assert (pick(few).tile_m, pick(many).tile_m) == (128, 256)
    sequence = problem("fprop", (8192,), (3,), C=256, K=256, N=8, low=2)
    assert (pick(sequence).tile_m, pick(sequence).tile_n) == (128, 256)
    half_empty = problem("fprop", (56, 56), (3, 3), C=64, K=64, N=64, low=1, high=1)
    assert pick(half_empty).tile_n == 64


def test_few_tiles_are_split_until_the_device_is_full():
    few = pick(problem("wgrad", (56, 56), (3, 3), N=64, C=64, K=64, low=1, high=1))
    assert 132 - 10 < 10 * few.splits <= 132  # nine taps by pairs
    many = pick(problem("wgrad", (14, 14), (3, 3), N=64, C=2048, K=2048, low=1, high=1))
    assert many.splits == 1
    sequence = pick(problem("wgrad", (1 << 16,), (3,), N=1, C=256, K=256, low=2))
    assert sequence.splits > 1


def test_others_than_wgrad_do_not_split():
    assert all(config.splits == 1 for name in CASES if "wgrad" not in name for config in candidates(CASES[name]))


def config_of(splits: int) -> ConvConfig:
    return ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=splits)


def test_phases_are_those_of_the_sources():
    """With groups and the batch label they make the parts that csrc/conv/conv_plan.cc makes."""
    rng, seen = random.Random(0), set()
    for _ in range(400):
        case = random_problem(rng)
        case = dataclasses.replace(case, role="dgrad", name=f"conv{cuda_conv.rank(case)}d_dgrad")
        if 0 in case.output or refuses(case):
            continue
        phases = cuda_conv.phases_of(case)
        assert len(plan(case, config_of(1))) == case.B * case.G * math.prod(phases), case
        seen.add(phases)
    assert len(seen) > 10


def test_sums_are_split_wherever_the_sources_split_them():
    rng, seen = random.Random(0), set()
    for _ in range(300):
        case = random_problem(rng)
        if case.role != "wgrad" or 0 in case.output or refuses(case):
            continue
        taken = [splits for splits in range(1, host_code.most_parts() + 2) if isinstance(plan(case, config_of(splits)), list)]
        assert sorted({config.splits for config in candidates(case)}) == taken, case
        seen.add(len(taken))
    assert len(seen) > 5
