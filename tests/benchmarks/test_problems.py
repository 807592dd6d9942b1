"""The suite of problems: every case is a function that lax and jaxext agree on, is counted right, and has a smaller twin of its kind."""

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
from jaxext.bench.targets import OF_CPUS, OF_GPUS, targets
from jaxext.tuning import random_operands, timing

SMALL = 2e6


def structs(case, dtypes=None):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(case.shapes, dtypes or case.dtypes, strict=True)]


def wide(struct):
    return jax.ShapeDtypeStruct(struct.shape, np.float64)


def named(problem):
    return problem.name


def test_names_are_told_apart():
    for things in (PROBLEMS, [case for problem in PROBLEMS for case in problem.cases()]):
        assert [name for name, times in collections.Counter(thing.name for thing in things).items() if times > 1] == []


@pytest.mark.sampled(92)
@pytest.mark.parametrize("problem", PROBLEMS, ids=named)
def test_lax_and_jaxext_agree_on_every_case(problem):
    assert problem.cases()
    for case in problem.cases():
        theirs, ours = (jax.eval_shape(case.build(library), *structs(case)) for library in ("lax", "jaxext"))
        assert theirs == ours
        assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype(DTYPES[case.numbers][2])}
        if case.numbers not in PLAIN:
            assert jax.eval_shape(case.truth, *structs(case, ["float64"] * len(case.shapes))) == jax.tree.map(wide, ours)


@pytest.mark.parametrize("case", [case for problem in select(tags=["own"]) for case in reduced(problem, SMALL).cases()], ids=named)
def test_an_own_operation_is_what_lax_users_write(case):
    """The numbers are the problem's and the truth is in float64; lax's form rounds between its operations."""
    arrays = random_operands.normal(case.shapes, case.dtypes)
    with jax.enable_x64(True):
        right = jax.jit(case.truth)(*(x.astype(np.float64) for x in arrays))
    for library, times in {"lax": 2, "xla": 1}.items():
        error, _ = timing.relative_error(jax.jit(case.build(library))(*arrays), right)
        assert error <= times * timing.law(["bfloat16"], None, "cuda"), library


ODD = Conv(name="odd", x=(2, 7, 6, 6), w=(3, 2, 2, 9), groups=3, stride=2, dilation=2, padding=((0, 0),) * 2)
PROBES = [
    Matmul(name="matmul", M=3, N=4, K=5),
    Matmul(name="batched", M=3, N=4, K=5, B=2),
    Ragged(name="ragged", sizes=(3, 0, 2), N=4, K=5),
    ODD,
    Conv(name="batched filters", x=(2, 6, 3), w=(3, 3, 4), batch=2, padding=((0, 0),)),
]


@pytest.mark.parametrize("problem", PROBES, ids=named)
def test_operations_are_counted(problem):
    """A product of ones adds up to the number of its multiplications; every role has as many, and a step all of them."""
    first = problem.case(problem.roles[0], "float32")
    products = float(jnp.sum(jax.jit(first.truth)(*map(np.ones, first.shapes))))
    assert [problem.flops(role) for role in problem.roles] == [2 * products] * 3 + [6 * products]


def test_zeros_that_a_dilation_inserts_are_not_counted():
    problem = Conv(name="", x=(1, 32, 32, 1), w=(4, 4, 1, 1), input_dilation=2, padding=((2, 2),) * 2)
    products = float(jnp.sum(problem.case("fprop", "float32").truth(*map(np.ones, problem.shapes("fprop")))))
    assert problem.flops("fprop") == pytest.approx(2 * products, rel=0.05)  # padding counts


def test_gradients_are_those_of_the_step():
    """Per-example gradients, which have a single filter, are among them."""
    per_example = Conv(name="", x=(2, 5, 3), w=(2, 3, 4), batch=3, per_example=True)
    for problem in (per_example, Matmul(name="", M=3, N=4, K=5, B=2), Ragged(name="", sizes=(3, 0, 2), N=4, K=5)):
        rng = np.random.default_rng(0)
        step = problem.case("step", "float32")
        a, b, c = (rng.standard_normal(shape) for shape in step.shapes)
        whole = jax.jit(step.truth)(a, b, c)
        others = (
            {"fprop": (a, b), "dgrad": (b, c), "wgrad": (a, c)} if isinstance(problem, Conv) else {"nn": (a, b), "nt": (c, b), "tn": (a, c)}
        )
        for (role, operands), right in zip(others.items(), whole, strict=True):
            np.testing.assert_allclose(jax.jit(problem.case(role, "float32").truth)(*operands), right, rtol=1e-10)


@pytest.mark.parametrize("flops", [SMALL, DEFAULT])
def test_a_twin_is_of_the_same_kind(flops):
    for problem in PROBLEMS:
        check_twin(problem, flops)


def check_twin(problem, flops):
    twin = reduced(problem, flops)
    assert twin == reduced(problem, flops) and reduced(twin, flops) is twin
    assert type(twin) is type(problem) and (twin.roles, twin.numbers) == (problem.roles, problem.numbers)
    if twin is problem:
        return
    assert twin.name.startswith(problem.name) and twin.tags == problem.tags | {"reduced"}
    assert all(twin.halved(stage) == twin for stage in twin.stages) or twin.flops(twin.roles[0]) <= flops
    if isinstance(problem, Conv):
        assert isinstance(twin, Conv) and list(twin.kinds) == list(problem.kinds)
        assert (twin.stride, twin.padding, twin.dilation, twin.w[:-2]) == (
            problem.stride,
            problem.padding,
            problem.dilation,
            problem.w[:-2],
        )
        assert [size % 2 for size in twin.w[-2:]] == [size % 2 for size in problem.w[-2:]]
        assert min(twin.x[0], 2) == min(problem.x[0], 2) and min(twin.output) > 1
    if isinstance(problem, Matmul):
        assert isinstance(twin, Matmul) and (twin.B > 1) == (problem.B > 1)
        assert [size % 2 for size in (twin.M, twin.N, twin.K)] == [size % 2 for size in (problem.M, problem.N, problem.K)]


def test_what_is_expected():
    cases = [case for problem in PROBLEMS for case in problem.cases()]
    held = [case for case in cases if targets(case, "gpu")]
    assert all(targets(case, "cuda") == targets(case, "gpu") and case.dtype == "bfloat16" for case in held)
    for tags, by_role in OF_GPUS:
        matched = [case for case in held if next(of for of, _ in OF_GPUS if of <= case.tags) == tags]
        assert {case.role for case in matched} == set(by_role)
    assert {kind for case in held for of in targets(case, "gpu").values() for kind in of} <= {"lax", "xla", "best", "copy", "tflops"}
    expected = {(case.problem, case.role): targets(case, "cpu") for case in cases if targets(case, "cpu")}
    assert expected == {(name, role): {"xla": {"lax": least}} for name, roles in OF_CPUS.items() for role, least in roles.items()}
    assert not any(targets(case, "tpu") for case in cases)
    assert not any(targets(case, platform) for problem in held_twins() for case in problem.cases() for platform in ("cpu", "gpu"))


def held_twins():
    return [twin for problem in select(tags=["target", "cpu"]) if "reduced" in (twin := reduced(problem, SMALL)).tags]


@pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")
@pytest.mark.parametrize("problem", select(tags=["target"]), ids=named)
def test_cases_with_targets_are_calls_of_kernels(problem):
    """One each, of the case's role, on arrays with an axis per label: three spatial ones, whatever the convolution has."""
    for case in problem.cases():
        if "cuda" not in targets(case, "gpu"):
            continue
        text = jaxext.export.lower_for(case.build("cuda"), arch="sm_90a")(*structs(case)).as_text()
        (target,) = re.findall(r"jaxext_\w+_v1", text)
        (operands,) = re.findall(rf"@{target}\(.*: \((.*)\) ->", text)
        ranks = [sizes.count("x") for sizes in re.findall(r"tensor<(\S+)>", operands)]
        if isinstance(problem, Fused):
            assert target == f"jaxext_{problem.operation}_v1" and case.role == "forward"
            assert ranks == [3, 3, 2, 3]  # with bias and residual
        else:
            form, called = target.removeprefix("jaxext_").removesuffix("_v1").split("_")
            assert called == case.role and form.startswith("matmul" if isinstance(problem, Matmul) else problem.kernel)
            of_ragged = {"nn": [5, 4, 4], "nt": [4, 5, 4], "tn": [5, 5, 4]}  # the last ones are the places of the groups
            assert ranks == (of_ragged[called] if form == "ragged" else 2 * [3 if form == "matmul" else 7])
