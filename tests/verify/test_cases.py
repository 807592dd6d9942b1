"""The list of cases: it has every kind of kernels that is offered on an H100, and the first of each kind come first."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.kernel import KernelPlan
from jaxext.bench.problems import PROBLEMS
from jaxext.core.contact import Contact
from jaxext.verify import cases

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = [name for name in cases.IMPLEMENTATIONS if name != "cuda" or not cuda_binding.missing()]


@pytest.fixture(scope="module")
def found():
    """The cases for an H100, by the kernels that are here."""
    with jaxext.use_target("sm_90a"), jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        return cases.listed(cases.contacts(), "cuda", KERNELS)[0]


def documented():
    """The calls on pages of the documentation."""
    for operation in cases.OPERATIONS:
        for calls in cases.cases_module(operation).PAGES.values():
            yield from (call for call in calls if call.operands[0].dtype not in (jnp.float64, jnp.complex64))


def benchmarked():
    """Yield a problem of the suite for each class, role, numbers and set of tags that choose a kernel."""
    seen = set()
    for problem in PROBLEMS:
        for case in problem.cases():
            tags = case.tags & {"depthwise", "grouped", "batched", "skinny", "one-axis", "two-axes", "three-axes", "gated", "ragged", "mlp"}
            if (key := (type(problem), case.operation, case.role, case.numbers, tags)) not in seen:
                seen.add(key)
                operands = [jax.ShapeDtypeStruct(*of) for of in zip(case.shapes, case.dtypes, strict=True)]
                yield Contact(case.name, case.build("jaxext"), tuple(operands))


def test_the_first_of_each_kind_comes_first_and_families_take_turns(found):
    kinds = len({case.key for case in found})
    assert len({case.key for case in found[:kinds]}) == kinds
    families = list(dict.fromkeys((case.family, case.implementation) for case in found))
    turn = [(case.family, case.implementation) for case in found[: len(families)]]
    assert {*turn} == {*families}


def test_each_kind_runs_a_large_tile_if_it_has_one(found):
    largest = {}
    for case in found:
        largest.setdefault(case.key, []).append((cases._size(case.config), max(map(cases._size, case.plan.configs))))
    small = [kind for kind, sizes in largest.items() if max(size for size, _ in sizes) <= 64 * 64 < max(most for _, most in sizes)]
    assert not small


def test_a_kind_says_which_factor_is_int4(found):
    """A kernel takes them as bytes."""
    kinds = {"ragged_scaled_w_nn bf16xi4->bf16", "ragged_scaled_w_nt i4xbf16->bf16"}
    assert {f"triton ragged_scaled {kind}" for kind in kinds} <= {case.key for case in found}


@pytest.mark.skipif("cuda" not in KERNELS, reason="no CUDA module here")
def test_a_gradient_is_computed_in_many_parts_and_in_one(found):
    assert {case.config.splits for case in found if "conv2d_wgrad: conv 3x3 bfloat16 in parts" in case.name and "cuda" in case.name} == {
        1,
        30,
    }


@pytest.mark.parametrize("source", [documented, benchmarked])
def test_every_kind_that_is_offered_has_a_case(found, source):
    listed = {case.key for case in found}
    missing = {}
    with jaxext.use_target("sm_90a"), jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for contact in source():
            for family, call in cases.calls_of(contact, "cuda"):
                for implementation in family.implementations[:-1]:
                    plan = implementation.planned(call) if implementation.name in KERNELS else "not here"
                    if isinstance(plan, KernelPlan) and not call.empty:
                        missing.setdefault(f"{implementation.name} {plan.kind(plan.configs[0])}", contact.name)
    missing = [f"{kind}: {name}" for kind, name in missing.items() if kind not in listed]
    assert not missing, "\n".join(missing)
