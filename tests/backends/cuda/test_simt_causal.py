"""The CUDA kernels of causal convolutions on a CPU, as test_simt.py runs those of depthwise convolutions."""

import dataclasses
import itertools

import numpy as np
import pytest
from simt_families import CAUSAL
from test_causal_kernel import ACTIVATIONS, a_problem, operands_of

from jaxext.kernels.epilogue import Epilogue
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.causal.cuda import CausalConfig

pytestmark = pytest.mark.cuda

DTYPES = ("fp32", "bf16", "fp16")
ROLES = ("forward", "backward")
ALL = dict(idx=True, state=True, idx_of_states=True)
GIVEN = [{}, dict(bias=False), dict(state=True), dict(idx=True), ALL, dict(bias=False, state=True)]


def check(simulator, problems, **options):
    simulator.check(CAUSAL, [(problem, config) for problem in problems for config in CAUSAL.configs(problem)], **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role, taps", [*itertools.product(ROLES, (1, 2, 3, 4, 5, 8)), ("forward", 9), ("forward", 31)])
def test_values(simulator, role, taps, dtype):
    """Small integers are exact with and without vectors.  In 16 bits, whose sizes are the same, cases have all operands or few."""
    odd_and_even = itertools.product((24, 7), GIVEN if dtype == "fp32" else GIVEN[-2:])
    check(simulator, [a_problem(role, taps, activation=None, dtype=dtype, C=C, **given) for C, given in odd_and_even])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(simulator, role, activation):
    problem = a_problem(role, activation=activation, C=8, **ALL)
    operands = operands_of(problem)
    operands["x"] *= 4
    CAUSAL.check(problem, simulator.launch(CAUSAL, problem, CausalConfig(lanes=1, strip=8), operands).results, operands, False)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(simulator, role, dtype):
    """Sums are in float32 and rounded once."""
    check(simulator, [a_problem(role, taps, dtype=dtype, C=16, **ALL) for taps in (4, 7)], integers=False)


@pytest.mark.parametrize("role", ROLES)
def test_mixed_dtypes(simulator, role):
    """Weight and bias may have others than x."""
    problems = []
    for x, (weight, bias) in itertools.product(DTYPES, (("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "fp32"))):
        problem = a_problem(role, activation=None, dtype=x, C=8, state=True)
        problems.append(dataclasses.replace(problem, dtypes=(x, weight, x), epilogue=Epilogue(bias=bias)))
    check(simulator, problems)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("given", [dict(state=True), ALL], ids=["state", "packed"])
def test_short_sequences(simulator, role, given):
    """A sequence may be shorter than the filter."""
    sizes = itertools.product((1, 2, 3, 5, 8), (2, 4, 8), (8, 3))
    check(simulator, [a_problem(role, taps, activation=None, T=T, C=C, **given) for T, taps, C in sizes])


@pytest.mark.parametrize("role", ROLES)
def test_sizes_of_zero(simulator, role):
    """The forward result is empty; sums, and the cotangent of a state of sequences without steps, are zeros."""
    sizes = [{"C": 8} | size for size in ({"B": 0}, {"T": 0}, {"C": 0})]
    check(simulator, [a_problem(role, activation=None, **size, **given) for size in sizes for given in (dict(state=True), ALL)])


@pytest.mark.parametrize("role", ROLES)
def test_many_sequences(simulator, role):
    check(simulator, [a_problem(role, activation=None, B=70, T=5, C=8, **given) for given in GIVEN])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_that_is_taken(simulator, dtype):
    """The one for exactly 4 taps, vectors where channels and addresses allow them, and fewer channels where registers do not."""
    widest = 4 if dtype == "fp32" else 8

    def taken(role, shifts=None, **how):
        problem = a_problem(role, dtype=dtype, **{"C": 16} | how)
        reply = simulator.plan(CAUSAL, problem, cuda_causal.candidates(problem)[0], shifts=shifts)
        assert shifts or CAUSAL.is_kernel(problem, None, reply.kernel)
        return reply.kernel

    exact, up_to, many = range(3)  # jaxext::causal::Kind
    kernels = {
        "forward": [("CausalForward", *kernel) for kernel in ((widest, exact), (widest, up_to), (widest, many), (1, many))],
        "backward": [("CausalBackward", *kernel) for kernel in ((widest, 4, True), (4, 4, False), (4, 8, False), (1, 8, False))],
    }
    for role, (of_4_taps, of_few, of_many, of_odd) in kernels.items():
        assert taken(role) == taken(role, state=True) == of_4_taps
        assert taken(role, idx=True) == taken(role, taps=3) == of_few
        assert taken(role, taps=5) == of_many
        assert taken(role, C=9) == taken(role, shifts={"x": 4}) == of_odd


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [8, 5])
@pytest.mark.parametrize("taps, cut", [(4, 10), (3, 1), (7, 2)])
def test_pieces_and_packed_sequences_are_the_whole_bit_for_bit(simulator, taps, cut, C, dtype):
    """Pieces and sequences may begin anywhere; results and the cotangents of inputs and state are compared."""
    before, config = taps - 1, CausalConfig(lanes=2, strip=6)
    operands = operands_of(a_problem("forward", taps, dtype=dtype, C=C))
    packed = operands | {"seq_idx": np.repeat(np.array([[0, 1]], np.int32), (cut, 21 - cut), 1).repeat(2, 0)}
    first = operands | {name: operands[name][:, :cut] for name in ("x", "d_y")}
    history = np.concatenate([np.zeros((2, before, C), operands["x"].dtype), operands["x"]], 1)[:, cut : cut + before]
    second = operands | {name: operands[name][:, cut:] for name in ("x", "d_y")} | {"initial_states": history}
    for role in ROLES:
        problem = a_problem(role, taps, dtype=dtype, C=C)
        pieces = [dataclasses.replace(problem, idx=True), *(dataclasses.replace(problem, T=steps) for steps in (cut, 21 - cut))]
        asked = [(piece, config, given) for piece, given in zip(pieces, (packed, first, second), strict=True)]
        if role == "forward":
            asked += [(problem, config, operands), (dataclasses.replace(pieces[-1], state=dtype), config, second)]
        of_packed, one, alone, *others = (reply.results[0] for reply in simulator.run(CAUSAL, asked))
        np.testing.assert_array_equal(np.concatenate([one, alone], 1).view(np.uint8), of_packed.view(np.uint8))
        if role == "forward":
            whole, continued = others
            np.testing.assert_array_equal(np.concatenate([one, continued], 1).view(np.uint8), whole.view(np.uint8))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("taps", [4, 7])
def test_what_is_infinite_stays_in_its_sequence(simulator, role, taps):
    """Infinite inputs and cotangents of one sequence spoil none of the others, of the batch or behind it."""
    for C, given in itertools.product((8, 3), (dict(idx=True), {})):
        problem = a_problem(role, taps, C=C, **given)
        operands = operands_of(problem) | {"seq_idx": np.repeat(np.arange(3, dtype=np.int32)[None], 7, 1).repeat(2, 0)}
        spoiled = dict(operands)
        for name in ("x", "d_y"):
            spoiled[name] = operands[name].copy()
            spoiled[name][1, 7 : 14 if given else 21] = np.inf
        config = CausalConfig(lanes=2, strip=4)
        got, want = (simulator.launch(CAUSAL, problem, config, each).results[0] for each in (spoiled, operands))
        keep = np.ones(got.shape[:2], bool)
        keep[1, (7 if given or role == "forward" else 7 - taps + 1) : 14 if given else 21] = False
        np.testing.assert_array_equal(got[keep], want[keep])


def test_partial_sums_are_twice_the_same(simulator):
    problem = a_problem("backward", dtype="bf16", B=3, T=50, C=16, state=True)
    asked = [(problem, CausalConfig(lanes=2, strip=8, splits=5), operands_of(problem))] * 2
    for one, other in zip(*(reply.results for reply in simulator.run(CAUSAL, asked)), strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
