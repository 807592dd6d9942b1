"""The CUDA kernels of depthwise convolutions on a CPU: compiled by a C++ compiler, with AddressSanitizer and UBSan, and run through
tests/csrc/simt.h.

Results are compared with float64, bit for bit on small integers.  Every case runs with three orders of threads, on arrays of exactly their
size.  Needs g++; no GPU and no CUDA.
"""

import dataclasses

import numpy as np
import pytest
import test_depthwise as triton
from simt_families import DEPTHWISE
from test_depthwise import ROLES, of_role, operands_of, problem, shape_of, truth

from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.conv.cuda_depthwise import DepthwiseConfig

pytestmark = pytest.mark.cuda

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


def in_vectors(case):
    """Return the case with enough channels for several vectors, if its outputs per group divide or fill them."""
    return dataclasses.replace(case, G=24 if case.K == 1 else 8)


def questions(narrow):
    """The case as it is, and with enough channels for vectors.

    In bfloat16 it has vectors alone, and every other config: float16, in the long tail, has the same sizes.
    """
    few = narrow.dtypes[0] == "bf16"
    cases = [*[narrow] * (not few), in_vectors(narrow)] if narrow.G else [narrow]
    return [(case, config) for case in cases for config in DEPTHWISE.configs(case)[:: 2 if few else 1]]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CASES)
def test_geometry(simulator, name, role, dtype):
    simulator.check(DEPTHWISE, questions(of_role(CASES[name], role, dtype)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("role", ROLES)
def test_rounding(simulator, role, dtype):
    """The result is the float32 sum, rounded once; the filter gradient may stay in float32."""
    case = of_role(problem((19, 9), (3, 5), G=24, N=2, low=2, high=1), role)
    for result in {dtype, "fp32"} if role == "wgrad" else {dtype}:
        rounded = dataclasses.replace(case, dtypes=(dtype, dtype, result))
        simulator.check(DEPTHWISE, [(rounded, DepthwiseConfig(lanes=2, strip=6))], integers=False)


@pytest.mark.parametrize("role", ROLES)
def test_large_numbers_round_to_infinity_and_small_ones_to_subnormals(simulator, role):
    case = of_role(problem((5,), (1,), G=8), role, "fp16")
    for number, product in ((300, np.inf), (3 * 2.0**-12, 9 * 2.0**-24)):
        operands = {slot: np.full_like(x, number) for slot, x in operands_of(case).items()}
        (got,) = simulator.launch(DEPTHWISE, case, DepthwiseConfig(lanes=1, strip=8), operands).results
        np.testing.assert_array_equal(got, product * (5 if role == "wgrad" else 1))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_that_is_taken(simulator, dtype, role):
    """Vectors where channels and addresses allow it, and a kernel made for the filter where there is one."""
    vector, wgrad = (4 if dtype == "fp32" else 8), role == "wgrad"

    def taken(*sizes, shifts=None, **options):
        case = of_role(problem(*sizes, **{"G": 8} | options), role, dtype)
        return simulator.plan(DEPTHWISE, case, DepthwiseConfig(lanes=1, strip=8), shifts=shifts).kernel

    def plane(taps, of_wgrad, window=True, many=False):
        return ("Wgrad", vector, of_wgrad, window, many) if wgrad else ("GatherPlane", vector, taps, window, many)

    line = plane(4, 4) if wgrad else ("GatherLine", vector, 4)
    assert taken((9,), (4,), low=3) == taken((9,), (4,), low=3, filter_dilation=2) == line
    assert taken((9, 9), (3, 3)) == taken((4, 9, 9), (3, 3, 3)) == plane(3, 3)
    assert taken((9, 9), (7, 7)) == plane(7, 7)
    assert taken((9, 9), (7, 6)) == taken((99,), (31,)) == plane(0, 7)
    assert taken((9, 9), (3, 3), stride=2) == plane(0, 4, window=role == "dgrad")
    assert taken((4, 9), (3, 4)) == plane(0, 4)
    for multiplier in (2, 8, 24):
        assert taken((9,), (4,), K=multiplier) == plane(0, 4, many=True)
    shifted = {"y" if role == "dgrad" else "x": 4 if dtype == "fp32" else 2}
    for options in (dict(G=7), dict(K=3), dict(G=1, K=2), dict(shifts=shifted)):
        assert taken((9,), (4,), **options)[1] == 1


def test_every_kernel_is_run(simulator):
    """A case of test_geometry runs each kernel: as it is, or with channels for vectors."""
    cases = [of_role(each, role) for case in CASES.values() if case.G for each in (case, in_vectors(case)) for role in ROLES]
    cases = [case for case in cases if 0 not in shape_of(case, ROLES[case.role])]
    replies = simulator.run(DEPTHWISE, [(case, cuda_depthwise.candidates(case)[0], None) for case in cases])
    ran = {role: {reply.kernel for case, reply in zip(cases, replies, strict=True) if case.role == role} for role in ROLES}
    planes = {(1, 0, False, False), (4, 0, False, False), *((4, taps, True, False) for taps in (0, 3, 5, 7)), (4, 0, False, True)}
    gather = {("GatherPlane", *plane) for plane in planes | {(4, 0, True, True)}} | {("GatherLine", 4, taps) for taps in (2, 3, 4)}
    sums = {(1, 4, False, False), (4, 4, False, False), *((4, taps, True, False) for taps in (2, 3, 4, 5, 7)), (4, 4, False, True)}
    assert ran == {"fprop": gather, "dgrad": gather, "wgrad": {("Wgrad", *kernel) for kernel in sums | {(4, 4, True, True)}}}


def test_what_no_target_or_tap_meets_is_not_multiplied(simulator):
    """An infinity that the last target does not reach, beside a strip that ends there; and taps of other phases."""
    config = DepthwiseConfig(lanes=1, strip=8)
    for high in (-1, -2, -3):
        summed, gathered = of_role(problem((9,), (3,), G=8, high=high), "wgrad"), problem((9,), (31,), G=8, low=25, high=5 + high)
        for case, met in ((summed, slice(None)), (gathered, slice(9 + high - 5))):
            operands = operands_of(case)
            operands["x"][:, :, :, :, 9 + high :] = np.inf
            assert np.isfinite(simulator.launch(DEPTHWISE, case, config, operands).results[0][:, :, :, :, met]).all()


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
def test_an_infinity_reaches_only_targets_that_meet_it(simulator, case, role):
    case = of_role(case, role, "bf16")
    operands = operands_of(case)
    source = operands["x" if role == "fprop" else "y"]
    source[...] = 0
    source[:, :, -1, -1, 12] = 1
    met = truth(case, operands | {"w": np.ones_like(operands["w"])}) > 0
    source[source > 0] = np.inf
    (got,) = simulator.launch(DEPTHWISE, case, DepthwiseConfig(lanes=1, strip=5), operands).results
    np.testing.assert_array_equal(np.isfinite(got.astype(np.float32)), ~met)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_parts_of_the_sum(simulator, splits):
    """Some of them empty; twice the same bits."""
    case = of_role(problem((13, 9), (3, 3), G=16, N=3, low=1, high=1), "wgrad", "bf16")
    config = DepthwiseConfig(lanes=2, strip=4, pieces=2, splits=splits)
    assert simulator.plan(DEPTHWISE, case, config).grid == (2, splits, 1)
    simulator.check(DEPTHWISE, [(case, config)])
    operands = operands_of(case, integers=False)
    first, second = (simulator.launch(DEPTHWISE, case, config, operands).results[0] for _ in range(2))
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
@pytest.mark.parametrize("role", ["fprop", "dgrad"])
def test_filters_that_do_not_fit_into_shared_memory(simulator, case, role):
    """Some rows at a time."""
    case, config = of_role(case, role), DepthwiseConfig(lanes=16, strip=2)
    assert 0 < simulator.plan(DEPTHWISE, case, config).shared_bytes <= 48 << 10
    simulator.check(DEPTHWISE, [(case, config)])
