"""The launchers of the hand-written CUDA kernels on a CPU (simt.py): where offsets leave 32 bits, what the CUDA runtime answers, and
which problems they take."""

import dataclasses
import math

import harness
import host_code
import numpy as np
import pytest
import simt
from test_depthwise import ROLES, of_role, operands_of, problem, shape_of, truth
from test_simt import CASES, in_vectors

from jaxext.backends.cuda import cuda_depthwise
from jaxext.backends.cuda.cuda_depthwise import DepthwiseConfig

INVALID, INTERNAL = 1, 2  # jaxext::Status
UNKNOWN = 999  # cudaErrorUnknown


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return simt.build(tmp_path_factory)


FAR = problem((40,), (2,), G=1024, low=1 << 21, filter_dilation=1 << 21)
LARGE = {  # what there are more than 2^31 of -> the ends of the arrays, what the arrays are besides, blocks; pieces and splits of wgrad
    "elements of an image": (problem((40,), (4,), G=1024, low=3), {"N": 2, "input": (1, 1, 1 << 22)}, 8, 1, 4096),
    "elements of all lines": (problem((4, 30), (3, 3), G=512, low=1, high=1), {"N": 3, "input": (1, 1 << 16, 30)}, 12, 1, 8192),
    "elements that are read one by one": (problem((40,), (3,), G=129, low=2), {"N": 4, "input": (1, 1, 1 << 22)}, 9, 1, 16384),
    "elements of all batches": (problem((16, 16), (3, 3), G=136, low=1, high=1), {"B": 65535}, 6, 1, 1),
    "elements from one target to the next": (FAR, {"input": (1, 1, 1 << 22)}, 40, 1, 1 << 15),
    "taps of all channels": (problem((1, 1), (7, 7), G=8, low=3, high=3), {"G": 1 << 26}, 1, 8, 1),
    "elements of all planes": (
        problem((4, 3, 5), (3, 2, 3), G=264, low=(1, 0, 1), high=(1, 1, 1)),
        {"N": 40, "input": (14000, 3, 5)},
        18,
        1,
        4200,
    ),
    "elements of all outputs": (problem((40,), (4,), G=64, K=16, low=3), {"N": 2, "input": (1, 1, 1 << 22)}, 8, 1, 4096),
    "outputs read one by one": (problem((40,), (3,), G=43, K=3, low=2), {"N": 4, "input": (1, 1, 1 << 22)}, 9, 1, 16384),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("what", LARGE)
def test_more_than_2_to_the_31(driver, tmp_path, what, role):
    """The last blocks of arrays that are zero before their ends give what the ends alone give."""
    case, changes, blocks, pieces, splits = LARGE[what]
    case = of_role(case, role, "bf16")
    whole = dataclasses.replace(case, **changes, output=changes.get("input", case.output))
    assert max(math.prod(shape) for shape in whole.shapes.values()) > 2**31 and host_code.refuses(whole, cuda_depthwise) is None
    config = DepthwiseConfig(lanes=16, strip=64)
    if role == "wgrad":
        config = dataclasses.replace(config, pieces=pieces, splits=splits)
    operands = operands_of(case)
    (reply,) = simt.run(driver, tmp_path, [(case, config, operands)], whole=whole, blocks=blocks)
    assert reply.code == 0, reply.message
    harness.check(reply.result, truth(case, operands))


@pytest.mark.parametrize("role", ROLES)
def test_what_cuda_remembers(driver, tmp_path, role):
    """An error of another's call, which nobody asked for, was taken for one of the launch; and one of a launch is told once."""
    case = of_role(CASES["3x3"], role)
    asked = [(case, DepthwiseConfig(lanes=2, strip=8), operands_of(case))]
    (reply,) = simt.run(driver, tmp_path, asked, pending=UNKNOWN)
    assert (reply.code, reply.message, reply.remembered) == (0, "", UNKNOWN)
    harness.check(reply.result, truth(case, asked[0][2]))
    (reply,) = simt.run(driver, tmp_path, asked, refusal=UNKNOWN)
    assert reply.code == INTERNAL and reply.message.startswith("depthwise: the launch failed: ") and reply.remembered == 0


def random_problem(rng, role):
    """Of sizes from 1 to the limits, and sometimes at one or one beyond it."""

    def size(limit):
        return limit + int(rng.integers(-1, 2)) if rng.random() < 0.1 else int(2 ** rng.uniform(0, rng.uniform(0, math.log2(limit))))

    def sizes(limit):
        return tuple(size(limit) if rng.random() < 0.4 else 1 for _ in range(rank))

    rank = int(rng.integers(1, 4))
    input, filter = sizes(1 << 30), sizes(31)
    steps = dict(stride=sizes(65535), input_dilation=sizes(65535), filter_dilation=sizes(1 << 25))
    low, high = (tuple(int(rng.choice([-1, 1])) * n for n in sizes(1 << 30)) for _ in range(2))
    outputs = size(65535) if rng.random() < 0.4 else 1
    case = problem(input, filter, G=size(1 << 30), K=outputs, N=sizes(1 << 31)[0], B=sizes(65535)[0], low=low, high=high, **steps)
    return of_role(case, role, str(rng.choice(list(simt.DTYPES))))


def test_what_is_taken_can_be_launched(driver, tmp_path):
    """In every configuration, wherever the arrays start, if they fit into memory.  2^30 channels were taken, and then refused."""
    rng = np.random.default_rng(0)
    cases = [random_problem(rng, role) for _ in range(1000) for role in ROLES]
    elements = [[math.prod(shape) for shape in case.shapes.values()] for case in cases]
    cases = [case for case, counts in zip(cases, elements, strict=True) if 0 < min(counts) and max(counts) < 1 << 38]
    taken = [case for case in cases if host_code.refuses(case, cuda_depthwise) is None]
    assert min(len(taken), len(cases) - len(taken)) > 100
    asked = [(case, config, {}) for case in taken for config in cuda_depthwise.candidates(case)]
    for shifts in ((0, 0, 0), (8, 8, 8)):
        for (case, config, _), reply in zip(asked, simt.run(driver, tmp_path, asked, dry=True, shifts=shifts), strict=True):
            assert reply.code == 0, f"{reply.message}: {case}, {config}"
            assert reply.grid == cuda_depthwise.grid(case, config) or any(shifts)


def test_every_kernel_is_run(driver, tmp_path):
    """By a case of test_simt.test_geometry: as it is, or with channels for vectors."""
    cases = [of_role(each, role) for case in CASES.values() if case.G for each in (case, in_vectors(case)) for role in ROLES]
    cases = [case for case in cases if 0 not in shape_of(case, ROLES[case.role])]
    replies = simt.run(driver, tmp_path, [(case, cuda_depthwise.pick(case), {}) for case in cases], dry=True)
    ran = {role: set() for role in ROLES}
    for case, reply in zip(cases, replies, strict=True):
        ran[case.role].add((reply.many, reply.vector, reply.vector and reply.window, reply.line, reply.taps))
    gather = {(False, False, False, 0), (True, False, False, 0), *((True, True, False, taps) for taps in (0, 3, 5, 7))}
    gather = {(False, *kernel) for kernel in gather | {(True, True, True, taps) for taps in (2, 3, 4)}}
    wgrad = {(False, False, False, 4), (True, False, False, 4), *((True, True, False, taps) for taps in (2, 3, 4, 5, 7))}
    wgrad = {(False, *kernel) for kernel in wgrad}
    many, many_wgrad = ({(True, True, window, False, taps) for window in (False, True)} for taps in (0, 4))
    assert ran == {"fprop": gather | many, "dgrad": gather | many, "wgrad": wgrad | many_wgrad}
