"""The hand-written CUDA kernels on a CPU: compiled by a C++ compiler, with AddressSanitizer and UBSan, and run through tests/csrc/simt.h.

Results are compared with float64, bit for bit on small integers.  Every case runs with three orders of threads, on arrays of exactly their
size.  Needs g++; no GPU and no CUDA.
"""

import dataclasses
import math

import harness
import host_code
import numpy as np
import pytest
import test_depthwise as triton
from simt import DTYPES, build, run
from test_depthwise import ROLES, of_role, operands_of, problem, truth

from jaxext.backends.cuda import cuda_depthwise
from jaxext.backends.cuda.cuda_depthwise import DepthwiseConfig

INVALID = 1  # jaxext::Status

CASES = triton.CASES | {
    "causal k3, several chunks": problem((37,), (3,), N=2, low=2),
    "causal k7": problem((21,), (7,), low=6),
    "causal k8": problem((21,), (8,), low=7),
    "k6, even": problem((11,), (6,), low=2, high=3),
    "5x5": problem((9, 11), (5, 5), low=2, high=2),
    "5x5 dilated": problem((9, 14), (5, 5), filter_dilation=(2, 3), low=4, high=4),
    "1x7": problem((3, 12), (1, 7), low=(0, 3), high=(0, 3)),
    "7x1": problem((12, 3), (7, 1), low=(3, 0), high=(3, 0)),
    "31x2": problem((6, 5), (31, 2), G=2, low=(15, 1), high=(15, 0)),
    "2x31": problem((3, 14), (2, 31), G=2, low=(0, 15), high=(1, 15)),
    "k3 stride 7": problem((31,), (3,), stride=7, low=1, high=1),
    "3x3 stride 5 and 4": problem((17, 15), (3, 3), stride=(5, 4), low=1, high=1),
    "stride beyond the image": problem((4, 5), (2, 2), stride=9, low=1),
    "k2 stride 2 dilation 4": problem((23,), (2,), stride=2, filter_dilation=4, low=4),
    "transposed, stride 3 of k5": problem((5, 4), (5, 5), input_dilation=3, low=3, high=3),
    "many images, batched filters": problem((3, 4), (3, 3), B=3, N=11, low=1, high=1),
    "no padding at all": problem((9, 8), (3, 3)),
    "one target": problem((4,), (4,)),
    "k17, a window that begins anew": problem((40,), (17,), G=3, low=8, high=8),
    "2x3x31": problem((2, 2, 9), (2, 3, 31), G=1, low=(1, 1, 15), high=(0, 1, 15)),
    "3-D dgrad in phases": problem((5, 4, 6), (3, 2, 3), G=3, stride=(2, 3, 2), low=1, high=1),
    "3-D dilated": problem((6, 5, 7), (2, 3, 2), G=2, filter_dilation=(3, 1, 2), low=1, high=2),
    "3-D transposed": problem((2, 3, 3), (3, 2, 4), G=2, input_dilation=(2, 1, 2), low=1, high=2),
    "planes of several images": problem((4, 1, 3), (3, 1, 1), G=3, N=3, B=2, low=(1, 0, 0), high=(1, 0, 0)),
    "multiplier 4, dilated rows": problem((3, 11), (2, 5), G=2, K=4, low=(1, 4), high=4, filter_dilation=(1, 2)),
    "multiplier 4 by 2": problem((7, 9), (3, 3), G=2, K=4, stride=2, low=1, high=1),
    "multiplier 2 transposed": problem((3, 4), (4, 4), G=4, K=2, input_dilation=2, low=2, high=2),
    "multiplier 8": problem((5, 9), (3, 3), G=1, K=8, N=2, low=1, high=1),
    "multiplier 16": problem((4, 9), (2, 3), G=1, K=16, low=1, high=1),
    "multiplier 24 in 3-D": problem((2, 3, 4), (2, 2, 3), G=1, K=24, low=1, high=1),
    "multiplier 12": problem((6,), (3,), G=2, K=12, low=1, high=1),
}


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return build(tmp_path_factory)


@pytest.fixture
def launch(driver, tmp_path):
    """launch(case, config, operands, ...) -> Reply, or an AssertionError with what the driver said."""

    def launch(case, config, operands=None, **options):
        return run(driver, tmp_path, [(case, config, operands_of(case) if operands is None else operands)], **options)[0]

    return launch


def configs(case):
    """Strips shorter than a chunk, of several chunks, and what is picked; of wgrad, pieces and splits of which some are empty."""
    found = [DepthwiseConfig(lanes=2, strip=3), DepthwiseConfig(lanes=1, strip=11), cuda_depthwise.pick(case)]
    if case.role == "wgrad":
        found[0] = dataclasses.replace(found[0], pieces=4, splits=3)
        found[1] = dataclasses.replace(found[1], pieces=1)
    return list(dict.fromkeys(found))


def in_vectors(case):
    """With enough channels for several vectors, if its outputs per group divide or fill them."""
    return dataclasses.replace(case, G=24 if case.K == 1 else 8)


def questions(narrow):
    """The case as it is, and with enough channels for vectors.

    In bfloat16 it has vectors alone, and every other config: float16, in the long tail, has the same sizes.
    """
    few = narrow.dtypes[0] == "bf16"
    cases = [*[narrow] * (not few), in_vectors(narrow)] if narrow.G else [narrow]
    return [(case, config, operands_of(case)) for case in cases for config in configs(case)[:: 2 if few else 1]]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CASES)
def test_geometry(driver, tmp_path, name, role, dtype):
    asked = questions(of_role(CASES[name], role, dtype))
    for (case, config, operands), reply in zip(asked, run(driver, tmp_path, asked), strict=True):
        assert reply.code == 0, reply.message
        try:
            harness.check(reply.result, truth(case, operands))
        except AssertionError as error:
            raise AssertionError(f"{case}, {config}: {error}") from None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
def test_rounding(launch, role, dtype):
    """The result is the float32 sum, rounded once; the filter gradient may stay in float32."""
    for result in {dtype, "fp32"} if role == "wgrad" else {dtype}:
        case = dataclasses.replace(of_role(problem((19, 9), (3, 5), G=24, N=2, low=2, high=1), role), dtypes=(dtype, dtype, result))
        operands = operands_of(case, integers=False)
        magnitudes = truth(case, {slot: np.abs(x.astype(np.float64)) for slot, x in operands.items()})
        harness.check(launch(case, DepthwiseConfig(lanes=2, strip=6), operands).result, truth(case, operands), magnitudes)


@pytest.mark.parametrize("role", ROLES)
def test_large_numbers_round_to_infinity_and_small_ones_to_subnormals(launch, role):
    case = of_role(problem((5,), (1,), G=8), role, "fp16")
    operands = {slot: np.full_like(x, 300) for slot, x in operands_of(case).items()}
    assert np.isinf(launch(case, DepthwiseConfig(lanes=1, strip=8), operands).result).all()
    operands = {slot: np.full_like(x, 3 * 2.0**-12) for slot, x in operands.items()}
    np.testing.assert_array_equal(
        launch(case, DepthwiseConfig(lanes=1, strip=8), operands).result, (9 * 2.0**-24 * (5 if role == "wgrad" else 1))
    )


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_that_is_taken(launch, dtype, role):
    """Vectors where channels and addresses allow it, and a kernel made for the filter where there is one."""

    def taken(case, **options):
        reply = launch(of_role(case, role, dtype), DepthwiseConfig(lanes=1, strip=8), dry=True, **options)
        return (reply.vector, reply.window, reply.line, reply.taps) + ("many",) * reply.many

    line, any_taps = role != "wgrad", 0
    assert taken(problem((9,), (4,), G=8, low=3)) == (True, True, line, 4)
    assert taken(problem((9,), (4,), G=8, low=3, filter_dilation=2)) == (True, True, line, 4)
    assert taken(problem((9, 9), (3, 3), G=8)) == (True, True, False, 3)
    assert taken(problem((9, 9), (7, 7), G=8)) == (True, True, False, 7)
    assert taken(problem((9, 9), (7, 6), G=8)) == (True, True, False, 7 if role == "wgrad" else any_taps)
    assert taken(problem((99,), (31,), G=8)) == (True, True, False, 7 if role == "wgrad" else any_taps)
    assert (
        taken(problem((9, 9), (3, 3), G=8, stride=2))
        == ({"fprop": (True, False, False, 0), "dgrad": (True, True, False, 0), "wgrad": (True, False, False, 4)}[role])
    )
    assert taken(problem((9,), (4,), G=7))[0] is False
    assert taken(problem((4, 9, 9), (3, 3, 3), G=8)) == (True, True, False, 3)
    assert taken(problem((4, 9), (3, 4), G=8)) == (True, True, False, 4 if role == "wgrad" else any_taps)
    for multiplier in (2, 8, 24):
        assert taken(problem((9,), (4,), G=8, K=multiplier)) == (True, True, False, 4 if role == "wgrad" else any_taps, "many")
    assert taken(problem((9,), (4,), G=8, K=3))[0] is False
    assert taken(problem((9,), (4,), G=1, K=2))[0] is False
    assert taken(problem((9,), (4,), G=8), shifts=(DTYPES[dtype](0).nbytes, 0, 0))[0] is False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
def test_misaligned_arrays(driver, tmp_path, role, dtype):
    """Any of them may start wherever one of its elements can."""
    case = of_role(problem((9,), (4,), G=8, low=3), role, dtype)
    operands = operands_of(case)
    size = DTYPES[dtype](0).nbytes
    for shifts in [(0, 0, 0), (size, 0, 0), (0, size, 0), (0, 0, size), (8, 8, 8), (0, 16 - size, 8)]:
        (reply,) = run(driver, tmp_path, [(case, DepthwiseConfig(lanes=4, strip=8), operands)], shifts=shifts)
        harness.check(reply.result, truth(case, operands))


def test_what_no_target_or_tap_meets_is_not_multiplied(launch):
    """An infinity that the last target does not reach, beside a strip that ends there; and taps of other phases."""
    config = DepthwiseConfig(lanes=1, strip=8)
    for high in (-1, -2, -3):
        case = of_role(problem((9,), (3,), G=8, high=high), "wgrad")
        operands = operands_of(case)
        operands["x"][:, :, :, :, 9 + high :] = np.inf
        assert np.isfinite(launch(case, config, operands).result).all()
        case = of_role(problem((9,), (31,), G=8, low=25, high=5 + high), "fprop")
        operands = operands_of(case)
        operands["x"][:, :, :, :, 9 + high :] = np.inf
        assert np.isfinite(launch(case, config, operands).result[:, :, :, :, : 9 + high - 5]).all()


@pytest.mark.parametrize("role", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    "case",
    [
        problem((3, 24), (2, 31), G=8, low=(1, 30)),
        problem((3, 2, 24), (2, 2, 5), G=8, low=(1, 0, 4), high=(0, 1, 0)),
        problem((24,), (5,), G=8, K=4, low=8, filter_dilation=2),
        problem((24,), (6,), G=8, K=16, low=5, high=1, input_dilation=2),
    ],
    ids=["31 taps", "3-D", "multiplier 4", "multiplier 16 in phases"],
)
def test_an_infinity_reaches_only_targets_that_meet_it(launch, case, role):
    case = of_role(case, role, "bf16")
    operands = operands_of(case)
    source = operands["x" if role == "fprop" else "y"]
    source[...] = 0
    source[:, :, -1, -1, 12] = 1
    met = truth(case, operands | {"w": np.ones_like(operands["w"])}) > 0
    source[source > 0] = np.inf
    got = launch(case, DepthwiseConfig(lanes=1, strip=5), operands).result
    np.testing.assert_array_equal(np.isfinite(got.astype(np.float32)), ~met)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_parts_of_the_sum(launch, splits):
    """Some of them empty; twice the same bits."""
    case = of_role(problem((13, 9), (3, 3), G=16, N=3, low=1, high=1), "wgrad", "bf16")
    config = DepthwiseConfig(lanes=2, strip=4, pieces=2, splits=splits)
    reply = launch(case, config)
    assert reply.grid == (2, splits, 1)
    harness.check(reply.result, truth(case, operands_of(case)))
    operands = operands_of(case, integers=False)
    first, second = (launch(case, config, operands).result for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.parametrize(
    "case",
    [
        problem((5, 4), (31, 31), G=64, low=15, high=15),
        problem((3, 2, 4), (5, 3, 9), G=64, low=(2, 1, 4), high=(2, 1, 4)),
        problem((3, 4), (7, 7), G=16, K=16, low=3, high=3),
    ],
    ids=["31x31", "5x3x9", "multiplier 16"],
)
def test_filters_that_do_not_fit_into_shared_memory(launch, case):
    """Some rows at a time."""
    for role in ("fprop", "dgrad"):
        case = of_role(case, role)
        reply = launch(case, DepthwiseConfig(lanes=16, strip=2))
        assert 0 < reply.shared_bytes <= 48 << 10
        harness.check(reply.result, truth(case, operands_of(case)))


HUGE = problem((1 << 20, 1 << 10), (3, 3), G=8, N=1 << 10, low=1, high=1)
REFUSED = [  # by every config
    ({"C": 2}, "2 input channels per group, it takes 1"),
    ({"K": 0}, "0 outputs per group, it takes 1 to 65535"),
    ({"K": 65536}, "65536 outputs per group, it takes 1 to 65535"),
    ({"G": 1 << 30}, "1073741824 outputs of all groups, it takes fewer than 1073741824"),
    ({"G": 1 << 16, "K": 1 << 14}, "1073741824 outputs of all groups, it takes fewer than 1073741824"),
    ({"N": -1}, "a size is -1, it takes 0 or more"),
    ({"input": (1, -1, 6)}, "a size is -1, it takes 0 or more"),
    ({"stride": (1, 0, 1)}, "a stride or dilation of 0, it takes 1 or more"),
    ({"filter": (1, 3, 32)}, "32 taps along an axis, it takes 31 at most"),
    ({"stride": (1, 65536, 1)}, "a stride or input dilation of 65536, it takes 65535 at most"),
    ({"input_dilation": (1, 1, 65536)}, "a stride or input dilation of 65536, it takes 65535 at most"),
    ({"filter_dilation": (1, 1, 1 << 30)}, "an axis reaches 3221225479 places, it takes fewer than 1073741824"),
    ({"filter": (32, 3, 3)}, "32 taps along an axis, it takes 31 at most"),
    ({"stride": (65536, 1, 1)}, "a stride or input dilation of 65536, it takes 65535 at most"),
    ({"low": (1 << 30, 0, 0)}, "an axis reaches 1073741826 places, it takes fewer than 1073741824"),
    ({"low": (0, 1 << 30, 0)}, "an axis reaches 1073741832 places, it takes fewer than 1073741824"),
    ({"filter_dilation": (1, 1, 1 << 25)}, "neighbours in a strip or a filter row lie 33554432 places apart, it takes fewer than 33554432"),
    ({"B": 65536}, "B=65536 and 1 phases, it takes 65535 at most"),
    (
        {"role": "dgrad", "input": (1, 600, 600), "stride": (1, 512, 512)},
        "B=1 and 262144 phases, it takes 65535 at most",
    ),
    (
        {"role": "dgrad", "input": (60, 60, 60), "stride": (50, 50, 50)},
        "B=1 and 125000 phases, it takes 65535 at most",
    ),
    (
        {"N": HUGE.N, "input": HUGE.input, "output": HUGE.output},
        "about 1100585369600 positions, it takes fewer than 2147418112",
    ),
    ({"dtypes": ("bf16", "bf16", "fp32")}, "bf16 times bf16 into fp32, it takes a single dtype"),
    ({"role": "wgrad", "dtypes": ("bf16", "bf16", "fp16")}, "bf16 times bf16 into fp16, it takes a single dtype"),
]


@pytest.mark.parametrize("changes, reason", REFUSED)
def test_refusals(launch, changes, reason):
    """The launcher says the same as the module says before a program is made."""
    case = dataclasses.replace(of_role(CASES["3x3"], changes.get("role", "fprop")), **changes)
    assert host_code.refuses(case, cuda_depthwise) == reason
    reply = launch(case, DepthwiseConfig(lanes=2, strip=8), {}, dry=True)
    assert (reply.code, reply.message) == (INVALID, f"depthwise: {reason}")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"name": "conv4d_fprop"}, "4 spatial axes, want 1 to 3"),
        ({"name": "conv0d_fprop"}, "0 spatial axes, want 1 to 3"),
        ({"dtypes": ("i8",) * 3}, "dtype i8, it takes fp32, bf16, fp16"),
        ({"dtypes": ("bf16", "fp32", "bf16")}, "bf16 times fp32 into bf16, it takes a single dtype"),
        ({"arch": 75}, "compute capability 7.5, it takes 8.0 and newer"),
    ],
)
def test_refusals_before_a_launch(changes, reason):
    """Of what a launcher is not told."""
    assert host_code.refuses(CASES["3x3"], cuda_depthwise) is None
    assert host_code.refuses(dataclasses.replace(CASES["3x3"], **changes), cuda_depthwise) == reason


LIMITS = {  # of each: the last problem within and the first beyond it
    "groups": ({"G": (1 << 30) - 1}, {"G": 1 << 30}),
    "outputs of a group": ({"G": 1, "K": 65535}, {"G": 1, "K": 65536}),
    "outputs of all groups": ({"G": 35791394, "K": 30}, {"G": 1 << 25, "K": 32}),
    "planes": ({"N": 61354, "output": (50, 100, 6)}, {"N": 61355, "output": (50, 100, 6)}),
    "taps": ({"filter": (1, 31, 3)}, {"filter": (1, 32, 3)}),
    "steps": ({"input_dilation": (1, 1, 65535)}, {"input_dilation": (1, 1, 65536)}),
    "places": ({"low": (0, (1 << 30) - 9, 0)}, {"low": (0, (1 << 30) - 8, 0)}),
    "places below": ({"low": (0, 9 - (1 << 30), 0)}, {"low": (0, 8 - (1 << 30), 0)}),
    "batches": ({"B": 65535}, {"B": 65536}),
    "places apart": ({"filter_dilation": (1, 1, (1 << 25) - 1)}, {"filter_dilation": (1, 1, 1 << 25)}),
    "positions": ({"N": 61354, "output": (1, 5000, 6)}, {"N": 61355, "output": (1, 5000, 6)}),
    "phases": (
        {"role": "dgrad", "input": (1, 255, 257), "stride": (1, 511, 509)},
        {"role": "dgrad", "input": (1, 256, 256), "stride": (1, 511, 509)},
    ),
    "capability": ({"arch": 80}, {"arch": 79}),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_are_where_they_are(limit):
    within, beyond = (
        host_code.refuses(dataclasses.replace(of_role(CASES["3x3"], c.get("role", "fprop")), **c), cuda_depthwise) for c in LIMITS[limit]
    )
    assert within is None and beyond is not None


REFUSED_CONFIGS = [
    ({}, {"lanes": 3}, "lanes is 3, want a power of two up to 32"),
    ({}, {"lanes": 64}, "lanes is 64, want a power of two up to 32"),
    ({}, {"strip": 0}, "strip is 0, want 1 to"),
    ({}, {"pieces": 2}, "fprop: pieces is 2, want a power of two up to 1"),
    ({}, {"splits": 2}, "fprop: splits is 2, want 1 to 1"),
    ({"role": "wgrad"}, {"lanes": 32, "pieces": 8}, "wgrad: pieces is 8, want a power of two up to 4"),
    ({"role": "wgrad"}, {"splits": 65536}, "wgrad: splits is 65536, want 1 to 65535"),
    (
        {"G": (1 << 29) + 1, "input": (1, 64, 64), "output": (1, 64, 64)},
        {"lanes": 1, "strip": 8},
        "4294967304 blocks along the first axis of the grid, it takes 2147483647 at most",
    ),
]


@pytest.mark.parametrize("problem_changes, config_changes, message", REFUSED_CONFIGS)
def test_refused_configs(launch, problem_changes, config_changes, message):
    """Said in words, before anything is launched."""
    role = problem_changes.get("role", "fprop")
    case = dataclasses.replace(of_role(CASES["3x3"], role), **problem_changes)
    reply = launch(case, dataclasses.replace(DepthwiseConfig(lanes=2, strip=8), **config_changes), {}, dry=True)
    assert reply.code == INVALID and reply.message.startswith("depthwise") and message in reply.message


LARGE = triton.LARGE | {
    "multiplier 2": problem((56, 56), (3, 3), G=64, K=2, N=32, low=1, high=1),
    "multiplier 32": problem((64, 64), (7, 7), G=32, K=32, N=32, low=3, high=3),
    "31x31": problem((32, 32), (31, 31), G=384, N=32, low=15, high=15),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
def test_what_is_picked_can_be_launched(driver, tmp_path, role, dtype):
    """The grid is what Python takes it for, and a multiprocessor gets enough to do."""
    cases = [of_role(case, role, dtype, arch=arch) for case in LARGE.values() for arch in (80, 90, 100)]
    asked = [(case, config, {}) for case in cases for config in cuda_depthwise.candidates(case)]
    for (case, config, _), reply in zip(asked, run(driver, tmp_path, asked, dry=True), strict=True):
        assert reply.code == 0, reply.message
        assert reply.grid == cuda_depthwise.grid(case, config)
        assert reply.vector
    for case in cases:
        assert host_code.refuses(case, cuda_depthwise) is None
        assert cuda_depthwise.pick(case) in cuda_depthwise.candidates(case)
        assert math.prod(cuda_depthwise.grid(case, cuda_depthwise.pick(case))) >= 132
