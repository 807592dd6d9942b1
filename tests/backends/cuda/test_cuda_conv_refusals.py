"""What the dense convolutions for Hopper refuse.  Needs g++; no GPU."""

import dataclasses

import pytest
from cuda_convs import CASES, pick, problem, refuses
from host_code import plan

from jaxext.backends.cuda.cuda_conv import GEOMETRY, ConvConfig

REFUSED = {
    "input dilation": (problem("fprop", (8, 8), (3, 3), input_dilation=(1, 2, 1)), "input dilation of 2"),
    "many phases": (problem("dgrad", (8, 8), (3, 3), stride=8, G=9), "64 phases of the strides in each of 9 groups"),
    "long stride": (problem("fprop", (32, 32), (16, 16), stride=16), "stride of 16"),
    "input channels": (problem("fprop", (8, 8), (3, 3), C=12), "12 channels"),
    "output channels": (problem("wgrad", (8, 8), (3, 3), K=4), "4 channels"),
    "many groups": (problem("fprop", (8, 8), (3, 3), G=13, B=5), "65 groups"),
    "3-D, wide filter": (problem("fprop", (40, 4, 4), (33, 1, 1), low=(16, 0, 0), high=(16, 0, 0)), "dilated filter of 33 on axis D"),
    "3-D, far taps without padding": (problem("fprop", (40, 4, 4), (18, 1, 1)), "corners 0 and -17"),
    "2-D, far padding": (problem("fprop", (8, 8), (200, 1), low=(199, 0)), "corners -199"),
    "1-D, far dilation": (problem("fprop", (70000,), (2,), low=0, dilation=65535), "dilated filter of 65536"),
    "only padding": (problem("fprop", (4,), (2,), low=9, high=-6), "lies in the padding"),
    "pixels": (problem("fprop", (1 << 15, 1 << 15), (1, 1), N=2), "pixels"),
    "elements": (problem("fprop", (1 << 15, 1 << 10), (1, 1), C=1 << 16), "elements"),
    "blocks": (problem("wgrad", (200, 200), (100, 100), C=448), "70000 blocks"),
    "outputs": (problem("fprop", (4,), (1,), K=1 << 23), "131072 blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    case, reason = REFUSED[name]
    said = refuses(case)
    assert reason in (said or "")
    assert plan(case, ConvConfig(tile_m=128, tile_n=64, cluster=2)) == f"conv: {said}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": 80}, "compute capability is 8.0"),
        ({"arch": 100}, "compute capability is 10.0"),
        ({"dtypes": ("fp32", "fp32", "fp32")}, "the operands are fp32"),
        ({"dtypes": ("bf16", "fp16", "bf16")}, "the operands are bf16 and fp16"),
        ({"dtypes": ("bf16", "bf16", "fp16")}, "the result is fp16"),
        ({"name": "conv4d_fprop"}, "4 spatial axes"),
        ({"name": "conv0d_fprop"}, "0 spatial axes"),
        ({"dtypes": ("fp16", "fp16", "fp32")}, None),
        ({"N": 0}, None),
        ({"C": 2**31}, "2^31"),
    ],
)
def test_what_the_call_may_be(changes, reason):
    got = refuses(dataclasses.replace(CASES["causal"], **changes))
    assert got is None if reason is None else reason in (got or "")


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
    reason = plan(case, ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=splits))
    assert isinstance(reason, str) and words in reason


def test_sizes_that_no_array_has_are_refused():
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    case = CASES["causal"]
    huge = 2**62
    for name in ("B", "N", "G", "C", "K"):
        for size in (-8, 2**31, huge):
            assert isinstance(plan(dataclasses.replace(case, **{name: size}), config), str)
    for name in GEOMETRY:
        for size in (-huge, 2**31, huge):
            assert isinstance(plan(dataclasses.replace(case, **{name: (1, 1, size)}), config), str), (name, size)


def test_arrays_beyond_counting_are_refused():
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    size = 2**30
    case = dataclasses.replace(CASES["causal"], N=size, C=size, K=size, input=(1, 1, size), output=(1, 1, size), filter=(1, 1, size))
    assert "2^39" in str(plan(case, config))


def test_an_empty_result_has_no_parts():
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    assert plan(dataclasses.replace(CASES["causal"], N=0), config) == []
    assert isinstance(plan(dataclasses.replace(CASES["causal"], C=0), config), str)
    assert pick(dataclasses.replace(CASES["wgrad"], N=0)).splits == 1
