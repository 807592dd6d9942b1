"""The CUDA kernels of causal convolutions on a CPU: compiled by a C++ compiler, with AddressSanitizer and UBSan, and run through
tests/csrc/simt.h.

Results are compared with float64, bit for bit on small integers.  Every case runs with three orders of threads, on arrays of exactly their
size.  Needs g++; no GPU and no CUDA.
"""

import dataclasses
import itertools

import harness
import host_code
import numpy as np
import pytest
import simt
from simt import DTYPES
from simt_causal import operand_shapes, run
from test_causal_kernel import ACTIVATIONS, a_problem, near, operands_of, true

from jaxext.backends.cuda import cuda_causal
from jaxext.backends.cuda.cuda_causal import CausalConfig
from jaxext.kernels.epilogue import Epilogue

INVALID, INTERNAL = 1, 2  # jaxext::Status
UNKNOWN = 999  # cudaErrorUnknown
ROLES = ("forward", "backward")
ALL = dict(idx=True, state=True, idx_of_states=True)
GIVEN = [{}, dict(bias=False), dict(state=True), dict(idx=True), ALL, dict(bias=False, state=True)]


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return simt.build(tmp_path_factory, family="causal")


def configs(problem):
    """Strips shorter than a chunk, of several chunks, and what is picked; backward also parts of which some are empty."""
    backward = problem.role == "backward"
    found = [CausalConfig(lanes=2, strip=3, splits=3 if backward else 1), CausalConfig(lanes=4, strip=11, splits=7 if backward else 1)]
    return list(dict.fromkeys([*found, cuda_causal.pick(problem)]))


def check(driver, folder, problems, integers=True, **options):
    """Exact where all is in small integers, otherwise within float32's rounding."""
    asked = []
    for problem in problems:
        operands = operands_of(problem, integers)
        asked += [(problem, config, operands) for config in configs(problem)]
    for (problem, config, operands), reply in zip(asked, run(driver, folder, asked, **options), strict=True):
        try:
            assert reply.code == 0, reply.message
            if integers:
                for got, want in zip(reply.results, true(problem, operands), strict=True):
                    harness.check(got, want)
            else:
                near(problem, reply.results, operands)
        except AssertionError as error:
            raise AssertionError(f"{problem}, {config}: {error}") from None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role, taps", [*itertools.product(ROLES, (1, 2, 3, 4, 5, 8)), ("forward", 9), ("forward", 31)])
def test_values(driver, tmp_path, role, taps, dtype):
    """With and without vectors, in small integers.  In 16 bits, whose sizes are the same, with all operands or few."""
    odd_and_even = itertools.product((24, 7), GIVEN if dtype == "fp32" else GIVEN[-2:])
    check(driver, tmp_path, [a_problem(role, taps, activation=None, dtype=dtype, C=C, **given) for C, given in odd_and_even])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(driver, tmp_path, role, activation):
    problem = a_problem(role, activation=activation, C=8, **ALL)
    operands = operands_of(problem)
    operands["x"] *= 4
    (reply,) = run(driver, tmp_path, [(problem, CausalConfig(lanes=1, strip=8), operands)])
    near(problem, reply.results, operands)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(driver, tmp_path, role, dtype):
    """Sums are in float32 and rounded once."""
    check(driver, tmp_path, [a_problem(role, taps, dtype=dtype, C=16, **ALL) for taps in (4, 7)], integers=False)


@pytest.mark.parametrize("role", ROLES)
def test_mixed_dtypes(driver, tmp_path, role):
    """Weight and bias may have others than x."""
    problems = []
    for x, (weight, bias) in itertools.product(DTYPES, (("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "fp32"))):
        problem = a_problem(role, activation=None, dtype=x, C=8, state=True)
        problems.append(dataclasses.replace(problem, dtypes=(x, weight, x), epilogue=Epilogue(bias=bias)))
    check(driver, tmp_path, problems)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("given", [dict(state=True), ALL], ids=["state", "packed"])
def test_short_sequences(driver, tmp_path, role, given):
    """Also shorter than the filter."""
    sizes = itertools.product((1, 2, 3, 5, 8), (2, 4, 8), (8, 3))
    check(driver, tmp_path, [a_problem(role, taps, activation=None, T=T, C=C, **given) for T, taps, C in sizes])


@pytest.mark.parametrize("role", ROLES)
def test_sizes_of_zero(driver, tmp_path, role):
    """Nothing forward; sums, and the cotangent of a state of sequences without steps, are zeros."""
    for size in ({"B": 0}, {"T": 0}, {"C": 0}):
        check(driver, tmp_path, [a_problem(role, activation=None, **{"C": 8} | size, **given) for given in (dict(state=True), ALL)])


@pytest.mark.parametrize("role", ROLES)
def test_many_sequences(driver, tmp_path, role):
    check(driver, tmp_path, [a_problem(role, activation=None, B=70, T=5, C=8, **given) for given in GIVEN])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
def test_misaligned_arrays(driver, tmp_path, role, dtype):
    """Any of them may start wherever one of its elements can."""
    problem, size = a_problem(role, activation=None, dtype=dtype, C=8, **ALL), DTYPES[dtype](0).nbytes
    names = {*operand_shapes(problem), "first", "sums", "d_initial_states"}
    for name in names:
        check(driver, tmp_path, [problem], shifts={name: 4 if name in ("sums", "seq_idx", "idx_of_states") else size})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_that_is_taken(driver, tmp_path, dtype):
    """The one for exactly 4 taps, vectors where channels and addresses allow them, and fewer channels where registers do not."""
    widest = 16 // DTYPES[dtype](0).nbytes

    def taken(role, shifts=None, **how):
        problem = a_problem(role, dtype=dtype, **{"C": 16} | how)
        (reply,) = run(driver, tmp_path, [(problem, cuda_causal.pick(problem), {})], dry=True, shifts=shifts)
        if not shifts:
            assert (reply.vector, reply.grid) == (cuda_causal.vector(problem), cuda_causal.grid(problem, cuda_causal.pick(problem)))
        return reply.kind, reply.vector

    for role, many in (("forward", widest), ("backward", 4)):
        assert taken(role) == taken(role, state=True) == ("exact", widest)
        assert taken(role, idx=True) == taken(role, taps=3) == ("up to", many)
        assert taken(role, taps=5) == ("many", many)
        assert taken(role, C=9) == taken(role, shifts={"x": 4}) == ("many", 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [8, 5])
def test_pieces_and_packed_sequences_are_the_whole_bit_for_bit(driver, tmp_path, dtype, C):
    """Wherever they begin, forward and in the cotangents of inputs and state."""
    for taps, cut in ((4, 10), (3, 1), (7, 2)):
        before = taps - 1
        forward, backward = (a_problem(role, taps, dtype=dtype, C=C) for role in ROLES)
        config = CausalConfig(lanes=2, strip=6)
        operands = operands_of(forward)
        packed = operands | {"seq_idx": np.repeat(np.array([[0, 1]], np.int32), (cut, 21 - cut), 1).repeat(2, 0)}
        first = operands | {name: operands[name][:, :cut] for name in ("x", "d_y")}
        history = np.concatenate([np.zeros((2, before, C), operands["x"].dtype), operands["x"]], 1)[:, cut : cut + before]
        second = operands | {name: operands[name][:, cut:] for name in ("x", "d_y")} | {"initial_states": history}
        asked = [(forward, config, operands), (dataclasses.replace(forward, idx=True), config, packed)]
        asked += [(dataclasses.replace(forward, T=cut), config, first)]
        asked += [(dataclasses.replace(forward, T=21 - cut, state=dtype), config, second)]
        asked += [(dataclasses.replace(forward, T=21 - cut), config, second)]
        whole, of_packed, one, other, alone = (reply.results[0] for reply in run(driver, tmp_path, asked))
        np.testing.assert_array_equal(np.concatenate([one, other], 1).view(np.uint8), whole.view(np.uint8))
        np.testing.assert_array_equal(np.concatenate([one, alone], 1).view(np.uint8), of_packed.view(np.uint8))
        asked = [(dataclasses.replace(backward, idx=True), config, packed), (dataclasses.replace(backward, T=cut), config, first)]
        asked += [(dataclasses.replace(backward, T=21 - cut), config, second)]
        of_packed, one, alone = (reply.results[0] for reply in run(driver, tmp_path, asked))
        np.testing.assert_array_equal(np.concatenate([one, alone], 1).view(np.uint8), of_packed.view(np.uint8))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("taps", [4, 7])
def test_what_is_infinite_stays_in_its_sequence(driver, tmp_path, role, taps):
    """Infinite inputs and cotangents of one sequence spoil none of the others, of the batch or behind it."""
    for C, given in itertools.product((8, 3), (dict(idx=True), {})):
        problem = a_problem(role, taps, C=C, **given)
        operands = operands_of(problem) | {"seq_idx": np.repeat(np.arange(3, dtype=np.int32)[None], 7, 1).repeat(2, 0)}
        spoiled = dict(operands)
        for name in ("x", "d_y"):
            spoiled[name] = operands[name].copy()
            spoiled[name][1, 7 : 14 if given else 21] = np.inf
        config = CausalConfig(lanes=2, strip=4)
        got, want = (reply.results[0] for reply in run(driver, tmp_path, [(problem, config, of) for of in (spoiled, operands)]))
        keep = np.ones(got.shape[:2], bool)
        keep[1, (7 if given or role == "forward" else 7 - taps + 1) : 14 if given else 21] = False
        np.testing.assert_array_equal(got[keep], want[keep])


def test_partial_sums_are_twice_the_same(driver, tmp_path):
    problem = a_problem("backward", dtype="bf16", B=3, T=50, C=16, state=True)
    asked = [(problem, CausalConfig(lanes=2, strip=8, splits=5), operands_of(problem))] * 2
    for one, other in zip(*(reply.results for reply in run(driver, tmp_path, asked)), strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


LARGE = {  # what there are more than 2^31 of -> the ends of the arrays, what the arrays are besides, blocks, and splits backward
    "elements of a sequence": (dict(B=1, T=40, C=1024), {"T": 1 << 22}, 16, 1 << 13),
    "elements of all sequences": (dict(B=2, T=8, C=64), {"B": 1 << 23}, 1, 1 << 15),
    "elements that go one by one": (dict(B=1, T=40, C=129), {"T": 1 << 24}, 9, 1 << 15),
}


@pytest.mark.parametrize("taps", [4, 7])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("what", LARGE)
def test_more_than_2_to_the_31(driver, tmp_path, what, role, taps):
    """The last blocks of arrays that are zero before their ends give what the ends alone give."""
    sizes, changes, blocks, splits = LARGE[what]
    case = a_problem(role, taps, activation=None, dtype="bf16", **sizes)
    whole = dataclasses.replace(case, **changes)
    assert whole.B * whole.T * whole.C > 2**31 and host_code.refuses(whole, cuda_causal) is None
    config = CausalConfig(lanes=16, strip=64, splits=splits if role == "backward" else 1)
    operands = operands_of(case, integers=True)
    (reply,) = run(driver, tmp_path, [(case, config, operands)], whole=whole, blocks=blocks)
    assert reply.code == 0, reply.message
    harness.check(reply.results[0], true(case, operands)[0])


@pytest.mark.parametrize("role", ROLES)
def test_what_cuda_remembers(driver, tmp_path, role):
    """An error of another's call is not taken for one of the launch; and one of a launch is told once."""
    problem = a_problem(role, C=8)
    asked = [(problem, CausalConfig(lanes=2, strip=8), operands_of(problem))]
    (reply,) = run(driver, tmp_path, asked, pending=UNKNOWN)
    assert (reply.code, reply.message, reply.remembered) == (0, "", UNKNOWN)
    near(problem, reply.results, asked[0][2])
    (reply,) = run(driver, tmp_path, asked, refusal=UNKNOWN)
    assert reply.code == INTERNAL and reply.message.startswith("causal: the launch failed: ") and reply.remembered == 0
