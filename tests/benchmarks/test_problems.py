"""The suite of problems: every case is a function that lax and jaxext agree on, is counted right, and has a smaller one of its kind."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.bench.case import DTYPES, PLAIN
from jaxext.bench.kinds import Conv, Fused, Matmul, Ragged
from jaxext.bench.problems import DEFAULT, PROBLEMS, reduced, select
from jaxext.bench.targets import FIRST, OF_CPUS, OF_GPUS, in_order, targets
from jaxext.tuning import random_operands, timing

SMALL = 2e6
CASES = [case for problem in PROBLEMS for case in problem.cases()]


def structs(case, dtypes=None):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(case.shapes, dtypes or case.dtypes, strict=True)]


def named(problem):
    return problem.name


def test_names_are_told_apart():
    for things in (PROBLEMS, CASES):
        assert [name for name, times in collections.Counter(thing.name for thing in things).items() if times > 1] == []


@pytest.mark.sampled(40)
@pytest.mark.parametrize("problem", PROBLEMS, ids=named)
def test_lax_and_jaxext_agree_on_every_case(problem):
    for case in problem.cases():
        theirs, ours = (jax.eval_shape(case.build(library), *structs(case)) for library in ("lax", "jaxext"))
        assert theirs == ours and {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype(DTYPES[case.numbers][2])}
        if case.numbers not in PLAIN:
            truth = jax.eval_shape(case.truth, *structs(case, ["float64"] * len(case.shapes)))
            assert truth == jax.tree.map(lambda struct: jax.ShapeDtypeStruct(struct.shape, np.float64), ours)


# One of each kind and kind of numbers: small ones of a kind are alike.
OWN = {(type(problem), problem.numbers): problem for problem in select(tags=["own"])}


@pytest.mark.parametrize("case", [reduced(problem, SMALL).cases()[-1] for problem in OWN.values()], ids=named)
def test_an_own_operation_is_what_lax_users_write(case):
    """The numbers are the problem's and the truth is in float64; lax's form rounds between its operations."""
    arrays = random_operands.normal(case.shapes, case.dtypes)
    right = jax.jit(case.truth)(*(x.astype(np.float64) for x in arrays))
    for library, times in {"lax": 2, "xla": 1}.items():
        error, _ = timing.relative_error(jax.jit(case.build(library))(*arrays), right)
        assert error <= times * timing.law(["bfloat16"], None, "cuda"), library


PROBES = [
    Matmul(name="batched", M=3, N=4, K=5, B=2),
    Ragged(name="ragged", sizes=(3, 0, 2), N=4, K=5),
    Conv(name="odd", x=(2, 7, 6, 6), w=(3, 2, 2, 9), groups=3, stride=2, dilation=2, padding=((0, 0),) * 2),
    Conv(name="per example", x=(2, 5, 3), w=(2, 3, 4), batch=3, per_example=True, padding=((0, 0),)),
]


@pytest.mark.parametrize("problem", PROBES, ids=named)
def test_operations_are_counted_and_gradients_are_those_of_the_step(problem):
    """A product of ones adds up to the number of its multiplications; every role has as many, and a step all of them."""
    first = problem.case(problem.roles[0], "float32")
    products = float(jnp.sum(first.truth(*map(np.ones, first.shapes))))
    assert [problem.flops(role) for role in problem.roles] == [2 * products] * 3 + [6 * products]
    step, rng = problem.case("step", "float32"), np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape) for shape in step.shapes)
    pairs = ((a, b), (b, c) if isinstance(problem, Conv) else (c, b), (a, c))
    for role, operands, right in zip(problem.roles, pairs, step.truth(a, b, c), strict=False):
        np.testing.assert_allclose(problem.case(role, "float32").truth(*operands), right, rtol=1e-10)


def test_zeros_that_a_dilation_inserts_are_not_counted():
    problem = Conv(name="", x=(1, 32, 32, 1), w=(4, 4, 1, 1), input_dilation=2, padding=((2, 2),) * 2)
    products = float(jnp.sum(problem.case("fprop", "float32").truth(*map(np.ones, problem.shapes("fprop")))))
    assert problem.flops("fprop") == pytest.approx(2 * products, rel=0.05)  # padding counts


@pytest.mark.parametrize("flops", [SMALL, DEFAULT])
def test_a_smaller_problem_is_of_the_same_kind(flops):
    odd = lambda *sizes: [size % 2 for size in sizes]
    for problem in PROBLEMS:
        smaller = reduced(problem, flops)
        assert smaller == reduced(problem, flops) and reduced(smaller, flops) is smaller
        assert type(smaller) is type(problem) and (smaller.roles, smaller.numbers) == (problem.roles, problem.numbers)
        if smaller is problem:
            continue
        assert smaller.name.startswith(problem.name) and smaller.tags == problem.tags | {"reduced"}
        assert all(smaller.halved(stage) == smaller for stage in smaller.stages) or smaller.flops(smaller.roles[0]) <= flops
        if isinstance(problem, Conv) and isinstance(smaller, Conv):
            kept = lambda of: (of.stride, of.padding, of.dilation, of.w[:-2], [*of.kinds], odd(*of.w[-2:]), min(of.x[0], 2))
            assert kept(smaller) == kept(problem) and min(smaller.output) > 1
        if isinstance(problem, Matmul) and isinstance(smaller, Matmul):
            assert (smaller.B > 1) == (problem.B > 1) and odd(smaller.M, smaller.N, smaller.K) == odd(problem.M, problem.N, problem.K)


def test_targets():
    """Each has cases; smaller ones have none."""
    held = [case for case in CASES if targets(case, "gpu")]
    for tags, by_role in OF_GPUS:
        assert {case.role for case in held if next(of for of, _ in OF_GPUS if of <= case.tags) == tags} == set(by_role)
    expected = {(case.problem, case.role): targets(case, "cpu") for case in CASES if targets(case, "cpu")}
    assert expected == {(name, role): {"xla": {"lax": least}} for name, roles in OF_CPUS.items() for role, least in roles.items()}
    reduced_problems = [smaller for problem in select(tags=["target", "cpu"]) if "reduced" in (smaller := reduced(problem, SMALL)).tags]
    assert not any(targets(case, platform) for smaller in reduced_problems for case in smaller.cases() for platform in ("cpu", "gpu"))


def test_the_most_wanted_come_first():
    """A run on a GPU may end early: one case of each kind and role comes before a second of any, those with targets first."""
    kinds = [(next((kind for kind in FIRST if kind in case.tags), ""), case.role) for case in in_order(CASES, "gpu")]
    held = [bool(targets(case, "gpu")) for case in in_order(CASES, "gpu")][: len({*kinds})]
    assert {*kinds[: len(held)]} == {*kinds} and held == sorted(held, reverse=True) and sum(held) > 20


@pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")
@pytest.mark.sampled(12)
@pytest.mark.parametrize("problem", select(tags=["target"]), ids=named)
def test_cases_with_targets_are_calls_of_kernels(problem):
    """One each, of the case's role."""
    for case in problem.cases():
        if "cuda" in targets(case, "gpu"):
            text = jaxext.export.lower_for(case.build("cuda"), arch="sm_90a")(*structs(case)).as_text()
            (target,) = re.findall(r"jaxext_(\w+)_v1", text)
            kernel = problem.operation if isinstance(problem, Fused) else f"{problem.kernel}_{case.role}"
            assert target == kernel or re.sub(r"\dd", "", target) == kernel
